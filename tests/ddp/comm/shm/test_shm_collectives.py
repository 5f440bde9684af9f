"""The collectives of the backend `shm`, between real processes."""

from __future__ import annotations

import pytest
from ddp_worlds.nursery import Nursery

CASES = "ddp_worlds.shm_cases"


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_sum_has_the_bits_of_the_ranks_in_order(nursery: Nursery, world_size: int) -> None:
    nursery.run(world_size, f"{CASES}:every_sum_has_the_bits_of_the_ranks_in_order")


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_that_is_moved_arrives(nursery: Nursery, world_size: int) -> None:
    nursery.run(world_size, f"{CASES}:all_that_is_moved_arrives")
