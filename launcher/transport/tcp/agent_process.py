"""The agent of a node that was started by hand: its process and its three pipes, none of which is ever waited for.

Owned by relay.py, whose selector says when a pipe is ready.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections import deque
from collections.abc import Mapping, Sequence

from launcher.machine import processes
from launcher.transport.local import start_agent
from launcher.transport.tcp.encrypted_records import MAX_DATA_BYTES

__all__ = ["END_S", "AgentPipes"]

READ_BYTES = MAX_DATA_BYTES
WORDS_BYTES = 8 << 10  # of the agent's stderr
LAST_OUTPUT_S = 1.0  # for the end of the agent's output after its own
END_S = 900.0  # for an agent to end: far more than any that works needs, its grace period included


class AgentPipes:
    """One agent (its guard's process, to be exact). Raises HostError if it cannot be started."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._process = start_agent(command, env)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.stdin, self.stdout, self.stderr = self._process.stdin, self._process.stdout, self._process.stderr
        for file in (self.stdin, self.stdout, self.stderr):
            os.set_blocking(file.fileno(), False)
        self.unwritten: deque[memoryview] = deque()
        self.unwritten_bytes = 0
        self.exited_at: float | None = None
        self._words = b""
        self._begun = False  # the preamble has gone ahead
        self._whole = True  # the last thing in `unwritten` ends a frame
        self._injected: list[bytes] = []
        self._ending = False

    @property
    def input_over(self) -> bool:
        """Whether its input is to be closed now."""
        return self._ending and not self.unwritten

    @property
    def status(self) -> int | None:
        return self._process.returncode

    @property
    def words(self) -> str:
        return self._words.decode("utf-8", "replace")

    def put(self, data: bytes, *, whole: bool) -> None:
        """Have bytes written to its input; with `whole` a frame may follow them."""
        self._append(data)
        self._begun, self._whole = True, whole
        if whole:
            for frame in self._injected:
                self._append(frame)
            self._injected.clear()
        self.write()

    def inject(self, frame: bytes) -> None:
        """Have a frame of ours written as soon as that is between two of node 0's."""
        if self._begun and self._whole:
            self._append(frame)
            self.write()
        else:
            self._injected.append(frame)

    def end(self) -> None:
        """End its input once everything is written."""
        self._ending = True
        self.write()

    def drop(self) -> None:
        """End its input now."""
        self.unwritten.clear()
        self.unwritten_bytes = 0
        self.end()

    def write(self) -> None:
        try:
            while self.unwritten:
                written = self.stdin.write(self.unwritten[0])
                if not written:  # None: the pipe is full
                    return
                self.unwritten_bytes -= written
                if written < len(self.unwritten[0]):
                    self.unwritten[0] = self.unwritten[0][written:]
                else:
                    self.unwritten.popleft()
        except OSError:  # it has ended; that is seen elsewhere
            self.unwritten.clear()
            self.unwritten_bytes = 0
            self._ending = True

    def read(self) -> bytes | None:
        """Return what it has written, b"" at the end, None if there is nothing after all."""
        try:
            return os.read(self.stdout.fileno(), READ_BYTES)
        except BlockingIOError:
            return None

    def listen(self) -> bool:
        """Keep the last that it says on stderr; return whether that has ended."""
        said = self.stderr.read(READ_BYTES)
        if said:
            self._words = (self._words + said)[-WORDS_BYTES:]
        return said == b""

    def gone(self, now: float) -> bool:
        """Say whether it has ended and all it wrote is read; reaps it."""
        if self.exited_at is None and self._process.poll() is not None:
            self.exited_at = now
        return self.exited_at is not None and (self.stdout.closed or now > self.exited_at + LAST_OUTPUT_S)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        """Kill the agent itself: its guard ends what is left then. Without one, kill what there is."""
        children = [child for child in processes.everything() if child.parent == self._process.pid]
        for child in children:
            processes.send(child, signal.SIGKILL)
        if not children:
            self._process.kill()

    def close(self) -> None:
        """Release everything; only after an error is it still there."""
        for file in (self.stdin, self.stdout, self.stderr):
            with contextlib.suppress(OSError):
                file.close()
        self._process.wait(END_S)

    def _append(self, data: bytes) -> None:
        self.unwritten.append(memoryview(data))
        self.unwritten_bytes += len(data)
