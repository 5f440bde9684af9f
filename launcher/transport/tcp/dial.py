"""How a node that was started by hand reaches the door of node 0: it dials until it is let in, or told why not."""

from __future__ import annotations

import errno
import os
import random
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from launcher.decode import decode_json
from launcher.errors import DtrainError, ProtocolError
from launcher.transport.tcp import tcp
from launcher.transport.tcp.encrypted_records import Kind, Opener, Record, Sealer
from launcher.transport.tcp.greeting import Greeting, Verdict, Welcome, printable
from launcher.transport.tcp.handshake import Handshake, NotDtrain, OtherVersion, Side, WrongToken
from launcher.transport.tcp.rendezvous_file import Meeting
from launcher.transport.tcp.signals import Signals

__all__ = ["JoinError", "Link", "Stopped", "Verdict", "dial", "read_verdict"]

FIRST_PAUSE_S, PAUSE_S = 0.05, 1.0  # between attempts
CONNECT_S = 5.0
ANSWER_S = 8.0  # for the whole of the handshake: node 0 may look first whether our place is still taken
READ_BYTES = 1 << 16


class JoinError(DtrainError):
    """This node cannot take part in the run; says what to do."""


class Stopped(Exception):
    """A signal told us to end while we waited."""


@dataclass
class Link:
    """A connection to the door, on which this node has been let in."""

    sock: socket.socket
    sealer: Sealer
    opener: Opener
    place: str
    node_rank: int
    host: str  # node 0's name
    records: deque[Record] = field(default_factory=deque)  # that came with the welcome


def dial(
    find: Callable[[], Meeting | None], greeting: Greeting, *, certain: bool, deadline: float, signals: Signals
) -> Link | Verdict:
    """Dial the door until it lets us in, or the run turns out to be over. Blocks until `deadline` (monotonic).

    With `certain`, what answers there is node 0 or nothing is: another token, or something that is no dtrain, is an
    error at once. Raises JoinError, Stopped.
    """
    pause_s, problem = FIRST_PAUSE_S, "no run of this user has said where it is"
    while True:
        if signals.stops:
            raise Stopped
        if (meeting := find()) is not None:
            try:
                return _knock(meeting, greeting, deadline, signals)
            except (WrongToken, OtherVersion, NotDtrain) as error:
                problem = _who_answers(meeting, error)
                if certain:
                    raise JoinError(problem) from error
            except (OSError, ProtocolError) as error:
                problem = _why(meeting, error)
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise JoinError(f"node 0 was not found in time: {problem}")
        wait_until_ready(signals, None, 0, min(left_s, pause_s * random.uniform(0.8, 1.2)))
        pause_s = min(PAUSE_S, 1.5 * pause_s)


def wait_until_ready(signals: Signals, sock: socket.socket | None, events: int, limit_s: float) -> bool:
    """Wait for a socket, but no longer than that; say whether it is ready. Raises Stopped."""
    poll = select.poll()
    poll.register(signals, select.POLLIN)
    if sock is not None:
        poll.register(sock, events)
    deadline = time.monotonic() + limit_s
    while True:
        ready = [fd for fd, _ in poll.poll(max(0.0, 1000 * (deadline - time.monotonic())))]
        if signals.fileno() in ready:
            signals.woken()
            if signals.stops:
                raise Stopped
        if sock is not None and sock.fileno() in ready:
            return True
        if time.monotonic() >= deadline:
            return False


def _knock(meeting: Meeting, greeting: Greeting, deadline: float, signals: Signals) -> Link | Verdict:
    """Try once to get in. Raises OSError, ProtocolError, JoinError, Stopped."""
    sock = _connect(meeting, min(deadline, time.monotonic() + CONNECT_S), signals)
    try:
        answered = _introduce(sock, meeting.token, greeting, signals)
    except BaseException:
        sock.close()
        raise
    if isinstance(answered, Verdict):
        sock.close()
    return answered


def _connect(meeting: Meeting, deadline: float, signals: Signals) -> socket.socket:
    problem: OSError = ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    for family, kind, protocol, _, where in socket.getaddrinfo(meeting.address, meeting.port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            tcp.tune(sock)
            if (code := sock.connect_ex(where)) == errno.EINPROGRESS:
                if not wait_until_ready(signals, sock, select.POLLOUT, max(0.1, deadline - time.monotonic())):
                    raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            if sock.getsockname() == sock.getpeername():  # TCP lets a socket meet itself where nobody listens
                raise problem
            return sock
        except OSError as error:
            sock.close()
            problem = error
        except BaseException:
            sock.close()
            raise
    raise problem


def _introduce(sock: socket.socket, token: bytes, greeting: Greeting, signals: Signals) -> Link | Verdict:
    deadline = time.monotonic() + ANSWER_S
    handshake = Handshake(Side.JOINER, token)
    _send(sock, handshake.greeting)
    while handshake.keys is None:
        if answer := handshake.feed(_receive(sock, deadline, signals)):
            _send(sock, answer)
    link = Link(sock, Sealer(handshake.keys.sending), Opener(handshake.keys.receiving), "", 0, "")
    _send(sock, link.sealer.seal(Kind.GREETING, greeting.encode()))
    while not link.records:
        link.records.extend(link.opener.feed(_receive(sock, deadline, signals)))
    first = link.records.popleft()
    if first.kind is Kind.VERDICT:
        return read_verdict(first.data)
    if first.kind is Kind.REFUSAL:
        raise JoinError(f"node 0 refuses this node: {_lines(first.data)}")
    if first.kind is not Kind.WELCOME:
        raise ProtocolError("node 0 answers otherwise than this version of dtrain")
    welcome = decode_json(Welcome, first.data)
    link.place, link.node_rank, link.host = welcome.place, welcome.node_rank, welcome.host
    return link


def read_verdict(data: bytes) -> Verdict:
    """Read a VERDICT's data. Raises ProtocolError."""
    verdict = decode_json(Verdict, data)
    return replace(verdict, text=_lines(verdict.text.encode("utf-8", "replace")))


def _send(sock: socket.socket, data: bytes) -> None:
    if sock.send(data) != len(data):  # nothing else is under way, and this is short
        raise ConnectionError("it takes nothing")


def _receive(sock: socket.socket, deadline: float, signals: Signals) -> bytes:
    if not wait_until_ready(signals, sock, select.POLLIN, deadline - time.monotonic()):
        raise TimeoutError(errno.ETIMEDOUT, "it accepts the connection but says nothing")
    if data := sock.recv(READ_BYTES):
        return data
    raise ConnectionError("it closes the connection at once")


def _lines(data: bytes) -> str:
    return "\n".join(
        "".join(c if c.isprintable() else "?" for c in line) for line in data.decode("utf-8", "replace").splitlines()
    )


# ---- why not -------------------------------------------------------------------------------------------------


def _who_answers(meeting: Meeting, error: ProtocolError) -> str:
    where = _where(meeting)
    if isinstance(error, WrongToken):
        return f"{where} has another token than this node; give both the same DTRAIN_TOKEN, or --token-file"
    if isinstance(error, OtherVersion):
        return f"{where}: {error}"
    return f"{where}: {error}; is that --master-addr, and the control port of the run?"


def _why(meeting: Meeting, error: Exception) -> str:
    where = _where(meeting)
    start = "start dtrain on node 0 too, with --node-rank 0 and the same --master-addr"
    if isinstance(error, socket.gaierror):
        return f"the name {printable(meeting.address)} is not known here; check --master-addr"
    if isinstance(error, ConnectionRefusedError):
        return f"nobody listens at {where}; {start}"
    if isinstance(error, TimeoutError) or getattr(error, "errno", None) in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return f"{where}: {(error.strerror or str(error)).lower()}; check --master-addr, and firewalls in between"  # type: ignore[attr-defined]  # both are OSErrors
    return f"{where}: {error or type(error).__name__}; {start}"


def _where(meeting: Meeting) -> str:
    address = printable(meeting.address)
    return f"[{address}]:{meeting.port}" if ":" in address else f"{address}:{meeting.port}"
