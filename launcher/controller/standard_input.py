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
from collections.abc import Callable

from launcher.job.events import Event, InputRead
from launcher.output.writer import OutputThread
from launcher.protocol.commands import StartWorker
from launcher.protocol.message import CHANNEL_BYTES
from launcher.protocol.two_way import ChannelData, ChannelTaken

LOOK_S = 0.2  # interval of checks whether this process is in the foreground


class StandardInput:
    """Standard input of this command, for one rank. The controller's loop calls everything but the thread's part."""

    def __init__(
        self, output: OutputThread, put: Callable[[Event], None], send: Callable[[str, ChannelData], None]
    ) -> None:
        """Prepare the thread, which puts what it reads as an event; `send` sends a message to a host."""
        self._output = output
        self._put = put
        self._send = send
        self.is_terminal = os.isatty(0)
        self._kept = bytearray()  # read, but not consumed yet
        self._has_ended = False
        self._target: tuple[str, int] | None = None  # host and channel of the rank's newest process
        self._sent = 0  # bytes of `_kept` sent to that process
        self._room = threading.Condition()
        self._unconsumed = 0  # bytes, as the thread knows them
        self._thread = threading.Thread(target=self._read, name="standard input", daemon=True)

    def worker_starts(self, host: str, start: StartWorker) -> None:
        """Send this worker what was not consumed, and later input, if it has any; the first time, start reading."""
        if not start.input_channel:
            return
        is_first, self._target = self._target is None, (host, start.input_channel)
        self._sent = 0
        if is_first:
            with contextlib.suppress(RuntimeError):  # no thread left: the rank waits for its input
                self._thread.start()
        self._forward()

    def taken(self, host: str, message: ChannelTaken) -> None:
        """Record that a host has passed on bytes."""
        if (host, message.channel) != self._target:
            return
        count = min(message.count, self._sent)
        del self._kept[:count]
        self._sent -= count
        with self._room:
            self._unconsumed -= count
            self._room.notify()

    def add(self, data: bytes) -> None:
        """Send what the thread has read; b"" is the end."""
        self._kept += data
        self._has_ended = not data
        self._forward()

    def _forward(self) -> None:
        assert self._target is not None
        host, channel = self._target
        if self._sent < len(self._kept):
            self._send(host, ChannelData(channel, bytes(self._kept[self._sent :])))
            self._sent = len(self._kept)
        if self._has_ended:
            self._send(host, ChannelData(channel))

    # In the thread

    def _read(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTIN})  # read() fails instead, in the background
        data = b"begin"
        while data:
            with self._room:
                while self._unconsumed >= CHANNEL_BYTES:
                    self._room.wait()
                room = CHANNEL_BYTES - self._unconsumed
            data = self._next(room)
            if self.is_terminal:  # before the rank can react to it
                self._output.answer(is_line=data.endswith(b"\n"))
            with self._room:
                self._unconsumed += len(data)
            self._put(InputRead(data))

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
