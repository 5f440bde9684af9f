"""Watches workers from outside, at each heartbeat: how long each has been silent, and which are stopped.

A sign of life is a step, a checkpoint, the begin or end of a phase (ddp/monitoring/progress.py), or a new line of
output, if ddp has not counted steps of the worker: then it is not known when it evaluates or saves. A line that is
redrawn does not count: progress bars do that while training stands still. A worker is watched once it has made a step
or has written new lines at OUTPUTS looks: before that, silence is normal start-up. But one that replaces another is
watched from its start, since others wait for it. A worker that waits for its standard input, for a user to type, is not
silent. Whether a worker is stopped is looked up from its start on. The controller decides what a silence means
(launcher/hangs). While a worker meets others again and waits for one that starts, a silence does not tell how long a
step takes: nothing is learned until its next step.
"""

from __future__ import annotations

from collections.abc import Iterable

from launcher.agent.workers.worker import Worker
from launcher.machine import processes
from launcher.protocol.two_way import START, STEPS

OUTPUTS = 10
PHASES = 3  # see ddp/monitoring/progress.py
LATE = 3.0  # times the pause between two looks: this process was delayed then, and perhaps the workers too


class _Signs:
    """Signs of one worker. `since` is the time of the newest."""

    def __init__(self, now: float) -> None:
        self.seen: object = None
        self.since = now
        self.phase = 0
        self.steps = 0
        self.outputs = -1  # looks with a new line or another sign; the first look always counts
        self.is_stopped = False
        self.regroups_until = -1  # steps

    @property
    def is_watched(self) -> bool:
        return self.steps > 0 or self.outputs >= OUTPUTS or self.phase == START


class SignsOfLife:
    """Signs of life of one attempt's workers. `longest_s` is as in Heartbeat."""

    def __init__(self) -> None:
        self.longest_s = [0.0] * (START + 1)
        self.silent_s = 0.0
        self.silent_in = 0
        self.stopped: list[int] = []
        self._signs: dict[int, _Signs] = {}  # by the worker's number
        self._looked_at: float | None = None

    def look(
        self, workers: Iterable[Worker], now: float, *, pause_s: float, counts: bool = True, reader: int | None = None
    ) -> None:
        """Look at the running workers; the time since the last look does not count if they were suspended.

        `reader` is the rank that waits for its standard input, if there is one.
        """
        since, self._looked_at = self._looked_at or now, now
        rested_s = now - since if not counts else max(0.0, now - since - LATE * pause_s)
        before, self._signs = self._signs, {}
        self.stopped = []
        for worker in workers:
            signs = self._signs[worker.number] = before.get(worker.number) or _Signs(now)
            signs.since = now if worker.rank == reader else signs.since + rested_s
            self._read(worker, signs, now)
            was_stopped, signs.is_stopped = signs.is_stopped, counts and _is_stopped(worker.own_pid)
            if was_stopped and signs.is_stopped:
                self.stopped.append(worker.rank)
        watched = [signs for signs in self._signs.values() if signs.is_watched]
        oldest = min(watched, key=lambda signs: signs.since, default=None)
        self.silent_s, self.silent_in = (0.0, 0) if oldest is None else (now - oldest.since, oldest.phase)

    def regroup(self, workers: Iterable[Worker]) -> None:
        """Record that workers are about to meet others again; one more step may end before that."""
        for worker in workers:
            if (signs := self._signs.get(worker.number)) is not None:
                signs.regroups_until = worker.progress[0] + 1

    def of(self, worker: Worker, now: float) -> tuple[float, int, int]:
        """Return how long a worker has been silent, its phase and its steps."""
        signs = self._signs.get(worker.number)
        if signs is None:
            return 0.0, 0, 0
        return max(0.0, now - signs.since), signs.phase, signs.steps

    def _read(self, worker: Worker, signs: _Signs, now: float) -> None:
        steps, saved = worker.progress
        seen = (steps, saved, worker.phase, worker.output_lines if worker.is_known_by_output else 0)
        if seen != signs.seen:
            if signs.steps < STEPS <= steps:
                self.longest_s[START] = max(self.longest_s[START], now - worker.began)
            if signs.is_watched and signs.phase != START and signs.steps > signs.regroups_until:
                self.longest_s[signs.phase] = max(self.longest_s[signs.phase], now - signs.since)
            signs.seen, signs.since, signs.steps = seen, now, steps
            signs.outputs += 1
        signs.phase = START if worker.takes_over and steps < STEPS else worker.phase % PHASES


def _is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal, not by a debugger."""
    process = processes.find(pid)
    return process is not None and process.state == "T" and not is_traced(pid)


def is_traced(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            status = file.read()
    except OSError:  # ended meanwhile
        return False
    return b"\nTracerPid:\t0\n" not in status
