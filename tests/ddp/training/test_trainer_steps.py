"""A fit with a `ddp.StepLoader` has the same bits on any number of ranks: weights, history, evaluations."""

from __future__ import annotations

from pathlib import Path

import pytest
from testbed.nursery import Nursery

CASES = "ddp_worlds.trainer_steps_cases"


@pytest.mark.parametrize("loss", ["samples", "labels"])
def test_a_fit_has_the_same_bits_on_any_number_of_ranks(nursery: Nursery, loss: str) -> None:
    """The last step has 14 samples; of five ranks one has no micro-batch."""
    worlds = [(1, "shm"), (2, "gloo"), (3, "shm"), (5, "shm")]
    results = [each for size, group in worlds for each in nursery.run(size, f"{CASES}:fits", group=group, loss=loss)]
    assert len(results) == 11
    assert all(each == results[0] for each in results), results


def test_a_fit_goes_on_with_another_number_of_ranks(nursery: Nursery, tmp_path: Path) -> None:
    """From within an epoch, from its last step, and from within the last epoch; the history has all epochs."""
    for ranks, step in ((2, 2), (3, 6), (1, 8)):
        nursery.run(ranks, f"{CASES}:resumes", folder=str(tmp_path / "parts"), stops_at=step)
    parts = nursery.run(3, f"{CASES}:fits", loss="labels", folder=str(tmp_path / "parts"))
    (whole,) = nursery.run(1, f"{CASES}:fits", loss="labels", folder=str(tmp_path / "whole"))
    assert parts == [whole] * 3


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_fit_is_the_loop_by_hand_on_whole_batches(nursery: Nursery, ranks: int) -> None:
    nursery.run(ranks, f"{CASES}:is_the_loop_by_hand")


def test_what_does_not_fit_is_refused(nursery: Nursery) -> None:
    nursery.run(2, f"{CASES}:what_does_not_fit_is_refused")
