"""The signals that the command on a node started by hand gets while it waits for node 0 and for its agent.

They end no system call by an exception: whoever waits, waits on `fileno()` too, and looks then.
"""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Signals"]

_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_OTHER = (signal.SIGUSR1, signal.SIGUSR2)


class Signals:
    """Takes the signals while the context lasts; in the main thread only.

    `stops` are those that told us to end, the first one first.
    """

    def __init__(self) -> None:
        self.stops: list[int] = []
        self._others: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for signum in (*_STOP, *_OTHER, signal.SIGCHLD):
            if signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN:
                continue  # started by nohup
            self._before[signum] = signal.signal(signum, self._take)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._read)
        os.close(self._write)

    def fileno(self) -> int:
        """Return a descriptor that is readable after a signal, the end of a child included."""
        return self._read

    def woken(self) -> None:
        """Wait for the next signal from now on."""
        try:
            os.read(self._read, 1 << 12)
        except BlockingIOError:
            return

    def others(self) -> list[int]:
        """Return the signals that are for the workers, each once."""
        others, self._others = self._others, []
        return others

    def _take(self, signum: int, _frame: FrameType | None) -> None:
        if signum in _STOP:
            self.stops.append(signum)
        elif signum in _OTHER:
            self._others.append(signum)
