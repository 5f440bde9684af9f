"""What an agent sends of its workers' times: summed up, within limits, and only what can be true."""

from __future__ import annotations

import math
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testbed.agent import AgentProcess

from launcher.agent.observation.step_times import RECORDS, StepTimesReader
from launcher.agent.stream_writer import StreamWriter
from launcher.protocol.reports import Exited, Timings
from launcher.protocol.two_way import Heartbeat
from launcher.timeline.records import Detail, Record, Span, StepTimes, unpack

# What ddp/monitoring/timeline.py does, without the seconds that torch takes to be imported.
WRITES = """
import mmap, os, struct, time
file = open(os.environ["DTRAIN_TIMELINE_FILE"], "r+b")
ring = mmap.mmap(file.fileno(), 0)
written = 0
def put(kind, *values):
    global written
    at = 16 + written % ((len(ring) - 16) // 72) * 72
    struct.pack_into("<q8d", ring, at, written * 4 + kind, *values, *[0.0] * (8 - len(values)))
    written += 1
    struct.pack_into("<QQ", ring, 0, os.getpid(), written)
def step(number, s=0.001):
    put(0, number, time.monotonic(), s, s, s, s, s, s)
"""


class Sent:
    """In the place of the agent's stream."""

    def __init__(self) -> None:
        self.messages: list[Timings] = []

    def send(self, message: Timings) -> None:
        self.messages.append(message)

    def records(self) -> list[Record]:
        found = [record for message in self.messages for record in unpack(message.data, message.attempt)]
        self.messages.clear()
        return found


class Ring:
    """A worker's side."""

    def __init__(self, path: str) -> None:
        self.file = os.open(path, os.O_RDWR)
        self.written = 0

    def put(self, kind: int, *values: float) -> None:
        at = 16 + self.written % RECORDS * 72
        padded = [*values, *[0.0] * (8 - len(values))]
        os.pwrite(self.file, struct.pack("<q8d", self.written * 4 + kind, *padded), at)
        self.written += 1
        os.pwrite(self.file, struct.pack("<QQ", os.getpid(), self.written), 0)

    def step(self, number: int, each_s: float = 1.0) -> None:
        self.put(0, number, 100.0 + 6 * number, *[each_s] * 6)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    with AgentProcess(tmp_path) as started:
        yield started


@pytest.fixture
def sent() -> Sent:
    return Sent()


@pytest.fixture
def reader(sent: Sent, tmp_path: Path) -> Iterator[StepTimesReader]:
    reader = StepTimesReader(3, cast(StreamWriter, sent), folder=str(tmp_path), at_most=10)
    yield reader
    reader.close()


@pytest.fixture
def ring(reader: StepTimesReader) -> Iterator[Ring]:
    ring = Ring(reader.open(5, 1.0))
    yield ring
    os.close(ring.file)


def test_each_record_is_sent_once(reader: StepTimesReader, ring: Ring, sent: Sent) -> None:
    reader.asked = (7.0, 8.0)
    ring.step(1)
    ring.put(1, 1, 107.0, 108.0)
    ring.put(2, 3, 2, 2, 108.0, 109.0)
    reader.send(1000.0)
    (message,) = sent.messages
    assert (message.time, message.asked, message.asked_at, message.lost) == (1000.0, 7.0, 8.0, 0)
    assert sent.records() == [
        StepTimes(3, 5, 1, 1, 106.0, (1.0,) * 6),
        Span(3, 5, "save", 107.0, 108.0),
        Detail(3, 5, 2, "wait", 2, 108.0, 109.0),
    ]
    reader.send(1001.0)
    assert sent.messages == []
    ring.step(2)
    reader.send(1002.0, [4])  # another one
    assert sent.messages == []
    reader.send(1002.0, [5])
    assert [record.ended for record in sent.records()] == [112.0]


def test_more_steps_than_fit_are_summed_up_without_a_loss(reader: StepTimesReader, ring: Ring, sent: Sent) -> None:
    for number in range(1, 96):
        ring.step(number, number / 100)
    reader.send(1000.0)
    steps = [record for record in sent.records() if isinstance(record, StepTimes)]
    assert len(steps) == 10
    assert sum(times.steps for times in steps) == 95
    assert (steps[0].step, steps[0].steps, steps[-1].step) == (10, 10, 95)
    assert math.isclose(sum(sum(times.phases_s) for times in steps), 6 * sum(range(1, 96)) / 100)


def test_steps_without_ddp_are_one_record_a_look(reader: StepTimesReader, sent: Sent) -> None:
    reader.open(5, 1.0)
    looks = [(0, 0.0), (3, 10.0), (7, 12.5), (7, 12.5), (8, 14.0), (2, 20.0), (4, 21.0)]  # the last ones: another count
    for steps, ended in looks:
        reader.count(5, steps, ended, 100.0)
    reader.count(6, 1, 2.0, 100.0)  # a rank without a file
    reader.send(100.0)
    assert sent.records() == [
        StepTimes(3, 5, step, steps, ended, (0.0,) * 5 + (length_s,))
        for step, steps, ended, length_s in [(7, 4, 12.5, 2.5), (8, 1, 14.0, 1.5), (4, 2, 21.0, 1.0)]
    ]
    reader.send(101.0)
    assert sent.messages == []


@pytest.mark.parametrize("count", [(2**60, 12.0), (9, 9.0), (9, 0.5), (9, 1e6), (2**64 - 1, 2.0**64 / 1e9)])
def test_a_count_that_cannot_be_true_is_left_out(reader: StepTimesReader, sent: Sent, count: tuple[int, float]) -> None:
    reader.open(5, 1.0)
    reader.count(5, 5, 10.0, 100.0)
    reader.count(5, *count, 100.0)
    reader.send(100.0)
    assert sent.messages == []


def test_what_was_overwritten_is_counted_as_lost(reader: StepTimesReader, ring: Ring, sent: Sent) -> None:
    ring.step(1)
    reader.send(1e5)
    sent.messages.clear()
    for number in range(2, RECORDS + 20):
        ring.step(number)
    reader.send(1e5)
    assert sum(message.lost for message in sent.messages) == 18
    steps = [record for record in sent.records() if isinstance(record, StepTimes)]
    assert sum(times.steps for times in steps) == RECORDS
    assert steps[-1].step == RECORDS + 19


def test_only_the_longest_details_of_the_newest_step_are_sent(reader: StepTimesReader, ring: Ring, sent: Sent) -> None:
    for step in (1, 2, 3):
        for bucket in range(300 if step == 3 else 4):
            ring.put(2, 3, bucket, step, 100.0, 101.0 + bucket % 100)
    reader.send(1000.0)
    records = sent.records()
    assert len(records) == 40
    details = [record for record in records if isinstance(record, Detail)]
    assert {record.step for record in details} == {3}
    assert min(record.ended for record in details) > 180.0, "the longest"


def test_a_restarted_worker_continues_the_count_of_steps(reader: StepTimesReader, ring: Ring, sent: Sent) -> None:
    ring.step(1)
    reader.send(1000.0)
    again = Ring(reader.open(5, 2.0))
    again.step(1)
    sent.messages.clear()
    reader.send(1001.0)
    os.close(again.file)
    (record,) = sent.records()
    assert isinstance(record, StepTimes)
    assert (record.ended, record.step) == (106.0, 2)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (0, (1, 2000.0, 1, 1, 1, 1, 1, 1)),  # it has not ended yet
        (0, (1, 0.5, 0, 0, 0, 0, 0, 0)),  # before the worker was there
        (0, (1, 100.0, 1, 1, 1, 1, 1, 99.5)),  # as long as the worker is not there yet
        (0, (1, 100.0, 1, -1, 1, 1, 1, 1)),
        (0, (1, math.nan, 1, 1, 1, 1, 1, 1)),
        (0, (math.inf, 100.0, 1, 1, 1, 1, 1, 1)),
        (0, (1e300, 100.0, 1, 1, 1, 1, 1, 1)),
        (0, (-1, 100.0, 1, 1, 1, 1, 1, 1)),
        (1, (9, 100.0, 101.0)),
        (1, (0.5, 100.0, 101.0)),
        (1, (0, 101.0, 100.0)),
        (2, (6, 0, 1, 100.0, 101.0)),
        (2, (3, 1e10, 1, 100.0, 101.0)),
        (2, (3, -2, 1, 100.0, 101.0)),
        (3, (1, 100.0, 101.0)),
    ],
)
def test_what_cannot_be_true_is_dropped(
    reader: StepTimesReader, ring: Ring, sent: Sent, kind: int, values: tuple[float, ...]
) -> None:
    ring.put(kind, *values)
    ring.step(1)
    reader.send(1000.0)
    assert [message.lost for message in sent.messages] == [1]
    assert [record.ended for record in sent.records()] == [106.0]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, RECORDS * 72), st.binary(min_size=1, max_size=200)), max_size=6))
def test_no_content_of_the_file_does_harm(writes: list[tuple[int, bytes]]) -> None:
    sent = Sent()
    reader = StepTimesReader(0, cast(StreamWriter, sent), folder="/nonexistent", at_most=10)
    ring = Ring(reader.open(0, 1.0))
    try:
        for number in range(RECORDS):
            ring.step(number)
        for at, data in writes:
            os.pwrite(ring.file, data, at)
            reader.send(1e6)
        os.ftruncate(ring.file, writes[0][0] if writes else 8)
        reader.send(1e6)
        sent.records()  # raises if one is out of bounds
    finally:
        os.close(ring.file)
        reader.close()


def test_step_times_arrive_during_the_run_and_before_its_end(agent: AgentProcess) -> None:
    agent.prepare()
    agent.tell(Heartbeat(time=time.monotonic(), sent=17.0))
    agent.start(WRITES + "step(1)\nprint('up', flush=True)\ntime.sleep(600)", rank=1)
    agent.tell(Heartbeat(time=time.monotonic(), sent=18.0))
    times = agent.expect(Timings)
    (record,) = unpack(times.data, 0)
    assert isinstance(record, StepTimes)
    assert (record.rank, record.step, record.steps) == (1, 1, 1)
    assert agent.hello.time < record.ended <= times.time
    agent.start(WRITES + "step(1); step(2)", rank=2)
    agent.expect(Exited)
    seen = [type(message) for message in agent.seen]
    assert seen.index(Exited) > len(seen) - 1 - seen[::-1].index(Timings)
    agent.start(WRITES + "step(7)\ntime.sleep(600)", rank=3)
    later = agent.expect(Timings)
    assert later.asked == 18.0
    assert agent.hello.time < later.asked_at <= later.time
    agent.end_attempt()


def test_a_worker_that_spoils_its_file_harms_no_one(agent: AgentProcess) -> None:
    agent.prepare()
    agent.start(
        "import os\nfile = os.open(os.environ['DTRAIN_TIMELINE_FILE'], os.O_RDWR)\n"
        "os.pwrite(file, b'\\xff' * 80000, 0)\nprint('up', flush=True)\nimport time; time.sleep(600)"
    )
    agent.expect_output(b"up")
    agent.start(WRITES + "step(4)", rank=1)
    agent.expect(Timings, lambda message: any(record.rank == 1 for record in unpack(message.data, 0)))
    agent.expect(Heartbeat)
    agent.end_attempt()
