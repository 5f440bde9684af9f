"""Where a host's monotonic clock stands against the controller's: by round trips, else by what is heard. Pure.

A round trip is as in NTP (RFC 5905): a heartbeat leaves at `asked` by our clock, arrives at `asked_at` by the host's,
whose message leaves at `time` and arrives at `now`. Half of what both ways differ by is the offset, which is wrong by
half of the time on the way at most; so the shortest one tells the most. A message alone gives a bound: it did not
arrive before it was sent.
"""

from __future__ import annotations

from collections import deque

__all__ = ["ClockOffset"]

MEASUREMENTS = 32  # that are looked at: clocks drift apart, and stand still while a machine sleeps


class ClockOffset:
    """Of one connection to a host."""

    def __init__(self) -> None:
        self._trips: deque[tuple[float, float]] = deque(maxlen=MEASUREMENTS)  # how long on the way, offset
        self._bounds: deque[float] = deque(maxlen=MEASUREMENTS)
        self._asked = 0.0

    def hear(self, time: float, now: float, *, asked: float = 0.0, asked_at: float = 0.0) -> None:
        """Take a message that was sent at `time`; `asked` 0: no heartbeat had come before it."""
        self._bounds.append(now - time)
        if asked <= self._asked:  # of each heartbeat the first answer, which waited least
            return
        self._asked = asked
        on_the_way_s = (now - asked) - (time - asked_at)
        if asked <= now and asked_at <= time and on_the_way_s >= 0.0:
            self._trips.append((on_the_way_s, ((asked - asked_at) + (now - time)) / 2))

    @property
    def error_s(self) -> float:
        """How wrong `offset_s` may be; infinity if nothing but the bound is known."""
        return min(self._trips)[0] / 2 if self._trips else float("inf")

    @property
    def offset_s(self) -> float:
        """What is to be added to a time of the host; 0 while nothing was heard."""
        if self._trips:
            return min(self._trips)[1]
        return min(self._bounds, default=0.0)
