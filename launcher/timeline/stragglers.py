"""Stragglers: the ranks or hosts that have been slow for several steps, and the cause. Pure.

Each rank's own work in a window is compared with the median of the other ranks', by the logarithm of the ratio. A
cumulative sum (E. S. Page, Continuous inspection schemes, Biometrika 41, 1954) of these values, less an allowance,
detects a change: a single slow step, however long, adds so little that several in a row are needed. The spread is
estimated from differences of successive values (J. von Neumann, 1941), which a lasting change does not widen. A second
sum of the opposite sign detects the end. The network is compared in the same way: the shortest wait of all ranks is
the one in which no rank was missing any more; if it grows while no rank's work does, the network is slow.

A straggler is reported once it matters (`_Stretch`): it was slow for 10 s and 50 steps, in nearly every second, and
cost a noticeable part of that time. The first seconds after a start, a restart or a join do not count. If ranks waited
for a processor of their host for nearly as long as they delayed the others, the host is reported as crowded instead,
once. Each rank, host or network is reported when it becomes slow and when it has recovered.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from statistics import median, median_low

from launcher.frozen import dataclass, replace
from launcher.timeline.windows import Share, Window

ALLOWANCE = 1.0  # in units of the spread; smaller deviations do not count
CLIP = 3.0  # most that one window counts, in units of the spread
LIMIT = 9.0  # of a sum
LEAST_SPREAD = 0.1  # of the logarithms: a rank that takes 10 % longer is never slow, however steady
FIRST = 3  # windows to skip: compilation, first batches
LEARNED = 8  # windows before the first report
AWAY = 20  # windows without a rank before it is dropped
SPREAD_OF = 64  # windows
USUAL_OF = 256  # windows
KEPT = 100  # stragglers
NEW_PART = 0.2  # weight of the newest window in the recent ratio
SETTLES_S = 2.0  # no comparison for this long after a rank starts or restarts
LEAST_S = 10.0  # of slowness before a report
LEAST_STEPS = 50
LEAST_STEP_S = 0.005  # shorter steps do not count
LEAST_PART = 0.05  # least part of the time that the others must lose
BIN_S = 1.0
LEAST_BINS = 0.8  # least part of the bins that must be slow; a long step of another rank may fall into one
CROWDED_PART = 0.5  # part of the others' loss that was spent in the queue for a processor
_PARTS = ("data", "compute", "other")
_MAD = 1.4826 / math.sqrt(2.0)  # from the median of absolute differences to a standard deviation


@dataclass(frozen=True)
class Straggler:
    """A slow host with all its ranks, some ranks of one host, or the network (no host, no ranks).

    `times` is the ratio of its work to the others' in the steps until it was found; for the network, the ratio of the
    step to the usual one. `after_s` counts from the start of the run. `to_step` and `for_s` are None until it ends.
    """

    host: str
    ranks: tuple[int, ...]
    what: str  # data, compute, other, network
    times: float
    attempt: int
    from_step: int
    after_s: float
    to_step: int | None = None
    for_s: float | None = None

    def as_json(self) -> dict[str, object]:
        return {
            "host": self.host,
            "ranks": [*self.ranks],
            "what": self.what,
            "times": round(self.times, 2),
            "attempt": self.attempt,
            "from_step": self.from_step,
            "after_s": round(self.after_s, 3),
            "to_step": self.to_step,
            "for_s": None if self.for_s is None else round(self.for_s, 3),
        }


@dataclass(frozen=True)
class Crowded:
    """A host whose ranks wait for a processor for this part of the time, which delays all other ranks."""

    host: str
    part: float


class _Stretch:
    """The time that the others have lost since something became slow."""

    def __init__(self) -> None:
        self.began: float | None = None
        self._ended = 0.0
        self._steps = 0
        self._lost_s = self._length_s = 0.0
        self._bins = self._slow_bins = 0
        self._bin_lost_s = self._bin_length_s = 0.0

    def add(self, window: Window, lost_s: float) -> None:
        """Add a window and the seconds lost in it, negative if time was gained."""
        if self.began is None:
            self.began = window.began
        self._ended = window.ended
        if window.length_s >= LEAST_STEP_S * window.steps:
            self._steps += window.steps
        self._lost_s += lost_s
        self._length_s += window.length_s
        self._bin_lost_s += lost_s
        self._bin_length_s += window.length_s
        if self._bin_length_s >= BIN_S:
            self._bins += 1
            self._slow_bins += self._bin_lost_s >= LEAST_PART * self._bin_length_s
            self._bin_lost_s = self._bin_length_s = 0.0

    @property
    def matters(self) -> bool:
        return (
            self.began is not None
            and self._ended - self.began >= LEAST_S
            and self._steps >= LEAST_STEPS
            and self.lost_part >= LEAST_PART
            and self._slow_bins >= LEAST_BINS * self._bins
        )

    @property
    def lost_part(self) -> float:
        """Part of the time spent in steps."""
        return self._lost_s / self._length_s if self._length_s else 0.0


class _Sum:
    """Cumulative sums of one rank or of the network."""

    def __init__(self) -> None:
        self.slow = self.usual = 0.0
        self.is_slow = False
        self.since: Window | None = None  # the first window of the current sum
        self.excess: dict[str, float] = {}  # seconds by activity, since then
        self.ratios: list[float] = []  # since then
        self.stretch = _Stretch()
        self._last: float | None = None

    def difference(self, value: float) -> float | None:
        """Return the absolute difference from the previous value; None for the first."""
        last, self._last = self._last, value
        return None if last is None else abs(value - last)

    def take(self, value: float, spread: float, window: Window, excess: Mapping[str, float], lost_s: float) -> None:
        counted = max(-CLIP, min(CLIP, value / spread))
        up = counted - ALLOWANCE
        self.slow = min(2 * LIMIT, max(0.0, self.slow + up))
        self.usual = max(0.0, self.usual - up) if self.is_slow else 0.0
        if self.is_slow:
            return
        if self.slow == 0.0:
            self._forget()
            return
        self.since = self.since or window
        self.stretch.add(window, lost_s)
        self.ratios.append(value)
        part = counted * spread / value if value else 1.0  # clip outliers here as in the sum
        for what, seconds in excess.items():
            self.excess[what] = self.excess.get(what, 0.0) + part * seconds

    @property
    def begins(self) -> bool:
        return not self.is_slow and self.slow > LIMIT and self.stretch.matters

    @property
    def is_over(self) -> bool:
        return self.is_slow and self.usual > LIMIT

    def begin(self) -> None:
        self.is_slow, self.usual = True, 0.0

    def end(self) -> None:
        self.is_slow, self.slow, self.usual = False, 0.0, 0.0
        self._forget()

    def _forget(self) -> None:
        self.since, self.excess, self.ratios, self.stretch = None, {}, [], _Stretch()


class Stragglers:
    """Finds stragglers in windows. Calls `report` with each straggler at its start and end, and with each `Crowded`.

    `began` is the start of the run. `host_of` returns a rank's current host. `queued_part(rank, since)` returns the
    part of the time since then (controller's clock) that the rank's training thread waited for a processor.
    """

    def __init__(
        self,
        began: float,
        *,
        host_of: Callable[[int], str],
        queued_part: Callable[[int, float], float],
        report: Callable[[Straggler | Crowded], None],
    ) -> None:
        self.found: list[Straggler] = []  # the newest, in the order of their start
        self._began = began
        self._host_of = host_of
        self._queued_part = queued_part
        self._report = report
        self._crowded: set[str] = set()  # hosts that were reported
        self._last: Window | None = None
        self._windows = 0
        self._settles_until = float("-inf")
        self._sums: dict[int, _Sum] = {}
        self._network = _Sum()
        self._differences: deque[float] = deque(maxlen=SPREAD_OF)
        self._network_differences: deque[float] = deque(maxlen=SPREAD_OF)
        self._usual: deque[tuple[float, float]] = deque(maxlen=USUAL_OF)  # shortest wait, median work, of a step
        self._recent: dict[int, float] = {}  # by rank, the logarithm of the recent ratio
        self._absent: dict[int, int] = {}  # by rank, consecutive windows without it
        self._what: dict[int, str] = {}  # by rank, its largest excess in the newest window

    @property
    def now(self) -> list[Straggler]:
        """The stragglers that are slow now."""
        return [each for each in self.found if each.to_step is None]

    @property
    def slowest(self) -> tuple[int, float, str] | None:
        """The slowest rank now, its recent ratio to the others' work, and the cause; None if no rank is slow."""
        slow = {rank for each in self.now for rank in each.ranks} & self._recent.keys()
        if not slow:
            return None
        rank = max(slow, key=lambda each: self._recent[each])
        return rank, math.exp(self._recent[rank]), self._what[rank]

    def add(self, window: Window) -> None:
        if self._last is not None and window.attempt != self._last.attempt:
            self._begin_attempt(self._last)
        self._last = window
        shares = {rank: share for rank, share in window.shares.items() if share.own > 0.0 and share.is_divided}
        if not shares.keys() <= self._sums.keys() or any("recovery" in share.spans for share in shares.values()):
            self._settles_until = window.ended + SETTLES_S
            self._sums |= {rank: _Sum() for rank in shares if rank not in self._sums}
        if window.ended < self._settles_until or len(shares) < 2:
            return
        self._windows += 1
        if self._windows <= FIRST:
            return
        others = _Others(shares)
        values = {rank: math.log(share.own / others.median(share.own)) for rank, share in shares.items()}
        excess = _excess(shares)
        self._absent = {rank: self._absent.get(rank, 0) + 1 for rank in self._sums.keys() - shares.keys()}
        for rank in [rank for rank, windows in self._absent.items() if windows > AWAY]:
            for known in (self._sums, self._recent, self._what, self._absent):
                known.pop(rank, None)
            self._usual.clear()
        differences = []
        for rank, value in values.items():
            self._recent[rank] = self._recent.get(rank, value) * (1 - NEW_PART) + value * NEW_PART
            self._what[rank] = _most(excess[rank])
            difference = self._sums[rank].difference(value)
            if difference is not None:
                differences.append(difference)
        if differences:
            self._differences.append(median(differences))
        # Windows with one rank are useless; they occur while the clock of a host is not well known.
        if self._windows > FIRST + LEARNED and len(self._differences) >= LEARNED:
            spread = max(LEAST_SPREAD, _MAD * median(self._differences))
            for rank, value in values.items():
                lost_s = shares[rank].own - others.median(shares[rank].own)
                self._sums[rank].take(value, spread, window, excess[rank], lost_s)
        if not self._absent:  # else the shortest wait may be missing
            self._take_network(window, shares)
        self._judge(window)

    def _begin_attempt(self, last: Window) -> None:
        """Reset for a new attempt: other processes run now, perhaps on other hosts."""
        self.found = [each if each.to_step is not None else self._ended(each, last) for each in self.found]
        self._windows = 0
        self._sums, self._network = {}, _Sum()
        self._settles_until = float("-inf")
        for known in (self._usual, self._recent, self._what):
            known.clear()

    def _take_network(self, window: Window, shares: Mapping[int, Share]) -> None:
        """Compare the shortest wait with the usual one, relative to the step."""
        wait, work = (
            min(share.wait for share in shares.values()) / window.steps,
            median(share.own for share in shares.values()) / window.steps,
        )
        if len(self._usual) >= LEARNED:
            usual_wait, usual_work = (median(values) for values in zip(*self._usual, strict=True))
            usual = usual_wait + usual_work
            value = math.log(max(1e-9, usual + wait - usual_wait) / usual)
            difference = self._network.difference(value)
            if difference is not None:
                self._network_differences.append(difference)
            if len(self._network_differences) >= LEARNED:
                spread = max(LEAST_SPREAD, _MAD * median(self._network_differences))
                grown = work > usual_work * math.exp(LEAST_SPREAD)
                lost_s = window.steps * (wait - usual_wait)
                self._network.take(min(value, 0.0) if grown else value, spread, window, {"network": lost_s}, lost_s)
        if self._network.slow < LIMIT / 2 and not self._network.is_slow:
            self._usual.append((wait, work))

    def _judge(self, window: Window) -> None:
        for rank, each in self._sums.items():
            if each.begins and not self._waits_for_processors(each, [rank]):
                self._begin(self._group_of(rank), window)
        is_alone = not any(each.slow > LIMIT / 2 for each in self._sums.values())
        if self._network.begins and is_alone and not self._waits_for_processors(self._network, self._sums):
            self._network.begin()
            self._note("", (), self._network, window)
        for index, straggler in enumerate(self.found):
            if straggler.to_step is not None:
                continue
            sums = [self._network] if straggler.what == "network" else self._sums_of(straggler.ranks)
            if all(each.is_over or not each.is_slow for each in sums):
                for each in sums:
                    each.end()
                self.found[index] = self._ended(straggler, window)
                if sums:  # else its ranks are gone
                    self._report(self.found[index])

    def _waits_for_processors(self, found: _Sum, ranks: Iterable[int]) -> bool:
        """Return whether overloaded processors may explain the loss; report a crowded host once."""
        assert found.stretch.began is not None
        parts = {rank: self._queued_part(rank, found.stretch.began) for rank in ranks}
        rank = max(parts, key=lambda each: parts[each])
        if parts[rank] < CROWDED_PART * found.stretch.lost_part:
            return False
        host = self._host_of(rank)
        if host not in self._crowded:
            self._crowded.add(host)
            self._report(Crowded(host, parts[rank]))
        return True

    def _group_of(self, rank: int) -> tuple[int, ...]:
        """Return all ranks of the rank's host if all are slow and other hosts have ranks; else only this rank."""
        host = self._host_of(rank)
        ranks = tuple(sorted(other for other in self._sums if self._host_of(other) == host))
        sums = self._sums_of(ranks)
        is_whole = 1 < len(ranks) < len(self._sums) and all(each.is_slow or each.slow > LIMIT / 2 for each in sums)
        return ranks if is_whole else (rank,)

    def _sums_of(self, ranks: tuple[int, ...]) -> list[_Sum]:
        return [self._sums[rank] for rank in ranks if rank in self._sums]

    def _begin(self, ranks: tuple[int, ...], window: Window) -> None:
        sums = self._sums_of(ranks)
        for each in sums:
            each.begin()
        first = max(sums, key=lambda each: each.slow)
        for index, known in enumerate(self.found):  # a report of the host replaces those of its ranks
            if known.to_step is None and known.ranks and {*known.ranks} < {*ranks}:
                self.found[index] = self._ended(known, window)
        self._note(self._host_of(ranks[0]), ranks, first, window)

    def _note(self, host: str, ranks: tuple[int, ...], found: _Sum, window: Window) -> None:
        since = found.since or window
        straggler = Straggler(
            host=host,
            ranks=ranks,
            what=_most(found.excess),
            times=math.exp(median(found.ratios)),
            attempt=window.attempt,
            from_step=since.step - since.steps + 1,
            after_s=max(0.0, since.began - self._began),
        )
        self.found = [*self.found, straggler][-KEPT:]
        self._report(straggler)

    def _ended(self, straggler: Straggler, window: Window) -> Straggler:
        for_s = max(0.0, window.ended - self._began - straggler.after_s)
        return replace(straggler, to_step=window.step, for_s=for_s)


class _Others:
    """Own work of all ranks; `median` leaves one out."""

    def __init__(self, shares: Mapping[int, Share]) -> None:
        self._sorted = sorted(share.own for share in shares.values())

    def median(self, without: float) -> float:
        """Return the median of all values but `without`: the geometric mean of the middle two."""
        others = len(self._sorted) - 1
        at = bisect_left(self._sorted, without)
        low, high = ((index + (index >= at)) for index in ((others - 1) // 2, others // 2))
        return math.sqrt(self._sorted[low] * self._sorted[high])


def _excess(shares: Mapping[int, Share]) -> dict[int, dict[str, float]]:
    """Return, by rank and activity, the seconds beyond the median of the ranks."""
    parts = {what: {rank: getattr(share, what) for rank, share in shares.items()} for what in _PARTS}
    typical = {what: median_low(values.values()) for what, values in parts.items()}
    return {rank: {what: parts[what][rank] - typical[what] for what in _PARTS} for rank in shares}


def _most(excess: Mapping[str, float]) -> str:
    return max(excess, key=lambda what: excess[what])
