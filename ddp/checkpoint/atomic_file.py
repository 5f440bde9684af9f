"""Files that are there as a whole or not at all, also after a loss of power or the death of their writer."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = ["make_durably", "remove_unfinished", "replacing"]

_SUFFIX = re.compile(r"\.[0-9a-f]{8}\.tmp")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path` for writing, which takes its place at the end of the block.

    When the block is over, the file is durable (fsynced and renamed); if it raises, `path` is what it was. The folder
    must be there. The temporary file is locked as long as its writer lives: the kernel drops the lock however the
    writer ends, so what can be locked was left by a dead one. Raises OSError where the system does.
    """
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        with open(temporary, "xb") as file:
            try:
                with contextlib.suppress(OSError):  # a file system without locks: nothing unfinished is removed there
                    fcntl.flock(file, fcntl.LOCK_EX)
                if not os.fstat(file.fileno()).st_nlink:
                    continue  # another writer took it for a left-over before it was locked
                yield file
                file.flush()
                os.fsync(file.fileno())
                os.replace(temporary, path)
                break
            finally:
                temporary.unlink(missing_ok=True)
    _fsync_folder(path.parent)


def remove_unfinished(folder: Path, name: re.Pattern[str]) -> None:
    """Remove what dead writers of files with such a name have left in `folder`."""
    for found in os.listdir(folder):
        suffix = _SUFFIX.search(found)
        if suffix and suffix.end() == len(found) and found[0] == "." and name.fullmatch(found[1 : suffix.start()]):
            with contextlib.suppress(OSError), open(folder / found, "r+b", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(folder / found)


def make_durably(folder: Path) -> None:
    """Make a folder and its parents, so that they survive a loss of power."""
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for parent in missing:
        _fsync_folder(parent.parent)


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
