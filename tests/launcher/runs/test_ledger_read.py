"""Ledgers as they are found: torn, of several attempts and ranks, on several machines; and the first difference."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import UsageError
from launcher.runs.ledger import Comparison, Ledger, Step, keep_snapshots, read_ledger, snapshots

A = {"torch": "2.13.0", "processor": "AVX2", "threads": 1}
B = {**A, "processor": "AVX512"}


def head(machine: Any = A, **loader: Any) -> dict[str, Any]:
    return {"ledger": 1, "machine": machine, "loader": {"seed": 0, **loader}}


def line(number: int, loss: float | None = None, **hashes: list[str]) -> dict[str, Any]:
    return {"step": number, "shares": [2, 1], "loss": loss, "every": 1, "hashes": hashes}


def write(path: Path, *lines: Any, end: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(each)}\n" for each in lines) + end)
    return path


def step(number: int, loss: float | None = None, machine: Any = A, **hashes: tuple[str, str]) -> Step:
    return Step(number, 3, loss, hashes, machine)


def present(ledger: Ledger, number: int) -> Step:
    found = ledger.step(number)
    assert found is not None
    return found


def test_the_last_line_of_a_step_counts_torn_ones_do_not(tmp_path: Path) -> None:
    path = write(
        tmp_path / "ledger.jsonl",
        head(seed=7),
        {"future": 1},
        line(0, w=["a", "b"]),
        line(1, w=["c", "d"]),
        {"checkpoint": "/old", "step": 2},
        head(B, seed=8),
        line(1, 0.5, w=["e", "f"]),
        {"checkpoint": "/old", "step": 1},
        {"checkpoint": "/new", "step": 2},
        {"step": 2},
        [3],
        end='{"step": 3, "loss"',
    )
    ledger = read_ledger(path)
    assert ledger.steps == [0, 1]
    assert present(ledger, 0) == step(0, w=("a", "b"))
    assert present(ledger, 1) == step(1, 0.5, B, w=("e", "f"))
    assert [ledger.step(number) for number in (2, 3)] == [None, None]
    assert (ledger.last, ledger.loader, ledger.machine) == (1, {"seed": 8}, B)
    assert ledger.checkpoints == {"/old": 1, "/new": 2}


def test_a_line_torn_by_a_kill_hides_no_earlier_one(tmp_path: Path) -> None:
    torn = '{"step": 0, "shares": [1], "lo\n'
    ledger = read_ledger(write(tmp_path / "file", head(), line(0, 0.5), end=f"{torn}\n{json.dumps(line(1, 1.5))}\n"))
    assert [present(ledger, number).loss for number in (0, 1)] == [0.5, 1.5]


def test_attempts_follow_each_other_and_the_last_rank_counts(tmp_path: Path) -> None:
    first = write(tmp_path / "attempt_2/0/ledger.jsonl", head(), line(0, 0.0), line(1, 0.0), line(2, 0.0))
    second = write(tmp_path / "attempt_2/1/ledger.jsonl", head(), line(1, 1.0), line(2, 1.0))
    write(tmp_path / "attempt_10/3/ledger.jsonl", head(), line(2, 2.0))
    for seconds, path in enumerate((first, second)):
        os.utime(path, (seconds, seconds))
    ledger = read_ledger(tmp_path)
    assert [present(ledger, number).loss for number in range(3)] == [0.0, 1.0, 2.0]
    assert ledger.last == 2


@pytest.mark.parametrize("path", ["none", "empty", "."])
def test_without_a_ledger_it_is_an_error(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").write_text("not a ledger\n")
    with pytest.raises(UsageError, match="cannot be read: No such file" if path == "none" else "has no ledger"):
        read_ledger(tmp_path / path)


def differ(then: Step, now: Step) -> str:
    return str(Comparison().add(then, now))


def test_the_first_difference_names_step_and_parameter() -> None:
    assert differ(step(3, a=("1", "2"), b=("3", "4")), step(3, a=("x", "2"), b=("x", "4"))) == (
        "step 3: the gradient of a and of 1 more"
    )
    assert differ(step(3, a=("1", "2"), b=("3", "4")), step(3, a=("x", "2"), b=("x", "x"))) == (
        "step 3: the parameter of b"
    )
    assert differ(step(3, 0.5, a=("1", "2")), step(3, 0.5000001, a=("1", "2"))) == "step 3: the loss"
    compared = Comparison()
    assert compared.add(step(2, a=("1", "2"), b=("3", "4")), step(2, b=("3", "4"), c=("5", "6"))) is None
    assert str(compared) == "step 2 has the same bits (2 hashes)"
    assert compared.add(step(3, a=("1", "2")), step(3, a=("1", "x"))) is not None
    assert compared.add(step(4, a=("1", "2")), step(4, a=("1", "x"))) is None, "only the first is of interest"
    assert str(compared) == "step 2 has the same bits (2 hashes)"


@pytest.mark.parametrize(
    ("then", "now", "machine", "equal"),
    [
        (math.nan, math.nan, A, True),
        (math.nan, 1.0, A, False),
        (math.inf, math.inf, B, True),
        (1.0, 1.0009, B, True),
        (1.0, 1.0009, A, False),
        (1.0, 1.0011, B, False),
        (None, 1.0, A, True),
    ],
)
def test_losses_are_equal_or_between_machines_near(then: Any, now: Any, machine: Any, equal: bool) -> None:
    compared = Comparison()
    assert (compared.add(step(0, then), step(0, now, machine)) is None) == equal


def test_between_machines_hashes_say_nothing() -> None:
    compared = Comparison()
    for number in range(3):
        assert compared.add(step(number, 1.0, a=("1", "2")), step(number, 1.0, B, a=("3", "4"))) is None
    assert str(compared) == (
        "steps 0 to 2 have the same losses within 0.001; bits are not compared: processor AVX2 and AVX512"
    )
    only = Comparison()
    assert only.add(step(0, 1.0), step(0, 1.0)) is None
    assert str(only) == "step 0 has the same losses, and no hashes"
    without = Comparison()
    assert without.add(step(0, a=("1", "2")), step(0, machine=B, a=("3", "4"))) is None
    assert str(without) == "no step could be compared"


def test_snapshots_are_named_and_kept_after_a_failure(tmp_path: Path) -> None:
    for name in ("step-0000000012.pt", "step-0000000009.pt", "step-12.pt.new", "other.pt"):
        write(tmp_path / "replayable" / name)
    assert {number: path.name for number, path in snapshots(tmp_path).items()} == {
        9: "step-0000000009.pt",
        12: "step-0000000012.pt",
    }
    assert keep_snapshots(tmp_path, failed=True) == "replayable from step 10"
    assert keep_snapshots(tmp_path, failed=False) == ""
    assert not tmp_path.exists()
