"""The signals that the command on a node started by hand gets while it dials node 0 and while its agent runs."""

from __future__ import annotations

import queue
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Signals", "Stopped"]

_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_OTHER = (signal.SIGUSR1, signal.SIGUSR2)


class Stopped(Exception):
    """A signal told us to end while we dialled."""


class Signals:
    """Takes the signals while the context lasts; in the main thread only.

    `stops` are those that told us to end, the first one first. `events` gets every signal; relay.py waits for it, and
    puts its own events there.
    """

    def __init__(self) -> None:
        self.stops: list[int] = []
        self.events: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._interrupts = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for signum in (*_STOP, *_OTHER):
            if signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN:
                continue  # started by nohup
            self._before[signum] = signal.signal(signum, self._take)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Have a signal that tells us to end raise Stopped while the context lasts."""
        try:
            self._interrupts = True
            if self.stops:
                raise Stopped
            yield
        finally:
            self._interrupts = False

    def _take(self, signum: int, _frame: FrameType | None) -> None:
        if signum in _STOP:
            self.stops.append(signum)
        if not self._interrupts:
            self.events.put(signal.Signals(signum))
        elif signum in _STOP:
            raise Stopped
