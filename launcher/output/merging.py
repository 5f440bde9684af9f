"""Merges equal lines that many ranks write at the same time. Pure: no clock, no file; used by console.py.

A line is held for PAUSE_S after the last rank that wrote it, at most for LONGEST_S, or until all ranks have written it.
Lines leave in the order of their first arrival, so those of one rank are never reordered: a rank joins a line only if
it came after the rank's own newest one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field

from launcher.output.text import ranges

PAUSE_S = 0.1
LONGEST_S = 0.2
# Limits on the different lines, and their bytes, compared in LONGEST_S. Beyond them lines pass unmerged until a period
# stays below the limits.
MOST_LINES = 2000
MOST_BYTES = 1 << 18


@dataclass(slots=True)
class HeldLine:
    number: int
    stream: int
    text: bytes
    until: float  # at the latest
    due: float
    ranks: list[int] = field(default_factory=list)


class LineMerger:
    """Holds lines to merge them. `ranks` is the number of ranks: a line that all have written is due immediately."""

    def __init__(self) -> None:
        self.ranks = 0
        self._held: deque[HeldLine] = deque()
        self._equal: dict[tuple[int, bytes], list[HeldLine]] = {}
        self._newest: dict[int, int] = {}  # by rank, the number of its newest line
        self._number = 0
        self._period_end = 0.0
        self._lines = self._bytes = 0  # new ones in this period
        self._was_flood = False  # in the previous period

    def takes(self, lines: bytes, now: float) -> bool:
        """Return whether to `add` these lines; otherwise show them immediately, after the held ones."""
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
        """Add whole lines of a rank, in order."""
        newest = self._newest.get(rank, 0)
        for text in lines.split(b"\n"):
            equal = self._equal.get((stream, text))
            if equal is None:
                equal = self._equal[stream, text] = []
            if not equal or equal[-1].number <= newest:
                self._number += 1
                self._lines += 1
                self._bytes += len(text)
                line = HeldLine(self._number, stream, text, until=now + LONGEST_S, due=0.0)
                equal.append(line)
                self._held.append(line)
            else:
                line = equal[bisect_right(equal, newest, key=_number)]
            line.ranks.append(rank)
            line.due = min(now + PAUSE_S, line.until) if len(line.ranks) < self.ranks else now
            newest = line.number
        self._newest[rank] = newest

    @property
    def next_due(self) -> float | None:
        """Time at which the first held line is due; None if there is none."""
        return self._held[0].due if self._held else None

    def leave(self, now: float) -> list[HeldLine]:
        """Remove and return the lines that are due, in order."""
        left = []
        while self._held and self._held[0].due <= now:
            line = self._held.popleft()
            equal = self._equal[line.stream, line.text]
            equal.pop(0)  # of equal lines, the earliest leaves first
            if not equal:
                del self._equal[line.stream, line.text]
            left.append(line)
        return left


def _number(line: HeldLine) -> int:
    return line.number


def label(ranks: list[int], count: int) -> str:
    """Format which of `count` ranks wrote a line: `all 8`, or `2-7`."""
    return f"all {count}" if len(ranks) == count else ranges(ranks)
