"""scripts/bench/scaling.py: a step in worlds that are not here, against arithmetic by hand."""

from __future__ import annotations

import itertools
import random
import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp.data_parallel.planning.link_cost import LinkCost
from ddp.data_parallel.planning.simulate import Bucket, GradReady, StepRecord, simulate
from ddp.data_parallel.planning.step_report import StepReport, explain_step

SCALING = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[3] / "scripts" / "bench" / "scaling.py")))
LOCAL, NETWORK = SCALING.Link(1e-6, 1e10), SCALING.Link(1e-5, 1e9)
RECORD = StepRecord(tuple(GradReady(i, 4_000_000, 0.006 * (i + 1)) for i in range(10)), 0.03, 0.06, 0.01)
BUCKETS = [Bucket((first, first + 1), 8_000_000) for first in range(0, 10, 2)]


def report(cost: LinkCost, computed_s: tuple[float, ...] = (0.1,)) -> StepReport:
    return explain_step(
        RECORD,
        cost,
        BUCKETS,
        backend="gloo",
        step_times_s=computed_s,
        compute_times_s=computed_s,
        plans={},
        compression=None,
        compressed_buckets=BUCKETS,
        compressions=[],
    )


def test_rings_and_hierarchies_send_each_byte_nearly_twice() -> None:
    for algorithm in (SCALING.ring_s, SCALING.hierarchy_s):
        assert algorithm(SCALING.Layout(1, 4, LOCAL, NETWORK), 1e9) == pytest.approx(6 * 1e-6 + 1.5 * 0.1)
        assert algorithm(SCALING.Layout(4, 1, LOCAL, NETWORK), 1e9) == pytest.approx(6 * 1e-5 + 1.5 * 1.0)
    two = SCALING.Layout(2, 4, LOCAL, NETWORK)
    assert SCALING.ring_s(two, 1e9) == pytest.approx(12 * 1e-6 + 2 * 1e-5 + 2 * 7 / 8 * 1.0)
    assert SCALING.hierarchy_s(two, 1e9) == pytest.approx(2 * 3 * 1e-6 + 1.5 * 0.1 + 2 * 1e-5 + 1.0)


def test_trees_take_fewer_messages_of_more_bytes() -> None:
    world = SCALING.Layout(64, 8, LOCAL, NETWORK)
    assert SCALING.tree_s(world, 0) == pytest.approx(2 * (7 * 1e-6 + 6 * 1e-5))
    assert SCALING.tree_s(world, 1e3) < SCALING.ring_s(world, 1e3)
    assert SCALING.tree_s(world, 1e9) > SCALING.ring_s(world, 1e9)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_world_of_the_measured_size_is_the_simulated_step(ranks: int) -> None:
    cost = LinkCost(ranks, 3e-4, 2e-9, contention=0.5)
    made = SCALING.scaled(report(cost), SCALING.Layout(1, ranks, SCALING.link_of(cost), NETWORK), "ring")
    assert made.step_s == pytest.approx(simulate(RECORD, BUCKETS, cost).total_s)
    assert (made.ranks, made.hosts, made.straggling_s) == (ranks, 1, 0)


def test_one_rank_sends_nothing_and_a_slow_network_its_bytes() -> None:
    measured = report(LinkCost(2, 0.0, 1e-9))
    alone = SCALING.scaled(measured, SCALING.Layout(1, 1, LOCAL, NETWORK), "ring")
    assert (alone.step_s, alone.wire_s, alone.efficiency) == pytest.approx((0.1, 0, 1))
    slow = SCALING.scaled(measured, SCALING.Layout(4, 1, LOCAL, SCALING.Link(0.0, 1e7)), "ring")
    wire_s = 2 * 3 / 4 * 40_000_000 / 1e7
    assert slow.wire_s == pytest.approx(wire_s)
    assert slow.step_s == pytest.approx(0.03 + 0.012 + wire_s + 0.01)  # the link is never idle after the first bucket


def test_ranks_that_vary_wait_for_the_slowest_of_all() -> None:
    cost, computed_s = LinkCost(2, 0.0, 1e-9), (0.09, 0.1, 0.1, 0.11)
    layout = SCALING.Layout(8, 1, LOCAL, NETWORK)
    even, uneven = (SCALING.scaled(report(cost, each), layout, "ring") for each in ((0.1,), computed_s))
    assert uneven.straggling_s == pytest.approx(SCALING.expected_maximum(computed_s, 8) - 0.1)
    assert uneven == replace(even, step_s=even.step_s + uneven.straggling_s, straggling_s=uneven.straggling_s)


@pytest.mark.parametrize(
    ("hosts", "gpus", "expected"),
    [
        (1, 6, [(1, 1), (1, 2), (1, 4), (1, 6)]),
        (5, 2, [(1, 1), (1, 2), (2, 2), (4, 2), (5, 2)]),
        (3, 1, [(1, 1), (2, 1), (3, 1)]),
    ],
)
def test_a_host_is_filled_before_the_next(hosts: int, gpus: int, expected: list[tuple[int, int]]) -> None:
    assert list(SCALING.worlds(hosts, gpus)) == expected


@given(sample=st.lists(st.floats(0, 100), min_size=1, max_size=6), draws=st.integers(1, 4))
def test_the_expected_maximum_is_the_mean_over_all_draws(sample: list[float], draws: int) -> None:
    if draws > len(sample):
        return
    every = [max(drawn) for drawn in itertools.product(sample, repeat=draws)]
    assert SCALING.expected_maximum(sample, draws) == pytest.approx(sum(every) / len(every), abs=1e-9)


def test_the_expected_maximum_of_many_draws_has_a_tail() -> None:
    random_ = random.Random(0)
    sample = [10 + random_.expovariate(1.0) for _ in range(2000)]
    for draws in (2, 100, 2000, 100_000):
        truth = 10 + sum(1 / at for at in range(1, draws + 1))  # the harmonic number
        assert SCALING.expected_maximum(sample, draws) == pytest.approx(truth, rel=0.05)
    assert SCALING.expected_maximum([0.5] * 7, 1000) == pytest.approx(0.5)
