"""Writes the checkpoints of one folder, on the rank that writes: in a thread while training goes on, or here and now.

Called by `ddp.checkpoint`. The process has one such thread, which writes one file at a time. What goes wrong is printed
at once, and kept for `finish`. The process does not end before the file is there; if the last one could not be written,
and no caller has got that as an error until then, the process ends with exit code 1. A process that ends with an
exception, for which others may wait, waits 5 s at most.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from ddp.checkpoint import file as checkpoint_file
from ddp.checkpoint.agreement import reason_of
from ddp.checkpoint.copies import CopyMemory, HostCopy, HostMemory, is_on_host
from ddp.checkpoint.folder_owner import FolderOwner
from ddp.checkpoint.kept_copy import Note
from ddp.errors import ArgumentError, CheckpointError
from ddp.monitoring.interrupts import is_interrupt
from ddp.monitoring.process_end import end_process
from ddp.monitoring.progress import count_checkpoint

OnError = Literal["warn", "stop"]
_MOST_FAILURES = 3  # in a row: then it is no passing trouble
_LONGEST_WAIT_S = 5.0  # after an exception

_thread: threading.Thread | None = None
_failure: Exception | None = None
_unwritten: dict[Path, CheckpointError] = {}  # by what they save to: failures that were no error so far


class Writer:
    """Writes checkpoints to `folder`, and removes older ones than the last `keep` whenever one is durable.

    `broken` are names of files that end as whole ones do, but were found damaged; `loaded` is that of the file that was
    loaded, which may still be on its way from a copy in memory.
    """

    def __init__(self, folder: Path, on_error: OnError) -> None:
        self.folder = folder
        self.owner = FolderOwner(folder)
        self.failed = FailedSaves(folder, on_error)
        self.broken: set[str] = set()
        self.loaded = ""
        self._memory = HostMemory()  # for copies of what is on devices; kept
        self._known: set[str] | None = None  # names of the files that are ours, or were there when we began
        self._newest: Path | None = None  # that this object has written

    def forget_files(self) -> None:
        """Accept at the next save whatever is in the folder then, as at the first one."""
        self._known = None

    def can_write(self, step: int, rank: int, *, in_background: bool) -> bool:
        """Check the folder; return False where the file system refuses what it did not refuse before.

        With `in_background`, it first waits for a file that is still written for a process that is gone. Raises
        ArgumentError for what is no step, CheckpointError for a step before others that are there, and for a folder in
        which another run saves.
        """
        if in_background:
            CopyMemory.of_host()
        try:
            self._check_folder(step, rank)
        except OSError as error:
            if not self.owner.has_claimed:  # most likely, it is the wrong one
                raise
            self._add_failure(step, rank, error)
            return False
        return True

    def _check_folder(self, step: int, rank: int) -> None:
        if type(step) is not int or step < 0:
            raise ArgumentError(f"step is {step!r}; it must be an int, 0 or more")
        self.owner.claim(rank)
        there = checkpoint_file.newest_first(self.folder)
        for found, path in there:
            is_foreign = self._known is not None and path.name not in self._known
            if (found <= step and not is_foreign) or path.name in self.broken or not checkpoint_file.ends_whole(path):
                continue
            if is_foreign:
                raise CheckpointError(
                    f"{path.absolute()} was saved by another run, or by another Checkpoint of this one, since this one "
                    "began: give each a folder of its own"
                )
            raise CheckpointError(  # after a restart those would be loaded instead
                f"{path.absolute()} is later than step {step}: this folder belongs to another run, or to a later part "
                "of this one. load() first to go on from there, use another folder, or move that file away"
            )
        if self._known is None:
            self._known = {*(path.name for _, path in there), self.loaded}

    def start(self, step: int, rank: int, content: Mapping[str, Any], *, keep: int, in_background: bool) -> None:
        """Copy content and write the copy in the thread, or write it now. What goes wrong is kept for `finish`.

        Call `finish` first. When `start` returns, training may change what is on the host. What is on devices is copied
        in the order of the current stream, without waiting for it.
        """
        if in_background:
            _run(lambda: self._copy_and_start(step, rank, content, keep), prints=True)
        else:
            _run(lambda: self.write(step, rank, content, keep=keep))

    def _copy_and_start(self, step: int, rank: int, content: Mapping[str, Any], keep: int) -> None:
        try:
            copy = Copy(content, self._memory, checkpoint_file.path_of(self.folder.absolute(), step), step)
        except Exception as error:
            raise CheckpointError(str(reason_of(error, f"copy step {step}"))) from error
        _start(lambda: self._write(step, rank, copy.write, keep))

    def write(self, step: int, rank: int, content: Mapping[str, Any], *, keep: int) -> None:
        """Write content; when this returns, the file is durable, or the failure is counted and no error yet."""

        def write() -> None:
            # Without a copy, but of what lies on torch_xla's devices: a file would ask for such a device again.
            on_host = HostCopy(self._memory, device_types={"xla"}).of(content)
            checkpoint_file.write(self.folder, step, on_host)

        self._write(step, rank, write, keep)

    def _write(self, step: int, rank: int, write: Callable[[], None], keep: int) -> None:
        """Write and prune, perhaps in the thread: nothing else uses what this changes until it is finished."""
        try:
            write()
            name = checkpoint_file.path_of(self.folder, step).name
            self.broken.discard(name)
            if self._known is not None:
                self._known.add(name)
            checkpoint_file.prune(self.folder, keep, self.broken)
        except OSError as error:
            self._add_failure(step, rank, error)
        except Exception as error:
            raise CheckpointError(str(reason_of(error, f"write step {step} to {self.folder.absolute()}"))) from error
        else:
            self._newest = checkpoint_file.path_of(self.folder.absolute(), step)
            self.failed.end()
            count_checkpoint()

    def _add_failure(self, step: int, rank: int, error: OSError) -> None:
        find = partial(checkpoint_file.newest_whole, self.folder.absolute(), self.broken)
        self.failed.add(rank, f"step {step}", error, lambda: self._newest or find())


class Copy:
    """A copy of a state, in the launcher's memory if that has room for it, else in this process's.

    What lies on the host is copied once. What lies on devices goes into pinned memory, and into the launcher's when the
    devices have finished that.
    """

    def __init__(self, content: Mapping[str, Any], memory: HostMemory, path: Path, step: int) -> None:
        self._path, self._step = path, step
        self._kept_in = CopyMemory.with_room(content)
        self._note = self._keep(content) if is_on_host(content) else None
        self._host = HostCopy(memory)
        self._content = {} if self._note else self._host.of(content)

    def write(self) -> None:
        """Write the file; when this returns, it is durable. Raises OSError where the system does."""
        self._host.wait()
        note = self._note or self._keep(self._content)
        if self._kept_in is None or note is None:
            checkpoint_file.write(self._path.parent, self._step, self._content)
        else:
            self._kept_in.write_file(note)

    def _keep(self, content: Mapping[str, Any]) -> Note | None:
        if self._kept_in is None:
            return None
        try:
            return self._kept_in.keep(self._step, self._path, content)
        except Exception as error:  # no memory after all, or what torch.save refuses, which the file meets again
            if is_interrupt(error):
                raise
            self._kept_in = None
            return None


class FailedSaves:
    """Counts the saves to `path` that the file system refused in a row: a full disk, a quota, a lost permission.

    Each is a line on stderr, or an error: the third in a row, or with `on_error` "stop" the first. What would fail in
    every later save as well is an error of the caller, and does not come here.
    """

    def __init__(self, path: Path, on_error: OnError) -> None:
        if on_error not in get_args(OnError):
            raise ArgumentError(f"on_error={on_error!r}; it must be 'warn' or 'stop'")
        self._path = path.absolute()
        self._most = _MOST_FAILURES if on_error == "warn" else 1
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
        """Reset the count: a save is durable."""
        self._in_a_row = 0
        _unwritten.pop(self._path, None)

    @property
    def is_last_lost(self) -> bool:
        """Whether the last save has failed, and no caller has got that as an error."""
        return self._path in _unwritten

    def take(self) -> CheckpointError | None:
        """Return the failure of the last save, once, for a caller that relies on its file."""
        return _unwritten.pop(self._path, None)


def finish(timeout_s: float | None = None) -> Exception | None:
    """Wait for the last save; return what it raised, once. Raises TimeoutError if it takes longer."""
    global _thread, _failure
    if _thread is not None:
        _thread.join(timeout_s)
        if _thread.is_alive():
            raise TimeoutError
        _thread = None
    failure, _failure = _failure, None
    return failure


def _start(write: Callable[[], None]) -> None:
    """Call `write` in the thread. `finish()` comes first."""
    global _thread
    assert _thread is None
    # A daemon: the interpreter would wait for others without end, and before it calls what is registered at exit.
    run = partial(_run, write, prints=True)
    _thread = threading.Thread(target=run, name="checkpoint", daemon=True)
    try:
        _thread.start()
    except RuntimeError:  # the interpreter ends, or there are too many threads
        _thread = None
        run()


def _run(write: Callable[[], None], *, prints: bool = False) -> None:
    """Call `write` here and now, and keep what it raises for `finish`, but for what a signal's handler raises.

    `prints` says it on stderr as well: the call that raises it may be an hour away.
    """
    global _failure
    try:
        write()
    except Exception as error:
        if is_interrupt(error):
            raise
        _failure = error
        if prints:
            print(f"ddp: {error}", file=sys.stderr, flush=True)


def _at_exit() -> None:
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)  # a session goes on after an error
    try:
        failure = finish(None if error is None else _LONGEST_WAIT_S) or next(iter(_unwritten.values()), None)
    except (TimeoutError, KeyboardInterrupt) as cause:  # the thread may still run, and must not outlive the interpreter
        print("ddp: this process ends before its last checkpoint is written; the one before is whole", file=sys.stderr)
        end_process(error or cause)
    if failure is None:
        return
    traceback.print_exception(failure)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)  # an exception here would change nothing


def _forget() -> None:
    """In a forked process: the thread and the failures are the parent's."""
    global _thread, _failure
    _thread = _failure = None
    _unwritten.clear()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_forget)
