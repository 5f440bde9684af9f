"""Requests to an active run: one JSON request and one answer on its Unix socket.

A thread of the controller's process lists the run, then answers. Requests: {"ask": "status"}, {"ask": "top"},
{"ask": "stop"}, {"ask": "kill"}, and {"ask": "wait"}, which is answered by closing the connection once the run has
ended. A long answer comes in pieces, up to the end of the connection. Requests in LONG are answered by the controller's
loop, which takes over the connection (controller/askers.py). Only processes of this user are accepted.
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
RETRY_S = 0.1  # after a failed accept: there may be no descriptor left
START_S = 5.0  # for listing the run, at the end of a very short one

Answer = Mapping[str, Any]


class Control:
    """The thread that answers. `register` lists the run; `answer` is called in it with any request but "wait"."""

    def __init__(
        self, register: Callable[[], Registration], answer: Callable[[str], Answer], complain: Callable[[str], None],
        pass_on: Callable[[socket.socket, Mapping[str, Any]], None],
    ) -> None:  # fmt: skip
        """Prepare the thread; `pass_on` takes over the connections of LONG requests."""
        self._register = register
        self._answer = answer
        self._pass_on = pass_on
        self._complain = complain
        self._registration: Registration | None = None
        self._waiting: list[socket.socket] = []
        self._closing = threading.Event()
        self._listed = threading.Event()  # or listing failed
        self._thread = threading.Thread(target=self._serve, name="control", daemon=True)

    def start(self) -> None:
        with contextlib.suppress(RuntimeError):  # no thread left: the run matters more
            self._thread.start()
            return
        self._listed.set()

    def wait_until_listed(self) -> bool:
        """Return whether the run is in the list. Blocks for a moment."""
        self._listed.wait(START_S)
        return self._registration is not None

    def note_end(self, state: str, exit_code: int, cause: str = "", report: str = "") -> None:
        """Record in the list how the run ended."""
        self._listed.wait(START_S)
        if self._registration is None:
            return
        try:
            self._registration.end(state, exit_code, cause, report)
        except (OSError, DtrainError) as error:
            self._complain(f"dtrain ps shows this run as lost, since its end could not be recorded: {error}")

    def close(self) -> None:
        """Notify the commands that wait for the end; call after `note_end`."""
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
            self._close_abandoned()
            try:
                connection, _ = self._registration.listening.accept()
            except OSError:  # it was shut down, or no descriptor is left
                self._closing.wait(RETRY_S)
                continue
            try:
                if not self._answer_one(connection):
                    connection.close()
            except (OSError, ValueError, RunError):  # the asker is gone, or sent an invalid request
                connection.close()

    def _close_abandoned(self) -> None:
        """Close the connections of commands that were interrupted while they waited."""
        poll = select.poll()
        for connection in self._waiting:
            poll.register(connection, 0)
        gone = {descriptor for descriptor, _ in poll.poll(0)}
        for connection in [each for each in self._waiting if each.fileno() in gone]:
            self._waiting.remove(connection)
            connection.close()

    def _answer_one(self, connection: socket.socket) -> bool:
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
        except (ConnectionError, BrokenPipeError):  # it has just ended
            return None
        except (OSError, ValueError) as error:
            raise RunError(
                f"run {entry.run_id} does not answer; if its process (pid {entry.pid}) is stopped, "
                f"resume it: kill -CONT {entry.pid}"
            ) from error
    return answer


def wait_for_end(entry: Entry) -> None:
    """Wait until a run has ended or is lost. Raises RunError."""
    with connect(entry, ANSWER_S) as connection:
        if connection is None:
            return
        with contextlib.suppress(OSError):  # it has just ended
            connection.send(json.dumps({"ask": "wait"}).encode())
            connection.settimeout(None)
            connection.recv(MOST_BYTES)
