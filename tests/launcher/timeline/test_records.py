"""Records of times arrive as they were sent; anything else is an error."""

import math
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.errors import ProtocolError
from launcher.timeline.records import PHASES, SPANS, Detail, Record, Span, StepTimes, pack, unpack

RANKS = st.integers(0, 100_000)
STEPS = st.integers(0, 2**40)
TIMES = st.floats(-1e9, 1e9)


@st.composite
def _records(draw: st.DrawFn) -> Record:
    rank, step, began = draw(RANKS), draw(STEPS), draw(TIMES)
    ended = began + draw(st.floats(0.0, 1e6))
    match draw(st.integers(0, 2)):
        case 0:
            phases = draw(st.tuples(*[st.floats(0.0, 1e6)] * len(PHASES)))
            return StepTimes(7, rank, step, draw(st.integers(1, 10_000)), ended, phases)
        case 1:
            return Span(7, rank, draw(st.sampled_from(SPANS)), began, ended)
        case _:
            return Detail(7, rank, step, draw(st.sampled_from(PHASES)), draw(st.integers(-1, 5000)), began, ended)


@settings(deadline=None)
@given(st.lists(_records(), max_size=20))
def test_records_arrive_as_they_were_sent(records: list[Record]) -> None:
    assert unpack(pack(records), 7) == records


@settings(deadline=None)
@given(st.binary(max_size=400))
def test_garbage_is_an_error_or_records_of_sense(garbage: bytes) -> None:
    try:
        records = unpack(garbage, 0)
    except ProtocolError:
        return
    for record in records:
        times = (record.ended, *record.phases_s) if isinstance(record, StepTimes) else (record.began, record.ended)
        assert all(map(math.isfinite, times))


GOOD = StepTimes(0, 1, 5, 2, 9.0, (1.0, 2.0, 0.5, 0.0, 0.0, 0.25))


@pytest.mark.parametrize(
    ("at", "format_", "value"),
    [
        (0, "<B", 9),  # which record
        (1, "<B", 1),  # a step has no kind
        (10, "<I", 0),  # no steps
        (14, "<q", -1),  # step
        (14, "<q", 2**60),
        (22, "<d", math.nan),
        (22, "<d", math.inf),
        (30, "<d", -1.0),  # a phase
    ],
)
def test_a_step_that_cannot_be_is_an_error(at: int, format_: str, value: float) -> None:
    data = bytearray(pack([GOOD]))
    assert unpack(bytes(data), 0) == [GOOD]
    struct.pack_into(format_, data, at, value)
    with pytest.raises(ProtocolError, match="malformed records of times"):
        unpack(bytes(data), 0)


def test_a_span_that_cannot_be_is_an_error() -> None:
    data = bytearray(pack([Span(0, 0, "save", 1.0, 2.0)]))
    data[1] = len(SPANS)
    with pytest.raises(ProtocolError):
        unpack(bytes(data), 0)
    with pytest.raises(ProtocolError):
        unpack(pack([Span(0, 0, "save", 2.0, 1.0)]), 0)


def test_a_record_on_another_clock_lasts_as_long() -> None:
    records: list[Record] = [GOOD, Span(0, 0, "load", 1.0, 3.0), Detail(0, 0, 4, "wait", 2, 1.0, 3.0)]
    assert unpack(pack(records), 0, 100.0) == [
        StepTimes(0, 1, 5, 2, 109.0, GOOD.phases_s),
        Span(0, 0, "load", 101.0, 103.0),
        Detail(0, 0, 4, "wait", 2, 101.0, 103.0),
    ]
