"""Collectives of Horovod's interface equal what one process computes; ranks that differ see who called what."""

from __future__ import annotations

import pytest
from testbed.nursery import Nursery

CASES = "ddp_worlds.horovod_cases"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_and_gradients_are_those_of_one_process(nursery: Nursery, world_size: int) -> None:
    cases = [
        "reductions_equal_those_of_one_process",
        "copies_arrive_unchanged",
        "gradients_are_those_of_one_process",
    ]
    nursery.in_turn(world_size, CASES, cases)


@pytest.mark.parametrize("world_size", [1, 3])
def test_states_and_objects_are_those_of_the_root(nursery: Nursery, world_size: int) -> None:
    cases = [
        "parameters_are_those_of_the_root",
        "optimizer_states_are_those_of_the_root",
        "objects_travel_without_pickle",
    ]
    nursery.in_turn(world_size, CASES, cases)


def test_ranks_that_call_different_things_are_named_and_can_go_on(nursery: Nursery) -> None:
    cases = ["different_calls_are_errors_that_name_them", "groups_and_places"]
    nursery.in_turn(3, CASES, cases)


def test_a_rank_that_does_not_come_is_named(nursery: Nursery) -> None:
    nursery.run(2, f"{CASES}:a_missing_rank_is_named")


def test_without_a_group_calls_say_what_to_do(nursery: Nursery) -> None:
    nursery.run(1, f"{CASES}:without_a_group_calls_say_what_to_do")
