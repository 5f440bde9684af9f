"""What torch.distributed promises on the CPU, by each backend: one world for all its cases.

Each case is tried three times: by gloo, by shm on one host and by shm over hosts, in worlds that take turns. The other
half of each world is slow.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from _pytest.mark import ParameterSet
from testbed.nursery import Nursery
from testbed.once import once

# Pairs; which of a pair tries the first case.
WORLDS = {
    ("gloo", 2): 0, ("gloo", 3): 1,
    ("shm", 3): 0, ("shm", 2): 1,
    ("shm 0,2|1|3", 4): 0, ("shm 0,1|2,3", 4): 1,
}  # fmt: skip


def _names(how: str, size: int, half: int) -> list[str]:
    from ddp_worlds.collective_cases import CASES

    return list(CASES)[(WORLDS[how, size] + half) % 2 :: 2]


def _cases() -> Iterator[ParameterSet]:
    for turn, (how, size) in enumerate(WORLDS):
        for half, marks in enumerate(([], [pytest.mark.slow(turn=turn)])):
            for name in _names(how, size, half):
                yield pytest.param((how, size, half), name, id=f"{name}-{how} {size}", marks=marks)


@pytest.fixture(scope="module")
def said(
    request: pytest.FixtureRequest, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, str]]:
    """What went wrong in each case, by rank."""
    how, size, half = request.param

    def run() -> list[dict[str, str]]:
        case, only = "ddp_worlds.collective_cases:run_cases", _names(how, size, half)
        return nursery.run(size, case, how=how, only=only, group="gloo", deadline_s=180.0)

    return once(tmp_path_factory, f"collectives {how} {size} {half}", run)


@pytest.mark.parametrize(("said", "name"), [*_cases()], indirect=["said"])
def test_collective(said: list[dict[str, str]], name: str) -> None:
    wrong = [f"rank {rank}:\n{each[name]}" for rank, each in enumerate(said) if each[name]]
    assert not wrong, "\n".join(wrong)


def test_all_reduce_of_three_ranks_on_each_of_two_hosts(nursery: Nursery) -> None:
    names = ["all_reduce_of_many_sizes", "all_reduce_is_the_same_bits_on_all_ranks"]
    case = "ddp_worlds.collective_cases:run_cases"
    found = nursery.run(6, case, how="shm 0,1,2|3,4,5", only=names, group="gloo", deadline_s=120.0)
    assert not any(text for each in found for text in each.values()), found
