"""Output of launcher.launch(): goes to sys.stdout and sys.stderr of the Python program, whatever they are."""

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

_READ_BYTES = 1 << 16


@contextmanager
def program_streams() -> Iterator[tuple[int, int]]:
    """Yield descriptors that lead to sys.stdout and sys.stderr; at the end all output has arrived there."""
    with ExitStack() as stack:
        yield stack.enter_context(_leading_to(sys.stdout)), stack.enter_context(_leading_to(sys.stderr))


def descriptor_of(stream: TextIO | None) -> int | None:
    """Return the descriptor of a plain file, pipe or terminal; None if it only has `write`, as in a notebook.

    The stream of a notebook has a descriptor too: that of the terminal where the notebook was started.
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
        stream.flush()  # earlier output of the program comes before that of the run
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
        # Background processes of --on-end may hold the pipe as well, so its end may come much later.
        with contextlib.suppress(OSError):
            os.write(writing, end)
        os.close(writing)
        arrived.wait()


def _pass_on(reading: int, stream: TextIO | None, end: bytes, arrived: threading.Event) -> None:
    """Copy data to the stream; set `arrived` after `end`, which is not written, and continue."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    held = b""
    try:
        with open(reading, "rb", buffering=0) as pipe:
            while data := pipe.read(_READ_BYTES):
                before, found, after = (held + data).partition(end)
                data = before + after
                at = data.rfind(b"\0")
                held = data[at:] if at >= 0 and end.startswith(data[at:]) else b""  # perhaps the first part of `end`
                text = decoder.decode(data.removesuffix(held))
                try:
                    if text and stream is not None and not stream.closed:
                        stream.write(text)
                        stream.flush()
                except (OSError, ValueError):  # just closed, or no longer read: the log files have all output
                    stream = None  # drop the output, so that the run does not wait
                if found:
                    arrived.set()
    finally:
        arrived.set()
