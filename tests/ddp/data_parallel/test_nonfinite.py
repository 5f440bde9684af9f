"""Gradients that are infinite or NaN are named with rank and step, or stop the run before the weights change."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.present import present
from testbed.worlds import world

import ddp
import ddp.horovod as hvd
from ddp.errors import NonFiniteError

NAN, INFINITE = float("nan"), float("inf")
SAYS = "in step 3, gradients of rank {} were infinite or NaN, and an optimizer "


def _model(by: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    if by == "ddp":
        model = ddp.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, hvd.DistributedOptimizer(optimizer) if by == "horovod" else optimizer


def _backward(model: torch.nn.Module, spoilt: float | None, *, in_the_middle: bool = False) -> None:
    """Spoil the loss, or with `in_the_middle` the gradients that come after those of the last layer."""

    def spoil(_module: object, _inputs: object, out: torch.Tensor) -> None:
        out.register_hook(lambda grad: grad if spoilt is None else grad * spoilt)

    (middle,) = (module for module in model.modules() if isinstance(module, torch.nn.ReLU))
    handle = (middle if in_the_middle else model).register_forward_hook(spoil)
    model(torch.ones(3, 4)).square().mean().backward()
    handle.remove()


class Run:
    """Six steps, of which the last rank spoils the third and the fifth."""

    def __init__(self, on_nonfinite: str, value: float, by: str = "ddp", skips: bool = False, **how: bool) -> None:
        model, optimizer = _model(by)
        self.error: NonFiniteError | None = None
        self.done = 0
        spoils = dist.get_rank() == dist.get_world_size() - 1
        with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            patched.setenv("DTRAIN_ON_NONFINITE", on_nonfinite)
            for step in range(1, 7):
                is_bad = step in (3, 5)
                _backward(model, value if spoils and is_bad else None, **how)
                try:
                    if not (skips and is_bad):
                        optimizer.step()
                except NonFiniteError as raised:
                    self.error = raised
                    break
                optimizer.zero_grad()
                self.done = step
        self.is_finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
        self.warned = [str(each.message) for each in warned if "infinite or NaN" in str(each.message)]


@pytest.mark.parametrize(("by", "value"), [*itertools.product(["ddp", "horovod"], [NAN, INFINITE])])
@world(3)
def test_one_rank_warns_once(by: str, value: float) -> None:
    run, is_bad = Run("warn", value, by), dist.get_rank() == 2
    assert (run.error, run.is_finite, run.done, len(run.warned)) == (None, False, 6, is_bad)
    assert all(text.startswith(SAYS.format(2) + "stepped") for text in run.warned)


@pytest.mark.parametrize("by", ["ddp", "horovod"])
@world(2)
def test_stop_raises_on_every_rank_before_the_weights_change(by: str) -> None:
    run = Run("stop", NAN, by)
    assert run.error is not None
    assert (run.warned, run.is_finite, run.done) == ([], True, 2)
    assert str(run.error).startswith(SAYS.format(1) + "was about to")
    assert (run.error.step, run.error.ranks) == (3, (1,))
    assert run.error.failed_ranks == (None if dist.get_rank() == 1 else (1,))


@world(2)
def test_gradients_spoilt_in_backward_are_seen_in_that_step() -> None:
    run = Run("stop", NAN, in_the_middle=True)
    assert run.error is not None
    assert (run.error.step, run.error.ranks, run.is_finite, run.done) == (3, (1,), True, 2)


@pytest.mark.parametrize("on_nonfinite", ["warn", "stop"])
@world(2)
def test_a_skipped_step_is_no_matter(on_nonfinite: str) -> None:
    """As a GradScaler skips it."""
    run = Run(on_nonfinite, INFINITE, skips=True)
    assert (run.warned, run.error, run.is_finite, run.done) == ([], None, True, 6)


@world(2)
def test_each_micro_batch_of_a_step_is_looked_at() -> None:
    """In step 2, the first of two micro-batches of rank 1 is spoilt."""
    model, optimizer = _model("ddp")
    loader = ddp.StepLoader(range(32), global_batch_size=8, micro_batch_size=2)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("DTRAIN_ON_NONFINITE", "stop")
        for step in loader.epochs(1):
            for number, _ in enumerate(step):
                spoils = (dist.get_rank(), loader.steps, number) == (1, 2, 0)
                _backward(model, NAN if spoils else None)
            if loader.steps == 2:
                break
            optimizer.step()
            optimizer.zero_grad()
        with pytest.raises(NonFiniteError, match=r"gradients of rank 1 \(micro-batch 2\) were") as caught:
            optimizer.step()
    assert (caught.value.step, caught.value.ranks) == (2, (1,))


@pytest.mark.parametrize("way", ["mended", "removed", "skipped inside"])
@world(2)
def test_gradients_that_the_script_has_mended_do_no_harm(way: str) -> None:
    """By nan_to_num_, by zero_grad after a look at the norm, and in a fused step that a GradScaler has told."""
    model, _ = _model("ddp")
    optimizer: Any = torch.optim.Adam(model.parameters(), fused=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("DTRAIN_ON_NONFINITE", "stop")
        for step in range(3):
            _backward(model, NAN if step == 1 and dist.get_rank() == 1 else None)
            if way == "mended":
                for parameter in model.parameters():
                    torch.nan_to_num_(present(parameter.grad))
            elif way == "removed" and not torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
                optimizer.zero_grad()
            elif way == "skipped inside":
                optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.full((), float(step == 1))
            optimizer.step()
            optimizer.zero_grad()
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


@world(2)
def test_the_other_of_two_optimizers_is_still_looked_at() -> None:
    model, _ = _model("ddp")
    first, *others = model.parameters()
    _backward(model, NAN)
    first.grad = None
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("DTRAIN_ON_NONFINITE", "stop")
        torch.optim.SGD([first], lr=0.1).step()
        with pytest.raises(NonFiniteError):
            torch.optim.SGD(others, lr=0.1).step()
