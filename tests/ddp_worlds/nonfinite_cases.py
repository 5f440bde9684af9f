"""Gradients that are infinite or NaN on one rank: each function runs on every rank and returns what it learned."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist

import ddp
import ddp.horovod as hvd


def _model(by: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    if by == "ddp":
        model = ddp.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, hvd.DistributedOptimizer(optimizer) if by == "horovod" else optimizer


def _backward(model: torch.nn.Module, spoilt: float | None, *, in_the_middle: bool) -> None:
    """Spoil the loss, or with `in_the_middle` the gradients that come after those of the last layer."""

    def spoil(_module: object, _inputs: object, out: torch.Tensor) -> None:
        out.register_hook(lambda grad: grad if spoilt is None else grad * spoilt)

    (middle,) = (module for module in model.modules() if isinstance(module, torch.nn.ReLU))
    handle = (middle if in_the_middle else model).register_forward_hook(spoil)
    model(torch.ones(3, 4)).square().mean().backward()
    handle.remove()


def steps(
    by: str, on_nonfinite: str, value: float, skipped: bool = False, in_the_middle: bool = False
) -> tuple[list[str], tuple[object, ...], bool, int]:
    """The last rank's loss is spoilt in steps 3 and 5 of 6.

    Return what was warned of; the error with its step, ranks and failed_ranks; whether the weights are finite; and how
    many steps were made.
    """
    model, optimizer = _model(by)
    error: tuple[object, ...] = ()
    done = 0
    spoils = dist.get_rank() == dist.get_world_size() - 1
    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        patched.setenv("DTRAIN_ON_NONFINITE", on_nonfinite)
        for step in range(1, 7):
            _backward(model, value if spoils and step in (3, 5) else None, in_the_middle=in_the_middle)
            try:
                if not (skipped and step in (3, 5)):
                    optimizer.step()
            except ddp.errors.NonFiniteError as raised:
                error = str(raised), raised.step, raised.ranks, raised.failed_ranks
                break
            optimizer.zero_grad()
            done = step
    are_finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    reported = [str(each.message) for each in warned if "infinite or NaN" in str(each.message)]
    return reported, error, are_finite, done


def a_micro_batch_that_is_not_the_last_is_spoilt() -> tuple[int, tuple[int, ...], bool]:
    """In step 2, the first of two micro-batches of rank 1. Return the error's step and ranks; whether it names that."""
    model, optimizer = _model("ddp")
    loader = ddp.StepLoader(range(32), global_batch_size=8, micro_batch_size=2)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("DTRAIN_ON_NONFINITE", "stop")
        for step in loader.epochs(1):
            for number, _ in enumerate(step):
                spoils = (dist.get_rank(), loader.steps, number) == (1, 2, 0)
                _backward(model, float("nan") if spoils else None, in_the_middle=False)
            try:
                optimizer.step()
            except ddp.errors.NonFiniteError as raised:
                return raised.step, raised.ranks, "gradients of rank 1 (micro-batch 2) were" in str(raised)
            optimizer.zero_grad()
    raise AssertionError("not noticed")
