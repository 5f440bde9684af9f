"""The model of a step, by numbers that can be worked out by hand; and what wrappers make of it, on real ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from testbed.worlds import world
from torch import nn

import ddp
from ddp.data_parallel.buckets.bucket_plan import BucketLimits, plan_buckets, spec_of
from ddp.data_parallel.planning import bucket_planner
from ddp.data_parallel.planning.link_cost import LinkCost, fit
from ddp.data_parallel.planning.simulate import (
    Bucket,
    Choice,
    CompressionCost,
    GradReady,
    StepRecord,
    buckets_of,
    candidates,
    choose,
    simulate,
)
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


def wrapped(**options: Any) -> Any:
    torch.manual_seed(7)
    return ddp.DistributedDataParallel(Net(), **options)


def train(model: Any, steps: int = STEPS) -> list[torch.Tensor]:
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


def limits_of(model: Any) -> BucketLimits:
    """But for pieces, which a link may ask for that a busy machine has slowed down."""
    limits: BucketLimits = model._reducer.sums.limits
    return dataclasses.replace(limits, piece_bytes=None)


def assert_agreed(*values: Any) -> None:
    dist.all_gather_object(every := [None] * dist.get_world_size(), repr(values))
    assert every == every[:1] * len(every)


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


@pytest.mark.parametrize("as_views", [False, True])
@world(2)
def test_a_plan_by_measurement_changes_no_bit(as_views: bool) -> None:
    fixed = wrapped(gradient_as_bucket_view=as_views, measure=False)
    planned = wrapped(gradient_as_bucket_view=as_views)
    with rank_0_wants(SMALL):
        expected, found = train(fixed), train(planned)
    assert limits_of(planned) == SMALL
    assert limits_of(fixed) != SMALL
    assert all(map(torch.equal, expected, found))


@world(2)
def test_pieces_for_a_slow_link_change_no_bit() -> None:
    expected = train(wrapped(measure=False))
    for link, pieces in ((SLOW, 1 << 10), (QUICK, None)):
        with costing(link), mock.patch.object(bucket_planner, "_PIECE_BYTES", 1 << 10):
            model = wrapped()
            found = train(model)
        schedule = model._reducer.sums
        assert schedule.limits.piece_bytes == pieces
        assert all(map(torch.equal, expected, found))


class OnDevice(HostClock):
    is_device = True


@world(2)
def test_no_backend_for_the_cpu_is_asked_on_a_device() -> None:
    lacking = mock.patch.object(bucket_planner, "backend_of", side_effect=RuntimeError("no backend for the CPU"))
    with costing(SLOW), lacking as backend_of:
        model = wrapped()
        model._reducer.planner.timer.clock = OnDevice()
        train(model)
    assert model.measurement is not None
    backend_of.assert_not_called()


@world(2)
def test_times_that_one_rank_cannot_read_decide_nothing_on_any() -> None:
    model = wrapped(bucket_cap_mb="auto")
    error = RuntimeError("the event was not recorded")
    unread: Any = (
        mock.patch.object(TimedStep, "times", side_effect=error) if dist.get_rank() else contextlib.nullcontext()
    )
    with unread, pytest.warns(UserWarning, match="incomplete on some rank"):
        train(model)
    assert not model.measurement


@world(2)
def test_the_first_steps_are_recorded_on_all_ranks_alike() -> None:
    model = wrapped()
    train(model, 4)
    assert not model.measurement
    train(model, 1)
    found = model.measurement
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
    assert_agreed(repr(model.measurement), limits_of(model))
    before = model.measurement
    train(model, 2)
    assert model.measurement is before
    assert not model._reducer.planner.is_deciding


@world(3)
def test_with_more_ranks_buckets_change_on_request_only() -> None:
    plain, asked = wrapped(), wrapped(bucket_cap_mb="auto")
    initial = limits_of(plain)
    with rank_0_wants(SMALL):
        for model in (plain, asked):
            train(model)
    assert limits_of(plain) == initial
    assert plain.measurement is not None  # for explanations
    assert limits_of(asked) == SMALL


@world(3)
def test_a_rank_that_has_joined_takes_part() -> None:
    model = wrapped(bucket_cap_mb="auto")
    rank = dist.get_rank()
    with rank_0_wants(SMALL), model.join():
        for _ in range(STEPS if rank else 2):
            model.zero_grad()
            model(torch.full((2, 48), float(rank))).square().mean().backward()
    assert limits_of(model) == SMALL


@world(2)
def test_failed_steps_are_not_measured() -> None:
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
            assert not model.measurement
            fail()
            train(model, 1)
    assert model.measurement.record.other_s < pause_s
    assert limits_of(model) == SMALL
    fail()
    train(model, 1)
    assert limits_of(model) == SMALL


@world(2)
def test_unfreezing_begins_measuring_again() -> None:
    torch.manual_seed(7)
    module = Net()
    module.sometimes.requires_grad_(False)
    model: Any = ddp.DistributedDataParallel(module, bucket_cap_mb="auto")

    def step() -> None:
        model.zero_grad()
        model(torch.ones(2, 48)).square().mean().backward()

    with rank_0_wants(SMALL):
        for at in range(6):
            module.sometimes.requires_grad_(at >= 2)
            step()
        assert not model.measurement
        step()
    assert model.measurement.record.nbytes == sum(parameter.nbytes for parameter in module.parameters())
    assert limits_of(model) == SMALL


@world(2)
def test_a_rank_that_raises_after_the_averages_agrees() -> None:
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


@pytest.mark.parametrize(
    ("place", "goes_on"),
    [("delivers first", True), ("plans first", False), ("delivers", True), ("chooses", True), ("plans", False)],
)
@world(3)
def test_a_rank_that_raises_where_ranks_agree_fails_all(place: str, goes_on: bool) -> None:
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
        raises = mock.patch.object(owner, name, side_effect=RuntimeError("no memory"))
        error: type[Exception] = ddp.errors.PeerFailedError
        said = r"failed on rank 1, .* RuntimeError: no memory"
        if rank == 1:
            error, said = RuntimeError, r"^no memory$"
        with raises if rank == 1 else contextlib.nullcontext(), pytest.raises(error, match=said) as reported:
            loss.backward()
        assert rank == 1 or ("the next step can go on" in str(reported.value)) == goes_on
        assert time.monotonic() - began < reducer.report.timeout_s / 2
        assert all(parameter.grad is None for parameter in model.parameters())
        if not goes_on:
            with pytest.raises(
                ddp.errors.CollectiveError, match="not in step with the other ranks any more: start all"
            ):
                model(torch.ones(2, 48))
            return
        seen = train(model)
    assert_agreed(limits_of(model), [float(each.sum()) for each in seen])
    assert (limits_of(model) == SMALL) == (place != "chooses")


@world(2)
def test_auto_that_can_decide_nothing_warns() -> None:
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
        assert not model.measurement
        said = [str(each.message) for each in seen if "has no effect" in str(each.message)]
        assert len(said) == warned


def _fail(*_: object) -> None:
    raise AssertionError("not to be called")


@world(2)
def test_nothing_is_measured_where_that_is_not_wanted() -> None:
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
            assert not model.measurement
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


@world(2)
def test_a_checkpoint_keeps_what_was_decided() -> None:
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


MB = 1 << 20


TEN = StepRecord(tuple(GradReady(i, 100, (i + 1) / 10) for i in range(10)), 0.5, 1.0, 0.25)


HALVES = [Bucket((0, 1, 2, 3, 4), 500), Bucket((5, 6, 7, 8, 9), 500)]


def test_a_link_is_fitted_to_what_its_collectives_took() -> None:
    link = LinkCost(3, 2e-3, 1e-8)
    fitted = fit(3, [(size, link.collective_s(size)) for size in (4 << 10, 256 << 10, 4 * MB)])
    assert (fitted.latency_s, fitted.seconds_per_byte) == pytest.approx((2e-3, 1e-8))
    assert fitted.ring_bytes_per_s == pytest.approx(2 * (3 - 1) / 3 * 1e8)
    with pytest.raises(ValueError, match="two sizes"):
        fit(2, [(4, 1.0), (4, 1.0)])


@given(seconds=st.lists(st.floats(1e-6, 10), min_size=3, max_size=3))
def test_no_part_of_a_fitted_cost_is_negative(seconds: list[float]) -> None:
    fitted = fit(2, list(zip((4 << 10, 256 << 10, 4 * MB), seconds, strict=True)))
    assert fitted.latency_s >= 0
    assert fitted.seconds_per_byte >= 0


def test_a_bandwidth_is_corrected_by_what_a_whole_step_took() -> None:
    assert LinkCost(2, 0.1, 1.0).corrected(5, 1000, 2.5) == LinkCost(2, 0.1, 0.002)
    assert LinkCost(2, 0.1, 1.0).corrected(5, 1000, 0.4) == LinkCost(2, 0.1, 1.0)


def test_what_backward_does_not_cover_is_exposed() -> None:
    step = simulate(TEN, HALVES, LinkCost(2, 0.1, 1e-3))  # 0.6 s a bucket, ready at 0.5 and 1.0
    first, second = step.buckets
    assert (first.ready_s, first.start_s, first.end_s) == pytest.approx((0.5, 0.5, 1.1))
    assert (second.ready_s, second.start_s, second.end_s) == pytest.approx((1.0, 1.1, 1.7))
    assert (step.wire_s, step.exposed_s, step.overlapped_s) == pytest.approx((1.2, 0.7, 0.5))
    assert (step.compute_s, step.delayed_s, step.total_s) == pytest.approx((1.75, 0.0, 2.45))


def test_computing_is_slower_beside_a_collective() -> None:
    step = simulate(TEN, HALVES, LinkCost(2, 0.0, 2e-4, contention=1.0))  # 0.1 s a bucket
    assert step.delayed_s == pytest.approx(0.05)  # 0.1 s beside the first bucket, at half its pace
    assert step.total_s == pytest.approx(1.75 + 0.05 + 0.1)


def test_compressing_takes_its_time_and_saves_that_of_the_wire() -> None:
    cost = LinkCost(2, 0.01, 1e-3)
    halved = CompressionCost("half", wire_ratio=0.5, s_per_byte=3e-4)
    step = simulate(TEN, HALVES, cost, compression=halved)
    assert step.wire_s == pytest.approx(2 * (2 * 0.01 + 500 * 0.5e-3))
    assert step.delayed_s == pytest.approx(2 * 500 * 3e-4)
    assert step.total_s == pytest.approx(1.75 + 0.3 + 0.27)


@given(
    ready=st.lists(st.floats(0, 1), min_size=1, max_size=12),
    sizes=st.lists(st.integers(0, 10**6), min_size=12, max_size=12),
    per_byte=st.floats(0, 1e-6),
    latency=st.floats(0, 0.1),
    contention=st.floats(0, 2),
)
def test_a_step_takes_between_its_parts_and_all_of_them(
    ready: list[float], sizes: list[int], per_byte: float, latency: float, contention: float
) -> None:
    gradients = tuple(GradReady(i, sizes[i], when) for i, when in enumerate(sorted(ready)))
    record = StepRecord(gradients, 0.1, 1.0, 0.2)
    buckets = [Bucket((gradient.index,), gradient.nbytes) for gradient in gradients]
    step = simulate(record, buckets, LinkCost(2, latency, per_byte, contention))
    assert step.total_s >= max(step.compute_s, 0.3 + step.wire_s) - 1e-9
    assert step.total_s <= step.compute_s + step.wire_s * (1 + contention) + 1e-9
    assert step.total_s == pytest.approx(step.compute_s + step.delayed_s + step.exposed_s)
    assert step.wire_s == pytest.approx(step.overlapped_s + step.exposed_s)


def test_buckets_are_chosen_for_the_link() -> None:
    specs = [spec_of(index, torch.empty(256, 256)) for index in range(64)]  # 16 MB
    gradients = tuple(GradReady(spec.index, spec.nbytes, (at + 1) / 640) for at, spec in enumerate(specs))
    record = StepRecord(gradients, 0.02, 0.1, 0.01)
    current = BucketLimits(25 * MB, (MB,), 4 * MB)

    def plan(limits: BucketLimits) -> list[Bucket]:
        return buckets_of(plan_buckets(specs, limits, status_numel=100))

    best, *others = choose(record, LinkCost(2, 1e-3, 6e-9), current, plan)  # as long on the wire as in backward
    assert len(others) + 1 == len(list(candidates(current)))
    now = next(choice for choice in others if choice.limits == current)
    assert best.limits.cap_bytes < 16 * MB
    assert best.step.total_s < 0.8 * now.step.total_s
    assert best.step.total_s == min(choice.step.total_s for choice in [best, *others])
    assert sum(time.bucket.nbytes for time in best.step.buckets) == sum(spec.nbytes for spec in specs) + 400
    # Where it makes no difference, nothing changes; where each collective costs much, there are few.
    assert choose(record, LinkCost(2, 0.0, 0.0), current, plan)[0].limits == current
    assert len(choose(record, LinkCost(2, 0.5, 1e-10), current, plan)[0].step.buckets) <= 2
