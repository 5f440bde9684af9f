"""What is typed or piped into this command, on its way to the rank that reads it.

One thread reads descriptor 0, never more than INPUT_BYTES ahead of what the rank's host has taken. The controller's
loop sends it on, and to the rank's next process what the last one has not taken.

A terminal is read only while this process is in its foreground: a run that is in the background is not stopped for it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator

from launcher.output.writer import OutputThread
from launcher.protocol.commands import Input, StartWorker
from launcher.protocol.message import INPUT_BYTES
from launcher.protocol.reports import InputTaken

LOOK_S = 0.2  # between looks whether this process has come to the foreground


class StandardInput:
    """Of this command, for one rank. All but the thread's part is called by the controller's loop."""

    def __init__(self, rank: int, output: OutputThread, wake: Callable[[], None]) -> None:
        """`wake` is called whenever `outgoing` has something new, from the thread."""
        self._rank = rank
        self._output = output
        self._wake = wake
        self.is_terminal = os.isatty(0)
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._kept = bytearray()  # what was read and not taken
        self._has_ended = False
        self._target: tuple[str, int] | None = None  # host and attempt of the rank's newest process
        self._sent = 0  # of what is kept, to that one
        self._sent_end = False
        self._thread = threading.Thread(target=self._read, name="standard input", daemon=True)

    def worker_starts(self, host: str, start: StartWorker) -> None:
        """Send it from now on to this worker, if that is to read it; the first time, begin to read."""
        if not start.has_input:
            return
        is_first, self._target = self._target is None, (host, start.attempt)
        self._sent, self._sent_end = 0, False
        if is_first:
            with contextlib.suppress(RuntimeError):  # no thread can be had: the rank waits for its input
                self._thread.start()

    def taken(self, host: str, message: InputTaken) -> None:
        """Take note that a host has passed bytes on."""
        if (host, message.attempt) != self._target or message.rank != self._rank:
            return
        with self._lock:
            count = min(message.count, self._sent)
            del self._kept[:count]
            self._sent -= count
            self._room.notify()

    def outgoing(self) -> Iterator[tuple[str, Input]]:
        """Yield what is to be sent now, and where to."""
        if self._target is None:
            return
        host, attempt = self._target
        with self._lock:
            data, is_end = bytes(self._kept[self._sent :]), self._has_ended
            self._sent = len(self._kept)
        if data or (is_end and not self._sent_end):
            self._sent_end = is_end
            yield host, Input(rank=self._rank, attempt=attempt, is_end=is_end, data=data)

    # In the thread

    def _read(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTIN})  # read() fails instead, in the background
        data = b"begin"
        while data:
            with self._lock:
                while len(self._kept) >= INPUT_BYTES:
                    self._room.wait()
                room = INPUT_BYTES - len(self._kept)
            data = self._next(room)
            if self.is_terminal:  # before the rank can say anything about it
                self._output.answer(is_line=data.endswith(b"\n"))
            with self._lock:
                self._kept += data
                self._has_ended = not data
            self._wake()

    def _next(self, room: int) -> bytes:
        """Wait for the next bytes; nothing at the end."""
        ready = select.poll()
        ready.register(0, select.POLLIN)
        while True:
            if not _in_foreground():
                time.sleep(LOOK_S)
                continue
            if not ready.poll(1000 * LOOK_S if self.is_terminal else None):
                continue
            try:
                return os.read(0, room)
            except BlockingIOError:  # somebody made it non-blocking, and somebody else was quicker
                continue
            except OSError:  # it has gone; or this process is in the background since a moment
                if _in_foreground():
                    return b""


def _in_foreground() -> bool:
    """Whether this process may read its terminal; true where it has no part in any job control."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return True
