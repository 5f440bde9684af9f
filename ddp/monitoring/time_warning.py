"""The warning that the job's time is nearly up: SIGUSR1, which SLURM sends before the end.

The signal reaches the ranks at different moments, between different steps, but they must react together. So the step
status of each backward pass includes whether a rank has received a warning that the ranks do not share yet. All of them
read the sum in the same step, and share the warning from then on.
"""

from __future__ import annotations

import signal
import threading
import weakref
from types import FrameType
from typing import Protocol


class Unsettled(Protocol):
    """A reducer whose failed pass is still in transit, with the status of the other ranks."""

    def settle(self) -> None: ...


class TimeWarning:
    """Warnings of this process. `shared` counts those that all ranks know, `statuses` the sums that were read."""

    def __init__(self) -> None:
        self.heard = 0  # by this rank
        self.shared = 0
        self.statuses = 0
        self.unsettled: weakref.WeakSet[Unsettled] = weakref.WeakSet()
        self._before: object = None
        self._listens = False

    def listen(self) -> None:
        """Receive SIGUSR1 from now on; an existing handler is still called.

        Outside of the main thread, where Python has no signals, nothing changes: the other ranks notify this one.
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
        """Whether this rank has received a warning that is not shared."""
        return self.heard > self.shared

    def note(self, count: int) -> None:
        """Record that `count` ranks had news in a step status. Every rank calls it in the same pass."""
        self.statuses += 1
        self.shared += count > 0

    def settle(self) -> None:
        """Read the statuses of this rank's failed passes, which the other ranks have read. Blocks."""
        for reducer in list(self.unsettled):
            reducer.settle()


time_warning = TimeWarning()
