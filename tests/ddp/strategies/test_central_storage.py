"""Central storage: equal to all-reduce, one copy of everything, and no silent difference between the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from testbed.nursery import Nursery
from testbed.seeds import Seeds

CASES = "ddp_worlds.central_storage_cases"


# model, optimizer, micro-batches, norm to clip the averaged gradient to (0: none)
SETTINGS = [
    ("mlp", "sgd", 1, 0.0),
    ("norm", "sgd", 3, 0.05),
    ("words", "adagrad", 2, 0.0),
    ("odd", "adagrad", 1, 0.3),
    ("norm", "adam fused", 1, 0.0),
    ("words", "sparse sgd", 1, 0.1),
    ("mlp", "adafactor", 1, 0.0),
    ("odd", "adamw", 2, 0.0),
    ("words", "plain sgd", 1, 0.0),
    ("conv", "rprop", 1, 0.0),
    ("words", "sparse adam", 1, 0.0),
]


@pytest.mark.parametrize(("world_size", "settings"), [(1, SETTINGS[:4]), (2, SETTINGS), (3, SETTINGS[:7])])
def test_training_equals_all_reduce(
    nursery: Nursery, world_size: int, settings: list[tuple[str, str, int, float]]
) -> None:
    nursery.run(world_size, f"{CASES}:equals_all_reduce", settings=settings)


@pytest.mark.parametrize("world_size", [1, 3])
def test_copies_of_a_device_may_be_late(nursery: Nursery, world_size: int, seeds: Seeds) -> None:
    settings = [SETTINGS[at] for at in (0, 1, 3, 4)]
    nursery.run(world_size, f"{CASES}:a_late_device_equals_all_reduce", settings=settings, seed=seeds(1)[0])


def test_there_is_one_copy_of_the_parameters(nursery: Nursery) -> None:
    nursery.run(2, f"{CASES}:there_is_one_copy")


def test_one_rank_saves_for_plain_torch_and_other_worlds(nursery: Nursery, tmp_path: Path) -> None:
    path = str(tmp_path / "state")
    nursery.run(2, f"{CASES}:one_rank_saves", path=path)
    nursery.run(3, f"{CASES}:a_state_fits_all_reduce", path=path)


def test_changes_of_the_model_are_errors_on_all_ranks(nursery: Nursery) -> None:
    gathered = nursery.run(2, f"{CASES}:changes_after_prepare_are_errors")
    assert "load_state_dict" in gathered[0][0]


def test_what_differs_between_ranks_is_an_error(nursery: Nursery) -> None:
    nursery.run(2, f"{CASES}:what_differs_between_ranks_is_an_error")


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_users_optimizer_steps_no_more(nursery: Nursery, world_size: int) -> None:
    nursery.run(world_size, f"{CASES}:the_users_optimizer_steps_no_more")


def test_half_precision_is_rounded_once(nursery: Nursery) -> None:
    nursery.run(3, f"{CASES}:half_precision_is_rounded_once")


def test_the_name_in_strategy_is_enough(nursery: Nursery) -> None:
    nursery.run(2, f"{CASES}:the_name_in_strategy_is_enough")


def test_a_rank_that_is_gone_or_late_is_an_error_for_the_others(nursery: Nursery) -> None:
    assert "gradients of the others" in nursery.run(2, f"{CASES}:a_rank_leaves")[0]
    late = nursery.run(2, f"{CASES}:a_rank_is_late")[0]
    assert "rank 1" in late
