"""Write the checkpoints of one folder, on rank 0: in a thread while training continues, or synchronously.

Called by `ddp.checkpoint`. The process has one such thread, which writes one file at a time. It prints errors at once,
and keeps them for `finish`. The process does not end before the file is complete; if the last file could not be
written and no call has raised that, the exit code is 1. A process that ends with an exception waits for 5 s at most,
since others may wait for it.
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
from ddp.checkpoint import kept_copy
from ddp.checkpoint.agreement import reason_of
from ddp.checkpoint.copies import CopyMemory, HostCopy, HostMemory, is_on_host
from ddp.checkpoint.folder_owner import FolderOwner
from ddp.checkpoint.kept_copy import Note
from ddp.errors import ArgumentError, CheckpointError
from ddp.monitoring.interrupts import has_started, is_interrupt
from ddp.monitoring.process_end import end_process
from ddp.monitoring.progress import count_checkpoint

OnError = Literal["warn", "stop"]
_MOST_FAILURES = 3  # in a row: then it is not temporary
_LONGEST_WAIT_S = 5.0  # after an exception

_thread: threading.Thread | None = None
_failure: Exception | None = None
_unwritten: dict[Path, CheckpointError] = {}  # by folder: failures that were not raised so far


class Writer:
    """Writes checkpoints to `folder`; whenever one is durable, removes those before the last `keep`.

    `broken` has the names of files that have a trailer, but were found damaged. `loaded` is the name of the loaded
    file, which may still be written from a copy in memory.
    """

    def __init__(self, folder: Path, on_error: OnError) -> None:
        self.folder = folder
        self.owner = FolderOwner(folder)
        self.failed = FailedSaves(folder, on_error)
        self.broken: set[str] = set()
        self.loaded = ""
        self._memory = HostMemory()  # for copies of tensors on devices
        self._known: set[str] | None = None  # names of the files of this object, or that existed before its first save
        self._newest: Path | None = None  # of the files that this object has written

    def forget_files(self) -> None:
        """Accept all files in the folder at the next save, as at the first one."""
        self._known = None

    def can_write(self, step: int, rank: int, *, in_background: bool) -> bool:
        """Check the folder; return False if the file system fails and has worked before.

        With `in_background`, it first waits for a file that is still written for an ended process. Raises ArgumentError
        for an invalid step, CheckpointError if there are later steps or another run saves in the folder.
        """
        if in_background:
            CopyMemory.of_host()
        try:
            self._check_folder(step, rank)
        except OSError as error:
            if not self.owner.has_claimed or is_interrupt(error):  # most likely the wrong folder
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
            raise CheckpointError(  # a restart would load that one instead
                f"{path.absolute()} is later than step {step}: this folder belongs to another run, or to a later part "
                "of this one. load() first to go on from there, use another folder, or move that file away"
            )
        if self._known is None:
            self._known = {*(path.name for _, path in there), self.loaded, *self._coming()}

    def _coming(self) -> set[str]:
        """Return the name of the file that is still written here for an ended process of this run, if there is one."""
        note = kept_copy.find()
        if note is None or Path(note.path).parent.resolve() != self.folder.resolve():
            return set()
        return {Path(note.path).name}

    def start(self, step: int, rank: int, content: Mapping[str, Any], *, keep: int, in_background: bool) -> None:
        """Copy content and write the copy in the thread, or write it now. Errors are kept for `finish`.

        Call `finish` first. When `start` returns, training may change tensors on the host. Those on devices are copied
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
        """Write content; when this returns, the file is durable, or the failure is counted and not raised yet."""

        def write() -> None:
            # Only tensors on torch_xla's devices are copied: loading the file would need such a device otherwise.
            on_host = HostCopy(self._memory, device_types={"xla"}).of(content)
            checkpoint_file.write(self.folder, step, on_host)

        self._write(step, rank, write, keep)

    def _write(self, step: int, rank: int, write: Callable[[], None], keep: int) -> None:
        """Write and prune, perhaps in the thread: no other code uses what this changes until `finish`."""
        try:
            write()
            name = checkpoint_file.path_of(self.folder, step).name
            self.broken.discard(name)
            if self._known is not None:
                self._known.add(name)
            checkpoint_file.prune(self.folder, keep, self.broken)
        except Exception as error:
            reason = str(reason_of(error, f"write step {step} to {self.folder.absolute()}"))
            if not isinstance(error, OSError):
                raise CheckpointError(reason) from error
            self._add_failure(step, rank, error)
        else:
            self._newest = checkpoint_file.path_of(self.folder.absolute(), step)
            self.failed.end()
            count_checkpoint()

    def _add_failure(self, step: int, rank: int, error: OSError) -> None:
        find = partial(checkpoint_file.newest_whole, self.folder.absolute(), self.broken)
        self.failed.add(rank, f"step {step}", error, lambda: self._newest or find())


class Copy:
    """A copy of a state, in the launcher's memory if it has room, else in this process's.

    A state in host memory is copied once. One on devices is copied to pinned memory, and to the launcher's when the
    devices have finished.
    """

    def __init__(self, content: Mapping[str, Any], memory: HostMemory, path: Path, step: int) -> None:
        self._path, self._step = path, step
        self._kept_in = CopyMemory.with_room(content)
        self._note = self._keep(content) if is_on_host(content) else None
        self._host = HostCopy(memory)
        self._content = {} if self._note else self._host.of(content)

    def write(self) -> None:
        """Write the file; when this returns, it is durable. Raises OSError."""
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
        except Exception as error:  # no memory, or an error of torch.save, which writing the file raises again
            if is_interrupt(error):
                raise
            self._kept_in = None
            return None


class FailedSaves:
    """Counts consecutive saves to `path` that the file system refused: a full disk, a quota, a lost permission.

    Each is a line on stderr, or an error: the third in a row, or with `on_error` "stop" the first. Errors of the
    program, which every later save would raise as well, are not counted here.
    """

    def __init__(self, path: Path, on_error: OnError) -> None:
        if on_error not in get_args(OnError):
            raise ArgumentError(f"on_error={on_error!r}; it must be 'warn' or 'stop'")
        self._path = path.absolute()
        self._most = _MOST_FAILURES if on_error == "warn" else 1
        self._in_a_row = 0

    def add(self, rank: int, what: str, error: OSError, newest: Callable[[], Path | None]) -> None:
        """Count a save of `rank` that could not write `what`: print it on stderr, or raise CheckpointError.

        `newest` returns the newest complete file.
        """
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
        """Whether the last save has failed and that was not raised."""
        return self._path in _unwritten

    def take(self) -> CheckpointError | None:
        """Return the failure of the last save, once, for a caller that needs its file."""
        return _unwritten.pop(self._path, None)


def finish(timeout_s: float | None = None) -> Exception | None:
    """Wait for the last save; return its error, once. Raises TimeoutError if it takes longer."""
    global _thread, _failure
    if _thread is not None:
        if has_started(_thread):
            _thread.join(timeout_s)
            if _thread.is_alive():
                raise TimeoutError
        _thread = None
    failure, _failure = _failure, None
    return failure


def _start(write: Callable[[], None]) -> None:
    """Call `write` in the thread. Call `finish()` first."""
    global _thread
    assert _thread is None
    # A daemon: the interpreter would wait for other threads without limit, and before it calls exit handlers.
    run = partial(_run, write, prints=True)
    _thread = threading.Thread(target=run, name="checkpoint", daemon=True)
    try:
        _thread.start()
    except RuntimeError as error:  # the interpreter ends, or there are too many threads
        if is_interrupt(error):
            raise
        _thread = None
        run()


def _run(write: Callable[[], None], *, prints: bool = False) -> None:
    """Call `write`, and keep its error for `finish`; raise one of a signal handler at once.

    `prints`: print the error on stderr as well, since the call that raises it may be an hour away.
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
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)  # a session continues after it
    try:
        failure = finish(None if error is None else _LONGEST_WAIT_S) or next(iter(_unwritten.values()), None)
    except (TimeoutError, KeyboardInterrupt) as cause:  # the thread may still run, and must end before the interpreter
        print(
            "ddp: this process ends before its last checkpoint is written; the previous one is whole",
            file=sys.stderr,
        )
        end_process(error or cause)
    if failure is None:
        return
    traceback.print_exception(failure)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)  # an exception here would change nothing


def _forget() -> None:
    """Leave the thread and the failures to the parent, in a forked process."""
    global _thread, _failure
    _thread = _failure = None
    _unwritten.clear()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_forget)
