"""Computes which part of the time the training threads of ranks waited for a processor. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

KEPT = 100  # readings of a rank


class ProcessorWaits:
    """Keeps readings of how long each rank has waited since its process started."""

    def __init__(self) -> None:
        self._readings: dict[str, deque[tuple[float, float]]] = {}  # by rank: when, and how long until then

    def add(self, now: float, waited_s: Mapping[str, float]) -> None:
        for rank, seconds in waited_s.items():
            readings = self._readings.setdefault(rank, deque(maxlen=KEPT))
            if readings and seconds < readings[-1][1]:  # a new process
                readings.clear()
            readings.append((now, seconds))

    def part(self, rank: int, since: float) -> float:
        """Return the part of the time since the last reading before `since`; 0 if unknown."""
        readings = self._readings.get(str(rank), deque())
        if len(readings) < 2:
            return 0.0
        last_at, last = readings[-1]
        first_at, first = max((each for each in readings if each[0] <= since), default=readings[0])
        return (last - first) / (last_at - first_at) if last_at > first_at else 0.0
