"""The step in worlds that are not here: against arithmetic by hand, and what published curves would need."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from testbed.require import require

from ddp.data_parallel.explaining.all_reduce_models import Layout, Link, all_reduce_s, exchange_s
from ddp.data_parallel.explaining.explain import _links
from ddp.data_parallel.explaining.extrapolate import (
    PUBLISHED,
    Extrapolator,
    Published,
    expected_maximum,
    link_of,
    rank_counts,
)
from ddp.data_parallel.explaining.scaling_report import ScalingReport
from ddp.data_parallel.planning.link_cost import CompressionCost, LinkCost, exchange_ratio
from ddp.data_parallel.planning.simulate import Bucket, simulate
from ddp.data_parallel.planning.step_record import GradReady, StepRecord
from ddp.errors import UnsupportedError

MB = 1_000_000
LOCAL, NETWORK = Link(5e-6, 1e10), Link(2e-5, 1.25e9)


def record(count: int = 10, backward_s: float = 0.06) -> StepRecord:
    """`count` gradients of 4 MB, ready one after the other, up to the end of backward."""
    ready = tuple(GradReady(i, 4 * MB, torch.float32, backward_s * (i + 1) / count) for i in range(count))
    return StepRecord(ready, forward_s=0.03, backward_s=backward_s, other_s=0.01)


def extrapolator(
    times: tuple[float, ...] = (0.1,) * 10, network: Link = NETWORK, backend: str = "gloo"
) -> Extrapolator:
    buckets = [Bucket((first, first + 1), 8 * MB) for first in range(0, 10, 2)]
    return Extrapolator(record(), buckets, backend, 0.0, times, LOCAL, network)


def report(made: Extrapolator, hosts: int = 64, gpus: int = 8) -> ScalingReport:
    needed = [made.needed(published) for published in PUBLISHED]
    return ScalingReport(
        made.steps(hosts, gpus), needed, gpus, LOCAL, made.network, made.algorithm, "gloo", ["A note."]
    )


def test_one_rank_is_the_measured_step_without_communication() -> None:
    alone = extrapolator().step(1, 1)
    assert (alone.step_s, alone.wire_s, alone.efficiency) == pytest.approx((0.1, 0, 1))


def test_a_slow_link_takes_its_bytes_and_the_first_bucket_s_gradients() -> None:
    """All but the time until the first bucket is there is on the wire, which is never idle from then on."""
    slow = Link(0.0, 10 * MB)
    step = extrapolator(network=slow).step(4, 1)
    wire_s = 2 * 3 / 4 * 40 * MB / (10 * MB)
    assert step.wire_s == pytest.approx(wire_s)
    assert step.step_s == pytest.approx(0.03 + 0.012 + wire_s + 0.01)
    assert step.exposed_s + step.overlapped_s == pytest.approx(wire_s)


@pytest.mark.parametrize("backend", ["gloo", "shm", "another"])
@pytest.mark.parametrize(("hosts", "each"), [(1, 2), (1, 4), (2, 1), (2, 2), (3, 4), (8, 8)])
def test_a_world_of_the_measured_size_on_the_measured_link_is_the_simulated_step(
    backend: str, hosts: int, each: int
) -> None:
    cost = LinkCost(hosts * each, 3e-4, 2e-9)
    local, network, _ = _links(link_of(cost, backend, hosts), hosts, hosts, None, None, None)
    layout = Layout(hosts, each, local, network)
    for nbytes in (0, MB, 5 * MB):
        assert all_reduce_s(backend, layout, nbytes) == pytest.approx(cost.collective_s(nbytes))
    made = replace(extrapolator(backend=backend), local=local, network=network)
    assert made.step(hosts, each).step_s == pytest.approx(simulate(made.record, made.buckets, cost).total_s)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize(("hosts", "each"), [(2, 1), (2, 4), (3, 4), (8, 8)])
def test_rows_of_a_compressor_take_what_all_ranks_send_each_other(backend: str, hosts: int, each: int) -> None:
    network = Link(0.0, 1e9)
    layout = Layout(hosts, each, Link(0.0, math.inf), network)
    ratio = exchange_s(layout, 1.0) / all_reduce_s(backend, layout, 1.0)
    assert exchange_ratio(backend, layout.ranks, [each] * hosts) == pytest.approx(ratio)
    assert exchange_ratio(backend, layout.ranks, None) >= ratio * (1 - 1e-9)
    made = replace(extrapolator(network=network, backend=backend), local=layout.local)
    half = replace(made, compression=lambda _: CompressionCost("half", 0.5, 0.0, 0.0))
    wire_s = 40 * MB * all_reduce_s(backend, layout, 1.0)
    assert made.step(hosts, each).wire_s == pytest.approx(wire_s)
    assert half.step(hosts, each).wire_s == pytest.approx(wire_s * ratio / 2)


def test_ranks_that_vary_wait_for_the_slowest_of_all() -> None:
    times = (0.09, 0.1, 0.1, 0.11)
    even, uneven = extrapolator().step(8, 1), extrapolator(times).step(8, 1)
    assert uneven.straggling_s == pytest.approx(expected_maximum(times, 8) - 0.1)
    assert uneven.step_s == pytest.approx(even.step_s + uneven.straggling_s)


@pytest.mark.parametrize(
    ("hosts", "each", "expected"),
    [
        (1, 1, [(1, 1)]),
        (1, 6, [(1, 1), (1, 2), (1, 4), (1, 6)]),
        (5, 2, [(1, 1), (1, 2), (2, 2), (4, 2), (5, 2)]),
        (3, 1, [(1, 1), (2, 1), (3, 1)]),
    ],
)
def test_a_host_is_filled_before_the_next(hosts: int, each: int, expected: list[tuple[int, int]]) -> None:
    assert rank_counts(hosts, each) == expected


def test_what_a_published_speed_up_needs_gives_just_that() -> None:
    made = extrapolator((0.1, 0.1, 0.1, 0.12), network=Link(2e-5, 2e8))
    published = Published("a curve", 64, 4, 0.7 * 64, "nobody")
    needed = made.needed(published)
    assert not needed.is_reached
    assert needed.gbit is not None
    assert needed.gbit > 1.6  # what it has
    enough = replace(made, network=replace(made.network, bytes_per_s=needed.gbit * 1e9 / 8)).step(16, 4)
    assert enough.efficiency == pytest.approx(0.7, rel=0.01)
    here = needed.here
    assert needed.overlap is not None
    exposed_s = (1 - needed.overlap) * here.wire_s
    assert here.compute_s / (here.compute_s + exposed_s + here.straggling_s) == pytest.approx(0.7)
    assert needed.spread is None  # the link alone costs more


def test_a_spread_that_costs_more_than_all_else_can_give_is_said_so() -> None:
    made = extrapolator((0.05, 0.15) * 20, network=Link(0.0, 1e12))
    needed = made.needed(Published("a curve", 64, 1, 0.9 * 64, "nobody"))
    assert (needed.gbit, needed.overlap) == (None, None)
    assert needed.spread is not None
    assert 0 < needed.spread < 1
    slower_s = needed.spread * needed.here.straggling_s + needed.here.exposed_s
    assert 0.1 / (0.1 + slower_s) == pytest.approx(0.9)


def test_the_curves_that_were_published_are_as_published() -> None:
    assert [(p.ranks, round(p.speed_up)) for p in PUBLISHED] == [(50, 40), (500, 300), (512, 461)]
    assert all(p.source and p.ranks % p.ranks_per_host == 0 for p in PUBLISHED)


def test_the_report_is_one_screen_and_a_dict_of_json() -> None:
    for network in (Link(2e-5, 12.5e9), Link(2e-5, 1e7), Link(2e-5, math.inf)):
        made = report(extrapolator((0.1, 0.1, 0.13), network))
        text = str(made)
        assert max(map(len, text.splitlines())) <= 80
        assert len(text.splitlines()) <= 24
        assert f"{made.steps[-1].speed_up:.1f}" in text
        assert "A note." in text
        held = json.loads(json.dumps(made.as_dict(), allow_nan=False))
        assert [step["ranks"] for step in held["steps"]] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
        assert held["steps"][-1]["efficiency"] == pytest.approx(made.steps[-1].efficiency)
        assert [curve["ranks"] for curve in held["published"]] == [50, 500, 512]


def test_bars_are_as_long_as_the_efficiency() -> None:
    made = report(extrapolator(network=Link(2e-5, 1e8)))
    bars = [line.count("#") for line in str(made).splitlines() if line.endswith("|")]
    assert bars == [round(13 * step.efficiency) for step in made.steps]
    assert bars[0] == 13
    assert bars[-1] < 7


def test_a_plot_is_drawn_where_matplotlib_is(tmp_path: Path) -> None:
    require(find_spec("matplotlib"), "matplotlib", "pip install matplotlib")
    for name, begins in (("curve.png", b"\x89PNG"), ("curve.svg", b"<?xml")):
        report(extrapolator()).plot(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(begins)


def test_without_matplotlib_a_plot_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError, match="pip install matplotlib"):
        report(extrapolator()).plot(tmp_path / "curve.png")
