"""Writes files atomically: readers never see a part of one, also where the disk is full."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Mapping[str, Any], *, mode: int = 0o666) -> None:
    """Replace a file by this object. Raises OSError; `mode` is the file's, less the umask."""
    write_whole(path, json.dumps(content, indent=2).encode() + b"\n", mode=mode)


def write_whole(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Replace a file. Raises OSError; readers see the whole new file or the previous one."""
    if path.exists() and not path.is_file():  # a pipe or /dev/null: a rename would put a file in its place
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # no reader: an error, not a wait
        with open(descriptor, "wb", buffering=0) as stream:
            if stream.write(data) != len(data):
                raise BlockingIOError(errno.EAGAIN, "the pipe is full", str(path))
        return
    target = Path(os.path.realpath(path))  # a link stays a link
    target.parent.mkdir(parents=True, exist_ok=True)
    # An unpredictable name and O_EXCL: a link that another user puts in its place is never followed.
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
