"""What is known of the time of ranks: steps with their phases, spans that are no step, and single steps in detail.

Made on the hosts (launcher/agent/step_times.py) from what ranks record (ddp/monitoring/timeline.py), and sent in the
payload of `Timings`: `pack` and `unpack` are its format. Times are seconds of the monotonic clock: that of the host in
a message, that of the controller afterwards.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from math import isnan
from typing import Any, TypeAlias

from launcher.errors import ProtocolError
from launcher.frozen import dataclass

__all__ = ["PHASES", "SPANS", "Detail", "Record", "Span", "StepTimes", "pack", "unpack"]

PHASES = ("data", "forward", "backward", "wait", "optimizer", "other")
SPANS = ("evaluation", "save", "load", "recovery")
KNOWN = 2**53  # larger integers are none in a float
LONGEST_S = 1e12  # of any clock


@dataclass(frozen=True)
class StepTimes:
    """One step of one rank, or several in a row that were summed up.

    A step ends where the optimizer's step ends; without one that is known, where the next forward begins. What a rank
    does before its first forward belongs to no step. Of a rank that trains without ddp all of a step is "other".
    """

    attempt: int
    rank: int
    step: int  # number of the last of them, as ddp.monitoring.progress counts steps
    steps: int  # how many
    ended: float  # when the last of them did
    # By PHASES, the sums over `steps`; together the wall time from the end of the step before to `ended`. "other" also
    # has the spans that lie in it.
    phases_s: tuple[float, ...]

    @property
    def is_divided(self) -> bool:
        """Whether more is known than its length."""
        return any(self.phases_s[: PHASES.index("other")])


@dataclass(frozen=True)
class Span:
    """Something that is no step, of one of the kinds in SPANS."""

    attempt: int
    rank: int
    kind: str
    began: float
    ended: float


@dataclass(frozen=True)
class Detail:
    """A part of one step: a phase from PHASES, as often as it came; a wait is for the bucket `bucket` (else -1)."""

    attempt: int
    rank: int
    step: int
    phase: str
    bucket: int
    began: float
    ended: float


Record: TypeAlias = StepTimes | Span | Detail

_STEP, _SPAN, _DETAIL = 0, 1, 2
_NONE = (0.0,) * 5
_FORMAT = struct.Struct("<BBiIIq7d")  # which of them, its kind, bucket, rank, how many steps, step, 7 times


def pack(records: Iterable[Record]) -> bytes:
    """Return the payload of a message, without the attempt, which the message has."""
    return b"".join(map(_packed, records))


def _packed(record: Record) -> bytes:
    match record:
        case StepTimes():
            times = (record.ended, *record.phases_s)
            return _FORMAT.pack(_STEP, 0, 0, record.rank, record.steps, record.step, *times)
        case Span():
            kind = SPANS.index(record.kind)
            return _FORMAT.pack(_SPAN, kind, 0, record.rank, 0, 0, record.began, record.ended, *_NONE)
        case Detail():
            kind, times = PHASES.index(record.phase), (record.began, record.ended, *_NONE)
            return _FORMAT.pack(_DETAIL, kind, record.bucket, record.rank, 0, record.step, *times)


def unpack(data: bytes, attempt: int, offset_s: float = 0.0) -> list[Record]:
    """Return what a payload says, by a clock that shows `offset_s` more. Raises ProtocolError for any other payload."""
    try:
        return [_unpacked(fields, attempt, offset_s) for fields in _FORMAT.iter_unpack(data)]
    except (struct.error, IndexError, ValueError) as error:
        raise ProtocolError(f"these are no records of times: {error}") from error


def _unpacked(fields: tuple[Any, ...], attempt: int, offset_s: float) -> Record:
    which, kind, bucket, rank, steps, step, *times = fields
    if not (min(times) >= -LONGEST_S and max(times) <= LONGEST_S and 0 <= step <= KNOWN) or isnan(sum(times)):
        raise ValueError("a number out of range")
    first = times[0] + offset_s
    # All by their names: that is quicker, of these classes.
    if which == _STEP:
        phases_s = tuple(times[1:])
        if steps == 0 or min(phases_s) < 0.0 or kind or bucket:
            raise ValueError("a step that is none")
        return StepTimes(attempt=attempt, rank=rank, step=step, steps=steps, ended=first, phases_s=phases_s)
    ended = times[1] + offset_s
    if not first <= ended:
        raise ValueError("an end before the beginning")
    if which == _SPAN:
        return Span(attempt=attempt, rank=rank, kind=SPANS[kind], began=first, ended=ended)
    if which == _DETAIL:
        phase = PHASES[kind]
        return Detail(attempt=attempt, rank=rank, step=step, phase=phase, bucket=bucket, began=first, ended=ended)
    raise ValueError(f"record {which}")
