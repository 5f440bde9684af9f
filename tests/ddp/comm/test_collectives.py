"""What torch.distributed promises on the CPU, by each backend: one world for all cases."""

from __future__ import annotations

import pytest
from ddp_worlds.nursery import Nursery

WORLDS = [("gloo", 2), ("gloo", 3), ("shm", 2), ("shm", 3), ("shm 0,1|2,3", 4), ("shm 0,2|1|3", 4)]


def _names() -> list[str]:
    from ddp_worlds.collective_cases import CASES

    return list(CASES)


@pytest.fixture(scope="module", params=WORLDS, ids=str)
def said(request: pytest.FixtureRequest, nursery: Nursery) -> list[dict[str, str]]:
    """What went wrong in each case, by rank."""
    how, size = request.param
    found: list[dict[str, str]] = nursery.run(
        size, "ddp_worlds.collective_cases:run_cases", how=how, group="gloo", deadline_s=180.0
    )
    return found


@pytest.mark.parametrize("name", _names())
def test_collective(said: list[dict[str, str]], name: str) -> None:
    wrong = [f"rank {rank}:\n{each[name]}" for rank, each in enumerate(said) if each[name]]
    assert not wrong, "\n".join(wrong)


def test_all_reduce_of_three_ranks_on_each_of_two_hosts(nursery: Nursery) -> None:
    names = ["all_reduce_of_many_sizes", "all_reduce_is_the_same_bits_on_all_ranks"]
    case = "ddp_worlds.collective_cases:run_cases"
    found = nursery.run(6, case, how="shm 0,1,2|3,4,5", only=names, group="gloo", deadline_s=120.0)
    assert not any(text for each in found for text in each.values()), found
