"""Forwards the standard input of this command to the rank that reads it.

One thread reads descriptor 0, at most CHANNEL_BYTES ahead of what the rank's host has consumed. The controller's loop
forwards it; input that a process did not consume goes to the rank's next process.

A terminal is read only while this process is in its foreground, so a run in the background is not stopped by SIGTTIN.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator

from launcher.job.events import Event, Tick
from launcher.output.writer import OutputThread
from launcher.protocol.commands import StartWorker
from launcher.protocol.message import CHANNEL_BYTES
from launcher.protocol.two_way import ChannelData, ChannelTaken

LOOK_S = 0.2  # interval of checks whether this process is in the foreground


class StandardInput:
    """Standard input of this command, for one rank. The controller's loop calls everything but the thread's part."""

    def __init__(self, output: OutputThread, put: Callable[[Event], None]) -> None:
        """Prepare the thread, which puts a Tick whenever `outgoing` has something new."""
        self._output = output
        self._put = put
        self.is_terminal = os.isatty(0)
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._kept = bytearray()  # read, but not consumed yet
        self._has_ended = False
        self._target: tuple[str, int] | None = None  # host and channel of the rank's newest process
        self._sent = 0  # bytes of `_kept` sent to that process
        self._sent_end = False
        self._thread = threading.Thread(target=self._read, name="standard input", daemon=True)

    def worker_starts(self, host: str, start: StartWorker) -> None:
        """Send later input to this worker if it reads standard input; the first time, start reading."""
        if not start.input_channel:
            return
        is_first, self._target = self._target is None, (host, start.input_channel)
        self._sent, self._sent_end = 0, False
        if is_first:
            with contextlib.suppress(RuntimeError):  # no thread left: the rank waits for its input
                self._thread.start()

    def taken(self, host: str, message: ChannelTaken) -> None:
        """Record that a host has passed on bytes."""
        if (host, message.channel) != self._target:
            return
        with self._lock:
            count = min(message.count, self._sent)
            del self._kept[:count]
            self._sent -= count
            self._room.notify()

    def outgoing(self) -> Iterator[tuple[str, ChannelData]]:
        """Yield the messages to send now, each with its host."""
        if self._target is None:
            return
        host, channel = self._target
        with self._lock:
            data, is_end = bytes(self._kept[self._sent :]), self._has_ended
            self._sent = len(self._kept)
        if data:
            yield host, ChannelData(channel, data)
        if is_end and not self._sent_end:
            self._sent_end = True
            yield host, ChannelData(channel)

    # In the thread

    def _read(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTIN})  # read() fails instead, in the background
        data = b"begin"
        while data:
            with self._lock:
                while len(self._kept) >= CHANNEL_BYTES:
                    self._room.wait()
                room = CHANNEL_BYTES - len(self._kept)
            data = self._next(room)
            if self.is_terminal:  # before the rank can react to it
                self._output.answer(is_line=data.endswith(b"\n"))
            with self._lock:
                self._kept += data
                self._has_ended = not data
            self._put(Tick())

    def _next(self, room: int) -> bytes:
        """Wait for the next bytes; b"" at the end."""
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
            except BlockingIOError:  # it was made non-blocking, and another process was faster
                continue
            except OSError:  # it is closed, or this process has just gone to the background
                if _in_foreground():
                    return b""


def _in_foreground() -> bool:
    """Return whether this process may read its terminal; true without job control."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return True
