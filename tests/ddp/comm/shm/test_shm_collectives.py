"""The collectives of the backend `shm`, between real processes."""

from __future__ import annotations

import pytest
from testbed.nursery import Nursery

CASES = "ddp_worlds.shm_cases"


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_every_sum_has_the_bits_of_the_tree(nursery: Nursery, world_size: int) -> None:
    nursery.run(world_size, f"{CASES}:every_sum_has_the_bits_of_the_tree")


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_that_is_moved_arrives(nursery: Nursery, world_size: int) -> None:
    nursery.run(world_size, f"{CASES}:all_that_is_moved_arrives")


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "case",
    [
        "each_collective_gives_what_gloo_gives",
        "exchanged_lists_and_objects",
        "an_asynchronous_call_does_not_wait",
        "futures_are_complete_without_a_wait",
        "messages_find_their_receivers",
        "messages_of_a_tag_keep_their_order",
        "the_default_device_changes_nothing",
        "different_calls_are_an_error_on_all",
    ],
)
def test_ranks_agree(nursery: Nursery, case: str, world_size: int) -> None:
    nursery.run(world_size, f"{CASES}:{case}")


def test_a_message_of_another_size_is_an_error_on_both(nursery: Nursery) -> None:
    nursery.run(2, f"{CASES}:a_message_of_another_size_is_an_error_on_both")
