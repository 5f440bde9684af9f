"""Goodput: how much of a run's wall time was training, and what the rest was spent on. Pure.

The wall time is divided into windows (windows.py) and the gaps between them.

In a window, a rank waits for stragglers as long as the slowest rank worked longer on the same steps, but no longer than
it waited at all; `waiting` is the mean over all ranks. The other waits are communication, which counts as training, as
does all own work. A recorded span (evaluation, save, load, recovery) counts for as long as it took the rank with the
longest one, since the others wait for that rank. If something failed in a window, its excess over the usual length
counts as failure, and none of its waits as waiting.

The gap before the first window is the start. In later gaps a failure counts first, from the previous window on, so that
its detection is included; then spans; then the rest. Steps that are repeated after a failure count as failures: those
since the newest checkpoint of `ddp`, or all steps of the attempt if there is none. Without ddp neither waits nor
checkpoints are known, so all steps count as training, repeated ones too.

Without windows (no steps) only the start, failures (until all workers run again) and the rest are known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median

from launcher.frozen import dataclass
from launcher.timeline.records import Span
from launcher.timeline.windows import Window

PARTS = ("start", "training", "waiting", "checkpoints", "failures", "rest")
USUAL_OF = 64  # windows
LONGER = 1.5  # a window longer than this times the usual was affected by a failure
KEPT = 10_000  # windows that may still be repeated; older ones are kept as a sum
SPANS = 1000  # most spans in a gap


@dataclass(frozen=True)
class Parts:
    """Seconds that add up to the wall time. `is_measured`: there were windows, so training is known."""

    start: float
    training: float
    waiting: float  # for stragglers
    checkpoints: float  # and evaluation
    failures: float  # detection, recovery, steps made twice
    rest: float  # without windows, includes the workers' work
    repeated: float  # part of `failures`: repeated steps
    is_measured: bool

    @property
    def wall_s(self) -> float:
        return self.start + self.training + self.waiting + self.checkpoints + self.failures + self.rest

    @property
    def goodput(self) -> float | None:
        """Training as a part of the wall time, from 0 to 1; None if unknown."""
        return self.training / self.wall_s if self.is_measured and self.wall_s > 0 else None

    def as_json(self) -> dict[str, float | None]:
        goodput = self.goodput
        seconds = {f"{name}_s": round(getattr(self, name), 3) for name in (*PARTS, "repeated")}
        known = seconds if self.is_measured else {**seconds, "training_s": None}
        return {"goodput": None if goodput is None else round(goodput, 4), **known}


class _Kept:
    """A window whose steps may still be repeated."""

    def __init__(self, window: Window, began: float, training: float, waiting: float) -> None:
        self.steps = float(window.steps)
        self.began = began
        self.ended = window.ended
        self.training = training
        self.waiting = waiting


class Goodput:
    """Divides the time of a run that began at `began`. Times are on the controller's clock and never decrease."""

    def __init__(self, began: float) -> None:
        self._began = self._until = began  # time before `_until` is divided
        self._sums = dict.fromkeys(PARTS, 0.0)
        self._repeated = 0.0
        self._is_measured = False
        self._start_s: float | None = None  # until all workers ran for the first time, without failures
        self._failures: deque[tuple[float, float]] = deque()  # since the last window
        self._failing_since: float | None = None
        self._failing_s = 0.0  # all failures that are over
        self._spans: deque[Span] = deque(maxlen=SPANS)  # that may be in a gap
        self._usual: deque[float] = deque(maxlen=USUAL_OF)  # length of a step
        self._kept: deque[_Kept] = deque()
        self._older = 0.0, 0.0  # training and waiting in older windows of the attempt

    def note(self, now: float, *, all_run: bool, fails: bool) -> None:
        """Record whether all workers run now, and whether a failure is not yet recovered."""
        if all_run and self._start_s is None:
            self._start_s = max(0.0, now - self._began - self._failed_s(now))
        if fails and self._failing_since is None:
            self._failing_since = now
        elif not fails and self._failing_since is not None:
            self._failures.append((self._failing_since, now))
            self._failing_s += now - self._failing_since
            self._failing_since = None

    def add_span(self, span: Span) -> None:
        """Add a span. A recovery turns training that it overlaps into failure."""
        if span.ended > self._until:
            self._spans.append(span)
        if span.kind == "recovery":
            for each in reversed(self._kept):
                if each.ended <= span.began:
                    break
                overlap = min(span.ended, each.ended) - max(span.began, each.began)
                if overlap > 0.0 and each.ended > each.began:
                    self._repeat(each, overlap / (each.ended - each.began))

    def add(self, window: Window) -> None:
        """Add the next window."""
        began, ended = max(window.began, self._until), window.ended
        if ended <= began:
            return
        for name, seconds in self._gap(began).items():
            self._sums[name] += seconds
        self._is_measured = True
        parts = self._divided(window, began)
        for name, seconds in parts.items():
            self._sums[name] += seconds
        self._usual.append((ended - began) / window.steps)
        if any(share.is_divided for share in window.shares.values()):  # else the script's checkpoints are unknown
            self._kept.append(_Kept(window, began, parts["training"], parts["waiting"]))
        if len(self._kept) > KEPT:
            oldest = self._kept.popleft()
            self._older = self._older[0] + oldest.training, self._older[1] + oldest.waiting
        self._until = ended
        while self._failures and self._failures[0][1] <= ended:
            self._failures.popleft()
        while self._spans and self._spans[0].ended <= ended:
            self._spans.popleft()

    def begin_attempt(self, lost_steps: int | None) -> None:
        """Begin another attempt, which repeats `lost_steps` steps of the last one; None: all of them."""
        left = float("inf") if lost_steps is None else float(lost_steps)
        while left > 0.0 and self._kept:
            newest = self._kept.pop()
            self._repeat(newest, min(1.0, left / newest.steps))
            left -= newest.steps
        if left > 0.0:
            self._move("training", self._older[0])
            self._move("waiting", self._older[1])
        self._kept.clear()
        self._older = 0.0, 0.0

    def parts(self, now: float) -> Parts:
        """Return the parts of the time up to `now`."""
        if self._is_measured:
            sums = dict(self._sums)
            for name, seconds in self._gap(max(now, self._until)).items():
                sums[name] += seconds
        else:
            sums = self._unmeasured(now)
        return Parts(**sums, repeated=self._repeated, is_measured=self._is_measured)

    def _gap(self, to: float) -> dict[str, float]:
        """Divide the gap between the last window and `to`."""
        began = self._until
        length = max(0.0, to - began)
        failed_at = min((since for since, until in self._failing() if until > began and since < to), default=None)
        if not self._is_measured:
            start = length if failed_at is None else min(length, max(0.0, failed_at - began))
            return {"start": start, "failures": length - start}
        if failed_at is not None:
            return {"failures": length}
        spans = _covered([(span.began, span.ended, span.kind) for span in self._spans], began, to)
        recovery = spans.pop("recovery", 0.0)
        checkpoints = sum(spans.values())
        return {"failures": recovery, "checkpoints": checkpoints, "rest": length - recovery - checkpoints}

    def _divided(self, window: Window, began: float) -> dict[str, float]:
        """Divide a window."""
        length = window.ended - began
        shares = [*window.shares.values()]
        held = [_without_recovery(share.spans) for share in shares]
        checkpoints = min(length, max(held, default=0.0))
        left = length - checkpoints
        failures = min(left, max((share.spans.get("recovery", 0.0) for share in shares), default=0.0))
        if any(since < window.ended and until > began for since, until in self._failing()):
            usual = median(self._usual) * window.steps if self._usual else 0.0
            if left > LONGER * usual:
                failures = max(failures, left - usual)
        left -= failures
        most = max((share.own for share in shares), default=0.0)
        waits = (
            min(max(0.0, share.wait - (checkpoints - mine)), most - share.own)
            for share, mine in zip(shares, held, strict=True)
        )
        waiting = 0.0 if failures else min(left, sum(waits) / max(1, len(shares)))
        return {
            "training": left - waiting, "waiting": waiting, "checkpoints": checkpoints, "failures": failures
        }  # fmt: skip

    def _failing(self) -> list[tuple[float, float]]:
        now = [] if self._failing_since is None else [(self._failing_since, float("inf"))]
        return [*self._failures, *now]

    def _unmeasured(self, now: float) -> dict[str, float]:
        wall = max(0.0, now - self._began)
        failures = min(wall, self._failed_s(now))
        start = wall - failures if self._start_s is None else min(wall - failures, self._start_s)
        return {**dict.fromkeys(PARTS, 0.0), "start": start, "failures": failures, "rest": wall - start - failures}

    def _failed_s(self, now: float) -> float:
        return self._failing_s + (0.0 if self._failing_since is None else now - self._failing_since)

    def _repeat(self, kept: _Kept, part: float) -> None:
        for name in ("training", "waiting"):
            seconds = getattr(kept, name)
            self._move(name, part * seconds)
            setattr(kept, name, (1.0 - part) * seconds)

    def _move(self, name: str, seconds: float) -> None:
        self._sums[name] -= seconds
        self._sums["failures"] += seconds
        self._repeated += seconds


def _without_recovery(spans: Mapping[str, float]) -> float:
    return sum(seconds for kind, seconds in spans.items() if kind != "recovery")


def _covered(spans: list[tuple[float, float, str]], began: float, ended: float) -> dict[str, float]:
    """Return, by kind, how much of a time the spans of all ranks cover; of overlapping spans the earlier counts."""
    found: dict[str, float] = {}
    at = began
    for since, until, kind in sorted(spans):
        since, until = max(at, since), min(ended, until)
        if until > since:
            found[kind] = found.get(kind, 0.0) + until - since
            at = until
    return found
