"""What can be seen of workers from outside, at each heartbeat: how long each has been silent, and who is stopped.

A sign of life is a step, a checkpoint, the begin or end of a phase (ddp/monitoring/progress.py), or, of a worker whose
steps ddp has not counted, a new line of output: when that evaluates or saves is not known. A line that is drawn again
is none: progress bars do that while training stands still. Only those workers are watched that have made a step, or
have written new lines at OUTPUTS looks: before that, a silence is a start. But one that takes another's place is
watched from its start on, since others wait for it. None is silent that waits for its standard input, for somebody to
type. What a silence means is for the controller to say (launcher/hangs). Nor does a silence tell how long a step takes
while a worker meets others again, and waits for one that starts: until its next step none is learned.
"""

from __future__ import annotations

from collections.abc import Iterable

from launcher.agent.workers.worker import Worker
from launcher.machine import processes
from launcher.protocol.two_way import START, STEPS

__all__ = ["PHASES", "SignsOfLife", "is_traced"]

OUTPUTS = 10
PHASES = 3  # see ddp/monitoring/progress.py
LATE = 3.0  # times the pause between two looks: then this process was held up, and perhaps the workers too


class _Signs:
    """Of one worker. `since` is the time of the newest one."""

    def __init__(self, now: float) -> None:
        self.seen: object = None
        self.since = now
        self.phase = 0
        self.steps = 0
        self.outputs = -1  # looks at which there was a new line, or anything; the first one finds what was before
        self.is_stopped = False
        self.regroups_until = -1  # steps

    @property
    def is_watched(self) -> bool:
        return self.steps > 0 or self.outputs >= OUTPUTS or self.phase == START


class SignsOfLife:
    """Of the workers of one attempt. `longest_s` is as in Heartbeat."""

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
        """Look at the workers that run; the time since the last look does not count if they were to be at rest.

        `reader` is the rank that waits for its standard input, if one does.
        """
        since, self._looked_at = self._looked_at or now, now
        rested_s = now - since if not counts else max(0.0, now - since - LATE * pause_s)
        before, self._signs = self._signs, {}
        self.stopped = []
        for worker in workers:
            signs = self._signs[worker.number] = before.get(worker.number) or _Signs(now)
            signs.since = now if worker.rank == reader else signs.since + rested_s
            self._read(worker, signs, now)
            was_stopped, signs.is_stopped = signs.is_stopped, counts and signs.is_watched and _is_stopped(worker.pid)
            if was_stopped and signs.is_stopped:
                self.stopped.append(worker.rank)
        watched = [signs for signs in self._signs.values() if signs.is_watched]
        oldest = min(watched, key=lambda signs: signs.since, default=None)
        self.silent_s, self.silent_in = (0.0, 0) if oldest is None else (now - oldest.since, oldest.phase)

    def regroup(self, workers: Iterable[Worker]) -> None:
        """Note that workers are about to meet others again; one step may still come to its end before."""
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
    """Whether a signal has stopped a process, and no debugger has it."""
    process = processes.find(pid)
    return process is not None and process.state == "T" and not is_traced(pid)


def is_traced(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            status = file.read()
    except OSError:  # ended meanwhile
        return False
    return b"\nTracerPid:\t0\n" not in status
