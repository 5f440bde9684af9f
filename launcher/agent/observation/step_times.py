"""Reads the step times that workers record, and sends them summed up: the amount of data on the stream is limited.

ddp/monitoring/timeline.py has the format of the file that a worker writes. For a worker that trains without ddp, only
the number of steps is known, and when the newest ended: all since the last look are one record, without phases.
Workers may write anything: only records that can be true are sent, and others are dropped. Owned by attempt.py.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable

from launcher.agent.stream_writer import StreamWriter
from launcher.agent.workers.memory_file import MemoryFile
from launcher.protocol.reports import Timings
from launcher.timeline.records import PHASES, SPANS, Detail, Record, Span, StepTimes, pack

RECORDS = 1024  # in the ring of a worker: about a second
SPANS_AT_MOST = 32  # for a worker, in one message
DETAILS = 4  # for each StepTimes of a worker; the longest are kept
LOST_AT_MOST = 1 << 31  # a larger number cannot be a count
RECORDS_AT_MOST = 10_000  # in one message
_HEADER = struct.Struct("<QQ")
_RECORD = struct.Struct("<q8d")
_STEP, _SPAN, _DETAIL = range(3)
_KINDS = 4
_LATE_S = 1.0  # an end further in the future cannot be true
_LARGEST_STEP = 2**53


class _Ring:
    """Records of one worker, from `began` on. It numbers its steps from 1; its rank made `before` steps before that."""

    def __init__(self, rank: int, path: str, began: float, before: int, *, in_memory: bool) -> None:
        """Raises OSError."""
        self.rank = rank
        self.file = MemoryFile("timeline", path, _HEADER.size + RECORDS * _RECORD.size, in_memory=in_memory)
        self.steps = before  # made by the rank, as far as collected
        self._before = before
        self._began = began
        self._read = 0  # number of records read
        self._counted = (0, began)  # steps counted without ddp, and when the last of them ended
        self._made: list[StepTimes] = []  # made of them, not collected yet

    def count(self, attempt: int, steps: int, ended: float, now: float) -> None:
        """Add the number of steps counted without ddp until `ended`. Time before the first look is no step."""
        (before, since), self._counted = self._counted, (steps, ended)
        made, length_s = steps - before, ended - since
        if before and 0 < made <= LOST_AT_MOST and length_s > 0.0 and self._may_be(steps, self._began, ended, now):
            phases_s = (*(0.0 for _ in PHASES[1:]), length_s)
            self._made.append(StepTimes(attempt, self.rank, self._before + steps, made, ended, phases_s))

    def collect(self, attempt: int, now: float, at_most: int) -> tuple[list[Record], int]:
        """Return the records since the last call, in order, and how many were lost."""
        steps, self._made = self._made, []
        spans: list[Span] = []
        details: list[Detail] = []
        values, lost = self._new()
        for kind, *numbers in values:
            record = self._record(attempt, int(kind) % _KINDS, numbers, now)
            if isinstance(record, StepTimes):
                steps.append(record)
            elif isinstance(record, Span):
                spans.append(record)
            elif record is not None:
                details.append(record)
            else:
                lost += 1
        self.steps = max(self.steps, *(each.step for each in steps), 0)
        last = max((detail.step for detail in details), default=0)
        shown = [detail for detail in details if detail.step == last]
        shown = sorted(shown, key=lambda detail: detail.ended - detail.began)[-DETAILS * at_most :]
        records: list[Record] = [*_summed(steps, at_most), *spans[-SPANS_AT_MOST:], *shown]
        return sorted(records, key=lambda record: record.ended), lost

    def _new(self) -> tuple[list[tuple[float, ...]], int]:
        """Return the records that were not read yet, and how many were lost."""
        # Read, not mapped: a mapped file truncated by its worker would end the agent with SIGBUS.
        header = os.pread(self.file.descriptor, _HEADER.size, 0)
        written = _HEADER.unpack(header)[1] if len(header) == _HEADER.size else 0
        before, self._read = self._read, written
        if written <= before:
            return [], 0
        first = max(before, written - RECORDS)
        data = os.pread(self.file.descriptor, RECORDS * _RECORD.size, _HEADER.size)
        found = []
        for number in range(first, written):
            at = number % RECORDS * _RECORD.size
            if at + _RECORD.size <= len(data):
                values = _RECORD.unpack_from(data, at)
                if values[0] // _KINDS == number:  # else it was overwritten meanwhile
                    found.append(values)
        return found, min(written - before, LOST_AT_MOST) - len(found)

    def _record(self, attempt: int, kind: int, values: list[float], now: float) -> Record | None:
        """Convert numbers to a record; return None if they cannot be true."""
        if not all(map(math.isfinite, values)):
            return None
        if kind == _STEP:
            step, ended, *phases_s = values
            longest_s = ended - self._began
            if not self._may_be(step, self._began, ended, now) or min(phases_s) < 0 or max(phases_s) > longest_s:
                return None
            number = self._before + int(step)
            return StepTimes(attempt, self.rank, number, steps=1, ended=ended, phases_s=tuple(phases_s))
        if kind == _SPAN:
            span, began, ended = values[:3]
            if not self._may_be(0, began, ended, now) or span not in range(len(SPANS)):
                return None
            return Span(attempt, self.rank, SPANS[int(span)], began, ended)
        phase, bucket, step, began, ended = values[:5]
        if kind != _DETAIL or phase not in range(len(PHASES)) or not -1 <= bucket < 2**31:
            return None
        if not self._may_be(step, began, ended, now):
            return None
        return Detail(attempt, self.rank, self._before + int(step), PHASES[int(phase)], int(bucket), began, ended)

    def _may_be(self, step: float, began: float, ended: float, now: float) -> bool:
        return 0 <= step <= _LARGEST_STEP - self._before and self._began <= began <= ended <= now + _LATE_S


def _summed(steps: list[StepTimes], at_most: int) -> Iterable[StepTimes]:
    """Yield at most `at_most` records: neighbours are summed up."""
    size = math.ceil(len(steps) / at_most)
    for first in range(0, len(steps), size or 1):
        group = steps[first : first + size]
        last = group[-1]
        phases_s = tuple(math.fsum(each) for each in zip(*(times.phases_s for times in group), strict=True))
        made = sum(times.steps for times in group)
        yield StepTimes(last.attempt, last.rank, last.step, made, last.ended, phases_s)


class StepTimesReader:
    """Reads the files of an attempt's workers. `at_most`: number of StepTimes of a worker in one message.

    `asked` is when the controller sent the newest heartbeat, and when it arrived here, each by its own clock.
    """

    def __init__(self, attempt: int, writer: StreamWriter, *, folder: str, at_most: int) -> None:
        self.asked = (0.0, 0.0)
        self._attempt = attempt
        self._writer = writer
        self._folder = folder
        self._at_most = max(1, at_most)
        self._rings: dict[int, _Ring] = {}  # by rank

    def open(self, rank: int, now: float, *, in_memory: bool = True) -> str:
        """Return the file for a worker that is about to start; empty if it cannot be made."""
        path = f"{self._folder}/{self._attempt}-{rank}.timeline"
        before = ring.steps if (ring := self._rings.get(rank)) is not None else 0
        self._close(rank)
        try:
            self._rings[rank] = _Ring(rank, path, now, before, in_memory=in_memory)
        except OSError:  # no memory or no descriptor: the worker runs without it
            return ""
        return self._rings[rank].file.path

    def count(self, rank: int, steps: int, ended: float, now: float) -> None:
        """Add the number of steps that a worker counted without ddp, and when the newest ended."""
        if (ring := self._rings.get(rank)) is not None:
            ring.count(self._attempt, steps, ended, now)

    def send(self, now: float, ranks: Iterable[int] | None = None) -> None:
        """Send new records of all workers, or of some."""
        records: list[Record] = []
        lost = 0
        for rank in [*self._rings] if ranks is None else ranks:
            if (ring := self._rings.get(rank)) is not None:
                new, missed = ring.collect(self._attempt, now, self._at_most)
                records += new
                lost += missed
        for first in range(0, len(records), RECORDS_AT_MOST):
            part = records[first : first + RECORDS_AT_MOST]
            sent, received = self.asked
            self._writer.send(Timings(self._attempt, now, sent, received, lost, pack(part)))
            lost = 0

    def close(self) -> None:
        for rank in [*self._rings]:
            self._close(rank)

    def _close(self, rank: int) -> None:
        if (ring := self._rings.pop(rank, None)) is not None:
            ring.file.close()
