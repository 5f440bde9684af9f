"""Says who is missing, and where, when a collective fails or lasts too long.

torch only knows that a receive timed out or that a peer closed its connection. A StallReport belongs to one wrapped
model. Its owner notes with `at` what this rank does, and waits for collectives with `wait`, or with `finish` inside
of `waiting`. Nothing else in `ddp` waits for a collective. When a wait goes wrong, the ranks tell each other through
the store where they are, and the error is a report of it. The thread of `ddp.monitoring.stall_channel` does so while
the main thread hangs. Nothing here starts a collective.
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
from ddp.torch_internals import device_types_of, is_by_gloo, timeout_of

__all__ = [
    "HostWork",
    "Pending",
    "StallReport",
    "at_files",
    "ended_with_connections",
    "finish",
    "report_of",
    "waiting_for_peers",
]

_TORCHS_TIMEOUT_S = 1800.0
_BROKEN_S = 1.0  # for a collective to fail whose connections are broken
_POLL_S = 1.0  # between two looks for Ctrl-C, which only Python code in the main thread sees
_NOT_WAITING, _BOUNDED, _UNBOUNDED, _FAILED = range(4)  # the last until the owner notes something else


class Pending(Protocol):
    """A reduction on its way: `dist.Work`, or what a communication hook does."""

    def wait(self, timeout: timedelta = ...) -> bool: ...

    def is_completed(self) -> bool: ...


class HostWork:
    """What a model on a device waits for on the host, by gloo or a hook's future: that blocks, so within bounds."""

    def __init__(self, work: Pending) -> None:
        self.wait = work.wait
        self.is_completed = work.is_completed


class StallReport:
    """Where this rank of a group stands in its training, told to the others when somebody waits too long.

    Every rank of the group makes its StallReport of that group in the same order; nothing blocks. `step` is set by
    the owner: the number of finished reductions; texts count steps from 1. `timeout_s` limits each wait; None is nine
    tenths of the group's own timeout, so that this error comes before torch's. `device` is where the collectives run,
    if `wait` is not told: where its streams order them, waiting does not block the caller, and a stall is written to
    stderr instead of raised.
    `kind` tells what is counted apart from the models of the group.
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
        # A backend that is not known is waited for as NCCL: that ends the process where a wait has a limit.
        self._by_host = {"cpu", *(each.type for each in device_types_of(group) if is_by_gloo(group, each))}
        self._device_type = "cpu" if device is None else device.type
        self._position: _Noted = ("the construction of the model", None, monotonic(), _NOT_WAITING)
        self._newest: tuple[Pending, str, float] | None = None  # on a device, and when it was handed over
        self._reported = 0.0
        self._left = ""  # how a wait ended before its collective did, which a signal and a stall leave on its way
        self._begun: list[str] = []  # what is not counted yet
        self._global_ranks: Sequence[int] = range(self.size)
        self._store_thread: StoreThread | None = None
        if self.size > 1:
            with contextlib.suppress(KeyError):  # a group that torch did not make: its ranks' positions are not known
                self._global_ranks = dist.get_process_group_ranks(group)
                self._store_thread = store_thread_of_world()
        self._key = "" if self._store_thread is None else self._store_thread.enter(group.group_name + kind, self)

    @property
    def timeout_s(self) -> float:
        """How long to wait for the others; calls that belong to no model wait no longer than the models do."""
        if self._own_timeout_s is not None:
            return self._own_timeout_s
        others_s = _limits_s.values() if self._is_for_calls else ()
        least_s: float = min([self._longest_s, *others_s])
        return least_s

    @property
    def interval_s(self) -> float:
        """How long the thread waits between two looks at the store."""
        return min(1.0, max(0.1, self.timeout_s / 10))

    def at(self, phase: str, detail: Callable[[], str] | None = None) -> None:
        """Note what this rank does from now on. `detail` is called in another thread, when somebody asks.

        `detail` is kept until the next note: a bound method keeps its object alive.
        """
        self._position = (phase, detail, monotonic(), _NOT_WAITING)

    def wait(self, work: Pending, what: str, *, device: torch.device | None = None) -> None:
        """Wait for a collective on `device` (None: a HostWork on the CPU, others where this report says).

        On the CPU, and what gloo moves on a device, block until it has ended, or raise a CollectiveError that says
        where each rank is; that takes some seconds more if a rank does not answer. After a stall, `work` still runs: it
        may be waited for again, and its tensors are in use until it ends. Otherwise let the current stream wait,
        without blocking; after a stall the report is written to stderr, and then torch's watchdog ends the process, if
        the backend has one.
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
        has_told = False
        while True:
            start = monotonic()
            poll_s = max(0.001, min(_POLL_S, deadline - start))
            try:
                work.wait(timedelta(seconds=poll_s))
                return
            except RuntimeError as error:
                if is_interrupt(error):
                    raise
                if work.is_completed():
                    break
                if monotonic() < start + poll_s / 2:  # that was no timeout
                    raise
                if broken_for_s() > _BROKEN_S:
                    leave_pending(work)
                    raise RuntimeError("the connections of the group were broken off") from error
                if monotonic() >= deadline:
                    deadline = max(deadline, debugged_until() + self.timeout_s)
                    if monotonic() < deadline:
                        continue
                    scene, heard = self._ask(what, "")
                    longest = began + self._longest_s
                    if monotonic() < longest and ranks_at_files(scene, heard):
                        if not has_told and (text := describe_files(scene, heard, longest - monotonic())):
                            print(text, file=sys.stderr, flush=True)
                        has_told = True
                        deadline = min(monotonic() + self.timeout_s, longest)
                        continue
                    self._left = f"has waited too long in the {what}"
                    leave_pending(work)
                    raise self._error(scene, heard) from error
        work.wait()  # raises what the work itself did, unless it came in the moment in which time was up

    def leave_step(self, how: str) -> None:
        """Let `check_in_step` raise from now on; `how` says how this rank got out of step."""
        self._left = how

    def begin(self, what: str) -> None:
        """Be out of step until `counted`: where an exception comes in between, nobody knows what is on its way."""
        self._begun.append(what)

    def counted(self) -> None:
        """What was begun last is done, or counted."""
        self._begun.pop()

    @property
    def is_in_step(self) -> bool:
        """Whether `check_in_step` passes."""
        return not (self._left or self._begun)

    def check_in_step(self) -> None:
        """Raise CollectiveError after `leave_step`, or if a wait ended before its collective, by a signal or a stall.

        That may still run: its tensors are in use until it ends, and the others may be ahead.
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
        """Wait in a block: `finish` in it waits within bounds, as `wait` does, and a RuntimeError becomes the report.

        Where the block waits otherwise, or for a device, a stall is written to stderr.
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
        """Wait for a collective of the block that `waiting` has begun. See `wait`."""
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
                raise
            collective_error = self.error(what, str(error))
            self._position = (what, None, monotonic(), _FAILED)
            raise collective_error from None  # it quotes that one; a second traceback says no more
        finally:
            timeline.wait_ended(recorded)
            if self._position[3] != _FAILED:
                self._position = before

    def tell_failure(self, round_: int, text: str) -> None:
        """Tell the other ranks of an exception here, under a number that they share. Never raises.

        Blocks until the store has it, at most a second.
        """
        if self._store_thread is not None:
            said = json.dumps([self.rank, printable(text)])
            self._store_thread.append(f"failures/{self._key}/{round_}", said + "\n")

    def failures(self, round_: int, *, expected: int = 1, patience_s: float = 2.0) -> dict[int, str]:
        """Return what the ranks told under this number, by rank, when `expected` ranks did or after `patience_s`."""
        told: dict[int, str] = {}
        deadline = monotonic() + patience_s
        while self._store_thread is not None and len(told) < expected and (left_s := deadline - monotonic()) > 0:
            for line in self._store_thread.read(f"failures/{self._key}/{round_}", left_s).splitlines():
                with contextlib.suppress(ValueError, TypeError):  # not what tell_failure writes
                    rank, text = json.loads(line)
                    told.setdefault(int(rank), printable(str(text)))
            if len(told) < expected:
                sleep(0.01)
        return told

    def close(self) -> None:
        """Tell no more of this model: its owner is gone. May be called twice, and in a destructor."""
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
        return Position(self.step, phase, is_waiting, monotonic() - since, _text_of(detail), has_failed)

    def line(self) -> str:
        """Name the line of the user's code that runs now in the thread that made this."""
        frames = sys._current_frames()
        frame = frames.get(self._thread) or frames.get(threading.main_thread().ident or 0)
        return line_of_frame(frame)

    def look(self) -> None:
        """Write a report to stderr, once, of what no error can tell now."""
        now = monotonic()
        what, _, since, kind = self._position
        if kind == _UNBOUNDED:
            self._report_later(what, since)
        # Only a work that no other has followed is asked: training that goes on never is, nor a graph capture.
        if self._newest is not None and now - self._newest[2] > self.timeout_s:
            work, what, since = self._newest
            if work.is_completed():
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
        """Make the error for a collective that failed, or that lasts too long if torch says nothing. Blocks: asks."""
        return self._error(*self._ask(what, torchs_text))

    def _error(self, scene: Scene, heard: Heard) -> CollectiveError:
        missing = self.in_world(find_missing(scene, heard))
        return CollectiveError(describe_stall(scene, heard), rank=self.rank, what=scene.what, failed_ranks=missing)

    def _ask(self, what: str, torchs_text: str) -> tuple[Scene, Heard]:
        """What this rank knows of a wait, and what the others answer."""
        scene = self._scene(what, torchs_text, self._position[2])
        store_thread = self._store_thread
        heard = Heard({}, "" if self.size == 1 else "there is no store to ask the others through")
        if store_thread is not None and (_asks_after_failures or not torchs_text):
            heard = store_thread.ask(self._others(), self._patience_s())
        return scene, heard

    def in_world(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return the numbers in the world of ranks of the group."""
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
    """Where a collective fails in the block, raise at once, and do not ask the others where they are: one is gone."""
    global _asks_after_failures
    before, _asks_after_failures = _asks_after_failures, False
    try:
        yield
    finally:
        _asks_after_failures = before


@contextlib.contextmanager
def ended_with_connections() -> Iterator[None]:
    """In the block, end waits for the script's own collectives in host memory once their connections are broken.

    gloo may go on waiting then until the timeout of the group (see `broken_for_s`). So `wait()` of torch's collectives
    looks every second.
    """
    wait: Callable[..., bool] = dist.Work.wait

    def wait_within_bounds(work: dist.Work, *timeout: timedelta, **named: timedelta) -> bool:
        while not (timeout or named or work.is_completed()):
            start = monotonic()
            try:
                return wait(work, timedelta(seconds=_POLL_S))
            except RuntimeError as error:
                if is_interrupt(error) or work.is_completed() or monotonic() < start + _POLL_S / 2:
                    raise
                if broken_for_s() > _BROKEN_S:
                    leave_pending(work)
                    raise RuntimeError("Connection closed: another rank has failed") from error
        return wait(work, *timeout, **named)

    # A class of C++, whose other users keep its own signature.
    dist.Work.wait = wait_within_bounds  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        dist.Work.wait = wait  # type: ignore[method-assign]


_Noted = tuple[str, Callable[[], str] | None, float, int]  # phase, detail, since when, how it waits

_reports: weakref.WeakKeyDictionary[dist.ProcessGroup, StallReport] = weakref.WeakKeyDictionary()
_limits_s: dict[int, float] = {}  # of the reports whose makers gave one, by id
_innermost = threading.local()  # has the report of the block of `waiting` that this thread is in


def report_of(group: dist.ProcessGroup | None) -> StallReport:
    """Return the one for calls in `group` (default: all ranks) that belong to no model; its steps are such calls."""
    group = dist.group.WORLD if group is None else group
    assert group is not None
    if group not in _reports:
        _reports[group] = StallReport(group, timeout_s=None, kind="/calls")
    return _reports[group]


@contextlib.contextmanager
def waiting_for_peers(what: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Call collectives of `group` in a block that belongs to no model: where one fails, CollectiveError says who."""
    report = report_of(group)
    report.check_in_step()
    with report.waiting(what):
        yield
    report.step += 1


def finish(work: Pending | None, *, device: torch.device | None = None) -> None:
    """Wait for a collective within the limit of the block of `waiting` that the caller is in.

    `device` is where it moves tensors, if that is not the report's. None, of a rank that is not in the group, is over.
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

    The others wait for this rank as long as the group's timeout lets them, since a large checkpoint takes long. One of
    them says so on stderr after its stall timeout: the file system may not answer at all.
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
    """The timeout of the group's collectives in seconds: the shortest, if it has several backends."""
    found = [timeout_of(group, device) for device in device_types_of(group)]
    return min((limit.total_seconds() for limit in found if limit is not None), default=_TORCHS_TIMEOUT_S)


def _text_of(detail: Callable[[], str] | None) -> str:
    """Call it while the main thread changes what it reads."""
    if detail is None:
        return ""
    for _ in range(5):
        try:
            return printable(detail())
        except RuntimeError:  # a set or dict changed its size meanwhile
            continue
        except Exception as error:  # its author's mistake must not cost the report
            return f"(no detail: {type(error).__name__})"
    return "(changes all the time)"
