"""The interface between controller and agents: one byte stream per host, over any transport.

`connect` (connect.py) opens one: a pair of pipes (local.py), those of an `srun` (srun.py) or of the site's own ssh
(ssh/client.py), an SSH channel (ssh/stream.py), or the connection of a node started by hand (tcp/). One thread reads a
stream, another writes and ends it, and any thread finishes it.
"""

from __future__ import annotations

import os
import selectors
import shlex
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Protocol

from launcher.errors import StreamError

WORDS_BYTES = 1 << 16


class Stream(Protocol):
    """A connection to one agent. `our_address` is this machine's address as the host sees it, if it is remote."""

    our_address: str | None

    def read(self) -> bytes:
        """Return the next bytes; b"" at the end. Blocks. Raises StreamError."""

    def write(self, data: bytes) -> None:
        """Write all bytes; may block. Raises StreamError if the other end is gone."""

    def end(self) -> None:
        """End our direction, which makes the agent stop. Its output can still be read.

        Raises StreamError.
        """

    def finish(self, wait_s: float) -> tuple[int | None, str]:
        """Wait for the agent to end, then give it up and release everything; a blocked `read` returns.

        Returns its exit status (None if it did not end in time) and its stderr. May be called again.
        """


def shell_line(command: Sequence[str]) -> str:
    """Return the line with which a shell on another host becomes the agent.

    It has only constants and the interpreter's path; all else goes through the stream. With `;`, which means the same
    in sh, csh and every fish; `cd /` does not fail.
    """
    return f"cd /; exec {shlex.join(command)}"


@contextmanager
def broken_by(*kinds: type[Exception]) -> Iterator[None]:
    """Raise errors that break a stream as StreamError: OSError, EOFError, and `kinds` of the library used."""
    broken: tuple[type[Exception], ...] = (OSError, EOFError, *kinds)
    try:
        yield
    except broken as error:
        words = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise StreamError(f"the connection broke: {words}") from error


class StderrTail:
    """The end of a process's stderr, which is always read, so that the process never waits for a reader."""

    def __init__(self, stderr: IO[bytes], kept_bytes: int = WORDS_BYTES) -> None:
        self._stderr = stderr
        self._kept_bytes = kept_bytes
        self._words = b""
        self._ended = threading.Event()
        _selector().register(stderr, selectors.EVENT_READ, self._read)

    def wait(self, wait_s: float) -> str:
        """Return it once the process has closed its stderr, at most after `wait_s`."""
        self._ended.wait(wait_s)
        return self._words.decode("utf-8", "replace")

    def _read(self) -> None:
        try:
            words = os.read(self._stderr.fileno(), WORDS_BYTES)
        except (OSError, ValueError):  # treated as its end: the thread reads for others too
            words = b""
        self._words = (self._words + words)[-self._kept_bytes :]
        if not words:
            _selector().unregister(self._stderr)
            self._stderr.close()
            self._ended.set()


_lock = threading.Lock()
_found: list[selectors.BaseSelector] = []


def _selector() -> selectors.BaseSelector:
    """Return the selector that one thread watches for all; a thousand hosts would need a thousand threads otherwise."""
    with _lock:
        if not _found:
            selector = selectors.DefaultSelector()
            threading.Thread(target=_watch, args=(selector,), name="stderr", daemon=True).start()
            _found.append(selector)
        return _found[0]


def _watch(selector: selectors.BaseSelector) -> None:
    while True:
        for key, _ in selector.select():
            key.data()
