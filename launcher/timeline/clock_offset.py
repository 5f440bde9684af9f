"""Estimates the offset between a host's monotonic clock and the controller's, from round trips and messages. Pure.

Round trips are measured as in NTP (RFC 5905): a heartbeat leaves at `asked` (our clock) and arrives at `asked_at` (the
host's); the host's message leaves at `time` and arrives at `now`. The offset is half the difference of both ways, with
an error of at most half the time in transit, so the shortest trip is the most accurate. A single message gives a bound:
it cannot arrive before it was sent.
"""

from __future__ import annotations

from collections import deque

MEASUREMENTS = 32  # newest kept: clocks drift, and stop while a machine sleeps


class ClockOffset:
    """Clock offset of one connection to a host."""

    def __init__(self) -> None:
        self._trips: deque[tuple[float, float]] = deque(maxlen=MEASUREMENTS)  # time in transit, offset
        self._bounds: deque[float] = deque(maxlen=MEASUREMENTS)
        self._asked = 0.0

    def hear(self, time: float, now: float, *, asked: float = 0.0, asked_at: float = 0.0) -> None:
        """Record a message that was sent at `time`. `asked` is 0 if no heartbeat came before it."""
        self._bounds.append(now - time)
        if asked <= self._asked:  # only the first answer to each heartbeat counts
            return
        self._asked = asked
        on_the_way_s = (now - asked) - (time - asked_at)
        if asked <= now and asked_at <= time and on_the_way_s >= 0.0:
            self._trips.append((on_the_way_s, ((asked - asked_at) + (now - time)) / 2))

    @property
    def error_s(self) -> float:
        """Largest possible error of `offset_s`; infinity if only the bound is known."""
        return min(self._trips)[0] / 2 if self._trips else float("inf")

    @property
    def offset_s(self) -> float:
        """Seconds to add to a time of the host; 0 until a message was received."""
        if self._trips:
            return min(self._trips)[1]
        return min(self._bounds, default=0.0)
