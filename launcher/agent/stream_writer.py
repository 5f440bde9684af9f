"""The agent's stream to its controller: queues data until it can be sent, and reports when too much is queued."""

from __future__ import annotations

import errno
import os
import selectors
import time
from collections import deque
from collections.abc import Callable

from launcher.protocol.frames import encode
from launcher.protocol.message import Report

HOLD_BYTES = 1 << 20  # with so much unsent, workers' pipes are not read: workers wait, and memory here stays bounded


class StreamWriter:
    """Owns writing to one descriptor, which must be non-blocking; calls `hold(True/False)` at the limits."""

    def __init__(self, fd: int, selector: selectors.BaseSelector, hold: Callable[[bool], None]) -> None:
        self._fd = fd
        self._selector = selector
        self._hold = hold
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._watched = False
        self.holding = False  # the last argument of `hold`
        self.closed = False  # the controller is gone: new data is dropped

    def __bool__(self) -> bool:
        return bool(self._unsent)

    def send(self, message: Report) -> None:
        self.put(encode(message))

    def put(self, data: bytes) -> None:
        if self.closed:
            return
        self._unsent.append(memoryview(data))
        self._unsent_bytes += len(data)
        self.write()
        if self._unsent_bytes > HOLD_BYTES:
            self._set_holding(True)

    def write(self) -> None:
        """Write as much as the stream accepts now."""
        try:
            while self._unsent:
                written = os.write(self._fd, self._unsent[0])
                self._unsent_bytes -= written
                if written < len(self._unsent[0]):
                    self._unsent[0] = self._unsent[0][written:]
                    break
                self._unsent.popleft()
        except BlockingIOError:
            pass  # full: the selector reports when it is writable
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.ECONNRESET):
                raise
            self.close()  # the end of input follows, and stops the agent
        self._watch(bool(self._unsent))
        if self._unsent_bytes < HOLD_BYTES // 2:
            self._set_holding(False)

    def close(self) -> None:
        """Drop unsent data, and all that follows."""
        self.closed = True
        self._unsent.clear()
        self._unsent_bytes = 0
        self._watch(False)
        self._set_holding(False)

    def flush(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while self._unsent and time.monotonic() < deadline:
            for key, _ in self._selector.select(0.05):
                if key.fd == self._fd:
                    self.write()

    def _set_holding(self, holding: bool) -> None:
        if holding != self.holding:
            self.holding = holding
            self._hold(holding)

    def _watch(self, wanted: bool) -> None:
        if wanted and not self._watched:
            self._selector.register(self._fd, selectors.EVENT_WRITE, self.write)
        elif self._watched and not wanted:
            self._selector.unregister(self._fd)
        self._watched = wanted
