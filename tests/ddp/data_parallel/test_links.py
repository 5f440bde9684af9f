"""What is foretold of ways to send, against measurement on emulated links of two hosts.

The links are so slow that their bytes take the time, and what computes only pauses: a busy machine changes little.
Where it does, the comparison is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest
from testbed.namespaces import PARTS, find_part
from testbed.network import why_not
from testbed.nursery import Nursery
from testbed.require import require
from testbed.slow_network import SlowNetwork

RATE = "25mbit"
TOLERANCE = 0.15
TRIES = 3


@pytest.fixture
def slow_network() -> Iterator[SlowNetwork]:
    """Two networks that send 25 Mbit/s each."""
    for part, package in PARTS.items():
        require(find_part(part), part, f"apt-get install {package}")
    if reason := why_not():
        pytest.skip(f"emulated links cannot be made here: {reason}")
    with SlowNetwork(2, RATE) as network:
        yield network


def assert_foretold(compare: Callable[[], Mapping[str, tuple[float, float]]]) -> None:
    """`compare` gives pairs of what was foretold and what was measured, by what they are of."""
    for attempt in range(1, TRIES + 1):
        found = compare()
        wrong = {what: pair for what, pair in found.items() if abs(pair[0] / pair[1] - 1) > TOLERANCE}
        if not wrong:
            return
        assert attempt < TRIES, f"foretold and measured: {wrong}, all: {found}"


def test_explain_foretells_the_steps_of_other_plans_of_compression_and_of_local_sgd(
    nursery: Nursery, slow_network: SlowNetwork
) -> None:
    names = ("now", "one bucket", "bf16", "int8", "powersgd", "LocalSGD, every=8")

    def compare() -> Mapping[str, tuple[float, float]]:
        case = "ddp_worlds.explain_cases:train"
        report, measured = nursery.run(2, case, networks=slow_network.pids, names=names, rounds=3)[0]
        foretold = {way["title"]: way["step_s"] for way in [*report["other_plans"], *report["other_ways"]]}
        foretold["now"] = report["step_s"]
        return {name: (foretold[name], measured[name]) for name in names}

    assert_foretold(compare)
