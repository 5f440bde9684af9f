"""The agent of a node that was started by hand: its process and its three pipes. Owned by relay.py."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Mapping, Sequence

from launcher.machine import processes
from launcher.transport.local import start_agent
from launcher.transport.tcp.encrypted_records import MAX_DATA_BYTES

__all__ = ["AgentProcess"]

WORDS_BYTES = 8 << 10  # of the agent's stderr
LAST_OUTPUT_S = 1.0  # for the end of the agent's output after its own
LOCKED_S = 0.1


class AgentProcess:
    """One agent (its guard's process, to be exact). Raises HostError if it cannot be started."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._process = start_agent(command, env)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._stdin, self._stdout, self._stderr = self._process.stdin, self._process.stdout, self._process.stderr
        self.over = False  # it has ended, and its output is over
        self.reported = False  # node 0 knows it, or never will
        self._words = b""
        self._writing = threading.Lock()
        self._between = False  # the last thing written ends a frame
        self._injected: list[bytes] = []
        self._listener = threading.Thread(target=self._listen, name="agent's stderr", daemon=True)
        self._listener.start()

    @property
    def words(self) -> str:
        return self._words.decode("utf-8", "replace")

    def write(self, data: bytes, *, whole: bool) -> None:
        """Write to its input; with `whole` a frame may follow. Blocks. That it has ended is seen elsewhere."""
        with self._writing, contextlib.suppress(OSError, ValueError):
            self._between = False
            self._write(data)
            self._between = whole
            self._write_injected()

    def inject(self, frame: bytes) -> None:
        """Have a frame of ours written as soon as that is between two of node 0's. Hardly waits."""
        self._injected.append(frame)
        if self._writing.acquire(timeout=LOCKED_S):
            try:
                with contextlib.suppress(OSError, ValueError):
                    self._write_injected()
            finally:
                self._writing.release()

    def _write_injected(self) -> None:
        while self._between and self._injected:
            self._write(self._injected.pop(0))

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._stdin.write(view) or 0 :]

    def end(self) -> None:
        """End its input once what is being written is. Blocks for that."""
        with self._writing, contextlib.suppress(OSError):
            self._stdin.close()

    def read(self) -> bytes:
        """Return what it has written, b"" at the end. Blocks."""
        return self._stdout.read(MAX_DATA_BYTES) or b""

    def wait(self, reader: threading.Thread) -> int:
        """Wait for its end, and a moment for that of its output; return the exit status. Blocks."""
        status = self._process.wait()
        reader.join(LAST_OUTPUT_S)
        self._listener.join(LAST_OUTPUT_S)
        self.over = True
        return status

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        """Kill the agent itself: its guard ends what is left then. Without one, kill what there is."""
        children = [child for child in processes.everything() if child.parent == self._process.pid]
        for child in children:
            processes.send(child, signal.SIGKILL)
        if not children:
            self._process.kill()

    def _listen(self) -> None:
        """Keep the last that it says on stderr, and never let it wait for a reader."""
        while words := self._stderr.read(WORDS_BYTES):
            self._words = (self._words + words)[-WORDS_BYTES:]
