"""What is foretold of links, worlds and ways to send, against measurement on emulated links of several hosts.

The links are so slow that their bytes take the time, and what computes only pauses: a busy machine changes little.
Where it does, the comparison is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from ddp_worlds.nursery import Nursery
from testbed.namespaces import PARTS, find_part
from testbed.network import why_not
from testbed.require import require
from testbed.slow_network import SlowNetwork

from ddp.data_parallel.explaining.all_reduce_models import Layout, Link, ring_s
from ddp.data_parallel.explaining.extrapolate import link_of
from ddp.data_parallel.planning.link_cost import fit

RATE, SLOW_RATE = "25mbit", "10mbit"
TCP = 0.95  # of a rate that is what TCP carries of it
SIZES = (200_000, 800_000)
TOLERANCE = 0.15
TRIES = 3


@pytest.fixture
def slow_network() -> Iterator[SlowNetwork]:
    """Four networks that send 25 Mbit/s each."""
    for part, package in PARTS.items():
        require(find_part(part), part, f"apt-get install {package}")
    if reason := why_not():
        pytest.skip(f"emulated links cannot be made here: {reason}")
    with SlowNetwork(4, RATE) as network:
        yield network


def assert_foretold(compare: Callable[[], Mapping[str, tuple[float, float]]]) -> None:
    """`compare` gives pairs of what was foretold and what was measured, by what they are of."""
    for attempt in range(1, TRIES + 1):
        found = compare()
        wrong = {what: pair for what, pair in found.items() if abs(pair[0] / pair[1] - 1) > TOLERANCE}
        if not wrong:
            return
        assert attempt < TRIES, f"foretold and measured: {wrong}, all: {found}"


def trained(nursery: Nursery, network: SlowNetwork, ranks: int, *names: str, scaled: Sequence[object] = ()) -> Any:
    """What rank 0 was told of the first way to train, and the time of a step in each."""
    case = "ddp_worlds.explain_cases:train"
    return nursery.run(ranks, case, networks=network.pids, names=names, rounds=3, scaled=list(scaled))[0]


def test_an_all_reduce_of_2_ranks_foretells_those_of_3_and_4_and_on_a_slower_link(
    nursery: Nursery, slow_network: SlowNetwork
) -> None:
    def measured(ranks: int) -> list[tuple[int, float]]:
        case = "ddp_worlds.explain_cases:all_reduce_times"
        found: list[tuple[int, float]] = nursery.run(ranks, case, networks=slow_network.pids, sizes=SIZES, times=4)[0]
        return found

    def compare() -> Mapping[str, tuple[float, float]]:
        slow_network.set_rate(RATE)
        link = link_of(fit(2, measured(2)), "gloo", hosts=2)
        pairs = {"bytes/s": (link.bytes_per_s, TCP * 25e6 / 8)}
        for ranks in (3, 4):
            for nbytes, seconds in measured(ranks):
                pairs[f"{nbytes} on {ranks}"] = (ring_s(Layout(ranks, 1, link, link), nbytes), seconds)
        slow_network.set_rate(SLOW_RATE)
        slower = Link(link.latency_s, TCP * 10e6 / 8)
        nbytes, seconds = measured(4)[-1]
        return pairs | {"slower": (ring_s(Layout(4, 1, slower, slower), nbytes), seconds)}

    assert_foretold(compare)


def test_explain_foretells_the_steps_of_other_plans_of_compression_and_of_local_sgd(
    nursery: Nursery, slow_network: SlowNetwork
) -> None:
    names = ("now", "one bucket", "bf16", "int8", "powersgd", "LocalSGD, every=8")

    def compare() -> Mapping[str, tuple[float, float]]:
        (report, _), measured = trained(nursery, slow_network, 2, *names)
        foretold = {way["title"]: way["step_s"] for way in [*report["other_plans"], *report["other_ways"]]}
        foretold["now"] = report["step_s"]
        return {name: (foretold[name], measured[name]) for name in names}

    assert_foretold(compare)


def test_explain_foretells_the_steps_of_3_and_4_hosts_and_on_a_slower_link(
    nursery: Nursery, slow_network: SlowNetwork
) -> None:
    asked = [{"hosts": 3}, {"hosts": 4}, {"hosts": 2, "gbit": TCP * 0.01}]

    def compare() -> Mapping[str, tuple[float, float]]:
        slow_network.set_rate(RATE)
        (_, scaled), here = trained(nursery, slow_network, 2, "now", scaled=asked)
        foretold = [report["steps"][-1]["step_s"] for report in scaled]
        measured = [trained(nursery, slow_network, ranks, "now")[1]["now"] for ranks in (3, 4)]
        slow_network.set_rate(SLOW_RATE)
        measured.append(trained(nursery, slow_network, 2, "now")[1]["now"])
        pairs = dict(zip(("3 hosts", "4 hosts", "slower"), zip(foretold, measured, strict=True), strict=True))
        return pairs | {"2 hosts": (scaled[0]["steps"][1]["step_s"], here["now"])}

    assert_foretold(compare)
