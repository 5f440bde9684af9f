"""Writes and reads a run's timeline, `timeline.jsonl` in its folder, for `dtrain trace` and `dtrain plot`.

The first line is a JSON object, every other line an array. Times are seconds since `clock`, a time of the controller's
monotonic clock; `began` is the same moment on the wall clock.

    {"format": "dtrain timeline", "version": 1, "run_id", "began", "clock"}
    ["attempt", number, time, [[rank, host], ...]]        begins, or continues with other ranks or hosts
    ["host", host, phase, began, ended]                   phase: connect, agent, check, rendezvous
    ["clock", host, offset_s, error_s]                    from its clock to ours; error null: at most the delay
    ["start", attempt, rank, ordered, started, how]       how: fork (imports already done), exec
    ["end", attempt, rank, time, status, text]            of a worker; text: the fault, else empty
    ["event", kind, time, text]                           kind: notice, signal, host lost
    ["steps", attempt, rank, step, steps, ended, [phases_s]]            as StepTimes in records.py
    ["span", attempt, rank, kind, began, ended]                         as Span
    ["detail", attempt, rank, step, phase, bucket, began, ended]        as Detail

The version changes when a field changes its meaning or is removed. A file of more than LIMIT_BYTES is thinned, in small
pieces with pauses: neighbouring steps are summed up, and details of the older half are dropped, so the oldest records
are the coarsest. If the run ends meanwhile, the file may stay a little larger. A file that cannot be written never
harms the run.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from launcher.errors import RunError

TIMELINE = "timeline.jsonl"
VERSION = 1
LIMIT_BYTES = 16 << 20
THINNED = 0.6  # largest size of a thinned file, as a part of the limit
WAITING = 20_000  # most lines queued for a slow disk; more are dropped
MAX_HEAD_BYTES = 1 << 16
PIECE_LINES = 100  # lines thinned without a pause: 2 ms, in which no other thread of the controller runs
PAUSE_S = 0.005
END_S = 5.0  # at the end, for queued lines
_NAME = "dtrain timeline"
_NEW = f".{TIMELINE}.new"  # the thinned file until it is complete
_to_json = json.JSONEncoder(separators=(",", ":")).encode
Line = list[Any]


class _GivenUp(Exception):
    """The run ends, and thinning would take too long."""


class TimelineFile:
    """Writes in its own thread, from `begin` on; earlier lines are queued.

    Calls `failed` once, in that thread, if the file cannot be written.
    """

    def __init__(
        self, folder: Path, run_id: str, failed: Callable[[OSError], None], *, limit_bytes: int = LIMIT_BYTES
    ) -> None:
        self.clock = time.monotonic()
        self.path = folder / TIMELINE
        if (began := _began(self.path)) is not None:  # SLURM restarted the job: use one time axis for all starts
            self.clock -= max(0.0, time.time() - began)
        self._failed = failed
        self._limit_bytes = limit_bytes
        self._head = {
            "format": _NAME, "version": VERSION, "run_id": run_id, "began": time.time(), "clock": self.clock,
        }  # fmt: skip
        self._waiting: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
        self._is_usable = True
        self._ends = threading.Event()
        self._thins_until = math.inf
        self._thread = threading.Thread(target=self._work, name="timeline", daemon=True)

    def begin(self) -> None:
        """Create the file. Call it once workers are about to start: a run that could not start leaves no file."""
        if self._thread.ident is None:
            try:
                self._thread.start()
            except RuntimeError:  # the thread limit is reached
                self._is_usable = False

    def add(self, *line: Any) -> None:
        """Queue a line. Never blocks. Floats are times or durations."""
        if self._is_usable and self._waiting.qsize() < WAITING:
            self._waiting.put([*line])

    def at(self, when: float) -> float:
        """Convert a time of the controller's monotonic clock to a time of the file."""
        return round(when - self.clock, 6)

    def close(self) -> None:
        """Write queued lines. Blocks for END_S at most."""
        self._thins_until = time.monotonic() + END_S / 2
        self._waiting.put(None)
        self._ends.set()
        if self._thread.ident is not None:
            self._thread.join(END_S)

    # In the thread

    def _work(self) -> None:
        try:
            self._write_all()
        except OSError as error:
            self._is_usable = False
            self._failed(error)

    def _write_all(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.with_name(_NEW).unlink(missing_ok=True)  # left by a killed run
        with contextlib.ExitStack() as stack:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            file = stack.enter_context(open(os.open(self.path, flags, 0o600), "ab", buffering=0))
            if not file.tell():
                file.write(_encoded([self._head]))
            elif not _ends_with_line(self.path):  # the previous run was killed while writing
                file.write(b"\n")
            while True:
                lines, is_last = self._next()
                data = memoryview(_encoded(lines))
                while data:
                    data = data[file.write(data) or 0 :]
                if file.tell() > self._limit_bytes:
                    with contextlib.suppress(_GivenUp):
                        _thin(self.path, int(THINNED * self._limit_bytes), self._pause)
                    stack.close()
                    file = stack.enter_context(open(self.path, "ab", buffering=0))
                if is_last:
                    return

    def _pause(self) -> None:
        """Pause between two pieces. At the end of the run queued lines come first; they may exceed the limit."""
        if self._ends.is_set() and not (self._waiting.empty() and time.monotonic() < self._thins_until):
            raise _GivenUp
        if self._waiting.qsize() < WAITING // 4:
            self._ends.wait(PAUSE_S)

    def _next(self) -> tuple[list[Line], bool]:
        """Wait for lines; return the queued ones, and whether they are the last."""
        lines: list[Line] = []
        line = self._waiting.get()
        while line is not None:
            lines.append(line)
            if self._waiting.empty():
                return lines, False
            line = self._waiting.get()
        return lines, True


def _began(path: Path) -> float | None:
    """Return when the run of an existing file began; None if there is no such file."""
    try:
        with path.open("rb") as file:
            head = _object(file.readline(MAX_HEAD_BYTES))
    except OSError:
        return None
    began = head.get("began") if isinstance(head, dict) and head.get("format") == _NAME else None
    return began if isinstance(began, float) else None


def _ends_with_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def _encoded(lines: Iterable[Any]) -> bytes:
    return "".join(f"{_to_json(line)}\n" for line in lines).encode()


def _thin(path: Path, most_bytes: int, pause: Callable[[], None]) -> None:
    """Shrink the file in place. If summing up steps does not suffice, drop the oldest lines."""
    news = path.with_name(_NEW)
    while (size := path.stat().st_size) > most_bytes:
        _rewrite(path, news, partial(_thinned, half=size // 2), pause)
        if path.stat().st_size > 0.9 * size:  # there is nothing left to sum up
            _rewrite(path, news, partial(_behind, half=path.stat().st_size // 2), pause)


def _rewrite(
    path: Path, news: Path, change: Callable[[Iterator[tuple[int, bytes]]], Iterable[bytes]], pause: Callable[[], None]
) -> None:
    """Rewrite the file: its head, then the result of `change` on the other lines and their positions."""
    descriptor = os.open(news, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with path.open("rb") as old, open(descriptor, "wb") as file:
            file.write(old.readline())
            file.writelines(change(_positioned(old, pause)))
        os.replace(news, path)
    except BaseException:
        news.unlink(missing_ok=True)
        raise


def _positioned(file: Iterable[bytes], pause: Callable[[], None]) -> Iterator[tuple[int, bytes]]:
    """Yield each line with its position in bytes, not counting the head."""
    position = 0
    for number, text in enumerate(file, 1):
        if number % PIECE_LINES == 0:
            pause()
        yield position, text
        position += len(text)


def _behind(lines: Iterable[tuple[int, bytes]], half: int) -> Iterator[bytes]:
    return (text for position, text in lines if position >= half)


def _thinned(lines: Iterable[tuple[int, bytes]], half: int) -> Iterator[bytes]:
    """Sum up each pair of neighbouring steps of a rank, and drop details before the position `half`."""
    waiting: dict[tuple[int, int], Line] = {}
    for position, text in lines:
        if text.startswith(b'["detail"') and position < half:
            continue
        if not text.startswith(b'["steps"'):
            yield text
            continue
        line = _object(text)
        if not isinstance(line, list):  # truncated by a full disk or a killed run
            continue
        first = waiting.pop((line[1], line[2]), None)
        if first is None:
            waiting[line[1], line[2]] = line
            continue
        phases_s = [round(math.fsum(each), 6) for each in zip(first[6], line[6], strict=True)]
        yield _encoded([[*line[:4], first[4] + line[4], line[5], phases_s]])
    for line in waiting.values():
        yield _encoded([line])


def read_lines(folder: Path) -> tuple[dict[str, Any], Iterator[Line]]:
    """Return the head and the lines of a run's file, which may still be growing. Raises RunError."""
    path = folder / TIMELINE
    try:
        with path.open("rb") as file:
            first, start = file.readline(), file.tell()
    except FileNotFoundError as error:
        raise RunError(f"{folder} has no {TIMELINE}: the run had no workers, or is one of an older dtrain") from error
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    if not first.endswith(b"\n"):
        raise RunError(f"{path} has no lines yet: the run has just begun")
    head = _object(first)
    if not isinstance(head, dict) or head.get("format") != _NAME:
        raise RunError(f"{path} is no file of a run's times")
    if head.get("version") != VERSION:
        raise RunError(f"{path} was written by another dtrain (version {head.get('version')}); use that one")
    return head, _rest(path, start)


def _rest(path: Path, start: int) -> Iterator[Line]:
    with path.open("rb") as file:
        file.seek(start)
        for text in file:
            line = _object(text)
            if isinstance(line, list) and line:  # the last one may be truncated
                yield line


def _object(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
