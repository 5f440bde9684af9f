"""Where the output of launcher.launch() goes: to sys.stdout and sys.stderr of the Python program, whatever they are."""

from __future__ import annotations

import codecs
import contextlib
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
    end = b"\0" + os.urandom(16).hex().encode()
    arrived = threading.Event()
    args = (reading, stream, end, arrived)
    threading.Thread(target=_pass_on, args=args, name="notebook output", daemon=True).start()
    try:
        yield writing
    finally:
        # What --on-end has left in the background may have the pipe as well: its end may be far.
        with contextlib.suppress(OSError):
            os.write(writing, end)
        os.close(writing)
        arrived.wait()


def _pass_on(reading: int, stream: TextIO | None, end: bytes, arrived: threading.Event) -> None:
    """Write to the stream what comes; set `arrived` after `end`, which is not written, and go on."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    held = b""
    try:
        with open(reading, "rb", buffering=0) as pipe:
            while data := pipe.read(_READ_BYTES):
                before, found, after = (held + data).partition(end)
                data = before + after
                at = data.rfind(b"\0")
                held = data[at:] if at >= 0 and end.startswith(data[at:]) else b""  # perhaps its first part
                text = decoder.decode(data.removesuffix(held))
                try:
                    if text and stream is not None and not stream.closed:
                        stream.write(text)
                        stream.flush()
                except (OSError, ValueError):  # it was closed just now, or nobody reads it: the log files have all
                    stream = None  # nobody wants it, and the run is not to wait
                if found:
                    arrived.set()
    finally:
        arrived.set()
