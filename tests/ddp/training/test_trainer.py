"""`fit` is the loop that one would write by hand, on whole batches; a resumed run ends as if it had never stopped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from testbed.nursery import Nursery
from testbed.once import once

CASES = "ddp_worlds.trainer_cases"


@pytest.mark.parametrize("world", [1, 3])
def test_fit_is_the_loop_by_hand_on_whole_batches(nursery: Nursery, world: int) -> None:
    nursery.run(world, f"{CASES}:fit_is_the_loop_by_hand", strategies=["all_reduce", "central_storage"])


def test_evaluation_and_prediction_are_those_of_one_process(nursery: Nursery) -> None:
    first, second, third = nursery.run(3, f"{CASES}:in_the_order_of_the_data")
    assert first == second == third


# In the middle of an epoch; after its last step, before the epoch's end; within the end of an epoch.
@pytest.mark.parametrize("breaks", [("on_step_begin", 6), ("on_evaluate_begin", 8), ("on_epoch_begin", 12)])
def test_a_run_that_is_resumed_ends_with_the_same_bits(
    nursery: Nursery, breaks: tuple[str, int], tmp_path: Path, uninterrupted: list[dict[str, object]]
) -> None:
    assert nursery.run(2, f"{CASES}:fits", folder=str(tmp_path), dropout=0.3, breaks=breaks) == [{}, {}]
    assert nursery.run(2, f"{CASES}:fits", folder=str(tmp_path), dropout=0.3) == uninterrupted


@pytest.fixture(scope="module")
def uninterrupted(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    def run() -> list[dict[str, object]]:
        folder = tmp_path_factory.mktemp("uninterrupted")
        results = nursery.run(2, f"{CASES}:fits", folder=str(folder), dropout=0.3)
        assert results[0]["step"] == 16
        again = nursery.run(2, f"{CASES}:fits", folder=str(folder), dropout=0.3)  # a run that is over does nothing more
        assert again == results
        return results

    return once(tmp_path_factory, "uninterrupted Trainer", run)


def test_a_run_goes_on_in_a_world_of_another_size(nursery: Nursery, tmp_path: Path) -> None:
    # The scaling of the rate would follow the world.
    whole = nursery.run(1, f"{CASES}:grows", folder=str(tmp_path / "whole"), until=4)[0]
    for world, until in ((2, 1), (3, 2), (1, 4)):
        found = nursery.run(world, f"{CASES}:grows", folder=str(tmp_path / "parts"), until=until, breaks=until < 4)
        assert all(each == found[0] for each in found)
    assert found[0]["step"] == whole["step"]
    assert found[0]["weights"] == pytest.approx(whole["weights"], abs=1e-12)
    assert found[0]["loss"] == pytest.approx(whole["loss"], abs=1e-12)


def test_without_a_process_group_the_main_replica_saves(nursery: Nursery, tmp_path: Path) -> None:
    nursery.run(2, f"{CASES}:saves_without_a_group", folder=str(tmp_path))


def test_an_evaluator_evaluates_until_the_training_ends(nursery: Nursery) -> None:
    seen = nursery.run(1, f"{CASES}:evaluates_until_the_end")[0]
    assert [each["step"] for each in seen] == [5, 9]
    assert seen[0]["loss"] == seen[1]["loss"] > 0


def test_every_strategy_trains_saves_and_goes_on(nursery: Nursery, tmp_path: Path) -> None:
    first, second = nursery.run(2, f"{CASES}:every_strategy_fits", folder=str(tmp_path))
    assert first == second
    assert first[0] == pytest.approx(first[2], abs=1e-12)  # all_reduce, central_storage


def test_exported_programs_run_without_this_package(nursery: Nursery, tmp_path: Path) -> None:
    nursery.run(2, f"{CASES}:writes_programs", folder=str(tmp_path))
    script = """
import sys, torch, warnings
warnings.simplefilter("ignore")
folder = sys.argv[1]
told = torch.load(f"{folder}/expected.0", weights_only=True)
for name in ("a.pt2", "b.pt2"):
    program = torch.export.load(f"{folder}/{name}").module()
    found = program(x=told["x"]) if name == "b.pt2" else program(told["x"])
    assert torch.allclose(found, told["expected"], rtol=0, atol=1e-12), name
assert not [name for name in sys.modules if name.split(".")[0] in ("ddp", "launcher")]
"""
    result = subprocess.run(
        [sys.executable, "-I", "-c", script, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr


def test_half_precision_trains(nursery: Nursery) -> None:
    nursery.run(2, f"{CASES}:half_precision")


def test_a_step_of_ones_own(nursery: Nursery) -> None:
    histories = nursery.run(3, f"{CASES}:own_step")
    assert histories[0] == histories[1] == histories[2]
    assert histories[0]["seen"] == [23 / 4, 23 / 4]


def test_wrong_use_is_refused(nursery: Nursery) -> None:
    nursery.run(1, f"{CASES}:refuses")
