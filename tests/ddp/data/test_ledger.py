"""The ledger of a training with ddp.StepLoader, and the comparison of its hashes between ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_worlds.ledger_cases import lines_of
from testbed.nursery import Nursery

CASES = "ddp_worlds.ledger_cases"


def _steps(path: Path) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in lines_of(path) if "hashes" in line}


@pytest.mark.parametrize("kind", ["transformer", "sparse", "bf16"])
def test_any_number_of_ranks_has_the_same_hashes_and_losses(nursery: Nursery, tmp_path: Path, kind: str) -> None:
    for ranks, group in ((1, "gloo"), (3, "gloo"), (4, "shm")):
        nursery.run(
            ranks, f"{CASES}:recorded", group=group, kind=kind, path=str(tmp_path / f"{ranks}"), steps=4, ledger="full"
        )
    first, *others = (_steps(tmp_path / f"{ranks}") for ranks in (1, 3, 4))
    assert [*first] == [1, 2, 3, 4]
    assert [line["shares"] for line in first.values()] == [
        [8],
        [8],
        [2],
        [8],
    ]  # the last step of an epoch has 6 samples
    assert [line["shares"] for line in others[0].values()][2:] == [[1, 1, 0], [3, 3, 2]]
    for other in others:
        for number, line in other.items():
            assert {**line, "shares": None} == {**first[number], "shares": None}
    hashes = [pair for line in first.values() for pair in line["hashes"].values()]
    assert len({*map(tuple, hashes)}) > len(hashes) // 2  # they tell steps and parameters apart


def test_its_first_line_says_what_it_depends_on(nursery: Nursery, tmp_path: Path) -> None:
    nursery.run(2, f"{CASES}:recorded", kind="mlp", path=str(tmp_path / "ledger"), steps=1)
    first, step = lines_of(tmp_path / "ledger")
    assert first == {
        "ledger": 1,
        "machine": {"torch": torch.__version__, "processor": torch.backends.cpu.get_cpu_capability(), "threads": 1},
        "loader": {
            "samples": 71, "steps": 3, "global_batch_size": 32, "micro_batches": 8, "seed": 3, "shuffle": True,
        },
    }  # fmt: skip
    assert (step["step"], step["hashes"]) == (1, {})  # how long a step takes is not known yet


def test_all_parameters_come_in_turn(nursery: Nursery, tmp_path: Path) -> None:
    """Those that a ledger has in any step, it has with the hashes of a full one."""
    for kind in ("sampled", "full"):
        nursery.run(2, f"{CASES}:recorded", kind="transformer", path=str(tmp_path / kind), steps=200, ledger=kind)
    sampled, full = (_steps(tmp_path / kind) for kind in ("sampled", "full"))
    assert {line["every"] for line in full.values()} == {1}
    names = {*full[1]["hashes"]}
    for first, line in sampled.items():
        for name, pair in line["hashes"].items():
            assert full[first]["hashes"][name] == pair
        every = line["every"]
        following = [sampled[at] for at in range(first + 1, first + 1 + every) if at in sampled]
        if len(following) == every and all(each["every"] == every for each in following):
            assert {name for each in following for name in each["hashes"]} == names, (first, every)
    assert max(line["every"] for line in sampled.values()) < 200


@pytest.mark.parametrize("what", ["parameter", "state", "gradient"])
def test_a_rank_that_differs_is_named(nursery: Nursery, tmp_path: Path, what: str) -> None:
    nursery.run(3, f"{CASES}:a_rank_that_differs", what=what, path=str(tmp_path / "ledger"))


def test_a_gradient_that_differs_is_named_where_weights_are_equal(nursery: Nursery, tmp_path: Path) -> None:
    nursery.run(3, f"{CASES}:a_gradient_that_one_rank_has_alone", path=str(tmp_path / "ledger"))


def test_a_second_model_has_a_number(nursery: Nursery, tmp_path: Path) -> None:
    nursery.run(2, f"{CASES}:two_models", path=str(tmp_path / "ledger"))
    assert {*_steps(tmp_path / "ledger")[1]["hashes"]} == {"weight", "bias", "weight of model 2", "bias of model 2"}


def test_what_has_no_line(nursery: Nursery, tmp_path: Path) -> None:
    nursery.run(2, f"{CASES}:what_has_no_line", path=str(tmp_path / "ledger"))
    assert [*_steps(tmp_path / "ledger")] == [1, 2]
    assert all(line["every"] > 1 for line in _steps(tmp_path / "ledger").values())


def test_a_full_disk_ends_only_the_ledger(nursery: Nursery) -> None:
    nursery.run(2, f"{CASES}:a_full_disk_ends_only_the_ledger")


def test_a_checkpoint_names_the_last_step_before_it(nursery: Nursery, tmp_path: Path) -> None:
    nursery.run(2, f"{CASES}:saved", folder=str(tmp_path / "saved"), path=str(tmp_path / "ledger"))
    file = tmp_path / "saved" / "step-0000000040.pt"
    *_, before, line, header, after = lines_of(tmp_path / "ledger")
    assert (before["step"], line, header["ledger"], after["step"]) == (4, {"checkpoint": str(file), "step": 4}, 1, 5)
    assert torch.load(file, weights_only=True)["ledger_step"] == 4
    nursery.run(3, f"{CASES}:loaded", folder=str(tmp_path / "saved"), path=str(tmp_path / "resumed"))
    _, resumed, step = lines_of(tmp_path / "resumed")
    assert (resumed, step["step"]) == (line, 5)
