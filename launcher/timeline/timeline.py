"""Distributes the ranks' records to subscribers as they arrive. Owned by the controller's loop.

It keeps only what a late subscriber needs; the run's file (file.py) has everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from launcher.timeline.records import Record, StepTimes

NEWEST = 32  # StepTimes kept of each rank


class Timeline:
    """Passes records, on the controller's clock, to all subscribers in the order of arrival.

    Records of one rank are ordered by their end. Records of different ranks are not ordered; a slow connection delays
    them.
    """

    def __init__(self) -> None:
        self._subscribers: list[Callable[[Record], None]] = []
        self._newest: dict[int, deque[StepTimes]] = {}

    def subscribe(self, take: Callable[[Record], None]) -> None:
        """Call `take` in the loop with every record from now on."""
        self._subscribers.append(take)

    def add(self, record: Record) -> None:
        if isinstance(record, StepTimes):
            self._newest.setdefault(record.rank, deque(maxlen=NEWEST)).append(record)
        for take in self._subscribers:
            take(record)

    def newest(self, rank: int) -> list[StepTimes]:
        """Return the newest StepTimes of a rank, oldest first."""
        return [*self._newest.get(rank, ())]

    def begin_attempt(self) -> None:
        """Forget the ranks of the previous attempt."""
        self._newest.clear()
