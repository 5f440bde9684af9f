"""What the ranks do with their time, as it becomes known: owned by the controller's loop. Others subscribe.

Nothing is kept here but what a late subscriber could need; the file of the run (file.py) has the whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from launcher.timeline.records import Record, StepTimes

__all__ = ["Timeline"]

NEWEST = 32  # StepTimes of each rank that are kept


class Timeline:
    """Takes records on the controller's clock and passes each on to all subscribers, in the order of their arrival.

    Those of one rank come in the order in which they ended, those of several ranks in none; what is late by a slow
    connection comes late.
    """

    def __init__(self) -> None:
        self._subscribers: list[Callable[[Record], None]] = []
        self._newest: dict[int, deque[StepTimes]] = {}

    def subscribe(self, take: Callable[[Record], None]) -> None:
        """Have `take` called in the loop with every record from now on."""
        self._subscribers.append(take)

    def add(self, record: Record) -> None:
        if isinstance(record, StepTimes):
            self._newest.setdefault(record.rank, deque(maxlen=NEWEST)).append(record)
        for take in self._subscribers:
            take(record)

    def newest(self, rank: int) -> list[StepTimes]:
        """Return the last StepTimes of a rank, the oldest first."""
        return [*self._newest.get(rank, ())]

    def begin_attempt(self) -> None:
        """Forget the ranks of the attempt before: there may be others now."""
        self._newest.clear()
