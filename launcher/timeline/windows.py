"""Windows: what all ranks did in the same stretch of time. Pure.

Ranks are compared by time, not by step number: each rank numbers its own steps, a restarted one from the start, and
agents sum up steps of different lengths. A window covers the newest StepTimes of the lowest rank. Every other rank
contributes the part of its records that overlaps it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from launcher.frozen import dataclass, field
from launcher.timeline.records import PHASES, Record, Span, StepTimes

LATE_S = 10.0  # stop waiting for a rank when other ranks have records that are newer by this
COVERS = 0.5  # least part of a window that a rank's records must cover
KEPT = 1000  # most records of one rank that wait for other ranks
SHARES_PER_S = 2000  # most shares computed, all ranks together
APART_S = 1e-3  # least gap between two records of a rank that are not consecutive
_DATA, _WAIT, _OTHER = (PHASES.index(name) for name in ("data", "wait", "other"))


@dataclass(frozen=True)
class Share:
    """Time use of a rank in a window, in seconds. The other fields do not include `spans`."""

    data: float
    compute: float  # forward, backward and optimizer
    other: float
    wait: float
    spans: Mapping[str, float] = field(default_factory=dict)  # by kind: evaluation, save, load, recovery

    @property
    def own(self) -> float:
        """Own work for the steps, without spans."""
        return self.data + self.compute + self.other

    @property
    def is_divided(self) -> bool:
        """Whether work and waits are known separately; they are not for training without ddp."""
        return self.data + self.compute + self.wait > 0.0


@dataclass(frozen=True)
class Window:
    """`steps` steps of the lowest rank, up to number `step`, on the controller's clock."""

    attempt: int
    step: int
    steps: int
    began: float
    ended: float
    shares: Mapping[int, Share]  # by rank

    @property
    def length_s(self) -> float:
        return self.ended - self.began


class _Rank:
    """Records of one rank that are not yet in a window."""

    def __init__(self) -> None:
        self.steps: deque[StepTimes] = deque(maxlen=KEPT)
        self.spans: deque[Span] = deque(maxlen=KEPT)
        self.heard_until = float("-inf")

    def share(self, began: float, ended: float) -> Share | None:
        """Return this rank's share of a window; None if its records cover too little."""
        phases = [0.0] * len(PHASES)
        for times in self.steps:
            length = sum(times.phases_s)
            overlap = min(ended, times.ended) - max(began, times.ended - length)
            if overlap > 0:
                part = overlap / length
                phases = [sum_ + part * value for sum_, value in zip(phases, times.phases_s, strict=True)]
        if sum(phases) < COVERS * (ended - began) or ended <= began:
            return None
        spans: dict[str, float] = {}
        for span in self.spans:
            overlap = min(ended, span.ended) - max(began, span.began)
            left = overlap
            for phase in (_OTHER, _DATA):  # spans are part of `other`; evaluation before a forward may count as data
                taken = max(0.0, min(left, phases[phase]))
                phases[phase] -= taken
                left -= taken
            if overlap > left:
                spans[span.kind] = spans.get(span.kind, 0.0) + overlap - left
        return Share(
            data=phases[_DATA],
            compute=sum(phases) - phases[_DATA] - phases[_OTHER] - phases[_WAIT],
            other=phases[_OTHER],
            wait=phases[_WAIT],
            spans=spans,
        )

    def forget(self, until: float) -> None:
        while self.steps and self.steps[0].ended <= until:
            self.steps.popleft()
        while self.spans and self.spans[0].ended <= until:
            self.spans.popleft()


class Windows:
    """Collects records, which may interleave between ranks in any order; `take` returns the complete windows."""

    def __init__(self) -> None:
        self._attempt = -1
        self._ranks: dict[int, _Rank] = {}
        self._complete: list[Window] = []  # of earlier attempts
        self._until = float("-inf")  # the end of the last window
        self._newest = float("-inf")

    def add(self, record: Record) -> None:
        """Add a record. Ignore it if it belongs to an older attempt or to a finished window."""
        if record.attempt > self._attempt:
            self._complete = self.take(is_over=True)
            self._attempt = record.attempt
            self._ranks.clear()
        if record.attempt < self._attempt or record.ended <= self._until:
            return
        if isinstance(record, StepTimes):
            rank = self._ranks.setdefault(record.rank, _Rank())
            rank.steps.append(record)
            rank.heard_until = record.ended
            self._newest = max(self._newest, record.ended)
        elif isinstance(record, Span):
            self._ranks.setdefault(record.rank, _Rank()).spans.append(record)

    def take(self, *, is_over: bool = False) -> list[Window]:
        """Return the windows for which all records have arrived; with `is_over`, all windows."""
        found, self._complete = self._complete, []
        while (window := self._next(is_over)) is not None:
            found.append(window)
        return found

    def _next(self, is_over: bool) -> Window | None:
        leading = self._leading()
        if leading is None:
            return None
        records, is_long = self._enough(leading)
        last = records[-1]
        if not is_over and not (is_long and all(self._has_all(rank, last.ended) for rank in self._ranks.values())):
            return None
        began, ended = max(_began(records[0]), self._until), last.ended
        shares = {number: rank.share(began, ended) for number, rank in sorted(self._ranks.items())}
        known = {number: share for number, share in shares.items() if share is not None}
        self._until = ended
        for number, rank in [*self._ranks.items()]:
            rank.forget(ended)
            if not rank.steps and not rank.spans and self._newest - rank.heard_until > LATE_S:
                del self._ranks[number]
        return Window(last.attempt, last.step, sum(times.steps for times in records), began, ended, known)

    def _leading(self) -> _Rank | None:
        """Return the lowest rank with a record, unless another rank's record ends before that one begins."""
        having = [rank for _, rank in sorted(self._ranks.items()) if rank.steps]
        if not having:
            return None
        began = _began(having[0].steps[0])
        return next((rank for rank in having if rank.steps[0].ended <= began), having[0])

    def _enough(self, rank: _Rank) -> tuple[list[StepTimes], bool]:
        """Return the records of the next window, and whether they are enough. More ranks mean longer windows."""
        least_s = len(self._ranks) / SHARES_PER_S
        records: list[StepTimes] = []
        for times in rank.steps:
            if records and _began(times) > records[-1].ended + APART_S:  # not consecutive
                return records, True
            records.append(times)
            if times.ended - _began(records[0]) >= least_s:
                return records, True
        return records, self._newest - records[-1].ended > LATE_S

    def _has_all(self, rank: _Rank, ended: float) -> bool:
        return rank.heard_until >= ended or (not rank.steps and self._newest - rank.heard_until > LATE_S)


def _began(times: StepTimes) -> float:
    return times.ended - sum(times.phases_s)
