"""Decides what a save is that the file system refuses: a line on stderr, or an error.

Called on the rank that writes, perhaps in the thread that does. Only an OSError of the writing comes here: a full disk,
a quota, a lost permission. What no later save would do better is an error of its caller.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

from ddp.errors import ArgumentError, CheckpointError

__all__ = ["FailedSaves", "OnError", "left"]

OnError = Literal["warn", "stop"]
_MOST = 3  # in a row: then it is no passing trouble

_unwritten: dict[Path, CheckpointError] = {}  # by what they save to: failures that were no error so far


class FailedSaves:
    """Counts the saves to `path` that failed in a row. With `on_error` "stop", each is an error."""

    def __init__(self, path: Path, on_error: OnError) -> None:
        if on_error not in get_args(OnError):
            raise ArgumentError(f"on_error={on_error!r}; it must be 'warn' or 'stop'")
        self._path = path.absolute()
        self._most = _MOST if on_error == "warn" else 1
        self._in_a_row = 0

    def add(self, rank: int, what: str, error: OSError, newest: Callable[[], Path | None]) -> None:
        """Count a save of `rank` that could not write `what`, and say so on stderr; raise CheckpointError if it is an
        error. `newest` returns the newest whole file."""
        self._in_a_row += 1
        failure = CheckpointError(f"could not write {what} to {self._path}: {error}")
        failure.__cause__ = error
        if self._in_a_row >= self._most:
            _unwritten.pop(self._path, None)
            if self._most > 1:
                failure.args = (f"{failure}. {self._in_a_row} saves in a row have failed",)
            raise failure
        _unwritten[self._path] = failure
        try:
            found = str(newest() or "not there")
        except OSError as unreadable:
            found = f"not known ({unreadable})"
        in_a_row = f"failed saves in a row: {self._in_a_row}; {self._most} are an error"
        line = f"ddp: rank {rank} {failure}. The newest whole checkpoint is {found}. Training goes on ({in_a_row})"
        with contextlib.suppress(OSError):  # stderr may be a file on the same disk
            print(line, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Begin to count again: a save is durable."""
        self._in_a_row = 0
        _unwritten.pop(self._path, None)

    @property
    def is_last_lost(self) -> bool:
        """Whether the last save has failed, and no caller has got that as an error."""
        return self._path in _unwritten

    def take(self) -> CheckpointError | None:
        """Return the failure of the last save, once, for a caller that relies on its file."""
        return _unwritten.pop(self._path, None)


def left() -> CheckpointError | None:
    """Return a failure of a last save that no caller has got as an error."""
    return next(iter(_unwritten.values()), None)


os.register_at_fork(after_in_child=_unwritten.clear)
