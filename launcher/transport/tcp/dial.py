"""How a node that was started by hand reaches node 0: it dials until it is let in, or hears why not."""

from __future__ import annotations

import errno
import os
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from launcher.decode import decode_json
from launcher.errors import DtrainError, ProtocolError
from launcher.transport.tcp.connection import Connection
from launcher.transport.tcp.encrypted_records import Kind
from launcher.transport.tcp.greeting import Greeting, RunEnd, Welcome, printable
from launcher.transport.tcp.handshake import NotDtrain, OtherVersion, Side, WrongToken
from launcher.transport.tcp.rendezvous_file import Endpoint
from launcher.transport.tcp.signals import Signals

__all__ = ["JoinError", "Joined", "dial", "read_run_end"]

FIRST_PAUSE_S, PAUSE_S = 0.05, 1.0  # between attempts
CONNECT_S = 5.0
ANSWER_S = 8.0  # for the whole of the handshake: node 0 may look first whether our slot is still taken


class JoinError(DtrainError):
    """This node cannot take part in the run; says what to do."""


@dataclass(frozen=True)
class Joined:
    """A connection to node 0, on which this node has been let in."""

    connection: Connection
    welcome: Welcome


def dial(
    find: Callable[[], Endpoint | None], greeting: Greeting, *, certain: bool, deadline: float, signals: Signals
) -> Joined | RunEnd:
    """Dial node 0 until it lets us in, or the run turns out to be over. Blocks until `deadline` (monotonic).

    With `certain`, what answers there is node 0 or nothing is: another token, or something that is no dtrain, is an
    error at once. Raises JoinError, Stopped.
    """
    pause_s, problem = FIRST_PAUSE_S, "no run of this user has said where it is"
    with signals.interrupting():
        while True:
            if (endpoint := find()) is not None:
                try:
                    return _join(endpoint, greeting, min(deadline, time.monotonic() + CONNECT_S))
                except (WrongToken, OtherVersion, NotDtrain) as error:
                    problem = _who_answers(endpoint, error)
                    if certain:
                        raise JoinError(problem) from error
                except (OSError, ProtocolError) as error:
                    problem = _why(endpoint, error)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise JoinError(f"node 0 was not found in time: {problem}")
            time.sleep(min(left_s, pause_s * random.uniform(0.8, 1.2)))
            pause_s = min(PAUSE_S, 1.5 * pause_s)


def _join(endpoint: Endpoint, greeting: Greeting, deadline: float) -> Joined | RunEnd:
    """Try once to get in. Raises OSError, ProtocolError, JoinError, Stopped."""
    sock = socket.create_connection((endpoint.address, endpoint.port), max(0.1, deadline - time.monotonic()))
    try:
        if sock.getsockname() == sock.getpeername():  # TCP lets a socket meet itself where nobody listens
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        connection = Connection(sock, Side.JOINER, endpoint.token)
        answered = _introduce(connection, greeting)
    except BaseException:
        sock.close()
        raise
    if isinstance(answered, RunEnd):
        sock.close()
        return answered
    return Joined(connection, answered)


def _introduce(connection: Connection, greeting: Greeting) -> Welcome | RunEnd:
    deadline = time.monotonic() + ANSWER_S
    connection.shake_hands(deadline)
    connection.send(Kind.GREETING, greeting.encode())
    answer = connection.receive(deadline)
    if answer.kind is Kind.RUN_END:
        return read_run_end(answer.data)
    if answer.kind is Kind.REFUSAL:
        raise JoinError(f"node 0 refuses this node: {_lines(answer.data.decode('utf-8', 'replace'))}")
    if answer.kind is not Kind.WELCOME:
        raise ProtocolError("node 0 answers otherwise than this version of dtrain")
    return decode_json(Welcome, answer.data)


def read_run_end(data: bytes) -> RunEnd:
    """Read a RUN_END's data. Raises ProtocolError."""
    run_end = decode_json(RunEnd, data)
    return replace(run_end, text=_lines(run_end.text))


def _lines(text: str) -> str:
    return "\n".join("".join(c if c.isprintable() else "?" for c in line) for line in text.splitlines())


# ---- why not -------------------------------------------------------------------------------------------------


def _who_answers(endpoint: Endpoint, error: ProtocolError) -> str:
    where = _where(endpoint)
    if isinstance(error, WrongToken):
        return f"{where} has another token than this node; give both the same DTRAIN_TOKEN, or --token-file"
    if isinstance(error, OtherVersion):
        return f"{where}: {error}"
    return f"{where}: {error}; is that --master-addr, and the control port of the run?"


def _why(endpoint: Endpoint, error: Exception) -> str:
    where = _where(endpoint)
    start = "start dtrain on node 0 too, with --node-rank 0 and the same --master-addr"
    if isinstance(error, socket.gaierror):
        return f"DNS lookup of {printable(endpoint.address)} failed: {error.strerror or error}; check --master-addr"
    if isinstance(error, ConnectionRefusedError):
        return f"nobody listens at {where}; {start}"
    if isinstance(error, TimeoutError) or getattr(error, "errno", None) in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return f"{where}: {(error.strerror or str(error)).lower()}; check --master-addr, and firewalls in between"  # type: ignore[attr-defined]  # both are OSErrors
    return f"{where}: {error or type(error).__name__}; {start}"


def _where(endpoint: Endpoint) -> str:
    address = printable(endpoint.address)
    return f"[{address}]:{endpoint.port}" if ":" in address else f"{address}:{endpoint.port}"
