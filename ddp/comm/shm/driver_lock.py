"""The lock of the thread that drives the operations of a group."""

from __future__ import annotations

import threading
import time

_POLL_S = 0.001


class DriverLock:
    """A lock that a thread which has it may take again.

    An exception that a signal's handler raises, right after the lock was taken or right before it is released, leaves
    it with its thread. That thread's next call goes on, where a plain lock would never be free again.
    """

    __slots__ = ("_holders",)

    def __init__(self) -> None:
        self._holders: dict[str, int] = {}  # the thread's identifier; taken and recorded by one call, which is atomic

    def take(self) -> bool:
        """Take the lock, unless another thread has it; return whether this thread has it. Never blocks."""
        me = threading.get_ident()
        return self._holders.setdefault("thread", me) == me

    def take_free(self) -> bool:
        """Take the lock, unless any thread has it, this one included: a finalizer runs in the middle of anything."""
        return not self._holders and self.take()

    def take_within(self, limit_s: float) -> bool:
        """Wait for the lock up to `limit_s`; return whether this thread has it."""
        deadline = time.monotonic() + limit_s
        while not self.take():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def release(self) -> None:
        self._holders.pop("thread", None)
