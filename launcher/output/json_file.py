"""Writes JSON files so that whoever reads one sees all of it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Mapping[str, Any], *, mode: int = 0o666) -> None:
    """Put a file in the place of the one before. Raises OSError; whoever reads it sees all of it or that.

    `mode` is the file's, less what the umask takes away.
    """
    data = json.dumps(content, indent=2).encode() + b"\n"
    if path.exists() and not path.is_file():  # a pipe or /dev/null: a rename would put a file in its place
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # no reader: an error, not a wait
        with open(descriptor, "wb", buffering=0) as stream:
            if stream.write(data) != len(data):
                raise BlockingIOError(errno.EAGAIN, "the pipe is full", str(path))
        return
    target = Path(os.path.realpath(path))  # a link stays a link
    target.parent.mkdir(parents=True, exist_ok=True)
    # A name that nobody can guess, for a file that is not there yet: a link put in its place is never followed.
    temporary = target.with_name(f".{target.name}.{os.urandom(8).hex()}.tmp")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(temporary, flags, mode), "wb") as file:
            file.write(data)
        os.replace(temporary, target)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
