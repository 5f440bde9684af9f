"""The model of a step, by numbers that can be worked out by hand; and what wrappers make of it, on real ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testbed.nursery import Nursery

from ddp.data_parallel.buckets.bucket_plan import BucketLimits, plan_buckets, spec_of
from ddp.data_parallel.planning.link_cost import LinkCost, fit
from ddp.data_parallel.planning.simulate import (
    Bucket,
    CompressionCost,
    GradReady,
    StepRecord,
    buckets_of,
    candidates,
    choose,
    simulate,
)

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


def test_computing_goes_on_more_slowly_beside_a_collective_that_needs_its_cores() -> None:
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
def test_a_step_takes_no_less_than_its_parts_and_no_more_than_all_of_them(
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


@pytest.mark.parametrize("as_views", [False, True])
def test_a_plan_by_measurement_changes_no_bit_of_two_ranks(nursery: Nursery, as_views: bool) -> None:
    nursery.run(2, "ddp_worlds.planning_cases:plans_change_no_bit", as_views=as_views)


@pytest.mark.parametrize(
    ("place", "goes_on"),
    [
        ("delivers first", True),
        ("plans first", False),
        ("delivers", True),
        ("chooses", True),
        ("plans", False),
    ],
)
def test_a_rank_that_raises_where_ranks_agree_is_an_error_on_all_at_once(
    nursery: Nursery, place: str, goes_on: bool
) -> None:
    case = "ddp_worlds.planning_cases:a_rank_that_raises_where_ranks_agree_is_an_error_on_all_at_once"
    nursery.run(3, case, place=place, goes_on=goes_on)


@pytest.mark.parametrize(
    ("world_size", "case"),
    [
        (2, "pieces_for_a_slow_link_change_no_bit"),
        (2, "no_backend_for_the_cpu_is_asked_for_pieces_on_a_device"),
        (2, "times_that_one_rank_cannot_read_decide_nothing_on_any"),
        (2, "the_first_steps_are_recorded_on_all_ranks_alike"),
        (3, "with_more_ranks_buckets_change_on_request_only"),
        (3, "a_rank_that_has_joined_takes_part"),
        (2, "failed_steps_are_not_measured"),
        (2, "a_parameter_unfrozen_while_steps_are_measured_begins_that_again"),
        (2, "a_rank_that_raises_alone_after_the_averages_agrees_in_the_same_step"),
        (2, "auto_that_can_decide_nothing_warns"),
        (2, "nothing_is_measured_where_that_is_not_wanted"),
        (2, "a_checkpoint_keeps_what_was_decided"),
        (2, "a_wrapper_that_measures_is_let_go"),
    ],
)
def test_measured_wrappers(nursery: Nursery, world_size: int, case: str) -> None:
    nursery.run(world_size, f"ddp_worlds.planning_cases:{case}")
