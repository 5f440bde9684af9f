"""The warning that the job's time is nearly up: SIGUSR1, which SLURM sends ahead of the end.

The signal reaches the ranks at different moments, between different steps; what they do about it they must do together.
So the step status of each backward pass says whether a rank has heard a warning that the ranks do not share yet. All of
them read the sum in the same step, and share the warning from then on.
"""

from __future__ import annotations

import signal
import threading
import weakref
from types import FrameType
from typing import Protocol

__all__ = ["TimeWarning", "time_warning"]


class Unsettled(Protocol):
    """One whose failed pass is still on its way, with the status of the other ranks."""

    def settle(self) -> None: ...


class TimeWarning:
    """Of this process. `shared` is how many warnings all ranks know of, `statuses` how many sums have been read."""

    def __init__(self) -> None:
        self.heard = 0  # by this rank
        self.shared = 0
        self.statuses = 0
        self.unsettled: weakref.WeakSet[Unsettled] = weakref.WeakSet()
        self._before: object = None
        self._listens = False

    def listen(self) -> None:
        """Hear SIGUSR1 from now on, beside whatever handler there was before.

        Outside of the main thread, where Python has no signals, nothing changes: this rank hears of it from the others.
        """
        if not self._listens and threading.current_thread() is threading.main_thread():
            self._listens = True
            self._before = signal.signal(signal.SIGUSR1, self._hear)

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        self.heard += 1
        if callable(self._before):
            self._before(signum, frame)

    @property
    def is_news(self) -> bool:
        """Whether this rank has heard one that is not shared."""
        return self.heard > self.shared

    def note(self, count: int) -> None:
        """Note that `count` ranks had news in a step status. Every rank does it in the same pass."""
        self.statuses += 1
        self.shared += count > 0

    def settle(self) -> None:
        """Read the statuses of this rank's failed passes, which the other ranks have read. Blocks."""
        for reducer in list(self.unsettled):
            reducer.settle()


time_warning = TimeWarning()
