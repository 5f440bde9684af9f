"""Manages the runs in a log folder: one active run per name, and removal of old ones beyond the limits.

An active run holds a lock on the file `.RUN_ID.lock` beside its folder; the kernel releases it when the process ends.
A folder is never removed if it has no manifest, its lock is held, or another user owns it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launcher.errors import UsageError

MANIFEST = "run.json"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.ENOLCK)  # from file systems without locks
_TRIES = 100
_REMOVED = ".removed"


class Limits:
    """The number of runs, including this one, and of bytes that a log folder may have; None: unlimited."""

    def __init__(self, runs: int | None, size: str | None) -> None:
        if runs is not None and runs < 1:
            raise UsageError(f"--keep-runs is {runs}; it must be 1 or more: this run is one of them")
        self.runs = runs
        self.max_bytes = None if size is None else parse_size(size, "--log-max-size")

    def __bool__(self) -> bool:
        return self.runs is not None or self.max_bytes is not None


def parse_size(text: str, option: str) -> int:
    """Parse `500M`, `20G` or a number of bytes. Raises UsageError."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,3})?) ?([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise UsageError(f"{option} is {text!r}; write a size such as 500M, 20G or 1T")
    return int(float(match[1]) * _UNITS[match[2].upper()])


@contextmanager
def hold(log_dir: Path, run_id: str) -> Iterator[bool]:
    """Hold the name of a run in a log folder. Raises UsageError if another active run has it.

    Yields whether this is certain: some file systems have no locks.
    """
    is_new = not log_dir.exists()
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        descriptor = _lock(_lock_file(log_dir, run_id))
    except BlockingIOError as error:
        raise UsageError(
            f"run {run_id} is active and writes to {log_dir / run_id}; choose another --run-id or --log-dir, "
            f"or stop it first: dtrain stop {run_id}"
        ) from error
    except OSError:  # the folder cannot be written, which LogFiles reports
        descriptor = None
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                _lock_file(log_dir, run_id).unlink()
            os.close(descriptor)
            if is_new:
                with contextlib.suppress(OSError):  # it is not empty
                    log_dir.rmdir()


def remove_oldest(log_dir: Path, limits: Limits, *, own: str) -> list[str]:
    """Remove ended runs, oldest first, until the limits are met; return their names. `own` is this run's id.

    Active runs count, but stay; other users' do not count. Blocks while it reads and removes files.
    """
    for half in log_dir.glob(f".*{_REMOVED}"):
        if _is_ours(half):
            _remove_half(half)
    runs = []
    for path in log_dir.glob(f"[!.]*/{MANIFEST}"):
        with contextlib.suppress(OSError):  # another run is removing it
            if _is_ours(path.parent):
                runs.append((path.stat().st_mtime, path.parent))
    others = (folder for _, folder in sorted(runs, reverse=True) if folder.name != own)
    folders = [folder for folder in others if not folder.is_symlink() and _is_run(folder)]
    sizes = {} if limits.max_bytes is None else {folder: _size(folder) for folder in [*folders, log_dir / own]}
    many = len(folders) + 1
    removed: list[str] = []
    for folder in reversed(folders):
        too_many = limits.runs is not None and many > limits.runs
        too_large = limits.max_bytes is not None and sum(sizes.values()) > limits.max_bytes
        if not (too_many or too_large):
            break
        if _remove(log_dir, folder):
            removed.append(folder.name)
            many -= 1
            sizes.pop(folder, None)
    return removed


def _remove(log_dir: Path, folder: Path) -> bool:
    import shutil  # only if a run removes something

    try:
        with hold(log_dir, folder.name) as is_locked:
            if not is_locked or _may_live_elsewhere(folder):
                return False
            away = log_dir / f".{folder.name}{_REMOVED}"  # found by the next run if this one is killed here
            folder.rename(away)
            try:
                shutil.rmtree(away)
            except OSError:
                if (away / MANIFEST).exists():  # it is still a run
                    away.rename(folder)
                raise
    except (UsageError, OSError):  # it is active, or cannot be removed
        return False
    return True


def _is_ours(folder: Path) -> bool:
    try:
        return folder.lstat().st_uid == os.geteuid()
    except OSError:  # another run is removing it
        return False


def _is_run(folder: Path) -> bool:
    """Return whether a folder belongs to a run of dtrain: other programs may have files of the same name."""
    return {"dtrain", "run_id", "attempts"} <= _manifest(folder).keys()


def _may_live_elsewhere(folder: Path) -> bool:
    """Return whether another host's run has no recorded end: some network file systems do not share locks."""
    content = _manifest(folder)
    controller = content.get("controller")
    here = isinstance(controller, dict) and controller.get("host") == os.uname().nodename
    return content.get("ended") is None and not here


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _remove_half(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)  # another run may do the same


def _size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return total


def _lock_file(log_dir: Path, run_id: str) -> Path:
    return log_dir / f".{run_id}.lock"


def _lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock; None if there are no locks. Raises BlockingIOError if it is held."""
    for _ in range(_TRIES):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    return descriptor
        except OSError as error:
            os.close(descriptor)
            if error.errno in _NO_LOCKS:
                return None
            raise
        os.close(descriptor)  # its holder has just removed the file: lock the new one
    return None
