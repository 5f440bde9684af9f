"""Where the output of a run goes that a Python program has asked for: what sys.stdout and sys.stderr are there."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TextIO

__all__ = ["descriptor_of", "program_streams"]

_READ_BYTES = 1 << 16


@contextmanager
def program_streams() -> Iterator[tuple[int, int]]:
    """Yield descriptors that lead to sys.stdout and sys.stderr; at the end all that was written has arrived there."""
    with ExitStack() as stack:
        yield stack.enter_context(_leading_to(sys.stdout)), stack.enter_context(_leading_to(sys.stderr))


def descriptor_of(stream: TextIO | None) -> int | None:
    """Return the descriptor of a plain file, pipe or terminal; None for what only has `write`, as in a notebook.

    The stream of a notebook has a descriptor too, which is that of the terminal where the notebook was started.
    """
    if type(stream) is not io.TextIOWrapper:
        return None
    try:
        return stream.fileno()
    except (OSError, ValueError):  # there is none, or it is closed
        return None


@contextmanager
def _leading_to(stream: TextIO | None) -> Iterator[int]:
    descriptor = descriptor_of(stream)
    if descriptor is not None and stream is not None:
        stream.flush()  # what the program has written stands before the output of the run
        yield descriptor
        return
    reading, writing = os.pipe()
    thread = threading.Thread(target=_pass_on, args=(reading, stream), name="notebook output", daemon=True)
    thread.start()
    try:
        yield writing
    finally:
        os.close(writing)
        thread.join()


def _pass_on(reading: int, stream: TextIO | None) -> None:
    with open(reading, encoding="utf-8", errors="replace", newline="") as pipe:
        while text := pipe.readline(_READ_BYTES):
            if stream is None or stream.closed:
                continue  # nobody wants it, and the run is not to wait
            try:
                stream.write(text)
                stream.flush()
            except (OSError, ValueError):  # it was closed just now, or nobody reads it: the log files have all
                stream = None
