"""Says who is missing, and where, when a collective fails or lasts too long.

torch only knows that a receive timed out or that a peer closed its connection. A StallReport belongs to one wrapped
model: its owner notes with `at` what this rank does, and waits for collectives with `wait`. When a wait goes
wrong, the ranks tell each other through the store where they are (`ddp.monitoring.stall_channel` has the thread that
does so while the main thread hangs), and the error is a report of it. Nothing here starts a collective.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import re
import sys
import sysconfig
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep
from types import FrameType, TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ddp.errors import ArgumentError, CollectiveError, DdpError
from ddp.monitoring.stall_channel import Answer, Heard, Position, StoreThread, printable, store_thread_of_world
from ddp.torch_internals import device_types_of, timeout_of

__all__ = ["Pending", "StallReport", "report_of", "waiting_for_peers"]

_TORCHS_TIMEOUT_S = 1800.0
_MOST_FINDINGS = 16  # of other ranks in a report, which should fit one screen
_NOT_WAITING, _BOUNDED, _UNBOUNDED = range(3)
_VICTIM = 5  # sorts after every other place


class Pending(Protocol):
    """A reduction on its way: `dist.Work`, or what a communication hook does."""

    def wait(self, timeout: timedelta = ...) -> bool: ...

    def is_completed(self) -> bool: ...


class StallReport:
    """Where this rank of a group stands in its training, told to the others when somebody waits too long.

    Every rank of the group makes its StallReport of that group in the same order; nothing blocks. `step` is set by
    the owner: the number of finished reductions; texts count steps from 1. `timeout_s` limits each wait; None is nine
    tenths of the group's own timeout, so that this error comes before torch's. `device` is where the collectives run:
    unless it is the CPU, waiting does not block the caller, and a stall is written to stderr instead of raised.
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
        self.timeout_s = 0.9 * _timeout_of(group) if timeout_s is None else timeout_s
        self.interval_s = min(1.0, max(0.1, self.timeout_s / 10))  # between two looks at the store
        self._thread = threading.get_ident()
        self._limit = timedelta(seconds=self.timeout_s)
        self._blocks = device is None or device.type == "cpu"
        self._position: _Noted = ("the construction of the model", None, monotonic(), _NOT_WAITING)
        self._newest: tuple[Pending, str, float] | None = None  # on a device, and when it was handed over
        self._reported = 0.0
        self._global_ranks: Sequence[int] = range(self.size)
        self._store_thread: StoreThread | None = None
        if self.size > 1:
            with contextlib.suppress(KeyError):  # a group that torch did not make: its ranks' positions are not known
                self._global_ranks = dist.get_process_group_ranks(group)
                self._store_thread = store_thread_of_world(_how_it_ends)
        self._key = "" if self._store_thread is None else self._store_thread.enter(group.group_name + kind, self)

    def at(self, phase: str, detail: Callable[[], str] | None = None) -> None:
        """Note what this rank does from now on. `detail` is called in another thread, when somebody asks.

        `detail` is kept until the next note: a bound method keeps its object alive.
        """
        self._position = (phase, detail, monotonic(), _NOT_WAITING)

    def wait(self, work: Pending, what: str) -> None:
        """Wait for a collective, or raise a CollectiveError that says where each rank is.

        That takes some seconds more if a rank does not answer. After a stall, `work` still runs: it may be waited for
        again, and its tensors are in use until it ends.
        """
        before = self._position
        self._position = (what, None, monotonic(), _BOUNDED if self._blocks else _UNBOUNDED)
        try:
            if self._blocks:
                self._wait_here(work, what)
            else:
                work.wait()
                self._newest = (work, what, monotonic())
        except DdpError:
            raise
        except RuntimeError as error:
            raise self.error(what, str(error)) from error
        finally:
            self._position = before

    def _wait_here(self, work: Pending, what: str) -> None:
        try:
            work.wait(self._limit)
        except RuntimeError as error:
            if not work.is_completed():
                _pending[:] = [*(other for other in _pending if not other.is_completed()), work]
                raise self.error(what, "") from error
            work.wait()  # raises what the work itself did, unless it came in the moment in which time was up

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Wait in a block that has no Work: its RuntimeError becomes the report, and a stall is written to stderr."""
        before = self._position
        self._position = (what, None, monotonic(), _UNBOUNDED)
        try:
            yield
        except DdpError:
            raise
        except RuntimeError as error:
            raise self.error(what, str(error)) from error
        finally:
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
        if store_thread is not None:
            store_thread.leave(self._key, self.step)

    def __del__(self) -> None:
        if getattr(self, "_key", None):  # else the constructor has failed
            self.close()

    # For the thread

    def position(self) -> Position:
        """Describe where this rank is now."""
        phase, detail, since, kind = self._position
        return Position(self.step, phase, kind != _NOT_WAITING, monotonic() - since, _text_of(detail))

    def line(self) -> str:
        """Name the line of the user's code that runs now in the thread that made this."""
        frames = sys._current_frames()
        frame = frames.get(self._thread) or frames.get(threading.main_thread().ident or 0)
        return _line_among(list(_spots(frame)))

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
            self._reported = since
            scene = self._scene(what, "", since)
            self._store_thread.ask_later(self._others(), self._patience_s(), lambda heard: _write(scene, heard))

    # When something is wrong

    def error(self, what: str, torchs_text: str) -> CollectiveError:
        """Make the error for a collective that failed, or that lasts too long if torch says nothing. Blocks: asks."""
        scene = self._scene(what, torchs_text, self._position[2])
        store_thread = self._store_thread
        heard = Heard({}, "" if self.size == 1 else "there is no store to ask the others through")
        if store_thread is not None:
            heard = store_thread.ask(self._others(), self._patience_s())
        return CollectiveError(_report(scene, heard), rank=self.rank, what=what)

    def _others(self) -> list[int]:
        return [number for rank, number in enumerate(self._global_ranks) if rank != self.rank]

    def _patience_s(self) -> float:
        return 1.0 + 2 * self.interval_s

    def _scene(self, what: str, torchs_text: str, since: float) -> _Scene:
        return _Scene(
            rank=self.rank,
            global_ranks=tuple(self._global_ranks),
            key=self._key,
            step=self.step,
            what=what,
            waited_s=monotonic() - since,
            limit_s=self.timeout_s,
            torchs_text=printable(torchs_text, 300),
        )


# Calls that belong to no model


_reports: weakref.WeakKeyDictionary[dist.ProcessGroup, StallReport] = weakref.WeakKeyDictionary()


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
    with report.waiting(what):
        yield
    report.step += 1


_Noted = tuple[str, Callable[[], str] | None, float, int]  # phase, detail, since when, how it waits


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


# The report


@dataclass(frozen=True)
class _Scene:
    """What the rank that asks knows by itself; no `torchs_text` after a stall."""

    rank: int
    global_ranks: tuple[int, ...]
    key: str
    step: int
    what: str
    waited_s: float
    limit_s: float
    torchs_text: str


@dataclass(frozen=True)
class _Finding:
    """What ranks in the same place have in common; the likeliest cause sorts first. Order 0 is where they should be."""

    order: int
    text: str
    tail: str = ""


def _write(scene: _Scene, heard: Heard) -> None:
    print(_report(scene, heard), file=sys.stderr, flush=True)


def _report(scene: _Scene, heard: Heard) -> str:
    """Say who is missing, then where every rank is: at most one screen."""
    positions: dict[_Finding, list[tuple[int, float]]] = {_Finding(0, ""): [(scene.rank, scene.waited_s)]}
    if not heard.trouble:
        for rank, number in enumerate(scene.global_ranks):
            if rank != scene.rank:
                finding, for_s = _finding_of(scene, heard.answers.get(number))
                positions.setdefault(finding, []).append((rank, for_s))
    elsewhere = sorted((finding for finding in positions if finding.order), key=lambda it: (it.order, positions[it]))
    causes = [finding for finding in elsewhere if finding.order != _VICTIM] or elsewhere
    gone = sorted(rank for finding in causes for rank, _ in positions[finding])
    lines = [_headline(scene, gone, heard.trouble)]
    for finding in elsewhere[:_MOST_FINDINGS]:
        there = positions[finding]
        lines += [f"  {_names(rank for rank, _ in there)}: {finding.text}{_durations(there)}{finding.tail}"]
    if len(elsewhere) > _MOST_FINDINGS:
        rest = [rank for finding in elsewhere[_MOST_FINDINGS:] for rank, _ in positions[finding]]
        lines.append(f"  {_names(rest)}: elsewhere")
    if not heard.trouble:
        here = positions[_Finding(0, "")]
        lines.append(f"  {_names(rank for rank, _ in here)}: in the {scene.what}{_durations(here)}")
    if scene.global_ranks != tuple(range(len(scene.global_ranks))):
        lines.append(f"  (ranks of a group; in the world they are {', '.join(map(str, scene.global_ranks[:64]))})")
    lines.append(_advice(scene, gone, heard.trouble))
    return "\n".join(lines)


def _headline(scene: _Scene, gone: Sequence[int], trouble: str) -> str:
    size = len(scene.global_ranks)
    where = f"the {scene.what} of step {scene.step + 1}"
    if scene.torchs_text:
        seen = f"{where} failed on rank {scene.rank} of {size} after {scene.waited_s:.1f} s"
    else:
        seen = f"rank {scene.rank} of {size} has waited {scene.waited_s:.1f} s in {where}"
    if trouble:
        return f"{seen}, and it is not known where the others are: {trouble}"
    if gone:
        return f"{_names(gone)} {'is' if len(gone) == 1 else 'are'} missing: {seen}"
    return f"{seen}, and no rank is missing: all {size} are there"


def _finding_of(scene: _Scene, answer: Answer | None) -> tuple[_Finding, float]:
    """Describe one other rank, and for how long that has been so."""
    if answer is None:
        reason = "its process is gone, stopped or cut off, or native code in it holds Python's lock"
        return _Finding(1, f"does not answer: {reason}"), 0.0
    position = answer.positions.get(scene.key)
    if answer.ended or scene.key in answer.finished:
        ended = answer.ended or f"has deleted this model, and is at {answer.line}"
        after = f" (after step {answer.finished[scene.key]})" if scene.key in answer.finished else ""
        return _Finding(_VICTIM if answer.is_victim else 2, ended + after), 0.0
    closed = "" if answer.has_group else "; it has closed its process group"
    if position is None:
        return _Finding(3, f"has not made this model (yet), and is at {answer.line}{closed}"), 0.0
    if position.is_waiting and (position.phase, position.step) == (scene.what, scene.step):
        return _Finding(0, ""), position.for_s
    text = f"step {position.step + 1}, {position.phase}"
    detail = f"; {position.detail}" if position.detail else ""
    if position.is_waiting:
        return _Finding(4, f"waits in step {position.step + 1}, {position.phase}", detail + closed), position.for_s
    others = [other for key, other in answer.positions.items() if key != scene.key and other.is_waiting]
    busy = f"; it waits for another model in step {others[0].step + 1}, {others[0].phase}" if others else ""
    return _Finding(3, text, f", at {answer.line}{detail}{busy}{closed}"), position.for_s


def _advice(scene: _Scene, gone: Sequence[int], trouble: str) -> str:
    if scene.torchs_text:
        return f"  torch says: {scene.torchs_text}"
    if gone or trouble:
        return f"  If a rank is only slow, allow more than stall_timeout_s = {scene.limit_s:g} s."
    return (
        "  The network between the ranks may be blocked, or they sent different amounts; "
        f"if it is only slow, allow more than stall_timeout_s = {scene.limit_s:g} s."
    )


def _durations(ranks: Sequence[tuple[int, float]]) -> str:
    times = [for_s for _, for_s in ranks]
    if not max(times):
        return ""
    first, last = f"{min(times):.1f}", f"{max(times):.1f}"
    return f" for {last} s" if first == last else f" for {first} to {last} s"


def _names(ranks: Any) -> str:
    """`rank 3` or `ranks 0-2, 5`."""
    ordered = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:12]]
    more = f" and {len(runs) - 12} more" if len(runs) > 12 else ""
    return f"rank{'s' if len(ordered) > 1 else ''} {', '.join(shown)}{more}"


# Where a thread is, in the user's terms

_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_OURS = str(Path(__file__).parents[1]) + os.sep
_PACKAGES = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")
_Spot = tuple[str, int, str]  # file, line, function


def _spots(frame: FrameType | None) -> Iterable[_Spot]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def _spots_of(trace: TracebackType | None) -> list[_Spot]:
    spots = []
    while trace is not None:
        code = trace.tb_frame.f_code
        spots.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return spots[::-1]


def _line_among(spots: Sequence[_Spot]) -> str:
    """The innermost of the user's own lines, and what runs inside it; `spots` come innermost first."""
    if not spots:
        return "an unknown line"
    own = min(spots, key=lambda spot: _foreignness(spot[0]))  # the first of the least foreign
    inner = spots[0]
    inside = "" if inner is own or inner[0].startswith(_OURS) else f", inside {_spot_text(inner)}"
    return printable(_spot_text(own) + inside)


def _foreignness(file: str) -> int:
    if file.startswith((_TORCH, _OURS, "<frozen ")):
        return 2
    if _PACKAGES.match(file):
        return 1
    return 2 if file.startswith(_STDLIB) else 0


def _spot_text(spot: _Spot) -> str:
    file, line, function = spot
    short = _PACKAGES.sub("", file)
    if short == file and file.startswith(_STDLIB):
        short = file[len(_STDLIB) :]
    with contextlib.suppress(ValueError, OSError):  # not below the working directory, or that is gone
        short = str(Path(short).relative_to(Path.cwd()))
    return f"{short}:{line} in {function}"


def _how_it_ends() -> tuple[str, bool]:
    """How this process ends, as seen when it does; and whether another rank is the cause."""
    error = getattr(sys, "last_value", None)
    if error is None or hasattr(sys, "ps1"):  # an interactive session goes on after an error
        return "has exited", False
    line = _line_among(_spots_of(error.__traceback__))
    said = traceback.format_exception_only(error)[0].splitlines()[0]  # also if its str() fails
    is_victim = isinstance(error, CollectiveError | dist.DistError) or "onnection closed by peer" in said
    return f"ended with {printable(said, 250)}, at {line}", is_victim


# The end of the process after a stall

_pending: list[Pending] = []  # those that have stalled


def _leave_at_once() -> None:
    """End a process that ends with an exception while a collective still hangs.

    At the interpreter's teardown, gloo would wait for that until the group's own timeout (half an hour by default),
    and neither the launcher nor the other ranks would learn that this rank has failed.
    """
    error = getattr(sys, "last_value", None)
    if isinstance(error, Exception) and not hasattr(sys, "ps1") and not all(work.is_completed() for work in _pending):
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # missing or closed
                stream.flush()
        os._exit(1)  # as after any exception


atexit.register(_leave_at_once)  # at import, so that what is registered later has run before
