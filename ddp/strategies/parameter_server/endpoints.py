"""Both ends of a parameter server's connections: ZeroMQ sockets over TCP, which carry `packets`.

Owns the sockets, their contexts and the sessions; `server` and `client` own the meaning of the messages. An endpoint
belongs to one thread; no call blocks longer than its timeout. Messages of a session arrive in order and at most once.
A broken connection is made again and keeps its session, but messages in flight may be lost: a side that waits for an
answer asks again.

Routes are ROUTER's own numbers, one per connection, so there is no routing id to hijack; a session's route is where
its last authenticated packet came from.
"""

from __future__ import annotations

import contextlib
import math
import socket as sockets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from ddp.errors import ArgumentError, KeyRefusedError, ParameterServerError, VersionMismatchError
from ddp.strategies.parameter_server.messages import MalformedError, Message
from ddp.strategies.parameter_server.packets import (
    MAX_HANDSHAKE_BYTES,
    MAX_TENSORS,
    PROTOCOL_VERSION,
    Packet,
    Prefix,
    RefusedError,
    RunKey,
    Session,
    answer_zap,
    decode,
    encode,
    read_plain_packet,
    read_prefix,
    refusal,
    unknown,
)

_HEADER_BYTES = 1 << 20
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 2_000, 10_000
_HANDSHAKE_MS = 10_000
_RECONNECT_MS, _RECONNECT_MAX_MS = 50, 1_000
_IN, _OUT, _NOBLOCK = int(zmq.POLLIN), int(zmq.POLLOUT), int(zmq.NOBLOCK)  # enums cost microseconds
_CRYPTOGRAPHIC = 0x11000001  # ZMQ_PROTOCOL_ERROR_ZMTP_...
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL

_HELLO_S = 2.0  # an unanswered hello is sent again
_BROKEN_HANDSHAKES, _BROKEN_S = 3, 5.0  # this many within this time: no mechanism, CURVE included, reports why
_FRESH_S = 1.0  # after a longer pause of the thread, the time of an event is unknown
_PROBE_S = 1.0
_MECHANISM_MISMATCH = 0x11000002  # ZMQ_PROTOCOL_ERROR_ZMTP_...
MAX_HALF_OPEN = 64
HALF_OPEN_S = 10.0
_ZAP = "inproc://zeromq.zap.01"


@dataclass(frozen=True)
class EndpointOptions:
    """The options that both ends of a connection share. At most `queue_messages` are queued in each direction."""

    key: bytes = field(repr=False)  # of the run
    encrypt: bool = False
    max_frame_bytes: int = 64 << 20
    queue_messages: int = 256
    version: str = field(default_factory=lambda: own_version())


class Endpoint:
    """The common part of both ends: one context with one socket and its monitor, opened in __init__, closed by close().

    When one of `sockets` is readable, `receive()` must be called until it returns None, which it may do at once.
    """

    def __init__(self, options: EndpointOptions, kind: int) -> None:
        self.refused: Counter[str] = Counter()  # refused packets and connections, by reason
        self._options = options
        self._key = RunKey(options.key)
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)  # until close() sets it: an unclosed endpoint must not hang the exit
        self._socket: zmq.Socket[bytes] = self._context.socket(kind)
        for option, value in (
            (zmq.SNDHWM, options.queue_messages),
            (zmq.RCVHWM, options.queue_messages),
            (zmq.MAXMSGSIZE, max(options.max_frame_bytes, _HEADER_BYTES)),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS),
            (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS),
            (zmq.RECONNECT_IVL, _RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS),
        ):
            self._socket.set(option, value)
        self._monitor = self._socket.get_monitor_socket(
            _FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self.sockets: list[zmq.Socket[bytes]] = []
        self._poller = zmq.Poller()
        self._watch(self._socket)
        self._watch(self._monitor)

    def _watch(self, socket: zmq.Socket[bytes]) -> None:
        self.sockets.append(socket)
        self._poller.register(socket, _IN)

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(linger_s=1.0 if error is None else 0.0)

    def close(self, *, linger_s: float = 1.0) -> None:
        """Close the sockets, after waiting up to `linger_s` for queued messages to be sent. May be repeated."""
        if not self._context.closed:
            self._socket.disable_monitor()
            self._context.destroy(linger=int(linger_s * 1000))

    def _ready(self, timeout_s: float) -> dict[Any, int]:
        """Wait for events on the sockets; return the sockets that have some."""
        return dict(self._poller.poll(max(0, math.ceil(timeout_s * 1000))))

    def _events(self) -> Iterator[tuple[int, int]]:
        while int(self._monitor.get(zmq.EVENTS)) & _IN:
            event = parse_monitor_message(self._monitor.recv_multipart())
            yield int(event["event"]), int(event["value"])

    def _frames(self) -> list[zmq.Frame]:
        """Return the frames of the next packet, which has already arrived."""
        return self._socket.recv_multipart(_NOBLOCK, copy=False)

    def _put(self, frames: Sequence[bytes | zmq.Frame]) -> bool:
        try:
            self._socket.send_multipart(frames, _NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return False
        return True

    def _signed(self, session: Session, message: Message, *, copy: bool) -> list[bytes | zmq.Frame]:
        header, frames = encode(message, copy=copy)
        largest = max((len(frame) for frame in frames), default=0)
        if len(header) > _HEADER_BYTES // 2 or largest > self._options.max_frame_bytes:
            raise ArgumentError(
                f"message {message.kind!r} has {len(header)} bytes of facts and a tensor of {largest} bytes; "
                f"the most is {_HEADER_BYTES // 2} and {self._options.max_frame_bytes}: send smaller pieces"
            )
        return [session.outgoing.sign(Packet.MESSAGE, session.id, header, frames), *frames]

    def _verified(
        self, session: Session, prefix: Prefix, head: memoryview, frames: Sequence[zmq.Frame]
    ) -> Message | None:
        """Return the message of an authenticated packet, None for a HERE; raises RefusedError."""
        header = session.incoming.verify(prefix, head, frames)
        if prefix.packet == Packet.HERE:
            return None
        try:
            return decode(header, frames)
        except MalformedError:
            raise RefusedError("malformed") from None


class ClientEndpoint(Endpoint):
    """The client's end of the connection to one server; connects by itself, and again whenever the connection breaks.

    `connections` counts the connections made: when it increases, messages in flight may be lost.
    """

    def __init__(self, options: EndpointOptions, address: str, *, name: str) -> None:
        super().__init__(options, zmq.DEALER)
        self.address, self.name = address, name
        self.connections = 0
        self._session: Session | None = None
        self._hello = b""
        self._hello_at = 0.0
        self._is_up = False
        self._broken: list[float] = []  # times of failed handshakes since the last successful one
        self._stepped_at = 0.0
        try:
            self._open()
        except BaseException:
            self.close(linger_s=0)
            raise

    def _open(self) -> None:
        self._key.guard_client(self._socket, encrypt=self._options.encrypt)
        self._socket.set(zmq.IPV6, int("[" in self.address))
        try:
            self._socket.connect(self.address)
        except zmq.ZMQError as error:
            raise ParameterServerError(f"{self.address!r} is no address of a parameter server: {error}") from error

    def receive(self, timeout_s: float = 0.0) -> Message | None:
        """Return the next message, or None after `timeout_s`; connects meanwhile.

        Raises KeyRefusedError, VersionMismatchError, or ParameterServerError if the ends differ in encryption or the
        other end is not a parameter server.
        """
        now = time.monotonic()
        deadline = now + timeout_s
        while True:
            message = self._step(deadline - now)
            now = time.monotonic()
            if message is not None or now >= deadline:
                return message

    def send(self, message: Message, *, copy: bool = False) -> bool:
        """Queue a message without blocking; return False if there is no session now or the queue is full.

        Without `copy`, large tensors must stay unchanged until the server has answered.
        """
        session = self._session
        if session is None or not int(self._socket.get(zmq.EVENTS)) & _OUT:  # before the work of signing it
            return False
        return self._put(self._signed(session, message, copy=copy))

    def _step(self, timeout_s: float) -> Message | None:
        """Wait for an event, at most `timeout_s`, and handle it; return the message if one arrived."""
        now = time.monotonic()
        is_fresh = now - self._stepped_at < _FRESH_S
        self._greet(now)
        ready = self._ready(timeout_s if self._session is not None else min(timeout_s, _HELLO_S))
        now = self._stepped_at = time.monotonic()
        if self._monitor in ready:
            for event, value in self._events():
                self._on_event(event, value)
                if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and is_fresh:
                    self._on_broken(now)
        message = None
        if self._socket in ready:
            try:
                message = self._received(self._frames())
            except RefusedError as refused:
                self.refused[refused.reason] += 1
        self._greet(now)
        return message

    def _greet(self, now: float) -> None:
        if self._session is None and self._is_up and now >= self._hello_at:
            self._hello = self._key.hello(self.name, self._options.version)
            self._hello_at = now + _HELLO_S
            self._put([self._hello])

    def _show_session(self) -> None:
        """Show the server that this connection belongs to the session."""
        if self._session is not None:
            self._put([self._session.outgoing.sign(Packet.HERE, self._session.id, b"")])

    def _on_event(self, event: int, value: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.connections += 1
            self._is_up, self._broken, self._hello_at = True, [], 0.0
            self._show_session()
        elif event == zmq.EVENT_DISCONNECTED:
            self._is_up = False
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH or value == _CRYPTOGRAPHIC:
            raise self._key_refused()
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:  # after which ZeroMQ does not try again
            if value == _MECHANISM_MISMATCH:
                raise self._disagreement()
            raise ParameterServerError(f"{self.address} is no parameter server: it does not speak ZeroMQ's protocol")

    def _on_broken(self, now: float) -> None:
        """Diagnose repeated handshake failures; raise if the reason is permanent."""
        self._broken = [*(at for at in self._broken if now - at < _BROKEN_S), now]
        if len(self._broken) < _BROKEN_HANDSHAKES or self._session is not None:
            return
        self._broken = []
        theirs, own = _mechanism_of(self.address), b"CURVE" if self._options.encrypt else b"PLAIN"
        if theirs in (b"CURVE", b"PLAIN") and theirs != own:
            raise self._disagreement()
        if theirs == own == b"CURVE":  # with a wrong key it just disconnects
            raise self._key_refused()

    def _key_refused(self) -> KeyRefusedError:
        return KeyRefusedError(
            f"the parameter server at {self.address} refused the key of {self.name}, so they belong to different runs: "
            "start servers and workers with one `dtrain run`, which hands out the key"
        )

    def _disagreement(self) -> ParameterServerError:
        this, that = ("encrypts", "does not") if self._options.encrypt else ("does not encrypt", "does")
        return ParameterServerError(
            f"{self.name} {this} and the parameter server at {self.address} {that}: give all processes the same option"
        )

    def _received(self, frames: list[zmq.Frame]) -> Message | None:
        head = frames[0].buffer
        prefix = read_prefix(head)
        session = self._session
        if prefix.packet == Packet.CHALLENGE and session is None:
            self._session = self._key.accept(self._hello, bytes(head))
            self._show_session()
        elif prefix.packet == Packet.REFUSED and session is None:
            self._on_refusal(read_plain_packet(bytes(head)))
        elif prefix.packet == Packet.UNKNOWN and session is not None and prefix.session == session.id:
            self._session, self._hello_at = None, 0.0  # the server has dropped this session: start a new one
        elif prefix.packet >= Packet.MESSAGE and session is not None and prefix.session == session.id:
            return self._verified(session, prefix, head, frames[1:])
        else:
            raise RefusedError("unknown session")
        return None

    def _on_refusal(self, fields: Mapping[str, Any]) -> None:
        if str(fields.get("nonce", "")).encode() not in self._hello:
            raise RefusedError("unknown session")
        if fields.get("reason") == "version":
            raise VersionMismatchError(
                f"the parameter server at {self.address} runs dtrain {fields.get('version')} and {self.name} runs "
                f"{self._options.version}: install the same version everywhere"
            )
        raise self._key_refused()


@dataclass
class Peer:
    """A server's record of a client with a session; `heard_s` is the monotonic time of its last packet."""

    name: str
    route: bytes
    session: Session
    heard_s: float


class ServerEndpoint(Endpoint):
    """The server's end, bound to one address of this host; `address` is what clients connect to.

    Raises ParameterServerError if the address cannot be bound.
    """

    def __init__(self, options: EndpointOptions, *, host: str) -> None:
        super().__init__(options, zmq.ROUTER)
        self._peers: dict[bytes, Peer] = {}
        self._half_open: dict[bytes, Peer] = {}  # the client has sent nothing in the session yet
        try:
            self._guard()
            self.address = self._bind(host)
        except BaseException:
            self.close(linger_s=0)
            raise

    def _guard(self) -> None:
        self._zap: zmq.Socket[bytes] = self._context.socket(zmq.REP)
        self._zap.bind(_ZAP)
        self._watch(self._zap)
        self._credentials = self._key.guard_server(self._socket, encrypt=self._options.encrypt)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)  # a send fails if the peer is gone

    def _bind(self, host: str) -> str:
        try:
            ip = str(sockets.getaddrinfo(host, None, type=sockets.SOCK_STREAM)[0][4][0])
        except OSError as error:
            raise ParameterServerError(f"no parameter server can listen at {host!r}: {error}") from error
        self._socket.set(zmq.IPV6, int(":" in ip))
        try:
            self._socket.bind(f"tcp://[{ip}]:*" if ":" in ip else f"tcp://{ip}:*")  # the system chooses the port
        except zmq.ZMQError as error:
            raise ParameterServerError(f"no parameter server can listen at {host} ({ip}): {error}") from error
        return bytes(self._socket.get(zmq.LAST_ENDPOINT)).decode().rstrip("\0")

    @property
    def peers(self) -> Mapping[bytes, Peer]:
        """The clients with a session, by the names that `receive` returns; a restarted client is a new one."""
        return self._peers

    def forget(self, peer: bytes) -> None:
        """Drop a session; a live client gets a new one with its next packet, which itself is lost."""
        self._peers.pop(peer, None)

    def receive(self, timeout_s: float = 0.0) -> tuple[bytes, Message] | None:
        """Return the next message and its sender, or None after `timeout_s`; accepts clients meanwhile."""
        now = time.monotonic()
        deadline = now + timeout_s
        while True:
            ready = self._ready(deadline - now)
            now = time.monotonic()
            if self._zap in ready and not answer_zap(self._zap, self._credentials):
                self.refused["key"] += 1
            if self._monitor in ready:
                self._count_failures()
            got = self._received(self._frames(), now) if self._socket in ready else None
            if got is not None or now >= deadline:
                return got

    def send(self, peer: bytes, message: Message, *, copy: bool = False) -> bool:
        """Queue a message without blocking; return False if it was dropped: `peer` is gone, or does not read.

        Without `copy`, large tensors must stay unchanged until the peer has answered.
        """
        known = self._peers.get(peer)
        return known is not None and self._put([known.route, *self._signed(known.session, message, copy=copy)])

    def _received(self, frames: list[zmq.Frame], now: float) -> tuple[bytes, Message] | None:
        route, head = frames[0].bytes, frames[1].buffer if len(frames) > 1 else memoryview(b"")
        try:
            if len(frames) > 2 + MAX_TENSORS:
                raise RefusedError("malformed")
            prefix = read_prefix(head)
            if prefix.packet < Packet.MESSAGE:
                self._greet(route, prefix, head, now)
                return None
            if prefix.version != PROTOCOL_VERSION:
                raise RefusedError("malformed")
            peer = self._peers.get(prefix.session) or self._half_open.get(prefix.session)
            if peer is None:
                self._put([route, unknown(prefix.session)])
                raise RefusedError("unknown session")
            message = self._verified(peer.session, prefix, head, frames[2:])
        except RefusedError as refused:
            self.refused[refused.reason] += 1
            return None
        if self._half_open.pop(prefix.session, None) is not None:
            self._peers[prefix.session] = peer
        peer.route, peer.heard_s = route, now
        return None if message is None else (prefix.session, message)

    def _greet(self, route: bytes, prefix: Prefix, head: memoryview, now: float) -> None:
        if len(head) > MAX_HANDSHAKE_BYTES or prefix.packet != Packet.HELLO:
            raise RefusedError("malformed")
        packet, version = bytes(head), self._options.version
        hello = self._key.read_hello(packet)
        reason = "version" if (prefix.version, hello.version) != (PROTOCOL_VERSION, version) else "key"
        if reason == "version" or not hello.is_proven:
            self._put([route, refusal(reason, nonce=hello.nonce, version=version)])
            raise RefusedError(reason)
        for session, peer in list(self._half_open.items()):
            if now - peer.heard_s > HALF_OPEN_S or len(self._half_open) >= MAX_HALF_OPEN:  # the oldest first
                del self._half_open[session]
                self.refused["half-open"] += 1
        challenge, made = self._key.challenge(packet, version)
        self._half_open[made.id] = Peer(hello.name, route, made, now)
        self._put([route, challenge])

    def _count_failures(self) -> None:
        for event, value in self._events():
            if event & _FAILED and event != zmq.EVENT_HANDSHAKE_FAILED_AUTH:  # already counted by ZAP
                self.refused["key" if value == _CRYPTOGRAPHIC else "handshake"] += 1


def _mechanism_of(address: str) -> bytes:
    """Return the handshake mechanism in a ZeroMQ socket's greeting (ZMTP 3.0); empty if there is none."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    greeting = b""
    with (
        contextlib.suppress(OSError),
        sockets.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S) as connection,
    ):
        connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03")  # not our own mechanism: it would disconnect at once
        while len(greeting) < 32 and (more := connection.recv(64)):
            greeting += more
    return greeting[12:32].rstrip(b"\0")


def own_version() -> str:
    """Return the version of the package that this process runs."""
    import importlib.metadata

    try:
        return importlib.metadata.version("dtrain")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
