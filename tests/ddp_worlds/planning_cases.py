"""What the ranks of a test world do whose wrappers decide by measurement. The figures that decide are set by the cases.

Measured ones would be those of a busy machine; that decisions follow from figures is tested without ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
import warnings
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from testbed.present import present
from torch import nn

import ddp
from ddp.data_parallel.buckets.bucket_plan import BucketLimits
from ddp.data_parallel.planning import bucket_planner
from ddp.data_parallel.planning.bucket_planner import Measurement
from ddp.data_parallel.planning.link_cost import LinkCost
from ddp.data_parallel.planning.simulate import Choice, choose
from ddp.data_parallel.planning.step_timer import HostClock, TimedStep

STEPS = 9  # the buckets change after the fifth
SMALL = BucketLimits(cap_bytes=1 << 10, first_caps_bytes=(256,), own_bytes=4 << 10)


class Net(nn.Module):
    """Not every rank uses all of its parameters; some gradients are large enough to travel alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(6))
        self.sometimes = nn.Linear(48, 48)

    def forward(self, x: torch.Tensor, *, uses_all: bool = True) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.sometimes(x) if uses_all else x


def wrapped(**options: Any) -> ddp.DistributedDataParallel:
    torch.manual_seed(7)
    return ddp.DistributedDataParallel(Net(), **options)


def train(model: ddp.DistributedDataParallel, steps: int = STEPS) -> list[torch.Tensor]:
    """Train, and return a copy of all gradients after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        with model.no_sync():
            model(torch.randn(3, 48, generator=generator)).square().mean().backward()
        uses_all = step % 3 != 0 or dist.get_rank() == 0
        model(torch.randn(3, 48, generator=generator), uses_all=uses_all).square().mean().backward()
        optimizer.step()
        seen.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    return seen


def measured(model: ddp.DistributedDataParallel) -> Measurement | None:
    return model.measurement


def limits_of(model: ddp.DistributedDataParallel) -> BucketLimits:
    """But for pieces, which a link may ask for that a busy machine has slowed down."""
    limits: BucketLimits = model._reducer.sums.limits
    return dataclasses.replace(limits, piece_bytes=None)


@contextlib.contextmanager
def rank_0_wants(limits: BucketLimits) -> Iterator[None]:
    """Let the choice be `limits` on rank 0, and what there is on the others."""

    def choose_these(record: Any, link: Any, current: Any, plan: Any) -> Any:
        choices = choose(record, link, current, plan)
        if dist.get_rank():
            return sorted(choices, key=lambda choice: choice.limits != current)
        now = next(choice for choice in choices if choice.limits == current)
        return [Choice(limits, now.step), *choices]

    with mock.patch.object(bucket_planner, "choose", choose_these):
        yield


@contextlib.contextmanager
def costing(link: LinkCost) -> Iterator[None]:
    """Let the link cost so much, whatever is measured."""
    with (
        mock.patch.object(bucket_planner, "measure_link", return_value=link),
        mock.patch.object(LinkCost, "corrected", lambda self, *_: self),
    ):
        yield


def plans_change_no_bit(as_views: bool) -> None:
    fixed = wrapped(gradient_as_bucket_view=as_views, measure=False)
    planned = wrapped(gradient_as_bucket_view=as_views)
    with rank_0_wants(SMALL):
        expected, found = train(fixed), train(planned)
    assert limits_of(planned) == SMALL
    assert limits_of(fixed) != SMALL
    for step, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert torch.equal(one, other), step


def pieces_for_a_slow_link_change_no_bit() -> None:
    expected = train(wrapped(measure=False))
    for link, pieces in ((SLOW, 1 << 10), (QUICK, None)):
        with costing(link), mock.patch.object(bucket_planner, "_PIECE_BYTES", 1 << 10):
            model = wrapped()
            found = train(model)
        schedule = model._reducer.sums
        assert schedule.limits.piece_bytes == pieces
        for step, (one, other) in enumerate(zip(expected, found, strict=True)):
            assert torch.equal(one, other), step


class OnDevice(HostClock):
    is_device = True


def no_backend_for_the_cpu_is_asked_for_pieces_on_a_device() -> None:
    lacking = mock.patch.object(bucket_planner, "backend_of", side_effect=RuntimeError("no backend for the CPU"))
    with costing(SLOW), lacking as backend_of:
        model = wrapped()
        model._reducer.planner.timer.clock = OnDevice()
        train(model)
    assert model.measurement is not None
    backend_of.assert_not_called()


def times_that_one_rank_cannot_read_decide_nothing_on_any() -> None:
    model = wrapped(bucket_cap_mb="auto")
    error = RuntimeError("the event was not recorded")
    unread = mock.patch.object(TimedStep, "times", side_effect=error) if dist.get_rank() else contextlib.nullcontext()
    with unread, pytest.warns(UserWarning, match="incomplete on some rank"):
        train(model)
    assert model.measurement is None


def the_first_steps_are_recorded_on_all_ranks_alike() -> None:
    model = wrapped()
    train(model, 4)
    assert measured(model) is None
    train(model, 1)
    found = present(measured(model))
    record, link = found.record, found.link
    named = dict(model.module.named_parameters())
    assert record.nbytes == sum(parameter.nbytes for parameter in named.values())
    ready = [gradient.ready_s for gradient in record.gradients]
    assert ready == sorted(ready)
    assert 0 < ready[0] < ready[-1] <= record.backward_s
    # Those of the last layer are ready first.
    names = list(named)
    assert names[record.gradients[0].index].startswith("sometimes")
    assert names[record.gradients[-1].index].startswith("layers.0")
    assert min(record.forward_s, record.other_s, model.measurement.step_s) > 0
    assert link.ranks == 2
    every: list[Any] = [None, None]
    dist.all_gather_object(every, (repr(model.measurement), limits_of(model)))
    assert every[0] == every[1]
    before = model.measurement
    train(model, 2)
    assert model.measurement is before
    reducer: Any = model._reducer
    assert not reducer.planner.is_deciding


def with_more_ranks_buckets_change_on_request_only() -> None:
    plain, asked = wrapped(), wrapped(bucket_cap_mb="auto")
    initial = limits_of(plain)
    with rank_0_wants(SMALL):
        for model in (plain, asked):
            train(model)
    assert limits_of(plain) == initial
    assert plain.measurement is not None  # for explanations
    assert limits_of(asked) == SMALL


def a_rank_that_has_joined_takes_part() -> None:
    model = wrapped(bucket_cap_mb="auto")
    rank = dist.get_rank()
    with rank_0_wants(SMALL), model.join():
        for _ in range(STEPS if rank else 2):
            model.zero_grad()
            model(torch.full((2, 48), float(rank))).square().mean().backward()
    assert limits_of(model) == SMALL


def failed_steps_are_not_measured() -> None:
    """They do not count among the first steps, and the next one begins after them; the plan stays."""
    model = wrapped()
    fits, pause_s = not dist.get_rank(), 0.5

    def fail() -> None:
        time.sleep(pause_s)
        with pytest.raises(ddp.errors.PeerFailedError if fits else RuntimeError):
            model(torch.ones(2, 48 if fits else 47)).square().mean().backward()

    with rank_0_wants(SMALL):
        train(model, 1)
        for _ in range(4):
            assert measured(model) is None
            fail()
            train(model, 1)
    assert present(measured(model)).record.other_s < pause_s
    assert limits_of(model) == SMALL
    fail()
    train(model, 1)
    assert limits_of(model) == SMALL


def a_parameter_unfrozen_while_steps_are_measured_begins_that_again() -> None:
    torch.manual_seed(7)
    module = Net()
    module.sometimes.requires_grad_(False)
    model = ddp.DistributedDataParallel(module, bucket_cap_mb="auto")

    def step() -> None:
        model.zero_grad()
        model(torch.ones(2, 48)).square().mean().backward()

    with rank_0_wants(SMALL):
        for at in range(6):
            module.sometimes.requires_grad_(at >= 2)
            step()
        assert measured(model) is None
        step()
    assert present(measured(model)).record.nbytes == sum(parameter.nbytes for parameter in module.parameters())
    assert limits_of(model) == SMALL


def a_rank_that_raises_alone_after_the_averages_agrees_in_the_same_step() -> None:
    model = wrapped(bucket_cap_mb="auto")
    rank = dist.get_rank()
    schedule = model._reducer.sums
    with rank_0_wants(SMALL):
        train(model, 2)
        model.zero_grad()
        loss = model(torch.ones(2, 48)).square().mean()
        if rank:
            with mock.patch.object(schedule, "deliver", side_effect=MemoryError), pytest.raises(MemoryError):
                loss.backward()
        else:
            loss.backward()
        train(model, 2)
    assert model.measurement is not None
    assert limits_of(model) == SMALL


def a_rank_that_raises_where_ranks_agree_is_an_error_on_all_at_once(place: str, goes_on: bool) -> None:
    """On rank 1 alone, in the first pass or in the one that decides; long before a wait would be given up."""
    model = wrapped(bucket_cap_mb="auto")
    rank, reducer = dist.get_rank(), model._reducer
    steps, owner, name = {
        "delivers first": (0, reducer.sums, "deliver"),
        "plans first": (0, reducer.sums, "plan"),
        "delivers": (4, reducer.sums, "deliver"),
        "chooses": (4, reducer.planner, "_chosen"),
        "plans": (4, reducer.sums, "use_limits"),
    }[place]
    with rank_0_wants(SMALL):
        train(model, steps)
        loss = model(torch.ones(2, 48)).square().mean()
        reducer.sums._found_twice |= {0} if place == "plans first" else set()  # else the first plan stays
        began = time.monotonic()
        if rank == 1:
            with (
                mock.patch.object(owner, name, side_effect=RuntimeError("no memory")),
                pytest.raises(RuntimeError, match=r"^no memory$"),
            ):
                loss.backward()
        else:
            with pytest.raises(
                ddp.errors.PeerFailedError, match=r"failed on rank 1, .* RuntimeError: no memory"
            ) as reported:
                loss.backward()
            assert ("the next step can go on" in str(reported.value)) == goes_on
        assert time.monotonic() - began < reducer.report.timeout_s / 2
        assert all(parameter.grad is None for parameter in model.parameters())
        if not goes_on:
            with pytest.raises(
                ddp.errors.CollectiveError, match="not in step with the other ranks any more: start all"
            ):
                model(torch.ones(2, 48))
            return
        seen = train(model)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (repr(limits_of(model)), [float(each.sum()) for each in seen]))
    assert all(each == every[0] for each in every)
    assert (limits_of(model) == SMALL) == (place != "chooses")


def auto_that_can_decide_nothing_warns() -> None:
    model = wrapped(bucket_cap_mb="auto", compression="bf16")
    before = limits_of(model)
    with rank_0_wants(SMALL):
        train(model, 4)
        with pytest.warns(UserWarning, match='bucket_cap_mb="auto" has no effect.*compression or a'):
            train(model, 1)
        train(model, 2)
    assert limits_of(model) == before
    for model, warned in ((wrapped(bucket_cap_mb="auto"), 1), (wrapped(), 0)):
        train(model, 3)
        model._reducer.planner._is_missing = True
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            train(model, 3)
        assert model.measurement is None
        said = [str(each.message) for each in seen if "has no effect" in str(each.message)]
        assert len(said) == warned


def _fail(*_: object) -> None:
    raise AssertionError("not to be called")


def nothing_is_measured_where_that_is_not_wanted() -> None:
    with mock.patch.object(bucket_planner, "measure_link", _fail):
        unmeasured: list[dict[str, Any]] = [
            {"bucket_cap_mb": 1},
            {"bucket_cap_mb_list": [1, 2]},
            {"init_sync": False},
            {"measure": False},
        ]
        for options in unmeasured:
            model = wrapped(**options)
            train(model)
            assert model.measurement is None
    refused: list[tuple[dict[str, Any], str]] = [
        ({"bucket_cap_mb": "big"}, 'it is a number of MiB, or "auto"'),
        ({"bucket_cap_mb": "auto", "bucket_cap_mb_list": [1]}, "leave one of them out"),
        ({"bucket_cap_mb": "auto", "measure": False}, "decides by measurement"),
        ({"compression": "auto"}, "'fp16', 'bf16', 'int8', 'powersgd'"),
    ]
    for options, text in refused:
        with pytest.raises(ddp.errors.ArgumentError, match=text):
            wrapped(**options)
    with pytest.raises(ddp.errors.LayoutMismatchError, match="measure"):
        wrapped(measure=dist.get_rank() == 0)


SLOW, QUICK = LinkCost(2, 1e-4, 1e-4), LinkCost(2, 1e-6, 1e-13)


def a_checkpoint_keeps_what_was_decided() -> None:
    with rank_0_wants(SMALL):
        model = wrapped(bucket_cap_mb="auto")
        train(model, 6)
        assert limits_of(model) == SMALL
        state = model._reducer.sums.plan_state()
    resumed = wrapped(bucket_cap_mb="auto")
    resumed._reducer.load_plan_state(state)
    assert limits_of(resumed) == limits_of(model)
    train(resumed)
    assert limits_of(resumed) == limits_of(model)


def a_wrapper_that_measures_is_let_go() -> None:
    model = wrapped(bucket_cap_mb="auto")
    train(model, 2)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
