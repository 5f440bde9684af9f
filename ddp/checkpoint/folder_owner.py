"""The owner of a checkpoint folder: one Checkpoint of one run at a time saves in it. Called on the rank that writes.

The owner holds a lock on the file `.owner`, which describes it. The kernel drops the lock when its process ends; most
shared file systems lock across hosts (NFS 4, Lustre with `flock`, GPFS, CephFS). Without locks, a process of the same
host is looked up by its pid. An owner on another host may be dead then, so it is replaced; if it lives, its next save
is refused, like that of a worker that was replaced while it still hangs.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import secrets
import socket
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ddp.checkpoint.atomic_file import Lock, make_durably
from ddp.environment import run_of
from ddp.errors import CheckpointError
from ddp.world import current_generation

_NAME = ".owner"


@dataclass(frozen=True)
class _Owner:
    """A Checkpoint of a process; `started` is the start of the pid in clock ticks, 0 if unknown."""

    run_id: str
    attempt: int
    host: str
    pid: int
    started: int
    rank: int
    since: str
    key: str
    generation: int = 0  # of the ranks in the attempt

    def __str__(self) -> str:
        run = f"run {self.run_id!r}, " if self.run_id else ""
        return f"{run}rank {self.rank}, pid {self.pid} on {self.host}, since {self.since}"


class FolderOwner:
    """Claims `folder` for one Checkpoint, as long as this object lives."""

    def __init__(
        self,
        folder: Path,
        environ: Mapping[str, str] = os.environ,
        generation: Callable[[], int | None] = current_generation,
    ) -> None:
        self._folder = folder
        self._environ = environ
        self._generation = generation
        self._me: _Owner | None = None
        self._end: weakref.finalize[..., FolderOwner] | None = None
        self.has_claimed = False  # ever

    def claim(self, rank: int) -> None:
        """Create the folder and own it from now on, or make sure that it is still owned.

        Raises CheckpointError, which names the owner, if another run owns it. A later attempt of the same run, or a
        later generation of its ranks, takes it over from a process of an earlier one that has not ended, or whose host
        is gone and keeps its locks for a while.
        """
        if self._me is not None and self._me.pid == os.getpid():
            owner = _read(self._folder)
            if owner is not None and owner.key != self._me.key:
                raise self._refused(owner, "has taken it over")
            return
        me = self._me_now(rank)
        make_durably(self._folder)
        owner = _read(self._folder)
        if owner is not None and (owner.host, owner.pid) == (me.host, me.pid):
            gc.collect()  # the owner may be an unused object of this process
        try:
            lock = Lock(self._folder / _NAME)
        except BlockingIOError:
            owner = _read(self._folder)
            if owner is None or not _is_earlier(owner, me):
                raise self._refused(owner, "saves here") from None
            (self._folder / _NAME).unlink(missing_ok=True)  # the lock stays with the old file
            lock = Lock(self._folder / _NAME)
        owner = None if lock.is_held else _read(self._folder)
        if owner is not None and owner.host == me.host and _is_alive(owner) and not _is_earlier(owner, me):
            lock.release()
            raise self._refused(owner, "saves here")
        lock.write(json.dumps(asdict(me)).encode())
        self._me = me
        self._end = weakref.finalize(self, _let_go, lock, self._folder, me)
        self._end.atexit = False
        self.has_claimed = True

    def release(self) -> None:
        """Let others own the folder, until the next `claim`."""
        if self._end is not None:
            self._end()
        self._me = self._end = None

    def _me_now(self, rank: int) -> _Owner:
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        host, pid = socket.gethostname(), os.getpid()
        key, generation = secrets.token_hex(8), self._generation() or 0
        return _Owner(*run_of(self._environ), host, pid, _started(pid), rank, since, key, generation)

    def _refused(self, owner: _Owner | None, what: str) -> CheckpointError:
        is_mine = owner is not None and (owner.host, owner.pid) == (socket.gethostname(), os.getpid())
        who = "another Checkpoint of this process" if is_mine else "another run, or another Checkpoint of this one,"
        named = "" if owner is None else f" ({owner})"
        return CheckpointError(
            f"{self._folder.absolute()} is in use: {who} {what}{named}. Give each a folder of its own, "
            "or end the other first"
        )


def _read(folder: Path) -> _Owner | None:
    with contextlib.suppress(OSError, ValueError, TypeError):  # it has no owner, or is still being written
        return _Owner(**json.loads((folder / _NAME).read_bytes()))
    return None


def _is_earlier(owner: _Owner, me: _Owner) -> bool:
    """Return whether the owner is of an earlier attempt of this run, or another process of an earlier generation."""
    if not me.run_id or owner.run_id != me.run_id:
        return False
    is_same = (owner.host, owner.pid) == (me.host, me.pid)
    return owner.attempt < me.attempt or (
        owner.attempt == me.attempt and owner.generation < me.generation and not is_same
    )


def _is_alive(owner: _Owner) -> bool:
    """Return whether the process of this host that wrote `owner` still lives."""
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return _started(owner.pid) in (0, owner.started)


def _started(pid: int) -> int:
    """Return the start of a process in clock ticks since the boot; 0 if unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return 0


def _let_go(lock: Lock, folder: Path, me: _Owner) -> None:
    """Remove the owner from the file, unless another run owns it now. Does nothing in a forked child."""
    if os.getpid() == me.pid:
        with contextlib.suppress(OSError, ValueError):
            if _read(folder) == me:
                lock.write(b"")
        lock.release()
