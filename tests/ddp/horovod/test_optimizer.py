"""A distributed optimizer trains as one process does on the whole batch: float64, to 1e-12; or it says who differs."""

from __future__ import annotations

import pytest
from testbed.nursery import Nursery

CASES = "ddp_worlds.horovod_cases"
# model, optimizer, backward passes a step, synchronize() and clip before step()
SETUPS = [
    ("mlp", "sgd", 1, False),
    ("odd", "adamw", 2, True),
    ("conv", "sgd", 3, True),
    ("attention", "sgd", 1, True),
    ("complex", "sgd", 2, False),
]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_training_equals_one_process_on_the_whole_batch(nursery: Nursery, world_size: int) -> None:
    nursery.run(world_size, f"{CASES}:equals_whole_batch", setups=SETUPS)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_other_ways_to_use_it_are_exact_too(nursery: Nursery, world_size: int) -> None:
    cases = [
        "a_sum_equals_the_sum",
        "more_passes_than_announced_are_exact",
        "parameters_without_gradients_are_exact",
        "sparse_gradients_stay_sparse",
        "closures_see_the_average",
        "grad_scaler_needs_nothing_else",
        "two_optimizers_share_a_backward_pass",
        "checkpoints_and_second_derivatives_are_exact",
        "unfrozen_and_added_parameters_are_averaged",
    ]
    nursery.in_turn(world_size, CASES, cases)


def test_sums_are_by_the_tree_if_the_group_prefers_that(nursery: Nursery) -> None:
    nursery.run(3, f"{CASES}:sums_are_by_the_tree", group="gloo")


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_optimizers_that_are_gone_leave_their_groups_to_others(nursery: Nursery, backend: str) -> None:
    nursery.run(3, f"{CASES}:optimizers_that_are_gone_leave_their_groups_to_others", group=backend)


@pytest.mark.parametrize("world_size", [1, 2])
def test_it_is_the_users_optimizer(nursery: Nursery, world_size: int) -> None:
    cases = ["it_is_the_users_optimizer", "bad_arguments_are_errors", "compressed_training_comes_close"]
    nursery.in_turn(world_size, CASES, cases)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_differ_are_named(nursery: Nursery, world_size: int) -> None:
    cases = [
        "different_parameters_are_errors",
        "unequal_replicas_are_an_error",
        "different_numbers_are_errors",
        "a_failed_backward_is_everybodys_error",
    ]
    nursery.in_turn(world_size, CASES, cases)


def test_sharded_parameters_are_refused_before_anything_communicates(nursery: Nursery) -> None:
    reported, nothing = nursery.run(2, f"{CASES}:sharded_parameters_are_refused_alone")
    assert nothing == []
    assert ["'1.weight'" in text for text in reported] == [True, True, False, False]
    for text in reported:
        assert text.startswith("parameter '")
        assert "is a DTensor" in text
        assert "without fully_shard() or parallelize_module()" in text


def test_a_rank_that_makes_no_backward_pass_is_named(nursery: Nursery) -> None:
    nursery.run(2, f"{CASES}:a_rank_that_makes_no_backward_pass_is_named")
