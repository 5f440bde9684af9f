"""The text of a report: the likeliest cause first, on one screen; and answers of ranks, whatever bytes come."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddp.monitoring.stall_text import Answer, Heard, Position, Scene, describe_stall, printable

SCENE = Scene(
    rank=0,
    global_ranks=tuple(range(100)),
    key="0/0",
    step=4,
    what="all-reduce",
    waited_s=2.0,
    limit_s=2.0,
    torchs_text="",
)


def _at(step: int, phase: str, **options: Any) -> Answer:
    place = Position(step=step, phase=phase, is_waiting=options.pop("is_waiting", False), for_s=1.0)
    return Answer(1, line="train.py:8 in main", positions={"0/0": place}, **options)


def test_the_likeliest_cause_comes_first() -> None:
    here = _at(4, "all-reduce", is_waiting=True)
    answers = dict.fromkeys(range(1, 100), here)
    answers[7] = Answer(2**53, finished={"0/0": 4}, ended="ended with CollectiveError: rank 9", is_secondary=True)
    answers[8] = _at(3, "all-reduce", is_waiting=True)
    answers[9] = answers[10] = _at(4, "user code")
    answers[11] = _at(4, "user code", has_group=False)
    del answers[12]
    lines = describe_stall(SCENE, Heard(answers)).splitlines()
    assert lines[0] == (
        "ranks 8-12 are missing: rank 0 of 100 has waited 2.0 s in the all-reduce of step 5"
    )  # all but rank 7, which left because of them
    assert [line.split(":")[0].strip() for line in lines[1:-1]] == [
        "rank 12",
        "ranks 9-10",
        "rank 11",
        "rank 8",
        "rank 7",
        "ranks 0-6, 13-99",
    ]
    assert lines[2] == "  ranks 9-10: step 5, user code for 1.0 s, at train.py:8 in main"


def test_a_report_fits_one_screen() -> None:
    answers = {rank: _at(rank, "user code " + "x" * 300) for rank in range(1, 100)}
    lines = describe_stall(replace(SCENE, torchs_text="y" * 300), Heard(answers)).splitlines()
    assert len(lines) <= 24
    assert "  ranks 17-99: elsewhere" in lines
    assert max(map(len, lines)) <= 400


def test_no_one_missing_is_said() -> None:
    answers = {rank: _at(4, "all-reduce", is_waiting=True) for rank in range(1, 100)}
    report = describe_stall(SCENE, Heard(answers))
    assert "no rank is missing: all 100 are there" in report
    assert "network" in report


@pytest.mark.parametrize(
    "text", [b"", b"\xff", b"[]", b"{}", b"null", b'{"question": "x"}', b"[" * 100_000, b'{"positions": {"0/0": 1}}']
)
def test_what_is_no_answer_is_none(text: bytes) -> None:
    assert Answer.from_json(text) is None


def test_answers_arrive_as_they_were_sent_but_printable() -> None:
    sent = Answer(
        3, "a.py:1 in f", {"0/0": Position(1, "user\x1b[2J code", False, 0.5)}, {"0/1": 7}, "left", True, False
    )
    assert Answer.from_json(sent.to_json().encode()) == replace(
        sent, positions={"0/0": Position(1, "user [2J code", False, 0.5)}
    )
    assert printable("a\nb\0c" * 200, 6) == "a b..."
