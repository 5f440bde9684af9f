"""Write files atomically: each is complete or absent, also after a power loss or the death of its writer."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_SUFFIX = re.compile(r"\.[0-9a-f]{8}\.tmp")

_locked: set[int] = set()  # descriptors of files that this process alone uses


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file for writing; it replaces `path` at the end of the block.

    After the block the file is durable (fsynced and renamed); if the block raises, `path` is unchanged. The folder must
    exist. The temporary file is locked while its writer lives. The kernel drops the lock however the writer ends, so a
    file that can be locked was left by a dead writer. Forked processes do not share the lock. Raises OSError.
    """
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        with open(temporary, "xb") as file:
            _locked.add(file.fileno())
            try:
                with contextlib.suppress(OSError):  # a file system without locks: nothing unfinished is removed there
                    fcntl.flock(file, fcntl.LOCK_EX)
                if not os.fstat(file.fileno()).st_nlink:
                    continue  # another writer removed it as a left-over before it was locked
                yield file
                file.flush()
                os.fsync(file.fileno())
                os.replace(temporary, path)
                break
            finally:
                _locked.discard(file.fileno())
                temporary.unlink(missing_ok=True)
    _fsync_folder(path.parent)


class Lock:
    """A lock on the file at `path`, which is created; the kernel drops it however this process ends.

    Raises BlockingIOError if another process, or another Lock of this process, holds it, and other OSErrors. `is_held`
    is False on a file system without locks. Forked processes do not share the lock.
    """

    def __init__(self, path: Path) -> None:
        self.is_held = False
        while True:
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115  # as long as the lock
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.is_held = True
            except BlockingIOError:
                self._file.close()
                raise
            except OSError:  # not in this file system
                return
            if os.fstat(self._file.fileno()).st_nlink:
                _locked.add(self._file.fileno())
                return
            self._file.close()  # it was removed, and another file may have the name

    def write(self, content: bytes) -> None:
        """Replace the content of the file."""
        self._file.truncate(0)
        self._file.write(content)

    def release(self) -> None:
        """Release the lock. May be called twice."""
        if not self._file.closed:
            _locked.discard(self._file.fileno())
            self._file.close()


def remove_unfinished(folder: Path, name: re.Pattern[str]) -> None:
    """Remove the temporary files that dead writers of files with such a name have left in `folder`."""
    for found in os.listdir(folder):
        suffix = _SUFFIX.search(found)
        if suffix and suffix.end() == len(found) and found[0] == "." and name.fullmatch(found[1 : suffix.start()]):
            with contextlib.suppress(OSError), open(folder / found, "r+b", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(folder / found)


def make_durably(folder: Path) -> None:
    """Create a folder and its parents so that they survive a power loss."""
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for parent in missing:
        _fsync_folder(parent.parent)


def leave_to_parent(descriptor: int) -> None:
    """Do not share an open file and its lock with processes forked from now on."""
    _locked.add(descriptor)


def _let_go() -> None:
    """Close the locked files in a forked process: its parent, whose locks they are, may end before it."""
    for descriptor in _locked:
        nothing = os.open(os.devnull, os.O_WRONLY)
        # Closing alone would let the number be used again while the file's object lives.
        os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)
    _locked.clear()


os.register_at_fork(after_in_child=_let_go)


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
