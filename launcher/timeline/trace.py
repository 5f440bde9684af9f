"""Converts a run's timeline to a trace for Perfetto (ui.perfetto.dev) and chrome://tracing. Pure.

The format is Chrome's "Trace Event Format": complete events (X), instants (i), flows (s, f) and names (M). Each host is
a process and each rank a thread; process 0 is the run, and thread LAUNCHER of a host shows what dtrain did there. Times
are microseconds since the start of the run.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from launcher.timeline.file import Line
from launcher.timeline.records import PHASES

LAUNCHER = 1_000_000  # thread id, above all ranks
_RUN = 0  # process id
_Event = dict[str, Any]


class _Slice:
    """A named interval, in seconds."""

    def __init__(self, name: str, began: float, ended: float, **about: Any) -> None:
        self.name = name
        self.began, self.ended = began, max(began, ended)
        self.about = about


class _Rank:
    """Intervals of one rank, in the order of arrival."""

    def __init__(self) -> None:
        self.steps: list[_Slice] = []
        self.parts: list[_Slice] = []  # parts of steps, and spans
        self.starts: list[tuple[float, float, str]] = []  # ordered, started, how

    def slices(self) -> Iterator[_Slice]:
        """Yield the intervals, properly nested: rounding may have shifted their bounds."""
        steps = sorted(self.steps, key=lambda each: each.ended)
        before = -math.inf
        for step in steps:
            step.began = min(max(step.began, before), step.ended)
            before = step.ended
        first_work = sorted(each.began for each in [*steps, *self.parts])
        starts = sorted(self.starts)
        for number, (ordered, started, how) in enumerate(starts):
            yield _Slice("start", ordered, started, how=how)
            following = starts[number + 1][0] if number + 1 < len(starts) else math.inf
            work = next((at for at in first_work if started <= at < following), None)
            if work is not None:  # the end of imports is known only from the first work
                yield _Slice("import", started, work)
        yield from steps
        yield from _within(steps, sorted(self.parts, key=lambda each: (each.began, -each.ended)))


def _within(steps: list[_Slice], parts: list[_Slice]) -> Iterator[_Slice]:
    """Trim parts to the bounds of their step; rounding or a new clock offset may have shifted them."""
    at = 0
    before = -math.inf
    for part in parts:
        middle = (part.began + part.ended) / 2
        while at < len(steps) and steps[at].ended < middle:
            at += 1
        part.began = max(part.began, before, steps[at - 1].ended if at else -math.inf)
        if at < len(steps) and steps[at].began <= middle:
            part.began, part.ended = max(part.began, steps[at].began), min(part.ended, steps[at].ended)
        elif at < len(steps):  # it lies before that step
            part.ended = min(part.ended, steps[at].began)
        if part.began < part.ended:
            before = part.ended
            yield part


def trace_events(lines: Iterable[Line]) -> Iterator[_Event]:
    """Yield the events of a trace. Skip unknown and truncated lines."""
    hosts: dict[str, int] = {}
    ranks: dict[tuple[int, int, int], _Rank] = defaultdict(_Rank)  # by host's number, attempt and rank
    places: dict[tuple[int, int], int] = {}  # by attempt and rank, the newest number of its host
    attempts: list[tuple[int, float]] = []
    last = 0.0

    def host(name: str) -> int:
        return hosts.setdefault(name, len(hosts) + 1)

    def rank(attempt: int, number: int) -> _Rank:
        return ranks[places.get((attempt, number), _RUN), attempt, number]

    for line in lines:
        match line:
            case ["attempt", int(number), float() | int() as time, list(workers)]:
                if not attempts or attempts[-1][0] != number:
                    attempts.append((number, time))
                else:
                    yield _instant("other hosts or ranks", time)
                places.update({(number, rank): host(name) for rank, name in workers})
                last = max(last, time)
            case ["host", str(name), str(phase), float() | int() as began, float() | int() as ended]:
                yield _complete(_Slice(phase, began, ended), host(name), LAUNCHER)
                last = max(last, ended)
            case ["event", str(kind), float() | int() as time, str(text)]:
                yield _instant(text if kind == "notice" else f"{kind}: {text}", time, kind=kind)
                last = max(last, time)
            case ["start", int(attempt), int(number), float() | int() as ordered, float() | int() as started, str(how)]:
                if rank(attempt, number).starts:
                    place = places.get((attempt, number), _RUN)
                    yield _instant(f"rank {number} is started again", ordered, pid=place, tid=number, kind="restart")
                rank(attempt, number).starts.append((ordered, started, how))
            case ["end", int(attempt), int(number), float() | int() as time, int(status), str(text)]:
                name = f"rank {number}: {text}" if text else f"rank {number} ended"
                place = places.get((attempt, number), _RUN)
                kind = "fault" if text else "end"
                yield _instant(name, time, pid=place, tid=number, kind=kind, status=status)
                last = max(last, time)
            case ["steps", int(attempt), int(number), int(step), int(steps), float() | int() as ended, list(phases_s)]:
                rank(attempt, number).steps.append(_steps(step, steps, ended, phases_s))
                last = max(last, ended)
            case ["span", int(attempt), int(number), str(kind), float() | int() as began, float() | int() as ended]:
                rank(attempt, number).parts.append(_Slice(kind, began, ended))
                last = max(last, ended)
            case [
                "detail", int(attempt), int(number), int(step), str(phase), int(bucket),
                float() | int() as began, float() | int() as ended,
            ]:  # fmt: skip
                name = f"wait for bucket {bucket}" if bucket >= 0 else phase
                rank(attempt, number).parts.append(_Slice(name, began, ended, phase=phase, step=step))
                last = max(last, ended)
    for (place, attempt, number), known in ranks.items():
        for each in known.slices():
            yield _complete(each, place, number, attempt=attempt)
    yield from _of_attempts(attempts, last)
    yield from _names(hosts, {(place, number) for place, _, number in ranks})


def _steps(step: int, steps: int, ended: float, phases_s: list[float]) -> _Slice:
    name = f"step {step}" if steps == 1 else f"steps {step - steps + 1}-{step}"
    phases = zip(PHASES, phases_s, strict=False) if any(phases_s[:-1]) else ()  # only the length is known
    about = {f"{phase}_ms": round(each_s * 1e3, 3) for phase, each_s in phases}
    return _Slice(name, ended - math.fsum(phases_s), ended, steps=steps, **about)


def _complete(each: _Slice, pid: int, tid: int, **about: Any) -> _Event:
    began = round(each.began * 1e6)
    return {
        "ph": "X", "name": each.name, "cat": "launcher" if tid == LAUNCHER or pid == _RUN else "rank", "pid": pid,
        "tid": tid, "ts": began, "dur": round(each.ended * 1e6) - began, "args": {**each.about, **about},
    }  # fmt: skip


def _instant(name: str, time: float, *, pid: int = _RUN, tid: int = 0, **about: Any) -> _Event:
    scope = "g" if pid == _RUN else "t"
    return {
        "ph": "i", "name": name, "cat": "event", "s": scope, "pid": pid, "tid": tid, "ts": round(time * 1e6),
        "args": about,
    }  # fmt: skip


def _of_attempts(attempts: list[tuple[int, float]], last: float) -> Iterator[_Event]:
    """Yield one slice for each attempt, and an arrow from each to the next."""
    for position, (number, began) in enumerate(attempts):
        ended = attempts[position + 1][1] if position + 1 < len(attempts) else max(last, began)
        yield _complete(_Slice(f"attempt {number}", began, ended), _RUN, 0)
        flow = {"name": "next attempt", "cat": "attempts", "pid": _RUN, "tid": 0}
        if position + 1 < len(attempts):
            yield {**flow, "ph": "s", "id": position, "ts": round(ended * 1e6) - 1}
        if position:
            yield _instant(f"attempt {number} begins", began, kind="restart")
            yield {**flow, "ph": "f", "bp": "e", "id": position - 1, "ts": round(began * 1e6)}


def _names(hosts: dict[str, int], ranks: Iterable[tuple[int, int]]) -> Iterator[_Event]:
    def named(kind: str, pid: int, tid: int, name: str, order: int) -> Iterator[_Event]:
        common = {"ph": "M", "pid": pid, "tid": tid}
        yield {**common, "name": f"{kind}_name", "args": {"name": name}}
        yield {**common, "name": f"{kind}_sort_index", "args": {"sort_index": order}}

    yield from named("process", _RUN, 0, "run", -1)
    yield from named("thread", _RUN, 0, "attempts", 0)
    for name, number in hosts.items():
        yield from named("process", number, 0, name, number)
        yield from named("thread", number, LAUNCHER, "dtrain", -1)
    for place, number in sorted(ranks):
        yield from named("thread", place, number, f"rank {number}", number)
