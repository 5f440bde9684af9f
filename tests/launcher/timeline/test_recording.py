"""What the controller writes down of a run: by events and commands alone, with hosts whose clocks are wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from testbed.job_drive import Drive

from launcher.job.events import AgentMessage, Command, Event
from launcher.protocol.reports import Timings
from launcher.timeline.file import read_lines
from launcher.timeline.recording import Recording
from launcher.timeline.records import Record, Span, StepTimes, pack

AHEAD_S = {"a": 5_000_000.0, "b": -777.0}


class Recorded(Drive):
    """A run of two hosts, with its recording."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.said: list[str] = []
        self.folder = folder
        self.recording = Recording(folder, "r1", say=self.said.append, failed=lambda error: pytest.fail(str(error)))
        self.recording._file.clock = 1000.0
        self.records: list[Record] = []
        self.recording.timeline.subscribe(self.records.append)
        super().__init__("a", "b", clocks=AHEAD_S, **changes)
        for command in self.commands:
            self.recording.sent(command, self.now)

    def event(self, event: Event, *, after_s: float = 0.0) -> list[Command]:
        commands = super().event(event, after_s=after_s)
        for command in commands:
            self.recording.sent(command, self.now)
        self.recording.heard(event, self.job, self.now)
        return commands

    def tell_times(self, host: str, *records: Record, attempt: int | None = None, way_s: float = 0.01) -> None:
        """Send records with times on our clock, in answer to a heartbeat; each way takes `way_s`."""
        ahead_s = self.clocks[host]
        asked = self.now
        number = self.number if attempt is None else attempt
        message = Timings(number, asked + way_s + ahead_s, asked, asked + way_s + ahead_s, 0, pack(records))
        self.say(host, message, after_s=2 * way_s)

    def lines(self, kind: str) -> list[list[Any]]:
        self.recording.close()
        _, found = read_lines(self.folder)
        return [line[1:] for line in found if line[0] == kind]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Recorded]:
    run = Recorded(tmp_path)
    yield run
    run.recording.close()


def step_of(run: Recorded, host: str, rank: int, step: int = 1) -> StepTimes:
    return StepTimes(0, rank, step, 1, run.now - 0.5 + AHEAD_S[host], (0.1,) * 6)


def test_steps_of_hosts_with_wrong_clocks_are_on_one_axis(run: Recorded) -> None:
    run.run()
    when = run.now - 0.5
    run.tell_times("a", step_of(run, "a", 0), Span(0, 1, "save", when + AHEAD_S["a"], when + AHEAD_S["a"] + 0.25))
    run.now = when + 0.5
    run.tell_times("b", step_of(run, "b", 2))
    first, span, second = run.records
    assert isinstance(span, Span)
    assert (first.ended, span.began, second.ended) == pytest.approx((when, when, when), abs=1e-6)
    assert [line[4] for line in run.lines("steps")] == pytest.approx([when - 1000] * 2, abs=1e-5)
    offsets = {host: (offset_s, error_s) for host, offset_s, error_s in run.lines("clock")}
    assert offsets["a"] == pytest.approx((-AHEAD_S["a"], 0.01), abs=1e-5)
    assert offsets["b"] == pytest.approx((-AHEAD_S["b"], 0.01), abs=1e-5)


def test_the_phases_of_a_start_are_written_in_order(run: Recorded) -> None:
    for name in run.names:
        run.now += 1
        run.join(name)
        run.now += 1
        run.check(name)
    run.now += 1
    run.begin()
    run.end_well()
    phases = run.lines("host")
    assert [phase for host, phase, *_ in phases if host == "a"] == ["connect", "agent", "check", "rendezvous"]
    assert all(began <= ended for _, _, began, ended in phases)
    assert [ranks for _, _, ranks in run.lines("attempt")] == [[[0, "a"], [1, "a"], [2, "b"], [3, "b"]]]
    assert [rank for _, rank, *_ in run.lines("start")] == [0, 1, 2, 3]
    assert [(rank, status, text) for _, rank, _, status, text in run.lines("end")] == [(r, 0, "") for r in range(4)]


def test_a_fault_and_the_next_attempt_are_written(tmp_path: Path) -> None:
    run = Recorded(tmp_path, max_restarts=1)
    run.run()
    run.now += 1
    run.fail(2, -9, at=run.now - 0.5)
    for rank in (0, 1, 3):
        run.say(run.host_of(rank), run.exited(run.host_of(rank), rank, -15, provoked=True))
    run.swept()
    run.begin()
    run.lose("b", "the cable was pulled")
    assert [number for number, *_ in run.lines("attempt")] == [0, 1]
    faults = [(rank, text) for _, rank, _, _, text in run.lines("end") if text]
    assert faults == [(2, "killed by SIGKILL")]
    events = run.lines("event")
    assert ["host lost", pytest.approx(run.now - 1000, abs=1e-5), "b: the cable was pulled"] in events
    assert any(kind == "notice" and "SIGKILL" in text for kind, _, text in events)


def test_what_a_host_cannot_know_is_dropped(run: Recorded) -> None:
    run.run()
    run.tell_times("a", step_of(run, "a", 2), step_of(run, "a", 99))  # ranks of others
    run.tell_times("a", step_of(run, "a", 0), attempt=7)
    run.say("a", Timings(0, run.time("a"), data=b"no records"))
    run.say("a", Timings(0, run.time("a"), data=b"\xff" * 78))
    assert run.records == []
    (said,) = run.said
    assert "will lack its times" in said
    run.tell_times("a", step_of(run, "a", 0))
    assert len(run.records) == 1


def test_what_an_older_link_says_counts_for_nothing(tmp_path: Path) -> None:
    run = Recorded(tmp_path, max_restarts=1)
    run.run()
    run.lose("b")
    run.wait(5.0)
    assert run.link("b") > 1
    data = pack([step_of(run, "b", 2)])
    run.event(AgentMessage("b", 1, Timings(0, run.time("b"), data=data)))
    assert run.records == []
    run.recording.close()
