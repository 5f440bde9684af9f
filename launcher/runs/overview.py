"""The progress of a run: how its ranks spend their time, stragglers, the hosts' use of memory and GPUs.

The controller's loop feeds it, with the job after each event, and the records of ranks; others read via session.py.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

from launcher.frozen import replace
from launcher.job.attempt import AttemptState
from launcher.job.events import AgentMessage, Event, Lost
from launcher.job.job import Job
from launcher.job.run import Phase
from launcher.output.insight import status_line, straggler_line
from launcher.protocol.reports import Exited, HostUse
from launcher.timeline.goodput import Goodput, Parts
from launcher.timeline.records import PHASES, Record, Span, Timeline
from launcher.timeline.stragglers import Straggler, Stragglers
from launcher.timeline.windows import Windows

RECENT = 10  # newest records of a rank, over which times are averaged: about a second each if steps are short
READINGS = 100  # of a rank's waits for a processor
_WAIT = PHASES.index("wait")

Content = Mapping[str, Any]


class Overview:
    """The overview. `say` prints a line; `watch` and the subscription to `timeline` are called only in the loop."""

    def __init__(self, timeline: Timeline, say: Callable[[str], None]) -> None:
        self._timeline = timeline
        self._say = say
        self._windows = Windows()
        self._goodput: Goodput | None = None
        self._stragglers: Stragglers | None = None
        self._attempt: AttemptState | None = None
        self._is_mending = False  # this attempt follows a failure, and not all of it runs yet
        self._has_news = False
        self._use: dict[str, HostUse] = {}  # by host
        self._faults: Counter[int] = Counter()  # by rank
        self._waits = ProcessorWaits()
        self._lost: Counter[str] = Counter()  # by host
        self._hosts: dict[int, str] = {}
        timeline.subscribe(self._add)

    def _add(self, record: Record) -> None:
        self._windows.add(record)
        self._has_news = True
        if isinstance(record, Span) and self._goodput is not None:
            self._goodput.add_span(record)

    def watch(self, job: Job, event: Event, now: float) -> None:
        """Update the overview after an event."""
        attempt = job.attempt
        if self._goodput is None:
            self._goodput = Goodput(job.began)
            self._stragglers = Stragglers(
                job.began,
                host_of=lambda rank: self._hosts.get(rank, ""),
                queued_part=self._waits.part,
                report=lambda found: self._say(straggler_line(found)),
            )
        if attempt is not self._attempt:
            self._start_attempt(attempt)
        if attempt is not None:
            all_run = job.phase is Phase.RUNNING and attempt.all_started
            self._is_mending &= not all_run
            stops = job.phase in (Phase.STOPPING, Phase.ENDED)
            fails = bool(attempt.failures) if stops else job.fails or self._is_mending
            self._goodput.note(now, all_run=all_run, fails=fails)
            self._count_fault(job, attempt, event, now)
        if self._has_news:
            self._has_news = False
            if attempt is not None:
                self._hosts = {worker.rank: worker.host for worker in attempt.placement.workers}
            self._divide(is_over=False)

    def _start_attempt(self, attempt: AttemptState | None) -> None:
        last, self._attempt = self._attempt, attempt
        self._use.clear()
        if last is not None and self._goodput is not None:
            self._divide(is_over=True)
            self._goodput.begin_attempt(last.lost_steps)
            self._is_mending = bool(last.failures)

    def _divide(self, *, is_over: bool) -> None:
        assert self._goodput is not None
        assert self._stragglers is not None
        for window in self._windows.take(is_over=is_over):
            self._goodput.add(window)
            self._stragglers.add(window)

    def _count_fault(self, job: Job, attempt: AttemptState, event: Event, now: float) -> None:
        if isinstance(event, AgentMessage):
            message = event.message
            if isinstance(message, HostUse) and message.attempt == attempt.number:
                gpus = {rank: gpu for rank, gpu in message.gpus.items() if len(gpu) == 3}
                self._use[event.host] = replace(message, gpus=gpus)
                self._waits.add(now, message.waited_s)
            elif isinstance(message, Exited) and message.status != 0 and not message.provoked:
                self._faults[message.rank] += 1
        elif isinstance(event, Lost):
            self._use.pop(event.host, None)
            self._lost[event.host] += job.phase not in (Phase.STOPPING, Phase.ENDED)

    def end(self, now: float) -> tuple[Parts | None, list[Straggler]]:
        """Return how the whole run spent its time, and the stragglers; call after the run's end."""
        if self._goodput is None or self._stragglers is None:
            return None, []
        self._divide(is_over=True)
        return self._goodput.parts(now), self._stragglers.found

    def goodput(self, now: float) -> float | None:
        return None if self._goodput is None else self._goodput.parts(now).goodput

    def status_line(self, attempt: AttemptState, per_s: float | None) -> str:
        """Format the progress of training in a few words."""
        slowest = None if self._stragglers is None else self._stragglers.slowest
        fullest = max(self._use.values(), key=_fullness, default=None)
        busy = [gpu[0] for use in self._use.values() for gpu in use.gpus.values()]
        return status_line(
            step=attempt.steps,
            per_s=per_s,
            slowest=None if slowest is None else (slowest[0], self._hosts.get(slowest[0], "?"), *slowest[1:]),
            memory=None if fullest is None else (fullest.memory_bytes, fullest.memory_limit_bytes),
            gpu_percent=sum(busy) / len(busy) if busy else None,
            workers=attempt.world_size,
        )

    def table(self, attempt: AttemptState | None, now: float) -> Content:
        """Return what `dtrain top` shows beside the status: by host and by rank, and stragglers."""
        if attempt is None:
            return {"hosts_used": [], "ranks": [], "stragglers": []}
        slow = [] if self._stragglers is None else self._stragglers.now
        return {
            "hosts_used": [self._of_host(host) for host in attempt.members],
            "ranks": [self._of_rank(attempt, worker.rank, worker.host, now) for worker in attempt.placement.workers],
            "stragglers": [{**each.as_json(), "line": straggler_line(each)} for each in slow],
        }

    def _of_host(self, host: str) -> Content:
        use = self._use.get(host)
        return {
            "host": host,
            "memory_bytes": None if use is None else use.memory_bytes,
            "memory_limit_bytes": None if use is None else use.memory_limit_bytes,
            "lost": self._lost[host],
        }

    def _of_rank(self, attempt: AttemptState, rank: int, host: str, now: float) -> Content:
        use = self._use.get(host)
        gpu = None if use is None else use.gpus.get(str(rank))
        newest = self._timeline.newest(rank)[-RECENT:]
        steps = sum(times.steps for times in newest)
        length_s = sum(sum(times.phases_s) for times in newest)
        wait_s = sum(times.phases_s[_WAIT] for times in newest)
        is_divided = any(times.is_divided for times in newest)
        return {
            "rank": rank,
            "host": host,
            "pid": None if use is None else use.pids.get(str(rank)),
            "step": newest[-1].step if newest else None,
            "last_step_ago_s": round(max(0.0, now - newest[-1].ended), 3) if newest else None,
            "step_s": round(length_s / steps, 6) if steps else None,
            "own_s": round((length_s - wait_s) / steps, 6) if is_divided else None,
            "wait_s": round(wait_s / steps, 6) if is_divided else None,
            "resident_bytes": None if use is None else use.resident_bytes.get(str(rank)),
            "gpu_percent": None if gpu is None else gpu[0],
            "gpu_memory_bytes": None if gpu is None else gpu[1],
            "gpu_memory_limit_bytes": None if gpu is None else gpu[2],
            "restarts": attempt.number + attempt.ranks.restarts_of(rank),
            "faults": self._faults[rank],
        }


class ProcessorWaits:
    """Keeps readings of how long the training threads of each rank have waited for a processor since its start."""

    def __init__(self) -> None:
        self._readings: dict[str, deque[tuple[float, float]]] = {}  # by rank: when, and how long until then

    def add(self, now: float, waited_s: Mapping[str, float]) -> None:
        for rank, seconds in waited_s.items():
            readings = self._readings.setdefault(rank, deque(maxlen=READINGS))
            if readings and seconds < readings[-1][1]:  # a new process
                readings.clear()
            readings.append((now, seconds))

    def part(self, rank: int, since: float) -> float:
        """Return the part of the time since the last reading before `since`; 0 if unknown."""
        readings = self._readings.get(str(rank), deque())
        if len(readings) < 2:
            return 0.0
        last_at, last = readings[-1]
        first_at, first = max((each for each in readings if each[0] <= since), default=readings[0])
        return (last - first) / (last_at - first_at) if last_at > first_at else 0.0


def _fullness(use: HostUse) -> float:
    return use.memory_bytes / max(1, use.memory_limit_bytes)
