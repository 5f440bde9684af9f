"""Report which ranks are missing, and where each is, when a collective fails or takes too long.

torch only knows that a receive timed out or that a peer closed its connection. A StallReport belongs to one wrapped
model. Its owner records with `at` what this rank does, and waits for collectives with `wait`, or with `finish` inside
of `waiting`. Nothing else in `ddp` waits for a collective. When a wait fails, the ranks exchange their positions
through the store, and the error contains them. The thread of `ddp.monitoring.stall_channel` does so while the main
thread hangs. Nothing here starts a collective.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from os import PathLike
from time import monotonic, sleep
from typing import Protocol

import torch
import torch.distributed as dist

from ddp.comm.shm.rounds import Lost
from ddp.errors import ArgumentError, CollectiveError, DdpError
from ddp.generation.connections import broken_for_s
from ddp.monitoring import timeline
from ddp.monitoring.debuggers import debugged_until
from ddp.monitoring.interrupts import is_interrupt
from ddp.monitoring.process_end import leave_pending
from ddp.monitoring.stall_channel import StoreThread, store_thread_of_world
from ddp.monitoring.stall_text import (
    AT_FILES,
    Heard,
    Position,
    Scene,
    describe_files,
    describe_stall,
    find_missing,
    printable,
    ranks_at_files,
)
from ddp.monitoring.user_code import line_of_frame
from ddp.torch_internals import device_types_of, is_by_gloo, is_message, timeout_of

_TORCHS_TIMEOUT_S = 1800.0
_BROKEN_S = 0.25  # for a collective with broken connections to fail; that in the middle of a message never does
_POLL_S = 0.1  # between two looks for that, and for Ctrl-C, which only Python code in the main thread sees
_NOT_WAITING, _BOUNDED, _UNBOUNDED, _FAILED = range(4)  # the last until the owner records something else


class Pending(Protocol):
    """A reduction in progress: `dist.Work`, or that of a communication hook."""

    def wait(self, timeout: timedelta = ...) -> bool: ...

    def is_completed(self) -> bool: ...


class HostWork:
    """Work of a model on a device that blocks the host (gloo, a hook's future), so that its wait needs a limit."""

    def __init__(self, work: Pending) -> None:
        self.wait = work.wait
        self.is_completed = work.is_completed


class StallReport:
    """The position of this rank of a group in its training, sent to the others when a rank waits too long.

    Every rank of the group must create its StallReports of that group in the same order; nothing blocks. `step` is set
    by the owner: the number of finished reductions; texts count steps from 1. `timeout_s` limits each wait; None is
    nine tenths of the group's own timeout, so that this error comes before torch's. `device` is the default of `wait`,
    where the collectives run: if its streams order them, waiting does not block the caller, and a stall is written to
    stderr instead of raised.
    `kind` distinguishes reports that are counted separately from the models of the group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        timeout_s: float | None,
        device: torch.device | None = None,
        kind: str = "",
    ) -> None:
        if timeout_s is not None and not timeout_s > 0:
            raise ArgumentError(f"the stall timeout must be more than 0 s, not {timeout_s!r}")
        self.rank, self.size = group.rank(), group.size()
        self.step = 0
        self._longest_s: float = 0.9 * _timeout_of(group)
        self._is_for_calls = bool(kind)
        self._own_timeout_s: float | None = timeout_s
        if timeout_s is not None:
            _limits_s[id(self)] = timeout_s
        self._thread = threading.get_ident()
        # An unknown backend is waited for like NCCL, which ends the process if a wait has a limit.
        self._by_host = {"cpu", *(each.type for each in device_types_of(group) if is_by_gloo(group, each))}
        self._device_type = "cpu" if device is None else device.type
        self._position: _Noted = ("the construction of the model", None, monotonic(), _NOT_WAITING)
        self._failed_step = 0
        self._newest: tuple[Pending, str, float] | None = None  # on a device, and when it was started
        self._reported = 0.0
        self._left = ""  # how a wait ended before its collective, which still runs after a signal or a stall
        self._begun: list[str] = []  # begun and not counted yet
        self._global_ranks: Sequence[int] = range(self.size)
        self._store_thread: StoreThread | None = None
        if self.size > 1:
            with contextlib.suppress(KeyError):  # a group that torch did not create: its ranks' positions are unknown
                self._global_ranks = dist.get_process_group_ranks(group)
                self._store_thread = store_thread_of_world()
        self._key = "" if self._store_thread is None else self._store_thread.enter(group.group_name + kind, self)

    @property
    def timeout_s(self) -> float:
        """Limit of a wait for the others; calls that belong to no model wait no longer than the models do."""
        if self._own_timeout_s is not None:
            return self._own_timeout_s
        others_s = _limits_s.values() if self._is_for_calls else ()
        least_s: float = min([self._longest_s, *others_s])
        return least_s

    @property
    def interval_s(self) -> float:
        """Time between two looks of the thread at the store."""
        return min(1.0, max(0.1, self.timeout_s / 10))

    def at(self, phase: str, detail: Callable[[], str] | None = None) -> None:
        """Record what this rank does from now on. `detail` is called in another thread, when a rank asks.

        `detail` is kept until the next call: a bound method keeps its object alive.
        """
        self._position = (phase, detail, monotonic(), _NOT_WAITING)

    def wait(self, work: Pending, what: str, *, device: torch.device | None = None) -> None:
        """Wait for a collective on `device` (None: the CPU for a HostWork, else this report's device).

        On the CPU, and for gloo's collectives on a device, block until it has ended, or raise a CollectiveError that
        says where each rank is; that takes a few seconds more if a rank does not answer. After a stall, `work` still
        runs: it may be waited for again, and its tensors are in use until it ends. Otherwise let the current stream
        wait, without blocking; after a stall the report is written to stderr, and then torch's watchdog ends the
        process, if the backend has one.
        """
        is_device = self._is_on_device(work, device)
        try:
            with self._in(what, _UNBOUNDED if is_device else _BOUNDED):
                if is_device:
                    work.wait()
                    self._newest = (work, what, monotonic())
                else:
                    self._wait_here(work, what)
        except BaseException as error:
            if not is_device and is_interrupt(error):
                self._left = f"was interrupted in the {what}"
                leave_pending(work)
            raise

    def _is_on_device(self, work: Pending, device: torch.device | None) -> bool:
        where = self._device_type if device is None else device.type
        return where not in self._by_host and (device is not None or not isinstance(work, HostWork))

    def _wait_here(self, work: Pending, what: str) -> None:
        began = monotonic()
        deadline = began + self.timeout_s
        has_reported = False
        while not _ends_within(max(0.001, min(_POLL_S, deadline - monotonic())), work, work.wait):
            if monotonic() < deadline:
                continue
            deadline = max(deadline, debugged_until() + self.timeout_s)
            if monotonic() < deadline:
                continue
            scene, heard = self._ask(what, "")
            if work.is_completed():  # it ended while they were asked
                continue
            longest = began + self._longest_s
            if monotonic() < longest and ranks_at_files(scene, heard):
                if not has_reported and (text := describe_files(scene, heard, longest - monotonic())):
                    print(text, file=sys.stderr, flush=True)
                has_reported = True
                deadline = min(monotonic() + self.timeout_s, longest)
                continue
            self._left = f"has waited too long in the {what}"
            leave_pending(work)
            raise self._error(scene, heard)

    @property
    def has_failed(self) -> bool:
        """Whether a collective has failed here, and this rank has recorded nothing since."""
        return self._position[3] == _FAILED

    def leave_step(self, how: str) -> None:
        """Make `check_in_step` raise from now on; `how` says how this rank got out of step."""
        self._left = how

    def begin(self, what: str) -> None:
        """Be out of step until `counted`: after an exception in between, it is unknown which collectives run."""
        self._begun.append(what)

    def counted(self) -> None:
        """End the last `begin`: its collective is done, or counted."""
        self._begun.pop()

    @property
    def is_in_step(self) -> bool:
        """Whether `check_in_step` passes."""
        return not (self._left or self._begun)

    def check_in_step(self) -> None:
        """Raise CollectiveError after `leave_step`, or if a signal or a stall ended a wait before its collective.

        The collective may still run: its tensors are in use until it ends, and the others may be ahead.
        """
        if left := self._left or (self._begun and f"was interrupted in the {self._begun[-1]}"):
            raise CollectiveError(
                f"rank {self.rank} of {self.size} {left}, so it is not in step with the other ranks any more: "
                "start all ranks again, from a checkpoint",
                rank=self.rank,
                what=left,
            )

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Wait in a block: `finish` in it has the limit of `wait`, and a RuntimeError becomes the report.

        If the block waits by other means, or for a device, a stall is written to stderr.
        """
        before, _innermost.report = getattr(_innermost, "report", None), self
        try:
            with self._in(what, _UNBOUNDED):
                yield
        except BaseException as error:
            if is_interrupt(error):
                self._left = self._left or f"was interrupted in the {what}"
            raise
        finally:
            _innermost.report = before

    def finish(self, work: Pending, device: torch.device | None) -> None:
        """Wait for a collective of a block of `waiting`. See `wait`."""
        self.wait(work, self._position[0], device=device)

    @contextlib.contextmanager
    def _in(self, what: str, how: int) -> Iterator[None]:
        phase, detail, since, kind = self._position
        before = (phase, detail, since, _NOT_WAITING if kind == _FAILED else kind)
        self._position = (what, None, monotonic(), how)
        recorded = timeline.wait_begins()
        try:
            yield
        except RuntimeError as error:
            if (isinstance(error, DdpError) and not isinstance(error, Lost)) or is_interrupt(error):
                if isinstance(error, CollectiveError) and not self.has_failed:
                    self._fail(what)
                raise
            collective_error = self.error(what, str(error))
            self._fail(what)
            raise collective_error from None  # it quotes the cause; a second traceback adds nothing
        finally:
            timeline.wait_ended(recorded)
            if self._position[3] != _FAILED:
                self._position = before

    def _fail(self, what: str) -> None:
        self._failed_step = self.step
        self._position = (what, None, monotonic(), _FAILED)

    def tell_failure(self, round_: int, text: str) -> None:
        """Report an exception here to the other ranks, under a number that they share. Never raises.

        Blocks until the store has it, at most a second.
        """
        if self._store_thread is not None:
            said = json.dumps([self.rank, printable(text)])
            self._store_thread.append(f"failures/{self._key}/{round_}", said + "\n")

    def failures(self, round_: int, *, expected: int = 1, patience_s: float = 2.0) -> dict[int, str]:
        """Return the reports under this number, by rank, once `expected` ranks have one or after `patience_s`."""
        reports: dict[int, str] = {}
        deadline = monotonic() + patience_s
        while self._store_thread is not None and len(reports) < expected and (left_s := deadline - monotonic()) > 0:
            for line in self._store_thread.read(f"failures/{self._key}/{round_}", left_s).splitlines():
                with contextlib.suppress(ValueError, TypeError):  # not written by tell_failure
                    rank, text = json.loads(line)
                    reports.setdefault(int(rank), printable(str(text)))
            if len(reports) < expected:
                sleep(0.01)
        return reports

    def close(self) -> None:
        """Stop reporting this model: its owner is gone. May be called twice, and in a destructor."""
        store_thread, self._store_thread, self._newest = self._store_thread, None, None
        _limits_s.pop(id(self), None)
        if store_thread is not None:
            store_thread.leave(self._key, self.step)

    def __del__(self) -> None:
        _limits_s.pop(id(self), None)
        if getattr(self, "_key", None):  # else the constructor has failed
            self.close()

    # For the thread

    def position(self) -> Position:
        """Describe where this rank is now."""
        phase, detail, since, kind = self._position
        is_waiting, has_failed = kind in (_BOUNDED, _UNBOUNDED), kind == _FAILED
        step = self._failed_step if has_failed else self.step
        return Position(step, phase, is_waiting, monotonic() - since, _text_of(detail), has_failed)

    def line(self) -> str:
        """Name the line of the user's code that runs now in the thread that made this."""
        frames = sys._current_frames()
        frame = frames.get(self._thread) or frames.get(threading.main_thread().ident or 0)
        return line_of_frame(frame)

    def look(self) -> None:
        """Write a report to stderr, once, for a stall that no error can report."""
        now = monotonic()
        what, _, since, kind = self._position
        if kind == _UNBOUNDED:
            self._report_later(what, since)
        # Only query a work that no other has followed: never in running training, nor in a graph capture.
        if self._newest is not None and now - self._newest[2] > self.timeout_s:
            work, what, since = self._newest
            try:
                is_over = work.is_completed()
            except RuntimeError as error:  # its end is an event in a captured graph, or the device is lost
                if is_interrupt(error):
                    raise
                is_over = True
            if is_over:
                self._newest = None
            else:
                self._report_later(what, since)

    def _report_later(self, what: str, since: float) -> None:
        if monotonic() - since > self.timeout_s and since != self._reported and self._store_thread is not None:
            if monotonic() - debugged_until() <= self.timeout_s:
                return
            self._reported = since
            scene = self._scene(what, "", since)
            self._store_thread.ask_later(self._others(), self._patience_s(), lambda heard: _write(scene, heard))

    def error(self, what: str, torchs_text: str) -> CollectiveError:
        """Create the error for a collective that failed or, without torch's text, takes too long. Blocks to ask."""
        return self._error(*self._ask(what, torchs_text))

    def _error(self, scene: Scene, heard: Heard) -> CollectiveError:
        missing = self.in_world(find_missing(scene, heard))
        return CollectiveError(describe_stall(scene, heard), rank=self.rank, what=scene.what, failed_ranks=missing)

    def _ask(self, what: str, torchs_text: str) -> tuple[Scene, Heard]:
        """Return what this rank knows of a wait, and the answers of the others."""
        scene = self._scene(what, torchs_text, self._position[2])
        store_thread = self._store_thread
        heard = Heard({}, "" if self.size == 1 else "there is no store to ask the others through")
        if store_thread is not None and (_asks_after_failures or not torchs_text):
            heard = store_thread.ask(self._others(), self._patience_s())
        return scene, heard

    def in_world(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return the global ranks of ranks of the group."""
        return tuple(self._global_ranks[rank] for rank in sorted(ranks) if 0 <= rank < self.size)

    def _others(self) -> list[int]:
        return [number for rank, number in enumerate(self._global_ranks) if rank != self.rank]

    def _patience_s(self) -> float:
        return 1.0 + 2 * self.interval_s

    def _scene(self, what: str, torchs_text: str, since: float) -> Scene:
        return Scene(
            rank=self.rank,
            global_ranks=tuple(self._global_ranks),
            key=self._key,
            step=self.step,
            what=what,
            waited_s=monotonic() - since,
            limit_s=self.timeout_s,
            torchs_text=printable(torchs_text, 300),
        )


_asks_after_failures = True


@contextlib.contextmanager
def without_questions() -> Iterator[None]:
    """Raise at once if a collective fails in the block, without asking the others: one is known to be gone."""
    global _asks_after_failures
    before, _asks_after_failures = _asks_after_failures, False
    try:
        yield
    finally:
        _asks_after_failures = before


@contextlib.contextmanager
def ended_with_connections() -> Iterator[None]:
    """End this thread's waits for collectives and messages in host memory once their connections are broken.

    For the block. gloo may continue to wait then until the timeout of the group (see `broken_for_s`), so `wait()` of
    torch's works looks ten times a second.
    """
    wait: Callable[..., bool] = dist.Work.wait
    owner = threading.get_ident()

    def wait_within_bounds(work: dist.Work, *timeout: timedelta, **named: timedelta) -> bool:
        if timeout or named or threading.get_ident() != owner:
            return wait(work, *timeout, **named)
        pending: Pending = work
        await_it: Callable[..., bool] = partial(wait, work)
        if is_message(work):  # gloo closes all connections of its group after a wait with a limit
            pending = message = ThreadedWork(await_it)
            await_it = message.wait
            threading.Thread(target=message.run, name="ddp-message", daemon=True).start()
        while not _ends_within(_POLL_S, pending, await_it):
            pass
        return True

    # A C++ class, whose other users keep its own signature.
    dist.Work.wait = wait_within_bounds  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        dist.Work.wait = wait  # type: ignore[method-assign]


def _ends_within(limit_s: float, work: Pending, wait: Callable[..., object]) -> bool:
    """Wait for a collective by `wait`; return whether it has ended. Raises what the collective raises.

    Raises RuntimeError, too, if the connections were broken and it goes on.
    """
    start = monotonic()
    try:
        wait(timedelta(seconds=limit_s))
        return True
    except RuntimeError as error:
        if is_interrupt(error) or monotonic() < start + limit_s / 2:  # not a timeout
            raise
        if not work.is_completed():
            if broken_for_s() > _BROKEN_S:
                leave_pending(work)
                raise RuntimeError("Connection closed: another rank has failed") from error
            return False
    wait()  # raises the collective's own exception, unless it ended just as time was up
    return True


class ThreadedWork:
    """Blocking messages that a thread makes by `run`, to be awaited like one of torch's works.

    `call` makes them. It is kept until it ends, with what it keeps alive.
    """

    def __init__(self, call: Callable[[], object]) -> None:
        self._call: Callable[[], object] | None = call
        self._done = threading.Event()
        self._error: Exception | None = None

    def run(self) -> None:
        """Make the messages, in the thread; blocks."""
        assert self._call is not None
        try:
            with torch.no_grad():
                self._call()
        except Exception as error:
            self._error = error
        finally:
            self._call = None  # the group may go
            self._done.set()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the messages are complete. Raises RuntimeError if that takes too long, or a rank is gone."""
        if not self._done.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("Operation timed out!")
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error
        return True


_Noted = tuple[str, Callable[[], str] | None, float, int]  # phase, detail, since when, how it waits

_reports: weakref.WeakKeyDictionary[dist.ProcessGroup, StallReport] = weakref.WeakKeyDictionary()
_limits_s: dict[int, float] = {}  # of reports that were given one, by id
_innermost = threading.local()  # has the report of the block of `waiting` that this thread is in


def report_of(group: dist.ProcessGroup | None) -> StallReport:
    """Return the report for calls in `group` (default: all ranks) that belong to no model; its steps are such calls."""
    group = dist.group.WORLD if group is None else group
    assert group is not None
    if group not in _reports:
        _reports[group] = StallReport(group, timeout_s=None, kind="/calls")
    return _reports[group]


@contextlib.contextmanager
def waiting_for_peers(what: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Call collectives of `group` in a block that belongs to no model; CollectiveError says which ranks are missing."""
    report = report_of(group)
    report.check_in_step()
    with report.waiting(what):
        yield
    report.step += 1


def finish(work: Pending | None, *, device: torch.device | None = None) -> None:
    """Wait for a collective within the limit of the caller's block of `waiting`.

    `device` is that of its tensors, if it is not the report's. A `work` of None, on a rank outside of the group, is
    over.
    """
    if work is None:
        return
    report: StallReport | None = getattr(_innermost, "report", None)
    if report is not None:
        report.finish(work, device)
    elif dist.group.WORLD is None:  # a group that torch does not know
        work.wait()
    else:
        report_of(None).wait(work, "exchange between the ranks", device=device)


@contextlib.contextmanager
def at_files(path: PathLike[str]) -> Iterator[None]:
    """Read or write the files at `path` in a block.

    The others wait for this rank as long as the group's timeout allows, since a large checkpoint takes long. One of
    them reports it on stderr after its stall timeout: the file system may not answer at all.
    """
    report = report_of(None) if dist.is_available() and dist.is_initialized() else None
    before = None if report is None else report._position
    try:
        if report is not None:
            report.at(AT_FILES, partial(os.fspath, path))
        yield
    finally:
        if report is not None and before is not None:
            report._position = before


def _write(scene: Scene, heard: Heard) -> None:
    print(describe_stall(scene, heard), file=sys.stderr, flush=True)


def _timeout_of(group: dist.ProcessGroup) -> float:
    """Return the timeout of the group's collectives in seconds: the shortest, if it has several backends."""
    found = [timeout_of(group, device) for device in device_types_of(group)]
    return min((limit.total_seconds() for limit in found if limit is not None), default=_TORCHS_TIMEOUT_S)


def _text_of(detail: Callable[[], str] | None) -> str:
    """Call `detail` while the main thread may change the data that it reads."""
    if detail is None:
        return ""
    for _ in range(5):
        try:
            return printable(detail())
        except RuntimeError:  # a set or dict changed its size meanwhile
            continue
        except Exception as error:  # a bug in it must not lose the report
            return f"(no detail: {type(error).__name__})"
    return "(changes all the time)"
