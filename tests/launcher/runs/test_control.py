"""The control socket: whatever comes, and whenever the run ends, the thread goes on and every command is let go."""

import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launcher.cli.runs.table import show_runs
from launcher.job.events import (
    Answer,
    Asked,
    AskerLeft,
    AskerSent,
    DebuggerQuestion,
    Event,
    PassOn,
    Signalled,
    StacksQuestion,
)
from launcher.protocol.message import CHANNEL_BYTES
from launcher.protocol.two_way import ChannelData, ChannelTaken
from launcher.runs.control import PACKET_BYTES, Control, ask, question
from launcher.runs.registry import Entry, connect, entries, registered

WAIT_S = 20.0


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@contextmanager
def control(put: Callable[[Event], None]) -> Iterator[tuple[Control, Entry]]:
    made = Control(lambda: registered("r", Path("runs/r"), "", detached=False), print)
    made.start(put)
    assert made.wait_until_listed()
    (entry,) = entries()
    try:
        yield made, entry
    finally:
        made.close()


@contextmanager
def asked(entry: Entry, request: bytes) -> Iterator[socket.socket]:
    """Send a request as it is, and give the connection."""
    with connect(entry, WAIT_S) as connection:
        assert connection is not None
        connection.send(request)
        yield connection


def debug() -> bytes:
    return json.dumps({"ask": "debug", "rank": 0, "debugger": "pdb"}).encode()


def test_the_end_may_come_while_a_question_is_read() -> None:
    has_come, go_on = threading.Event(), threading.Event()

    def put(event: Event) -> None:
        if isinstance(event, Asked):
            has_come.set()
            go_on.wait(WAIT_S)

    with control(put) as (made, entry), asked(entry, b'{"ask": "stacks"}') as connection:
        assert has_come.wait(WAIT_S)
        close = threading.Thread(target=made.close)
        close.start()
        time.sleep(0.1)  # either order is right: `close` gets a chance to be first
        go_on.set()
        close.join(WAIT_S)
        assert not close.is_alive()
        assert connection.recv(1) == b"", "the connection is closed"


@pytest.mark.parametrize(
    "request_",
    [
        b"no JSON",
        b"[]",
        b"{}",
        b'{"ask": []}',
        b'{"ask": "unknown"}',
        b'{"ask": "stacks", "ranks": "all"}',
        b'{"ask": "debug", "rank": true, "debugger": "pdb"}',
    ],
)
def test_an_invalid_question_ends_that_connection_only(request_: bytes) -> None:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    with control(events.put) as (_, entry):
        with asked(entry, request_) as connection:
            assert connection.recv(1) == b"", "the connection is closed"
        assert isinstance(events.get(timeout=WAIT_S), AskerLeft)
        with asked(entry, b'{"ask": "stacks", "ranks": [1]}'):
            assert events.get(timeout=WAIT_S) == Asked(2, StacksQuestion((1,)))


def test_an_invalid_acknowledgement_ends_its_connection_only() -> None:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    with control(events.put) as (made, entry), asked(entry, debug()) as connection:
        connection.send(b"four")
        assert events.get(timeout=WAIT_S) == Asked(1, DebuggerQuestion(0, "pdb"))
        assert events.get(timeout=WAIT_S) == AskerSent(ChannelData(1, b"four"))
        made.carry_out(PassOn(ChannelTaken(1, 1000)))
        assert connection.recv(1) == b"", "the connection is closed"
        assert events.get(timeout=WAIT_S) == AskerLeft(1)
        made.carry_out(Answer(1, {"ended": ""}))  # too late
        with asked(entry, b'{"ask": "stacks"}'):
            assert events.get(timeout=WAIT_S) == Asked(2, StacksQuestion())


def test_no_more_is_read_for_a_debugger_than_it_may_leave_unread() -> None:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    with control(events.put) as (made, entry), question(entry, "debug", rank=0, debugger="pdb") as connection:
        events.get(timeout=WAIT_S)
        threading.Thread(target=connection.send, args=(b"x" * 4 * CHANNEL_BYTES,), daemon=True).start()

        def read() -> int:
            total = 0
            while total < CHANNEL_BYTES:
                event = events.get(timeout=WAIT_S)
                assert isinstance(event, AskerSent)
                assert isinstance(event.message, ChannelData)
                total += len(event.message.data)
            time.sleep(0.2)
            assert events.empty(), "it waits for an acknowledgement"
            return total

        for _ in range(4):
            made.carry_out(PassOn(ChannelTaken(1, read())))


def test_a_debugger_s_bytes_are_acknowledged_once_sent() -> None:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    with control(events.put) as (made, entry), question(entry, "debug", rank=0, debugger="pdb") as connection:
        events.get(timeout=WAIT_S)
        data = bytes(range(256)) * (PACKET_BYTES // 128)
        made.carry_out(PassOn(ChannelData(1, data)))
        received = b""
        while len(received) < len(data):
            packet = connection.receive(WAIT_S)
            assert isinstance(packet, bytes)
            received += packet
        assert received == data
        taken = [events.get(timeout=WAIT_S) for _ in range(2)]
        assert taken == [AskerSent(ChannelTaken(1, PACKET_BYTES))] * 2


LONG = {"ranks": ["x" * 1000] * 5000}


def test_a_command_that_does_not_read_delays_no_other() -> None:
    def put(event: Event) -> None:
        if isinstance(event, Asked):
            made.carry_out(Answer(event.asker, LONG))

    with control(put) as (made, entry), asked(entry, b'{"ask": "status"}'):
        assert ask(entry, "status") == LONG


def test_a_command_that_leaves_early_is_forgotten() -> None:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    with control(events.put) as (made, entry):
        with asked(entry, b'{"ask": "status"}') as connection:
            events.get(timeout=WAIT_S)
            made.carry_out(Answer(1, LONG))
            assert connection.recv(1) == b"."
        assert events.get(timeout=WAIT_S) == AskerLeft(1)
        time.sleep(0.1)
        assert events.empty()


def test_the_last_answer_reaches_a_command_that_reads_late() -> None:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    with control(events.put) as (made, entry), question(entry, "status") as late:
        events.get(timeout=WAIT_S)
        made.carry_out(Answer(1, LONG))
        close = threading.Thread(target=made.close)
        close.start()
        time.sleep(0.1)
        assert late.answer(entry) == LONG
        close.join(WAIT_S)


def test_questions_end_with_the_loop_and_waits_with_the_run() -> None:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    with control(events.put) as (made, entry):
        with question(entry, "wait") as wait, question(entry, "stop") as stop, question(entry, "stacks") as stacks:
            assert stop.answer(entry) == {}
            assert {type(events.get(timeout=WAIT_S)) for _ in range(2)} == {Signalled, Asked}
            made.end_questions()
            assert stacks.receive(WAIT_S) is None
            assert ask(entry, "status") is None
            for waiting in (wait, stop):
                with pytest.raises(TimeoutError):
                    waiting.receive(0.1)
            made.close()
            assert wait.receive(WAIT_S) is None
            assert stop.receive(WAIT_S) is None
        assert ask(entry, "status") is None


def test_a_run_whose_loop_has_ended_is_stopping(capsys: pytest.CaptureFixture[str]) -> None:
    with control(lambda _: None) as (made, _):
        made.end_questions()
        assert show_runs(everything=False, as_json=True, say=print) == 0
        (row,) = json.loads(capsys.readouterr().out)
        assert row["state"] == "stopping"
