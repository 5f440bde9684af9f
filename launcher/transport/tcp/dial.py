"""Connects a node started by hand to node 0: dials until it is admitted, is refused, or gets a signal."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from launcher.decode import decode_json
from launcher.errors import DtrainError, ProtocolError
from launcher.transport.tcp.connection import Connection
from launcher.transport.tcp.encrypted_records import Kind
from launcher.transport.tcp.greeting import Greeting, RunEnd, Welcome, encode, printable, where_at, without_controls
from launcher.transport.tcp.handshake import NotDtrain, OtherVersion, Side, WrongToken
from launcher.transport.tcp.rendezvous import Endpoint

FIRST_PAUSE_S, PAUSE_S = 0.05, 1.0  # between attempts
CONNECT_S = 5.0
ANSWER_S = 8.0  # for the whole handshake: node 0 may check first whether our slot is still in use
_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH)
_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_OTHER = (signal.SIGUSR1, signal.SIGUSR2)


class JoinError(DtrainError):
    """This node cannot take part in the run; the message has the next step."""


class Stopped(Exception):
    """A signal to end came while dialling."""


class Signals:
    """Handles the signals while the context lasts; in the main thread only.

    `stops` are the signals to end, in order. `events` gets every signal; relay.py waits for it, and puts its own events
    there.
    """

    def __init__(self) -> None:
        self.stops: list[int] = []
        self.events: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._interrupts = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for signum in (*_STOP, *_OTHER):
            if signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN:
                continue  # started by nohup
            self._before[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Raise Stopped at a signal to end while the context lasts."""
        try:
            self._interrupts = True
            if self.stops:
                raise Stopped
            yield
        finally:
            self._interrupts = False

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        if signum in _STOP:
            self.stops.append(signum)
        if not self._interrupts:
            self.events.put(signal.Signals(signum))
        elif signum in _STOP:
            raise Stopped


@dataclass(frozen=True)
class Joined:
    """A connection to node 0 that has admitted this node."""

    connection: Connection
    welcome: Welcome


def dial(
    find: Endpoint | Callable[[], Endpoint | None], greeting: Greeting, *, deadline: float, signals: Signals
) -> Joined | RunEnd:
    """Dial node 0 until it admits us, or the run turns out to be over. Blocks until `deadline` (monotonic).

    `find` is the endpoint of node 0, or returns it before each attempt. With a fixed endpoint, another token, or a peer
    that is not dtrain, is an error immediately. Raises JoinError, Stopped.
    """
    pause_s, problem = FIRST_PAUSE_S, "no run of this user has published its address"
    with signals.interrupting():
        while True:
            endpoint = find if isinstance(find, Endpoint) else find()
            if endpoint is not None:
                try:
                    return _join(endpoint, greeting, min(deadline, time.monotonic() + CONNECT_S))
                except (OSError, ProtocolError) as error:
                    problem = _why(endpoint, error)
                    if endpoint is find and isinstance(error, (WrongToken, OtherVersion, NotDtrain)):
                        raise JoinError(problem) from error
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise JoinError(f"node 0 was not found in time: {problem}")
            time.sleep(min(left_s, pause_s * random.uniform(0.8, 1.2)))
            pause_s = min(PAUSE_S, 1.5 * pause_s)


def _join(endpoint: Endpoint, greeting: Greeting, deadline: float) -> Joined | RunEnd:
    """Try once to join. Raises OSError, ProtocolError, JoinError, Stopped."""
    sock = socket.create_connection((endpoint.address, endpoint.port), max(0.1, deadline - time.monotonic()))
    with contextlib.ExitStack() as unless_joined:
        unless_joined.callback(sock.close)
        if sock.getsockname() == sock.getpeername():  # without a listener, TCP may connect a socket to itself
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        connection = Connection(sock, Side.JOINER, os.fsencode(endpoint.token))
        deadline = time.monotonic() + ANSWER_S
        connection.shake_hands(deadline)
        connection.send(Kind.GREETING, encode(greeting))
        answer = connection.receive(deadline)
        if answer.kind is Kind.RUN_END:
            return RunEnd.decode(answer.data)
        if answer.kind is Kind.REFUSAL:
            raise JoinError(f"node 0 refuses this node: {without_controls(answer.data.decode('utf-8', 'replace'))}")
        if answer.kind is not Kind.WELCOME:
            raise ProtocolError("node 0 does not answer like this version of dtrain")
        welcome = decode_json(Welcome, answer.data)
        unless_joined.pop_all()
        return Joined(connection, welcome)


def _why(endpoint: Endpoint, error: Exception) -> str:
    """Format why node 0 was not reached, and what to do."""
    address = printable(endpoint.address)
    where = where_at(address, endpoint.port)
    start = "start dtrain on node 0 too, with --node-rank 0 and the same --master-addr"
    if isinstance(error, WrongToken):
        return f"{where} has another token than this node; give both the same DTRAIN_TOKEN, or --token-file"
    if isinstance(error, OtherVersion):
        return f"{where}: {error}"
    if isinstance(error, NotDtrain):
        return f"{where}: {error}; is that --master-addr, and the control port of the run?"
    if isinstance(error, socket.gaierror):
        return f"DNS lookup of {address} failed: {error.strerror or error}; check --master-addr"
    if isinstance(error, ConnectionRefusedError):
        return f"no process listens at {where}; {start}"
    if isinstance(error, OSError) and (isinstance(error, TimeoutError) or error.errno in _NO_ROUTE):
        return f"{where}: {(error.strerror or str(error)).lower()}; check --master-addr and firewalls"
    return f"{where}: {error or type(error).__name__}; {start}"
