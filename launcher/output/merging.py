"""Equal lines that many ranks write in the same moment become one. Pure: no clock, no file; used by console.py.

A line waits PAUSE_S after the last rank that wrote it, LONGEST_S at most, and no longer than until all ranks have.
Lines leave in the order in which they came first, so those of one rank are never reordered: a rank joins a line only if
that came after its own newest one. Lines that came in one piece are compared as one, while no piece of another rank may
have its lines in other pieces.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field

from launcher.output.text import ranges

__all__ = ["HeldLine", "LineMerger", "label"]

PAUSE_S = 0.1
LONGEST_S = 0.2
# So many different lines in LONGEST_S are compared, of so many bytes. A flood passes as it comes, until one such time
# had less.
MOST_LINES = 2000
MOST_BYTES = 1 << 18


@dataclass(slots=True)
class HeldLine:
    """A line, or several that one rank wrote at once, whose numbers are `number` and those that follow."""

    number: int
    stream: int
    text: bytes
    until: float  # at the latest
    due: float
    count: int = 1
    ranks: list[int] = field(default_factory=list)


class LineMerger:
    """`ranks` is how many there are: what all of them have written waits no longer."""

    def __init__(self) -> None:
        self.ranks = 0
        self._held: deque[HeldLine] = deque()
        self._equal: dict[tuple[int, bytes], list[HeldLine]] = {}
        self._blocks: list[int] = []  # the numbers of the held that are several lines
        self._newest: dict[int, int] = {}  # by rank, the number of its newest line
        self._number = 0
        self._period_end = 0.0
        self._lines = self._bytes = 0  # that came in this period, and were new
        self._was_flood = False  # in the one before

    def takes(self, lines: bytes, now: float) -> bool:
        """Whether lines are to be handed in; else they are to pass at once, after those that are held."""
        is_flood = self._lines >= MOST_LINES or self._bytes >= MOST_BYTES
        if now >= self._period_end:
            self._was_flood = is_flood and now < self._period_end + LONGEST_S
            self._period_end, self._lines, self._bytes, is_flood = now + LONGEST_S, 0, 0, False
        if is_flood or self._was_flood:
            self._lines += lines.count(b"\n") + 1
            self._bytes += len(lines)
            return False
        return self.ranks > 1

    def add(self, rank: int, stream: int, lines: bytes, now: float) -> None:
        """Take whole lines of a rank, in their order."""
        newest = self._newest.get(rank, 0)
        held = self._find(stream, lines, newest)
        if held is not None and not self._may_be_earlier(held, newest):
            newest = self._join(held, rank, now)
        elif not self._held or newest == self._number:  # none of them can be equal to one that is held
            newest = self._join(self._hold(stream, lines, now), rank, now)
        else:
            if self._blocks:
                self._split_blocks()
            for text in lines.split(b"\n"):
                held = self._find(stream, text, newest) or self._hold(stream, text, now)
                newest = self._join(held, rank, now)
        self._newest[rank] = newest

    def _find(self, stream: int, text: bytes, newest: int) -> HeldLine | None:
        """Return the first that is equal and came after the line `newest`."""
        equal = self._equal.get((stream, text))
        if equal is None or equal[-1].number <= newest:
            return None
        return equal[bisect_right(equal, newest, key=_number)]

    def _may_be_earlier(self, held: HeldLine, newest: int) -> bool:
        """Whether its first line may also be held between the line `newest` and it, in pieces of another size."""
        if held.count > 1:
            single = self._find(held.stream, held.text.partition(b"\n")[0], newest)
            return single is not None and single.number < held.number
        at = bisect_right(self._blocks, newest)
        return at < len(self._blocks) and self._blocks[at] < held.number

    def _join(self, held: HeldLine, rank: int, now: float) -> int:
        """Return the number of the rank's newest line."""
        held.ranks.append(rank)
        held.due = min(now + PAUSE_S, held.until) if len(held.ranks) < self.ranks else now
        return held.number + held.count - 1

    def _hold(self, stream: int, text: bytes, now: float) -> HeldLine:
        count = text.count(b"\n") + 1
        held = HeldLine(self._number + 1, stream, text, now + LONGEST_S, 0.0, count)
        self._number += count
        self._lines += count
        self._bytes += len(text)
        self._append(held)
        return held

    def _append(self, held: HeldLine) -> None:
        self._held.append(held)
        if held.count > 1:
            self._blocks.append(held.number)
        equal = self._equal.get((held.stream, held.text))
        if equal is None:
            self._equal[held.stream, held.text] = [held]
        else:
            equal.append(held)

    def _split_blocks(self) -> None:
        """Make single lines of all, since another rank's may be equal to some of them."""
        newest = []
        while self._blocks:
            newest.append(held := self._held.pop())
            self._forget(held, -1)
        for held in reversed(newest):
            for at, text in enumerate(held.text.split(b"\n")):
                number = held.number + at
                self._append(HeldLine(number, held.stream, text, held.until, held.due, 1, held.ranks.copy()))

    def _forget(self, held: HeldLine, at: int) -> None:
        """Hold no longer the first (0) or last (-1) of those that are equal."""
        if held.count > 1:
            self._blocks.pop(at)
        equal = self._equal[held.stream, held.text]
        equal.pop(at)
        if not equal:
            del self._equal[held.stream, held.text]

    @property
    def next_due(self) -> float | None:
        """When the first line is to leave; None if none waits."""
        return self._held[0].due if self._held else None

    def leave(self, now: float) -> list[HeldLine]:
        """Return the lines whose time has come, in order, and hold them no longer."""
        left = []
        while self._held and self._held[0].due <= now:
            line = self._held.popleft()
            self._forget(line, 0)  # a line leaves before those that are equal and came later
            left.append(line)
        return left


def _number(line: HeldLine) -> int:
    return line.number


def label(ranks: list[int], count: int) -> str:
    """Say who has written a line, of `count` ranks: `all 8`, or `2-7`."""
    return f"all {count}" if len(ranks) == count else ranges(ranks)
