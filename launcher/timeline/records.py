"""Records of what ranks spend their time on: steps with their phases, spans outside of steps, and details of a step;
and the Timeline, which distributes them to subscribers.

Agents (launcher/agent/observation/step_times.py) make them from what ranks record (ddp/monitoring/timeline.py) and send
them as the payload of `Timings`; `pack` and `unpack` define its format. Times are seconds on a monotonic clock: the
host's in a message, the controller's after `unpack`.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable
from math import isnan
from typing import Any, TypeAlias

from launcher.errors import ProtocolError
from launcher.frozen import dataclass

PHASES = ("data", "forward", "backward", "wait", "optimizer", "other")
SPANS = ("evaluation", "save", "load", "recovery")
NEWEST = 32  # StepTimes that a Timeline keeps of each rank
MOST_STEPS = 2**53  # a float holds larger integers inexactly
LONGEST_S = 1e12  # largest time of any clock


@dataclass(frozen=True)
class StepTimes:
    """One step of a rank, or the sum of several in a row.

    A step ends at the end of the optimizer's step, or where the next forward begins if no optimizer is known. Work
    before the first forward belongs to no step. For a rank that trains without ddp, a step is wholly "other".
    """

    attempt: int
    rank: int
    step: int  # number of the last step, as ddp.monitoring.progress counts them
    steps: int  # number of steps in this record
    ended: float  # end of the last step
    # By PHASES, summed over `steps`; the total is the wall time from the end of the previous step to `ended`. "other"
    # includes spans.
    phases_s: tuple[float, ...]

    @property
    def is_divided(self) -> bool:
        """Whether its phases are known, not only its length."""
        return any(self.phases_s[: PHASES.index("other")])


@dataclass(frozen=True)
class Span:
    """Time outside of steps. `kind` is one of SPANS."""

    attempt: int
    rank: int
    kind: str
    began: float
    ended: float


@dataclass(frozen=True)
class Detail:
    """A part of one step: one occurrence of a phase from PHASES. `bucket` is the one waited for, else -1."""

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
_FORMAT = struct.Struct("<BBiIIq7d")  # record type, kind, bucket, rank, steps, step, 7 times


def pack(records: Iterable[Record]) -> bytes:
    """Return the payload of a message. It does not include the attempt, which is a field of the message."""
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
    """Return the records of a payload, with `offset_s` added to their times. Raises ProtocolError if malformed."""
    try:
        return [_unpacked(fields, attempt, offset_s) for fields in _FORMAT.iter_unpack(data)]
    except (struct.error, IndexError, ValueError) as error:
        raise ProtocolError(f"malformed records of times: {error}") from error


def _unpacked(fields: tuple[Any, ...], attempt: int, offset_s: float) -> Record:
    which, kind, bucket, rank, steps, step, *times = fields
    if not (min(times) >= -LONGEST_S and max(times) <= LONGEST_S and 0 <= step <= MOST_STEPS) or isnan(sum(times)):
        raise ValueError("a number out of range")
    first = times[0] + offset_s
    # Keyword arguments are faster with launcher.frozen's dataclasses.
    if which == _STEP:
        phases_s = tuple(times[1:])
        if steps == 0 or min(phases_s) < 0.0 or kind or bucket:
            raise ValueError("not a valid step")
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


class Timeline:
    """Passes records, on the controller's clock, to all subscribers in the order of arrival.

    Records of one rank are ordered by their end. Records of different ranks are not ordered; a slow connection delays
    them. Owned by the controller's loop. It keeps only what a late subscriber needs; the run's file (file.py) has
    everything.
    """

    def __init__(self) -> None:
        self._subscribers: list[Callable[[Record], None]] = []
        self._newest: dict[int, deque[StepTimes]] = {}

    def subscribe(self, take: Callable[[Record], None]) -> None:
        """Call `take` in the loop with every record from now on."""
        self._subscribers.append(take)

    def add(self, record: Record) -> None:
        if isinstance(record, StepTimes):
            self._newest.setdefault(record.rank, deque(maxlen=NEWEST)).append(record)
        for take in self._subscribers:
            take(record)

    def newest(self, rank: int) -> list[StepTimes]:
        """Return the newest StepTimes of a rank, oldest first."""
        return [*self._newest.get(rank, ())]

    def begin_attempt(self) -> None:
        """Forget the ranks of the previous attempt."""
        self._newest.clear()
