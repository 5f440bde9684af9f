"""Requests to a run that take a while, or in which both sides send: controller/askers.py has the protocol."""

from __future__ import annotations

import contextlib
import json
import select
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from launcher.errors import RunError
from launcher.runs.control import ANSWER_S
from launcher.runs.registry import Entry, connect

PACKET_BYTES = 64 << 10


class Question:
    """The connection of one question. One thread may read while another writes."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._connection.settimeout(None)
        self.is_closed = False  # at this end

    def receive(self, wait_s: float | None = None) -> Mapping[str, Any] | bytes | None:
        """Return the next answer, or bytes of the debugger; None at the end. Raises TimeoutError, ValueError."""
        text = b""
        while True:
            poll = select.poll()
            poll.register(self._connection, select.POLLIN)
            if not poll.poll(None if wait_s is None else 1000 * wait_s):
                raise TimeoutError
            try:
                packet = self._connection.recv(PACKET_BYTES)
            except OSError:  # the run has ended, or its controller was killed
                packet = b""
            if not packet:
                return None
            if packet[:1] == b"d":
                return packet[1:]
            text += packet[1:]
            if packet[:1] == b"j":
                answer: Mapping[str, Any] = json.loads(text)
                return answer

    def answer(self, entry: Entry, wait_s: float) -> Mapping[str, Any]:
        """Return the first answer of the run of `entry`. Blocks for `wait_s`. Raises RunError if there is none."""
        try:
            answer = self.receive(wait_s)
        except TimeoutError as error:
            raise RunError(
                f"run {entry.run_id} does not answer; if its process (pid {entry.pid}) is stopped, "
                f"resume it: kill -CONT {entry.pid}"
            ) from error
        if not isinstance(answer, Mapping):
            raise RunError(f"run {entry.run_id} has ended meanwhile; see dtrain history")
        if "error" in answer:
            raise RunError(f"run {entry.run_id}: {answer['error']}")
        return answer

    def send(self, data: bytes) -> None:
        """Send bytes to the debugger. Blocks while it does not read; does nothing if it is gone."""
        with contextlib.suppress(OSError):
            for start in range(0, len(data), PACKET_BYTES // 2):
                self._connection.send(data[start : start + PACKET_BYTES // 2])

    def close(self) -> None:
        """Close the connection at both ends. Callable from any thread."""
        self.is_closed = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def question(entry: Entry, request: Mapping[str, Any]) -> Iterator[Question]:
    """Ask the controller of a run. Raises RunError if it has ended."""
    with connect(entry, ANSWER_S) as connection:
        if connection is None:
            how = f": {entry.state}" if entry.state else ""
            raise RunError(f"run {entry.run_id} has ended{how}; its output is in {entry.folder}")
        with contextlib.suppress(OSError):  # the next read then returns the end
            connection.send(json.dumps(request).encode())
        yield Question(connection)
