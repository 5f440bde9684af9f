"""The connections of commands that query an active run, each read and written by two threads.

The control socket (runs/control.py) accepts them. A request becomes an event of the controller's loop, whose answers
are queued here, so a command that reads slowly delays no one. Packets to a command start with one byte: `j` for JSON
(`.` for a part of it), or `d` for bytes of its debugger. Packets from it are bytes for its debugger.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

from launcher.job.events import (
    Answer,
    Asked,
    AskerLeft,
    AskerSent,
    AskerTook,
    CloseAsker,
    DebuggerQuestion,
    Event,
    PassOn,
    StacksQuestion,
    TookInput,
)
from launcher.protocol.message import CHANNEL_BYTES

PACKET_BYTES = 32 << 10
END_S = 2.0  # for all of them to receive their last packets
_DEBUGGERS = ("pdb", "debugpy")


class Askers:
    """The connections. `put` queues an event for the loop. Any thread may call `add`; only the loop calls the rest."""

    def __init__(self, put: Callable[[Event], None]) -> None:
        self._put = put
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._connections: dict[int, _Asker] = {}
        self._closed = False

    def add(self, connection: socket.socket, request: Mapping[str, Any]) -> None:
        """Take ownership of a command's connection, to close it at the end. Raises ValueError for a bad request."""
        question = _question(request)
        with self._lock:
            if self._closed:
                connection.close()
                return
            number = next(self._numbers)
            asker = self._connections[number] = _Asker(number, connection, self._put)
            self._put(Asked(number, question))  # before any event of its reader
            asker.start()  # under the lock: `close` finds its threads started, or does not find it

    def carry_out(self, command: Answer | PassOn | TookInput | CloseAsker) -> None:
        with self._lock:
            if isinstance(command, CloseAsker):
                asker = self._connections.pop(command.asker, None)
            else:
                asker = self._connections.get(command.asker)
        if asker is not None:
            asker.carry_out(command)

    def left(self, number: int) -> None:
        """Remove a command that has disconnected."""
        with self._lock:
            asker = self._connections.pop(number, None)
        if asker is not None:
            asker.carry_out(CloseAsker(number))

    def close(self) -> None:
        """Close all connections. Blocks for at most END_S."""
        with self._lock:
            self._closed = True
            askers, self._connections = self._connections, {}
        for number, asker in askers.items():
            asker.carry_out(CloseAsker(number))
        deadline = time.monotonic() + END_S
        for asker in askers.values():
            if asker.writer.ident is not None:  # otherwise no thread was left
                asker.writer.join(max(0.0, deadline - time.monotonic()))


class _Asker:
    def __init__(self, number: int, connection: socket.socket, put: Callable[[Event], None]) -> None:
        self._number = number
        self._connection = connection
        self._put = put
        self._outgoing: queue.SimpleQueue[Answer | PassOn | None] = queue.SimpleQueue()
        self._may_send = threading.Semaphore(CHANNEL_BYTES // PACKET_BYTES)
        self._unacknowledged = 0  # bytes of the oldest packets that the debugger has read; used only by the loop
        self._sizes: queue.SimpleQueue[int] = queue.SimpleQueue()  # of the packets in transit
        self._oldest = 0
        self.writer = threading.Thread(target=self._write, name=f"answer {number}", daemon=True)
        self._reader = threading.Thread(target=self._read, name=f"hear {number}", daemon=True)

    def start(self) -> None:
        try:
            self.writer.start()
            self._reader.start()
        except RuntimeError:  # no thread left
            self._outgoing.put(None)
            if not self.writer.is_alive():
                self._connection.close()
            self._put(AskerLeft(self._number))

    def carry_out(self, command: Answer | PassOn | TookInput | CloseAsker) -> None:
        if isinstance(command, TookInput):
            self._took_input(command.count)
        else:
            self._outgoing.put(None if isinstance(command, CloseAsker) else command)

    def _took_input(self, number: int) -> None:
        """Allow reading as many packets as have been passed on completely."""
        self._unacknowledged += number
        while self._unacknowledged > 0:
            try:
                self._oldest = self._oldest or self._sizes.get_nowait()
            except queue.Empty:  # its agent acknowledged more than it received
                self._outgoing.put(None)
                return
            if self._unacknowledged < self._oldest:
                return
            self._unacknowledged -= self._oldest
            self._oldest = 0
            self._may_send.release()

    # In the reader's thread

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # closed by us
            self._connection.settimeout(None)
            while data := self._connection.recv(PACKET_BYTES):
                self._sizes.put(len(data))
                self._put(AskerSent(self._number, data))
                self._may_send.acquire()
        self._put(AskerLeft(self._number))

    # In the writer's thread

    def _write(self) -> None:
        try:
            while (command := self._outgoing.get()) is not None:
                if isinstance(command, PassOn):
                    for start in range(0, len(command.data), PACKET_BYTES):
                        self._connection.send(b"d" + command.data[start : start + PACKET_BYTES])
                    self._put(AskerTook(self._number, len(command.data)))
                    continue
                text = json.dumps(command.value, default=vars).encode()
                for start in range(0, len(text), PACKET_BYTES):
                    part = text[start : start + PACKET_BYTES]
                    self._connection.send((b"." if start + PACKET_BYTES < len(text) else b"j") + part)
        except OSError:  # it disconnected, which the reader reports, or does not read
            self._put(AskerLeft(self._number))
        self._may_send.release()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # ends the reader
        self._connection.close()


def _question(request: Mapping[str, Any]) -> StacksQuestion | DebuggerQuestion:
    if request["ask"] == "stacks":
        ranks, native = request.get("ranks", []), request.get("native", False)
        if isinstance(ranks, list) and all(type(rank) is int for rank in ranks) and isinstance(native, bool):
            return StacksQuestion(tuple(sorted(set(ranks))), native)
    elif type(request.get("rank")) is int and request.get("debugger") in _DEBUGGERS:
        return DebuggerQuestion(request["rank"], request["debugger"])
    raise ValueError("not a valid request")
