"""The lease: time that this host may continue without hearing from the controller. Agent and guard share it.

A controller that hears nothing from a host gives it up after a while and may start its workers elsewhere; so a host
that cannot be heard must have ended them by then (the proof is in job/fleet.py). The agent does so; if it cannot (it
hangs, or was stopped), its guard ends it.
"""

from __future__ import annotations

import ctypes
import math
import mmap

ENDS_WITHIN_S = 20.0  # for an agent to end, beyond the grace period: kill, sweep, last messages, with all their limits
LATE_S, LATE = 1.0, 0.03  # how much later than the agent the guard acts; at most that part of the lease


class Limits(ctypes.Structure):
    """Times that an agent shares with its guard. Each is one aligned 64-bit value, so never torn."""

    lease_end: float  # inf while there is none, 0 if there never is one, nan while that is unknown
    ending_by: float  # when an agent that is ending must have ended; 0 before
    late_s: float  # time after the lease's end within which the agent should have acted
    _fields_ = (("lease_end", ctypes.c_double), ("ending_by", ctypes.c_double), ("late_s", ctypes.c_double))

    @classmethod
    def shared(cls, file: int = -1) -> Limits:
        """Return limits shared with all processes that this one forks from now on, or that map the same file.

        A file has its first limits already, since the order in which these processes start is not known.
        """
        limits = cls.from_buffer(mmap.mmap(file, ctypes.sizeof(cls)))
        if file < 0:
            limits.lease_end = math.nan
        return limits


class Lease:
    """Runs from the time at which this host was last heard, as of the newest heartbeat: late delivery prolongs nothing.

    A heartbeat carries that time in this host's clock, as the controller estimates it from this host's messages: too
    early by the least delay on the way, never too late (HostClock.theirs). So no delay in either direction makes a
    lease longer; a slow link makes it shorter. If that estimate is out of date for a while (this machine slept, and its
    clock with it), a heartbeat counts from its arrival at the latest.

    It may be started by an order that arrives at any time: no worker is started before the controller has heard an
    answer that was sent after that.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.duration_s = 0.0
        self._end = math.inf
        self._resting = False
        self.over = False

    @property
    def end(self) -> float:
        """When it ends; inf while it rests, once it is over, and if there is none."""
        return math.inf if self._resting or self.over else self._end

    def begin(self, duration_s: float, now: float) -> None:
        """Start the lease; a duration of 0 seconds means that there is none."""
        self.duration_s = duration_s
        self._limits.late_s = min(LATE_S, LATE * duration_s)
        self._end = now + duration_s if duration_s > 0 else math.inf
        self._share()

    def beat(self, time: float, now: float) -> None:
        """Add a heartbeat: the controller heard this host at or after `time`, on the same clock as `now`."""
        if self.duration_s <= 0 or self._resting or not math.isfinite(time):
            return
        self._end = max(self._end, min(time, now) + self.duration_s)  # an earlier heartbeat still holds
        self._share()

    def rest(self) -> None:
        self._resting = True
        self._share()

    def renew(self, now: float) -> None:
        """End the rest and restart the lease."""
        self._resting = False
        self.begin(self.duration_s, now)

    def used_up(self, now: float) -> None:
        """Record that the agent acts on its end: nothing renews it any more, and the guard waits for the agent."""
        self.over = True
        self._limits.lease_end = now + ENDS_WITHIN_S

    def _share(self) -> None:
        if not self.over:
            self._limits.lease_end = 0.0 if self.duration_s <= 0 else self.end
