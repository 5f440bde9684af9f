"""A training with ddp.StepLoader has the same bits on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from testbed.nursery import Nursery

CASES = "ddp_worlds.step_loader_cases"


@pytest.mark.parametrize(
    ("kind", "worlds"),
    [
        ("mlp", [(1, "shm"), (4, "gloo"), (9, "shm")]),  # of 9 ranks one has no micro-batch, in the last step three
        ("cnn", [(1, "shm"), (2, "gloo"), (3, "shm")]),
        ("transformer", [(1, "gloo"), (3, "gloo"), (5, "shm")]),
        ("sparse", [(1, "shm"), (2, "shm"), (3, "gloo")]),
        ("twice", [(1, "shm"), (3, "gloo"), (8, "shm")]),
        ("shared", [(1, "shm"), (3, "gloo"), (8, "shm")]),
        ("bf16", [(1, "shm"), (3, "gloo"), (4, "shm")]),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_bits_are_those_of_any_number_of_ranks(nursery: Nursery, kind: str, worlds: list[tuple[int, str]]) -> None:
    digests = {
        world: nursery.run(world[0], f"{CASES}:trained", group=world[1], deadline_s=300, kind=kind) for world in worlds
    }
    every = {digest for digests_of_world in digests.values() for digest in digests_of_world}
    assert len(every) == 1, digests


def test_loader_processes_and_other_micro_batches(nursery: Nursery) -> None:
    """Processes that load change nothing; other sizes of micro-batches are other sums."""
    plain, by_processes, other = (
        nursery.run(2, f"{CASES}:trained", kind="mlp", steps=2, num_workers=workers, micro_batch_size=size)
        for workers, size in ((0, 4), (2, 4), (0, 8))
    )
    assert plain == by_processes
    assert plain != other


def test_averages_of_buffers_are_those_of_any_number_of_ranks(nursery: Nursery) -> None:
    """In the last step two ranks of four have a micro-batch, and of nine one never has any."""
    worlds = [(1, "shm"), (2, "gloo"), (3, "shm"), (4, "gloo"), (9, "shm")]
    run = f"{CASES}:trained"
    digests = [
        each
        for size, group in worlds
        for each in nursery.run(size, run, group=group, kind="cnn", steps=5, buffers="average")
    ]
    assert len({*digests}) == 1, digests
    assert digests[0] != nursery.run(1, run, kind="cnn", steps=5)[0]
    nursery.run(2, f"{CASES}:averages_of_buffers_are_those_by_hand")


def test_weights_are_added_up_alike_on_any_number_of_ranks(nursery: Nursery) -> None:
    """They are not whole numbers, and some are 0; of nine ranks one has no micro-batch."""
    worlds = [(1, "shm"), (2, "gloo"), (3, "shm"), (4, "gloo"), (9, "shm")]
    run = f"{CASES}:trained"
    digests = [each for size, group in worlds for each in nursery.run(size, run, group=group, kind="mlp", weighs=True)]
    assert len({*digests}) == 1, digests
    assert digests[0] != nursery.run(1, run, kind="mlp")[0]


@pytest.mark.parametrize("ranks", [1, 3])
def test_weights_are_those_of_the_mean_over_everything(nursery: Nursery, ranks: int) -> None:
    nursery.run(ranks, f"{CASES}:weights_are_those_of_the_mean_over_everything")


def test_unfrozen_parameters_count_from_their_first_step_on(nursery: Nursery) -> None:
    run = f"{CASES}:unfrozen_parameters_count_from_their_first_step_on"
    digests = [
        each
        for size, group in [(1, "shm"), (2, "gloo"), (3, "shm"), (4, "gloo")]
        for each in nursery.run(size, run, group=group)
    ]
    assert len({*digests}) == 1, digests


def test_a_training_goes_on_with_another_number_of_ranks(nursery: Nursery, tmp_path: Path) -> None:
    """From the middle of an epoch. The digest of the rest has no losses of the first part, so that is done alike."""
    nursery.run(3, f"{CASES}:saved", kind="cnn", steps=2, folder=str(tmp_path))
    digests = [
        nursery.run(ranks, f"{CASES}:resumed", kind="cnn", steps=3, folder=str(tmp_path))[0] for ranks in (3, 2, 1)
    ]
    assert len({*digests}) == 1


def test_random_numbers_go_on_from_a_checkpoint_on_other_ranks(nursery: Nursery, tmp_path: Path) -> None:
    drawn = nursery.run(3, f"{CASES}:random_numbers_saved", folder=str(tmp_path))
    for ranks in (2, 3, 4):
        drawn += nursery.run(ranks, f"{CASES}:random_numbers_loaded", folder=str(tmp_path))
    assert all(each == drawn[0] for each in drawn), drawn


def test_ranks_without_micro_batches_are_named_once(nursery: Nursery) -> None:
    first, *others = nursery.run(3, "ddp_worlds.step_loader_cases:ranks_without_micro_batches_are_named")
    (text,) = first
    assert text.startswith("3 ranks, but only 2 micro-batches in a step of ddp.StepLoader: ranks from 2 on have none. ")
    assert others == [[], []]


def test_what_a_step_cannot_take_is_refused(nursery: Nursery) -> None:
    cases = [
        "what_a_step_cannot_take_is_refused",
        "a_step_that_was_abandoned_changes_nothing",
        "a_step_that_was_abandoned_after_some_micro_batches_changes_nothing",
    ]
    nursery.in_turn(2, CASES, cases)
