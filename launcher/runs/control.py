"""The control socket of a run: its protocol, and both ends.

A command connects to the run's Unix socket and sends its question, one packet of JSON. It reads answers until the
connection ends:

    {"ask": "status", "in_full": false}                how far the run is; `in_full`: with every host and rank
    {"ask": "stacks", "ranks": [0], "native": false}   where these ranks are, or all
    {"ask": "debug", "rank": 0, "debugger": "pdb"}     where the rank is; then bytes of the debugger, and why it ended
    {"ask": "stop"}, {"ask": "kill"}                   that it was understood, at once; the connection ends with the run
    {"ask": "wait"}                                    nothing; the connection ends with the run

A packet of an answer begins with one byte: `j` for JSON, `.` for a part of it, `d` for bytes of a debugger. Later
packets of the command are bytes for its debugger: no more than CHANNEL_BYTES are read before the worker has taken some.

One thread of the controller's process serves all connections, so a command that reads slowly delays no one. It turns
questions into events of the controller's loop, whose answers it sends. Only processes of this user are accepted.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any

from launcher.decode import decode_dataclass, parse_json
from launcher.errors import DtrainError, ProtocolError, RunError
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
    StatusQuestion,
)
from launcher.machine.processes import find
from launcher.machine.socket_folder import peer
from launcher.protocol.message import CHANNEL_BYTES
from launcher.protocol.two_way import ChannelData, ChannelTaken
from launcher.runs.registry import Entry, Registration, connect

ANSWER_S = 5.0
PACKET_BYTES = 32 << 10
MOST_BYTES = 1 << 16  # of a packet
RETRY_S = 0.1  # after a failed accept: there may be no descriptor left
START_S = 5.0  # for listing the run, at the end of a very short one
END_S = 2.0  # for all commands to receive their last packets
_QUESTIONS: Mapping[str, Any] = {"status": StatusQuestion, "stacks": StacksQuestion, "debug": DebuggerQuestion}


class Control:
    """The thread that serves the socket. `register` lists the run."""

    _put: Callable[[Event], None]

    def __init__(self, register: Callable[[], Registration], complain: Callable[[str], None]) -> None:
        self._register = register
        self._complain = complain
        self._registration: Registration | None = None
        self._listed = threading.Event()  # or that failed, or has not begun
        self._listed.set()
        self._commands: queue.SimpleQueue[Answer | PassOn] = queue.SimpleQueue()
        self._waker: socket.socket | None = None  # a byte sent here ends the thread's wait
        self._loop_has_ended = self._closing = False
        self._numbers = count(1)
        self._askers: dict[int, _Asker] = {}  # only for the thread
        self._thread = threading.Thread(target=self._serve, name="control", daemon=True)

    def start(self, put: Callable[[Event], None]) -> None:
        """List the run and serve the socket from now on; `put` queues an event for the controller's loop."""
        self._put = put
        self._listed.clear()
        try:
            self._thread.start()
        except RuntimeError:  # no thread left: the run matters more
            self._listed.set()

    def wait_until_listed(self) -> bool:
        """Return whether the run is in the list. Blocks for a moment."""
        self._listed.wait(START_S)
        return self._registration is not None

    def carry_out(self, command: Answer | PassOn) -> None:
        """Send a command what the job has for it. Does nothing if it has left."""
        self._commands.put(command)
        self._wake_up()

    def end_questions(self) -> None:
        """Let the commands go that wait for an answer: the controller's loop has ended."""
        self._loop_has_ended = True
        self._wake_up()

    def note_end(self, state: str, exit_code: int, cause: str = "", report: str = "") -> str:
        """Record in the list how the run ended; return a message if that fails, else an empty text."""
        self._listed.wait(START_S)
        if self._registration is None:
            return ""
        try:
            self._registration.end(state, exit_code, cause, report)
        except (OSError, DtrainError) as error:
            return f"dtrain ps shows this run as lost, since its end could not be recorded: {error}"
        return ""

    def close(self) -> None:
        """Notify the commands that wait for the end; call after `note_end`."""
        if self._registration is None:
            return
        self._closing = True
        self._wake_up()
        self._thread.join(ANSWER_S)
        self._registration.close()

    def _wake_up(self) -> None:
        if self._waker is not None:
            with contextlib.suppress(OSError):  # many are sent already; or the thread has ended
                self._waker.send(b"\0")

    # In the thread

    def _serve(self) -> None:
        with contextlib.ExitStack() as opened:
            try:
                woken, self._waker = map(opened.enter_context, socket.socketpair())
                self._waker.setblocking(False)
                self._registration = self._register()
            except (OSError, DtrainError) as error:
                self._complain(f"dtrain ps does not show this run: {error}")
                return
            finally:
                self._listed.set()
            listening = self._registration.listening
            while not self._closing:
                self._step(listening, woken, None)
            deadline = time.monotonic() + END_S
            while any(each.unsent for each in self._askers.values()) and (left_s := deadline - time.monotonic()) > 0:
                self._step(listening, woken, left_s)
            for asker in self._askers.values():
                asker.connection.close()

    def _step(self, listening: socket.socket, woken: socket.socket, wait_s: float | None) -> None:
        """Wait until something happens, and handle it."""
        poll = select.poll()
        for each in (listening, woken):
            poll.register(each, select.POLLIN)
        for asker in self._askers.values():
            poll.register(asker.connection, asker.wanted)
        ready = dict(poll.poll(None if wait_s is None else 1000 * wait_s))
        if woken.fileno() in ready:
            woken.recv(MOST_BYTES)
        while not self._commands.empty():
            self._obey(self._commands.get())
        for number, asker in [*self._askers.items()]:
            try:
                self._exchange(number, asker, ready.get(asker.connection.fileno(), 0))
                is_over = asker.has_all or (self._loop_has_ended and asker.asks in _QUESTIONS)
            except (OSError, ProtocolError, AttributeError, TypeError):  # it is gone, or its question is none
                self._put(AskerLeft(number))
                asker.unsent.clear()
                is_over = True
            if is_over and not asker.unsent:
                del self._askers[number]
                asker.connection.close()
        if listening.fileno() in ready:  # last: a new connection may get the descriptor of one that was closed
            self._accept(listening)

    def _accept(self, listening: socket.socket) -> None:
        try:
            connection, _ = listening.accept()
        except OSError:
            time.sleep(RETRY_S)
            return
        try:
            is_ours = peer(connection)[1] == os.geteuid()
            connection.setblocking(False)
        except OSError:
            is_ours = False
        if is_ours:
            self._askers[next(self._numbers)] = _Asker(connection)
        else:
            connection.close()

    def _obey(self, command: Answer | PassOn) -> None:
        asker = self._askers.get(command.asker)
        if asker is None:
            return
        if isinstance(command, Answer):
            asker.add(b"j", json.dumps(command.value, default=vars).encode())
            asker.has_all = command.is_last
        elif isinstance(command.message, ChannelData):
            asker.add(b"d", command.message.data)
        else:
            asker.on_way -= command.message.count

    def _exchange(self, number: int, asker: _Asker, happened: int) -> None:
        """Send and read what is possible. Raises OSError if the command is gone; see also `_begin`."""
        if asker.on_way < 0:
            raise ProtocolError("its agent acknowledged more than it received")
        with contextlib.suppress(BlockingIOError):
            while asker.unsent:
                asker.connection.send(asker.unsent[0])
                packet = asker.unsent.popleft()
                if packet[:1] == b"d":
                    self._put(AskerSent(ChannelTaken(channel=number, count=len(packet) - 1)))
        if not happened & ~select.POLLOUT:
            return
        data = asker.connection.recv(MOST_BYTES) if asker.wanted & select.POLLIN else b""
        if not data:
            raise ConnectionError
        if asker.asks:
            asker.on_way += len(data)
            self._put(AskerSent(ChannelData(channel=number, data=data)))
        else:
            self._begin(number, asker, parse_json(data))

    def _begin(self, number: int, asker: _Asker, request: Any) -> None:
        """Make an event of a question. Raises ProtocolError, AttributeError or TypeError if it is none."""
        asker.asks = request.pop("ask", "")
        if asker.asks in _QUESTIONS:
            self._put(Asked(number, decode_dataclass(_QUESTIONS[asker.asks], request)))
        elif asker.asks in ("stop", "kill"):
            self._put(Signalled(signal.SIGTERM))
            if asker.asks == "kill":
                self._put(Signalled(signal.SIGINT))  # a second signal while it stops
            asker.add(b"j", b"{}")
        elif asker.asks != "wait":
            raise ProtocolError("an unknown question")


class _Asker:
    """The connection of a command."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.asks = ""  # once it has asked
        self.unsent: deque[bytes] = deque()  # packets
        self.has_all = False  # no more packets follow
        self.on_way = 0  # bytes for its debugger that were not acknowledged

    @property
    def wanted(self) -> int:
        """Return the events to wait for, beside the end of the connection."""
        return (select.POLLIN if self.on_way < CHANNEL_BYTES else 0) | (select.POLLOUT if self.unsent else 0)

    def add(self, kind: bytes, data: bytes) -> None:
        """Add data to the packets to send."""
        pieces = [data[start : start + PACKET_BYTES] for start in range(0, max(1, len(data)), PACKET_BYTES)]
        self.unsent += [(b"." if kind == b"j" else kind) + piece for piece in pieces[:-1]]
        self.unsent.append(kind + pieces[-1])


class Question:
    """The connection of one question; None if the run has ended. One thread may read while another writes."""

    def __init__(self, connection: socket.socket | None) -> None:
        self._connection = connection
        self.is_closed = False  # at this end

    def receive(self, wait_s: float | None = None) -> Mapping[str, Any] | bytes | None:
        """Return the next answer, or bytes of the debugger; None at the end. Raises TimeoutError, ValueError."""
        text = b""
        poll = select.poll()
        if self._connection is not None:
            poll.register(self._connection, select.POLLIN)
        while self._connection is not None:
            if not poll.poll(None if wait_s is None else 1000 * wait_s):
                raise TimeoutError
            try:
                packet = self._connection.recv(MOST_BYTES)
            except OSError:  # the run has ended, or its controller was killed
                break
            if not packet:
                break
            if packet[:1] == b"d":
                return packet[1:]
            text += packet[1:]
            if packet[:1] == b"j":
                answer: Mapping[str, Any] = json.loads(text)
                return answer
        return None

    def answer(self, entry: Entry, wait_s: float = ANSWER_S) -> Mapping[str, Any] | None:
        """Return the first answer of the run of `entry`; None if it has ended. Blocks for `wait_s`. Raises RunError."""
        process = find(entry.pid)
        if process is not None and process.state == "T":  # Ctrl-Z or SIGSTOP
            wait_s = min(wait_s, ANSWER_S)
        try:
            answer = self.receive(wait_s)
        except (TimeoutError, ValueError) as error:
            raise RunError(
                f"run {entry.run_id} does not answer; if its process (pid {entry.pid}) is stopped, "
                f"resume it: kill -CONT {entry.pid}"
            ) from error
        if not isinstance(answer, Mapping):
            return None
        if "error" in answer:
            raise RunError(f"run {entry.run_id}: {answer['error']}")
        return answer

    def send(self, data: bytes) -> None:
        """Send bytes to the debugger. Blocks while it does not read; does nothing if it is gone."""
        assert self._connection is not None
        with contextlib.suppress(OSError):
            for start in range(0, len(data), PACKET_BYTES):
                self._connection.send(data[start : start + PACKET_BYTES])

    def close(self) -> None:
        """Close the connection at both ends. Callable from any thread."""
        self.is_closed = True
        assert self._connection is not None
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def question(entry: Entry, what: str, **about: Any) -> Iterator[Question]:
    """Ask the controller of a run. Raises RunError if it cannot be asked."""
    with connect(entry, ANSWER_S) as connection:
        if connection is not None:
            with contextlib.suppress(OSError):  # the next read then returns the end
                connection.send(json.dumps({"ask": what, **about}).encode())
            connection.settimeout(None)
        yield Question(connection)


def ask(entry: Entry, what: str, *, wait_s: float = ANSWER_S, **about: Any) -> Mapping[str, Any] | None:
    """Return the answer of a run; None if it has ended or is lost. Raises RunError if it does not answer."""
    with question(entry, what, **about) as asked:
        return asked.answer(entry, wait_s)
