"""A server's statistics, and how they are printed. Pure."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

_BINS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)  # lower ends


@dataclass
class Statistics:
    """Counts of one server since its start. Times in seconds.

    `staleness` counts, for each applied gradient of a chunk, the steps that others had made on it since its worker
    read it. `waited_s` is, by replica, how long answers were delayed to wait for others; `queue` the largest number of
    gradients that waited at once; `apply_s` the time spent on averaging and stepping.
    """

    pushes: int = 0
    steps: int = 0
    dropped: int = 0
    snapshots: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    bytes_shared: int = 0
    queue: int = 0
    apply_s: float = 0.0
    staleness: Counter[int] = field(default_factory=Counter)
    waited_s: dict[int, float] = field(default_factory=dict)

    def add_wait(self, replica: int, seconds: float) -> None:
        """Add the time by which an answer to a replica was delayed."""
        self.waited_s[replica] = self.waited_s.get(replica, 0.0) + seconds

    def as_dict(self) -> dict[str, Any]:
        """Return all counts as JSON values: the keys of `staleness` and `waited_s` become strings."""
        return {
            **{name: value for name, value in vars(self).items() if name not in ("staleness", "waited_s")},
            "staleness": {str(steps): count for steps, count in sorted(self.staleness.items())},
            "waited_s": {str(replica): round(seconds, 3) for replica, seconds in sorted(self.waited_s.items())},
        }

    def lines(self, *, name: str, ran_s: float) -> list[str]:
        """Return the lines that a server prints when it ends."""
        moved = f"{_size(self.bytes_in)} in, {_size(self.bytes_out)} out, {_size(self.bytes_shared)} by shared memory"
        lines = [
            f"{name}: {self.pushes:,} gradients, {self.steps:,} steps of chunks in {ran_s:.1f} s; {moved}; "
            f"averaging and stepping took {self.apply_s:.1f} s; at most {self.queue} gradients waited at once"
        ]
        if self.dropped:
            lines.append(f"{name}: {self.dropped:,} gradients arrived too late and were dropped")
        if self.waited_s and max(self.waited_s.values()) >= 0.05:
            waits = ", ".join(f"{replica}: {seconds:.1f} s" for replica, seconds in sorted(self.waited_s.items()))
            lines.append(f"{name}: workers waited for others: {waits}")
        if set(self.staleness) - {0}:
            lines.append(f"{name}: staleness in steps: {histogram(self.staleness)}")
        return lines


def histogram(staleness: Counter[int]) -> str:
    """Return shares by staleness, "0: 61 %, 1: 30 %, 4-5: 9 %".

    >>> histogram(Counter({0: 3, 5: 1}))
    '0: 75 %, 4-5: 25 %'
    """
    total = sum(staleness.values())
    shares = []
    for low, end in itertools.pairwise([*_BINS, math.inf]):
        count = sum(c for steps, c in staleness.items() if low <= steps < end)
        if count:
            name = f"{low}+" if end == math.inf else f"{low}" if end == low + 1 else f"{low}-{end - 1}"
            shares.append(f"{name}: {100 * count / total:.0f} %")
    return ", ".join(shares)


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
