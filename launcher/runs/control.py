"""How a run is asked and told things while it goes on: one JSON request and one answer on its Unix socket.

A thread of the controller's process lists the run, then answers. Requests: {"ask": "status"}, {"ask": "top"},
{"ask": "stop"}, {"ask": "kill"}, and {"ask": "wait"}, which is answered by the end of the connection once the run has
ended. A long answer comes in pieces, up to the end of the connection. What begins with one of LONG is answered by the
controller's loop, which takes the connection over (controller/askers.py). Only processes of this user are heard.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from launcher.errors import DtrainError, RunError
from launcher.machine.socket_folder import peer
from launcher.runs.registry import Entry, Registration, connect

LONG = ("stacks", "debug")

ANSWER_S = 5.0
MOST_BYTES = 1 << 16
RETRY_S = 0.1  # where no connection can be accepted: there may be no descriptor
START_S = 5.0  # for the list to be written, at the end of a run that was very short

Answer = Mapping[str, Any]


class Control:
    """`register` lists the run; `answer` is called in a thread, with what is asked for, but for "wait"."""

    def __init__(
        self, register: Callable[[], Registration], answer: Callable[[str], Answer], complain: Callable[[str], None],
        pass_on: Callable[[socket.socket, Mapping[str, Any]], None],
    ) -> None:  # fmt: skip
        """`pass_on` takes the connections of LONG requests over."""
        self._register = register
        self._answer = answer
        self._pass_on = pass_on
        self._complain = complain
        self._registration: Registration | None = None
        self._waiting: list[socket.socket] = []
        self._closing = threading.Event()
        self._listed = threading.Event()  # or it is known that it cannot be
        self._thread = threading.Thread(target=self._serve, name="control", daemon=True)

    def start(self) -> None:
        with contextlib.suppress(RuntimeError):  # no more threads can be had: the run matters more
            self._thread.start()
            return
        self._listed.set()

    def wait_until_listed(self) -> bool:
        """Return whether the run is in the list. Blocks for a moment."""
        self._listed.wait(START_S)
        return self._registration is not None

    def note_end(self, state: str, exit_code: int, cause: str = "", report: str = "") -> None:
        """Note in the list how the run has ended."""
        self._listed.wait(START_S)
        if self._registration is None:
            return
        try:
            self._registration.end(state, exit_code, cause, report)
        except (OSError, DtrainError) as error:
            self._complain(f"dtrain ps shows this run as lost, since its end could not be noted: {error}")

    def close(self) -> None:
        """Let those know who wait for the end; call after `note_end`."""
        if self._registration is None:
            return
        self._closing.set()
        with contextlib.suppress(OSError):
            self._registration.listening.shutdown(socket.SHUT_RDWR)  # ends accept in the thread
        self._thread.join(ANSWER_S)
        self._registration.close()
        for connection in self._waiting:
            connection.close()

    def _serve(self) -> None:
        try:
            self._registration = self._register()
        except (OSError, DtrainError) as error:
            self._complain(f"dtrain ps does not show this run: {error}")
            return
        finally:
            self._listed.set()
        while not self._closing.is_set():
            self._forget_those_who_left()
            try:
                connection, _ = self._registration.listening.accept()
            except OSError:  # it was shut down, or all descriptors are used
                self._closing.wait(RETRY_S)
                continue
            try:
                if not self._take(connection):
                    connection.close()
            except (OSError, ValueError, RunError):  # who asked has gone, or does not know how to
                connection.close()

    def _forget_those_who_left(self) -> None:
        """Close the connections of commands that were interrupted while they waited."""
        poll = select.poll()
        for connection in self._waiting:
            poll.register(connection, 0)
        gone = {descriptor for descriptor, _ in poll.poll(0)}
        for connection in [each for each in self._waiting if each.fileno() in gone]:
            self._waiting.remove(connection)
            connection.close()

    def _take(self, connection: socket.socket) -> bool:
        """Answer one request; return whether the connection stays open until the run ends."""
        if peer(connection)[1] != os.geteuid():
            return False
        connection.settimeout(ANSWER_S)
        request = json.loads(connection.recv(MOST_BYTES))
        what = request.get("ask") if isinstance(request, dict) else None
        if what == "wait":
            self._waiting.append(connection)
            return True
        if what in LONG:
            self._pass_on(connection, request)
            return True
        data = json.dumps(self._answer(str(what))).encode()
        for at in range(0, len(data), MOST_BYTES):
            connection.send(data[at : at + MOST_BYTES])
        return False


def ask(entry: Entry, what: str) -> Answer | None:
    """Ask the controller of a run; None if the run has ended or is lost. Raises RunError if it does not answer."""
    with connect(entry, ANSWER_S) as connection:
        if connection is None:
            return None
        try:
            connection.send(json.dumps({"ask": what}).encode())
            data = b"".join(iter(lambda: connection.recv(MOST_BYTES), b""))
            if not data:
                return None
            answer: Answer = json.loads(data)
        except (ConnectionError, BrokenPipeError):  # it ended just now
            return None
        except (OSError, ValueError) as error:
            raise RunError(
                f"run {entry.run_id} does not answer; if its process, pid {entry.pid}, is stopped, it does so "
                f"once it goes on: kill -CONT {entry.pid}"
            ) from error
    return answer


def wait_for_end(entry: Entry) -> None:
    """Wait until a run has ended or is lost. Raises RunError."""
    with connect(entry, ANSWER_S) as connection:
        if connection is None:
            return
        with contextlib.suppress(OSError):  # it ended just now
            connection.send(json.dumps({"ask": "wait"}).encode())
            connection.settimeout(None)
            connection.recv(MOST_BYTES)
