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

_SUFFIX = re.compile(r"\.[0-9a-f]{8}\.tmp")

_locked: set[int] = set()  # descriptors of files that this process alone uses


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path` for writing, which takes its place at the end of the block.

    When the block is over, the file is durable (fsynced and renamed); if it raises, `path` is what it was. The folder
    must be there. The temporary file is locked as long as its writer lives: the kernel drops the lock however the
    writer ends, so what can be locked was left by a dead one. A process that is forked meanwhile has no part in the
    lock. Raises OSError where the system does.
    """
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        with open(temporary, "xb") as file:
            _locked.add(file.fileno())
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
                _locked.discard(file.fileno())
                temporary.unlink(missing_ok=True)
    _fsync_folder(path.parent)


class Lock:
    """A lock on the file at `path`, which is made; the kernel drops it however this process ends.

    Raises BlockingIOError if another process, or another Lock of this one, holds it. `is_held` is False on a file
    system without locks. A process that is forked meanwhile has no part in it. Other OSErrors are the system's.
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
            self._file.close()  # removed meanwhile: another file has the name

    def write(self, content: bytes) -> None:
        """Put `content` in the place of what the file has."""
        self._file.truncate(0)
        self._file.write(content)

    def release(self) -> None:
        """Give the lock up. May be called twice."""
        if not self._file.closed:
            _locked.discard(self._file.fileno())
            self._file.close()


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


def leave_to_parent(descriptor: int) -> None:
    """Let processes that are forked from now on have no part in an open file and its lock."""
    _locked.add(descriptor)


def _let_go() -> None:
    """Give up the locks that a forked process shares with its parent, which may end before it."""
    for descriptor in _locked:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, descriptor, inheritable=False)  # closed, it would be given out again under the file's object
        os.close(nothing)
    _locked.clear()


os.register_at_fork(after_in_child=_let_go)


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
