"""The models of links against measurement: worlds of 2 to 4 ranks on emulated links."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ddp_worlds.nursery import Nursery
from testbed.namespaces import PARTS, find_part
from testbed.network import why_not
from testbed.require import require
from testbed.slow_network import SlowNetwork

from ddp.data_parallel.explaining.all_reduce_models import Layout, Link, ring_s
from ddp.data_parallel.explaining.extrapolate import link_of
from ddp.data_parallel.planning.link_cost import fit

SIZES = (200_000, 800_000)
TOLERANCE = 0.15


@pytest.fixture(scope="module")
def slow_network() -> Iterator[SlowNetwork]:
    """Four networks that send 25 Mbit/s each."""
    for part, package in PARTS.items():
        require(find_part(part), part, f"apt-get install {package}")
    if reason := why_not():
        pytest.skip(f"emulated links cannot be made here: {reason}")
    with SlowNetwork(4, "25mbit") as network:
        yield network


def test_an_all_reduce_of_2_ranks_foretells_those_of_3_and_4_and_on_a_slower_link(
    nursery: Nursery, slow_network: SlowNetwork
) -> None:
    def measured(ranks: int) -> list[tuple[int, float]]:
        (first, *_) = nursery.run(
            ranks, "ddp_worlds.explain_cases:all_reduce_times", networks=slow_network.pids, sizes=SIZES, times=4
        )
        return first

    link = link_of(fit(2, measured(2)), "gloo", hosts=2)
    assert link.bytes_per_s == pytest.approx(25e6 / 8, rel=TOLERANCE)
    for ranks in (3, 4):
        for nbytes, seconds in measured(ranks):
            assert ring_s(Layout(ranks, 1, link, link), nbytes) == pytest.approx(seconds, rel=TOLERANCE)
    slow_network.set_rate("10mbit")
    try:
        slower = Link(link.latency_s, 10e6 / 8)
        nbytes, seconds = measured(4)[-1]
        assert ring_s(Layout(4, 1, slower, slower), nbytes) == pytest.approx(seconds, rel=TOLERANCE)
    finally:
        slow_network.set_rate("25mbit")
