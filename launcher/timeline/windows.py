"""What all ranks did in the same stretch of time. Pure.

Ranks number their steps by themselves, one that was started again anew, and agents sum up steps of different length:
so ranks are compared by time, not by number. A window is the newest StepTimes of the lowest rank; of every other rank
it has the share of that rank's records that lies in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from launcher.frozen import dataclass, field
from launcher.timeline.records import PHASES, Record, Span, StepTimes

__all__ = ["Share", "Window", "Windows"]

LATE_S = 10.0  # so much newer records of others are there: nothing more of a rank is waited for
COVERS = 0.5  # of a window, for a rank to be in it
KEPT = 1000  # records of one rank that wait for those of others
SHARES_PER_S = 2000  # most that are worked out, of all ranks together
APART_S = 1e-3  # between two records of a rank that do not follow on each other
_DATA, _WAIT, _OTHER = (PHASES.index(name) for name in ("data", "wait", "other"))


@dataclass(frozen=True)
class Share:
    """What one rank did in a window, in seconds. `spans` is no longer in the rest."""

    data: float
    compute: float  # forward, backward and optimizer
    other: float
    wait: float
    spans: Mapping[str, float] = field(default_factory=dict)  # by kind: evaluation, save, load, recovery

    @property
    def own(self) -> float:
        """Its own work for the steps, without the spans."""
        return self.data + self.compute + self.other

    @property
    def is_divided(self) -> bool:
        """Whether work and waits are known apart: not of a rank that trains without ddp."""
        return self.data + self.compute + self.wait > 0.0


@dataclass(frozen=True)
class Window:
    """`steps` steps, `step` the last, of the lowest rank, on the controller's clock."""

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
    """The records of one rank that are not in a window yet."""

    def __init__(self) -> None:
        self.steps: deque[StepTimes] = deque(maxlen=KEPT)
        self.spans: deque[Span] = deque(maxlen=KEPT)
        self.heard_until = float("-inf")

    def share(self, began: float, ended: float) -> Share | None:
        """Return its share of a window; None where it has too little of it."""
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
            for phase in (_OTHER, _DATA):  # they lie in `other`; an evaluation before a forward may count as data
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
    """Takes the records of all ranks, in any order between ranks; `take` gives the windows that are complete."""

    def __init__(self) -> None:
        self._attempt = -1
        self._ranks: dict[int, _Rank] = {}
        self._complete: list[Window] = []  # of earlier attempts
        self._until = float("-inf")  # the end of the last window
        self._newest = float("-inf")

    def add(self, record: Record) -> None:
        """Take a record; one of an older attempt, or of a time that is over, is left out."""
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
        """Return the windows that no record of a rank is missing from any more; `is_over`: all that there are."""
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
        """Return the lowest rank with a record; but one of which a record ends before that begins comes first."""
        having = [rank for _, rank in sorted(self._ranks.items()) if rank.steps]
        if not having:
            return None
        began = _began(having[0].steps[0])
        return next((rank for rank in having if rank.steps[0].ended <= began), having[0])

    def _enough(self, rank: _Rank) -> tuple[list[StepTimes], bool]:
        """Return the next records for a window, and whether they are enough: of many ranks there are fewer windows."""
        least_s = len(self._ranks) / SHARES_PER_S
        records: list[StepTimes] = []
        for times in rank.steps:
            if records and _began(times) > records[-1].ended + APART_S:  # something else was between them
                return records, True
            records.append(times)
            if times.ended - _began(records[0]) >= least_s:
                return records, True
        return records, self._newest - records[-1].ended > LATE_S

    def _has_all(self, rank: _Rank, ended: float) -> bool:
        return rank.heard_until >= ended or (not rank.steps and self._newest - rank.heard_until > LATE_S)


def _began(times: StepTimes) -> float:
    return times.ended - sum(times.phases_s)
