"""How long this host may go on without a word from the controller, known to the agent and to its guard alike.

A controller that hears nothing from a host gives it up after a while and may start its workers elsewhere; so a host
that is not heard must have ended them by then (the proof is in job/fleet.py). The agent does; and where it cannot (it
hangs, or somebody stopped it) its guard ends it.
"""

from __future__ import annotations

import ctypes
import math
import mmap

__all__ = ["ENDS_WITHIN_S", "Lease", "Limits"]

ENDS_WITHIN_S = 20.0  # an agent that ends, beyond the grace period: kill, sweep, last words, with all their limits
LATE_S, LATE = 1.0, 0.03  # the guard acts so much after the agent should have; at most that part of the lease


class Limits(ctypes.Structure):
    """Times that an agent shares with its guard. Each is one aligned word, so never torn."""

    lease_end: float  # inf if there is none at present, 0 if there is never one, nan while that is not known yet
    ending_by: float  # when an agent that has begun to end must have done so; 0 before
    late_s: float  # how long after the lease's end the agent should have acted on it
    _fields_ = (("lease_end", ctypes.c_double), ("ending_by", ctypes.c_double), ("late_s", ctypes.c_double))

    @classmethod
    def shared(cls, file: int = -1) -> Limits:
        """Return limits that this process shares with those that it forks from now on, or that map the same file.

        A file has its first limits already, for nobody knows who of them comes last.
        """
        limits = cls.from_buffer(mmap.mmap(file, ctypes.sizeof(cls)))
        if file < 0:
            limits.lease_end = math.nan
        return limits


class Lease:
    """Runs from when this host was heard last, by the newest heartbeat: one long under way prolongs nothing.

    A heartbeat says that time by this host's clock as the controller knows it from what it has heard of it: too early
    by the least delay on that way, never too late (HostClock.theirs). So no delay in either direction makes a lease
    last longer; a slow link makes it shorter. Where that knowledge is out of date for a while (this machine slept, and
    its clock with it), a heartbeat counts from its arrival at the latest.

    It begins by an order that arrives at any time, since no worker is started before the controller has heard an
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
        """When it ends; inf while it rests, once it is over, and where there is none."""
        return math.inf if self._resting or self.over else self._end

    def begin(self, duration_s: float, now: float) -> None:
        """Let it run; of 0 seconds means that there is none."""
        self.duration_s = duration_s
        self._limits.late_s = min(LATE_S, LATE * duration_s)
        self._end = now + duration_s if duration_s > 0 else math.inf
        self._share()

    def beat(self, time: float, now: float) -> None:
        """Take a heartbeat: the controller heard this host at or after `time`, by the clock that `now` is of."""
        if self.duration_s <= 0 or self._resting or not math.isfinite(time):
            return
        self._end = max(self._end, min(time, now) + self.duration_s)  # the one before holds as well
        self._share()

    def rest(self) -> None:
        self._resting = True
        self._share()

    def renew(self, now: float) -> None:
        """End the rest; it begins anew."""
        self._resting = False
        self.begin(self.duration_s, now)

    def used_up(self, now: float) -> None:
        """Note that the agent acts on its end: nothing renews it any more, and the guard gives the agent some time."""
        self.over = True
        self._limits.lease_end = now + ENDS_WITHIN_S

    def _share(self) -> None:
        if not self.over:
            self._limits.lease_end = 0.0 if self.duration_s <= 0 else self.end
