"""Sums of small vectors over many ranks, and values that are gathered by them."""

from __future__ import annotations

import pytest
from testbed.nursery import Nursery


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
def test_small_sums_and_values_gathered_by_them(nursery: Nursery, world_size: int) -> None:
    cases = [
        "small_sums_take_few_messages_and_are_the_same_bits",
        "small_sums_of_a_group_are_made_by_one_thread_that_ends_with_it",
        "values_are_gathered_by_sums",
    ]
    nursery.in_turn(world_size, "ddp_worlds.comm_cases", cases, group="gloo")
