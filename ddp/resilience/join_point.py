"""Agreement on the commit at which the ranks of a run meet joining ones: all at the same one, without waiting before.

A new generation is announced to a rank at any time, and the ranks are not equally far. Each then promises not to pass a
commit a little ahead of it without knowing all promises, and continues to train. The promises are exchanged during
training, and all stop at the latest of these commits. No rank is beyond it, because each keeps its promise.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

_AHEAD = 2  # commits: one may be under way when the promise is made
_PAUSE_S = 0.02
_OUTCOME, _NO_COMMIT = "outcome", "none"  # the commit at which all stop, or "none"; the first to set it wins


class Regroup(BaseException):
    """Ends the resilient function after a commit, since other ranks join. `except Exception` does not catch it."""


class JoinPoint:
    """Join point of generation `number`. `is_over` returns whether a newer one was announced, which makes it void."""

    def __init__(self, number: int, is_over: Callable[[], bool]) -> None:
        self.number = number
        self._is_over = is_over
        self._changed = threading.Condition()
        self._promised: int | None = None
        self._stops_at: int | None = None
        self._is_void = False  # `agree` has ended without an agreement

    def agree(self, store: Any, rank: int, size: int, commit: Callable[[], int]) -> bool:
        """Exchange the promises of all ranks at a store that nothing else uses. Blocks: call it in a separate thread.

        Return whether they will stop at a commit: False if one of them has stopped elsewhere, or `is_over`. Raises
        RuntimeError if the store is gone. In any case, `committed` does not wait afterwards.
        """
        try:
            return self._agree(store, rank, size, commit)
        finally:
            with self._changed:
                self._is_void = self._stops_at is None
                self._changed.notify_all()

    def _agree(self, store: Any, rank: int, size: int, commit: Callable[[], int]) -> bool:
        with self._changed:
            self._promised = commit() + _AHEAD
        store.set(f"promise/{rank}", str(self._promised))
        if store.add("promises", 1) == size:  # the last one compares them, so that others only poll one key
            store.compare_set(_OUTCOME, "", str(max(int(store.get(f"promise/{each}")) for each in range(size))))
        while not store.check([_OUTCOME]):
            if self._is_over():
                return False
            time.sleep(_PAUSE_S)
        if (outcome := store.get(_OUTCOME).decode()) == _NO_COMMIT:
            return False
        with self._changed:
            self._stops_at = int(outcome)
        return True

    def committed(self, number: int) -> None:
        """Record a commit; raises Regroup at the one at which all stop. Waits if the promise requires it."""
        with self._changed:
            if self._promised is None or number < self._promised:
                return
            while self._stops_at is None and not self._is_void and not self._is_over():
                self._changed.wait(_PAUSE_S)
            if self._stops_at is not None and number >= self._stops_at:
                raise Regroup

    @property
    def is_agreed(self) -> bool:
        return self._stops_at is not None


def stop_elsewhere(store: Any) -> None:
    """Notify the ranks that agree at this store that this one stops before its promise: they must not wait for it."""
    store.compare_set(_OUTCOME, "", _NO_COMMIT)
