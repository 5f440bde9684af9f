"""A trace shows on each rank what it did, in order and properly nested, and what dtrain did around that."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.timeline.plot import StepCurves, shown_up_to
from launcher.timeline.trace import LAUNCHER, trace_events

Event = dict[str, Any]
PHASES_S = [0.1, 0.2, 0.3, 0.1, 0.05, 0.05]
# Rank 1 fails and is started again alone; later the attempt ends with its host, and there is another.
LINES: list[list[Any]] = [
    ["host", "a", "connect", 0.0, 0.1],
    ["host", "a", "check", 0.1, 0.4],
    ["attempt", 0, 0.5, [[0, "a"], [1, "b"]]],
    ["host", "a", "rendezvous", 0.5, 0.6],
    ["start", 0, 0, 0.6, 0.7, "exec"],
    ["start", 0, 1, 0.6, 0.7, "exec"],
    ["detail", 0, 0, 1, "forward", -1, 1.0, 1.2],
    ["detail", 0, 0, 1, "wait", 3, 1.2, 1.800002],  # over the end, by rounding
    ["steps", 0, 0, 1, 1, 1.8, PHASES_S],
    ["steps", 0, 0, 3, 2, 3.4, [2 * each for each in PHASES_S]],
    ["steps", 0, 1, 1, 1, 1.8, PHASES_S],
    ["span", 0, 0, "evaluation", 3.5, 3.9],
    ["end", 0, 1, 2.0, -9, "killed by SIGKILL"],
    ["event", "notice", 2.1, "rank 1 was killed"],
    ["start", 0, 1, 2.2, 2.3, "fork"],
    ["steps", 0, 1, 4, 1, 4.0, PHASES_S],
    ["event", "host lost", 5.0, "b: gone"],
    ["attempt", 1, 6.0, [[0, "a"], [1, "c"]]],
    ["start", 1, 1, 6.1, 6.2, "exec"],
    ["steps", 1, 1, 4, 1, 8.0, PHASES_S],
]


def _named(events: list[Event], *, pid: int, tid: int, phase: str = "X") -> list[tuple[str, float, float]]:
    found = [each for each in events if (each["ph"], each["pid"], each["tid"]) == (phase, pid, tid)]
    return [(each["name"], each["ts"] / 1e6, each.get("dur", 0) / 1e6) for each in found]


def _process(events: list[Event], name: str) -> int:
    (pid,) = [each["pid"] for each in events if each["name"] == "process_name" and each["args"]["name"] == name]
    assert isinstance(pid, int)
    return pid


def test_each_rank_has_its_start_its_steps_and_their_parts() -> None:
    events = [*trace_events(LINES)]
    first = _process(events, "a")
    assert _named(events, pid=first, tid=0) == [
        ("start", 0.6, 0.1),
        ("import", 0.7, 0.3),
        ("step 1", 1.0, 0.8),
        ("steps 2-3", 1.8, 1.6),
        ("forward", 1.0, 0.2),
        ("wait for bucket 3", 1.2, 0.6),
        ("evaluation", 3.5, 0.4),
    ]
    assert _named(events, pid=first, tid=LAUNCHER) == [
        ("connect", 0.0, 0.1),
        ("check", 0.1, 0.3),
        ("rendezvous", 0.5, 0.1),
    ]


def test_restarts_and_faults_are_instants() -> None:
    events = [*trace_events(LINES)]
    other = _process(events, "b")
    assert [name for name, *_ in _named(events, pid=other, tid=1)] == [
        "start", "import", "start", "import", "step 1", "step 4",
    ]  # fmt: skip
    instants = {(each["name"], each["args"].get("kind")) for each in events if each["ph"] == "i"}
    assert instants == {
        ("rank 1: killed by SIGKILL", "fault"),
        ("rank 1 is started again", "restart"),
        ("rank 1 was killed", "notice"),
        ("host lost: b: gone", "host lost"),
        ("attempt 1 begins", "restart"),
    }
    assert [name for name, *_ in _named(events, pid=0, tid=0)] == ["attempt 0", "attempt 1"]
    assert [(each["ph"], each["id"]) for each in events if each["ph"] in "sf"] == [("s", 0), ("f", 0)]
    assert [name for name, *_ in _named(events, pid=_process(events, "c"), tid=1)] == ["start", "import", "step 4"]


_TIMES = st.floats(0, 10, allow_nan=False)


@st.composite
def _odd_lines(draw: st.DrawFn) -> list[Any]:
    began, length_s = draw(_TIMES), draw(st.floats(0, 2))
    rank, step = draw(st.integers(0, 2)), draw(st.integers(0, 9))
    match draw(st.integers(0, 4)):
        case 0:
            return ["steps", 0, rank, step, draw(st.integers(1, 3)), began, [length_s / 6] * 6]
        case 1:
            return ["detail", 0, rank, step, "wait", draw(st.integers(-1, 3)), began, began + length_s]
        case 2:
            return ["span", 0, rank, "save", began, began + length_s]
        case 3:
            return ["start", 0, rank, began, began + length_s, "exec"]
        case _:
            return draw(st.lists(st.none() | st.integers() | st.text(max_size=3) | st.floats(), max_size=8))


@settings(deadline=None)
@given(st.lists(_odd_lines(), max_size=30))
def test_steps_and_their_parts_are_nested_whatever_the_lines_say(lines: list[Any]) -> None:
    by_rank: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for each in trace_events([["attempt", 0, 0.0, [[0, "a"], [1, "a"], [2, "b"]]], *lines]):
        if each["ph"] == "X" and each["name"] not in ("start", "import") and each["pid"]:
            by_rank[each["pid"], each["tid"]].append((each["ts"], each["ts"] + each["dur"]))
            assert each["dur"] >= 0
    for slices in by_rank.values():
        for number, (began, ended) in enumerate(slices):
            for other_began, other_ended in slices[number + 1 :]:
                apart = other_ended <= began or ended <= other_began
                inside = began <= other_began <= other_ended <= ended or other_began <= began <= ended <= other_ended
                assert apart or inside, (began, ended, other_began, other_ended)


def test_the_curve_of_a_rank_is_cut_where_it_was_started_again() -> None:
    curves = StepCurves(LINES)
    assert curves.restarts == [2.2, 6.0]
    assert curves.faults == [2.0]
    assert [[(round(own), round(wait)) for _, own, wait in piece] for piece in curves.runs_of(1)] == [[(700, 100)]] * 3
    assert [(round(own), round(wait)) for piece in curves.runs_of(0) for _, own, wait in piece] == [(700, 100)] * 2


def test_a_few_outliers_do_not_press_the_curves_flat() -> None:
    usual = [10.0] * 99 + [12.0] * 99
    assert shown_up_to([*usual, 15.0]) == pytest.approx(1.05 * 15.0)
    assert shown_up_to([*usual, 1000.0, 900.0]) == pytest.approx(1.05 * 24.0)
    assert shown_up_to([*usual, *[1000.0] * 20]) == pytest.approx(1.05 * 1000.0)
    assert shown_up_to([0.0, 0.0]) > 0.0
