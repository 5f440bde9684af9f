"""The two ends of a parameter server's wire: ZeroMQ sockets over TCP that pass only what the run's key has sealed.

Owns the sockets, their contexts and the sessions; `server` and `client` own what is said. An endpoint
belongs to one thread, which no call keeps beyond its timeout; only `Wakeup.set` is for others. Messages of a session
arrive in order and at most once. A connection that breaks is made anew and keeps its session, but what was under way
may be lost: who waits for an answer asks again.

A stranger without the key gets no frame in: the ZeroMQ handshake itself wants a password (or CURVE keys) derived from
the run's key. Routes are ROUTER's own numbers, one a connection, so there is no routing id to take over; a session's
route is where its last sealed packet came from.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import socket as sockets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from ddp.errors import ArgumentError, KeyRefusedError, ParameterServerError, VersionMismatchError
from ddp.strategies.parameter_server.auth import (
    MAX_HANDSHAKE_BYTES,
    Packet,
    Prefix,
    RefusedError,
    RunKey,
    Session,
    read_plain_packet,
    read_prefix,
    refusal,
    unknown,
)
from ddp.strategies.parameter_server.messages import MAX_TENSORS, WIRE_VERSION, MalformedError, Message, decode, encode

__all__ = ["ClientEndpoint", "Peer", "Poller", "ServerEndpoint", "Wakeup"]

MAX_FRAME_BYTES = 64 << 20
QUEUE_MESSAGES = 256  # in each direction of a connection
MAX_HALF_OPEN = 64
HALF_OPEN_S = 10.0
_HELLO_S = 2.0  # a hello without an answer is said again
_HEADER_BYTES = 1 << 20
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 2_000, 10_000
_HANDSHAKE_MS = 10_000
_RECONNECT_MS, _RECONNECT_MAX_MS = 50, 1_000
_BROKEN_HANDSHAKES, _BROKEN_S = 3, 5.0  # so many within this time: neither CURVE nor another mechanism says why
_FRESH_S = 1.0  # what a thread sees that was away for longer says nothing about when it happened
_PROBE_S = 1.0
_IN, _OUT, _NOBLOCK = int(zmq.POLLIN), int(zmq.POLLOUT), int(zmq.NOBLOCK)  # enums cost microseconds
_NOBLOCK_AND_MORE = _NOBLOCK | int(zmq.SNDMORE)
_USER = b"dtrain"
_DOMAIN = b"dtrain"
_ZAP = "inproc://zeromq.zap.01"
_CRYPTOGRAPHIC, _MECHANISM_MISMATCH = 0x11000001, 0x11000002  # ZMQ_PROTOCOL_ERROR_ZMTP_...
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


@dataclass
class Peer:
    """A client with a session, as a server knows it; `heard_s` is the monotonic time of its last packet."""

    name: str
    route: bytes
    session: Session
    heard_s: float


class _Endpoint:
    """What both ends share: one context with one socket and its monitor, opened in __init__, closed by close()."""

    def __init__(self, key: bytes, *, kind: int, max_frame_bytes: int, queue_messages: int, version: str | None):
        self.refused: Counter[str] = Counter()  # packets and connections not taken, by reason
        self._key = RunKey(key)
        self._version = own_version() if version is None else version
        self._max_frame_bytes = max_frame_bytes
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)  # until close() says otherwise: one never closed must not hang the exit
        self._socket: zmq.Socket[bytes] = self._context.socket(kind)
        for option, value in (
            (zmq.SNDHWM, queue_messages),
            (zmq.RCVHWM, queue_messages),
            (zmq.MAXMSGSIZE, max(max_frame_bytes, _HEADER_BYTES)),
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
        """Close the sockets; what is queued may leave within `linger_s`, for which this waits. May be repeated."""
        if not self._context.closed:
            self._socket.disable_monitor()
            self._context.destroy(linger=int(linger_s * 1000))

    def _ready(self, timeout_s: float) -> dict[Any, int]:
        """Wait until one of the sockets has something, and return those that have."""
        return dict(self._poller.poll(max(0, math.ceil(timeout_s * 1000))))

    def _events(self) -> Iterator[tuple[int, int]]:
        while int(self._monitor.get(zmq.EVENTS)) & _IN:
            event = parse_monitor_message(self._monitor.recv_multipart())
            yield int(event["event"]), int(event["value"])

    def _frames(self) -> list[zmq.Frame]:
        """Return the frames of the next packet, which is there already."""
        frames = [self._socket.recv(_NOBLOCK, copy=False)]
        while frames[-1].more:
            frames.append(self._socket.recv(_NOBLOCK, copy=False))
        return frames

    def _put(self, frames: Sequence[bytes | zmq.Frame]) -> bool:
        last = len(frames) - 1
        try:
            for index, frame in enumerate(frames):
                self._socket.send(frame, _NOBLOCK if index == last else _NOBLOCK_AND_MORE)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def _sealed(self, session: Session, message: Message, *, copy: bool) -> list[bytes | zmq.Frame]:
        header, frames = encode(message, copy=copy)
        largest = max((len(frame) for frame in frames), default=0)
        if len(header) > _HEADER_BYTES // 2 or largest > self._max_frame_bytes:
            raise ArgumentError(
                f"message {message.kind!r} has {len(header)} bytes of facts and a tensor of {largest} bytes; "
                f"the most is {_HEADER_BYTES // 2} and {self._max_frame_bytes}: send smaller pieces"
            )
        return [session.outgoing.seal(Packet.MESSAGE, session.id, header, frames), *frames]

    def _opened(
        self, session: Session, prefix: Prefix, head: memoryview, frames: Sequence[zmq.Frame]
    ) -> Message | None:
        """Return the message of a sealed packet, None for a HERE; raises RefusedError."""
        header = session.incoming.open(prefix, head, frames)
        if prefix.packet == Packet.HERE:
            return None
        try:
            return decode(header, frames)
        except MalformedError:
            raise RefusedError("malformed") from None


class ServerEndpoint(_Endpoint):
    """The server's end, bound to one address of this host; `address` is what clients connect to.

    A `port` of 0 lets the system choose. Raises ParameterServerError if the address cannot be bound.
    """

    def __init__(
        self,
        key: bytes,
        *,
        host: str,
        port: int = 0,
        encrypt: bool = False,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        queue_messages: int = QUEUE_MESSAGES,
        version: str | None = None,
    ) -> None:
        super().__init__(
            key, kind=zmq.ROUTER, max_frame_bytes=max_frame_bytes, queue_messages=queue_messages, version=version
        )
        self.dropped = 0  # messages for a client that is away or does not read
        self._peers: dict[bytes, Peer] = {}
        self._half_open: dict[bytes, tuple[Session, str, float]] = {}
        try:
            self._guard(encrypt)
            self.address = self._bind(host, port)
        except BaseException:
            self.close(linger_s=0)
            raise

    def _guard(self, encrypt: bool) -> None:
        self._door: zmq.Socket[bytes] = self._context.socket(zmq.REP)
        self._door.bind(_ZAP)
        self._watch(self._door)
        self._socket.set(zmq.ZAP_DOMAIN, _DOMAIN)
        self._socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)  # a send says so if nobody is there
        if encrypt:
            public, self._socket.curve_secretkey = self._key.curve_pair("server")
            self._socket.curve_publickey = public
            self._socket.curve_server = True
            self._credentials = [b"CURVE", z85.decode(self._key.curve_pair("client")[0])]
        else:
            self._socket.plain_server = True
            self._credentials = [b"PLAIN", _USER, self._key.password()]

    def _bind(self, host: str, port: int) -> str:
        ip = _resolved(host)
        self._socket.set(zmq.IPV6, int(":" in ip))
        try:
            self._socket.bind(f"tcp://[{ip}]:{port or '*'}" if ":" in ip else f"tcp://{ip}:{port or '*'}")
        except zmq.ZMQError as error:
            raise ParameterServerError(
                f"no parameter server can listen at {host} ({ip}) port {port}: {error}"
            ) from error
        return bytes(self._socket.get(zmq.LAST_ENDPOINT)).decode().rstrip("\0")

    @property
    def peers(self) -> Mapping[bytes, Peer]:
        """The clients with a session, by what `receive` calls them; a client that starts anew is a new one."""
        return self._peers

    def forget(self, peer: bytes) -> None:
        """Drop a session; if its client lives it gets a new one with its next packet, which is lost itself."""
        self._peers.pop(peer, None)

    def receive(self, timeout_s: float = 0.0) -> tuple[bytes, Message] | None:
        """Return the next message and who sent it, or None after `timeout_s`; lets clients in meanwhile."""
        now = time.monotonic()
        deadline = now + timeout_s
        while True:
            ready = self._ready(deadline - now)
            now = time.monotonic()
            if self._door in ready:
                self._answer_the_door()
            if self._monitor in ready:
                self._count_failures()
            got = self._taken(self._frames(), now) if self._socket in ready else None
            if got is not None or now >= deadline:
                return got

    def send(self, peer: bytes, message: Message, *, copy: bool = False) -> bool:
        """Queue a message and return at once; False if it was dropped: `peer` is away, or does not read.

        Without `copy`, large tensors must stay unchanged until the peer has answered.
        """
        known = self._peers.get(peer)
        sent = known is not None and self._put([known.route, *self._sealed(known.session, message, copy=copy)])
        self.dropped += not sent
        return sent

    def _taken(self, frames: list[zmq.Frame], now: float) -> tuple[bytes, Message] | None:
        route, head = frames[0].bytes, frames[1].buffer if len(frames) > 1 else memoryview(b"")
        try:
            if len(frames) > 2 + MAX_TENSORS:
                raise RefusedError("malformed")
            prefix = read_prefix(head)
            if prefix.packet < Packet.MESSAGE:
                self._shake_hands(route, prefix, head, now)
                return None
            if prefix.wire != WIRE_VERSION:
                raise RefusedError("malformed")
            peer = self._peers.get(prefix.session)
            if peer is None:
                self._put([route, unknown(prefix.session)])
                raise RefusedError("unknown session")
            message = self._opened(peer.session, prefix, head, frames[2:])
        except RefusedError as refused:
            self.refused[refused.reason] += 1
            return None
        peer.route, peer.heard_s = route, now
        return None if message is None else (prefix.session, message)

    def _shake_hands(self, route: bytes, prefix: Prefix, head: memoryview, now: float) -> None:
        if len(head) > MAX_HANDSHAKE_BYTES or prefix.packet not in (Packet.HELLO, Packet.PROOF):
            raise RefusedError("malformed")
        if prefix.packet == Packet.HELLO:
            self._greet(route, bytes(head), now)
        else:
            self._admit(route, bytes(head), prefix.session, now)

    def _greet(self, route: bytes, packet: bytes, now: float) -> None:
        hello = self._key.read_hello(packet)
        wire = read_prefix(memoryview(packet)).wire
        reason = "version" if (wire, hello.version) != (WIRE_VERSION, self._version) else "key"
        if reason == "version" or not hello.is_proven:
            self._put([route, refusal(reason, nonce=hello.nonce, version=self._version)])
            raise RefusedError(reason)
        for session, (_, _, until) in list(self._half_open.items()):
            if until < now or len(self._half_open) >= MAX_HALF_OPEN:  # the oldest first
                del self._half_open[session]
                self.refused["half-open"] += 1
        challenge, made = self._key.challenge(packet, self._version)
        self._half_open[made.id] = made, hello.name, now + HALF_OPEN_S
        self._put([route, challenge])

    def _admit(self, route: bytes, packet: bytes, session: bytes, now: float) -> None:
        made, name, _ = self._half_open.get(session, (None, "", 0.0))
        if made is None:
            raise RefusedError("unknown session")
        if not self._key.is_proof(packet, made.transcript):
            raise RefusedError("key")
        del self._half_open[session]
        self._peers[session] = Peer(name, route, made, now)
        self._put([route, made.outgoing.seal(Packet.HERE, session, b"")])

    def _answer_the_door(self) -> None:
        """Let in whom the run's key has made the password of (ZAP, ZeroMQ's RFC 27), nobody else."""
        version, request, *_ = knock = self._door.recv_multipart()
        status = (b"200", b"OK")
        if not _equal(knock[5:], self._credentials):
            status = (b"400", b"not the key of this run")
            self.refused["key"] += 1
        self._door.send_multipart([version, request, *status, b"", b""])

    def _count_failures(self) -> None:
        for event, value in self._events():
            if event & _FAILED and event != zmq.EVENT_HANDSHAKE_FAILED_AUTH:  # those the door has counted
                self.refused["key" if value == _CRYPTOGRAPHIC else "handshake"] += 1


class ClientEndpoint(_Endpoint):
    """A client's end for one server; connects by itself, and again whenever the connection breaks.

    `session` is what the server calls this client (empty before there is one). `connections` counts the connections
    made: when it goes up, what was under way may be lost.
    """

    def __init__(
        self,
        key: bytes,
        address: str,
        *,
        name: str,
        encrypt: bool = False,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        queue_messages: int = QUEUE_MESSAGES,
        version: str | None = None,
    ) -> None:
        if len(name) > 200:
            raise ArgumentError(f"the name of a client has {len(name)} characters, the most is 200")
        super().__init__(
            key, kind=zmq.DEALER, max_frame_bytes=max_frame_bytes, queue_messages=queue_messages, version=version
        )
        self.address, self.name = address, name
        self.connections = 0
        self._encrypts = encrypt
        self._session: Session | None = None
        self._offered: Session | None = None  # until the server has taken the proof
        self._hello = b""
        self._hello_at = 0.0
        self._is_up = False
        self._broken: list[float] = []  # when handshakes broke since the last that did not
        self._stepped_at = 0.0
        try:
            self._open()
        except BaseException:
            self.close(linger_s=0)
            raise

    def _open(self) -> None:
        if self._encrypts:
            self._socket.curve_publickey, self._socket.curve_secretkey = self._key.curve_pair("client")
            self._socket.curve_serverkey = self._key.curve_pair("server")[0]
        else:
            self._socket.plain_username, self._socket.plain_password = _USER, self._key.password()
        self._socket.set(zmq.IPV6, int("[" in self.address))
        try:
            self._socket.connect(self.address)
        except zmq.ZMQError as error:
            raise ParameterServerError(f"{self.address!r} is no address of a parameter server: {error}") from error

    @property
    def session(self) -> bytes:
        """The name of the session, which another session does not share; empty before there is one."""
        return b"" if self._session is None else self._session.id

    def connect(self, timeout_s: float) -> None:
        """Wait until there is a session. Raises KeyRefusedError, VersionMismatchError or, when the time is over or the
        two do not agree about encryption, ParameterServerError."""
        deadline = time.monotonic() + timeout_s
        while self._session is None:
            now = time.monotonic()
            if now >= deadline:
                raise ParameterServerError(
                    f"no answer from the parameter server at {self.address} within {timeout_s:g} s: "
                    + ("it is connected but busy or stopped" if self._is_up else "no connection could be made")
                )
            self._step(deadline - now)

    def receive(self, timeout_s: float = 0.0) -> Message | None:
        """Return the next message, or None after `timeout_s`; raises as `connect` if the server lets this one go."""
        now = time.monotonic()
        deadline = now + timeout_s
        while True:
            message = self._step(deadline - now)
            now = time.monotonic()
            if message is not None or now >= deadline:
                return message

    def send(self, message: Message, *, copy: bool = False) -> bool:
        """Queue a message and return at once; False if there is no session now, or the queue is full.

        Without `copy`, large tensors must stay unchanged until the server has answered.
        """
        session = self._session
        if session is None or not int(self._socket.get(zmq.EVENTS)) & _OUT:  # before the work of sealing it
            return False
        return self._put(self._sealed(session, message, copy=copy))

    def _step(self, timeout_s: float) -> Message | None:
        """Wait for something to do, at most `timeout_s`, and do it; return the message if one came."""
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
                message = self._taken(self._frames())
            except RefusedError as refused:
                self.refused[refused.reason] += 1
        self._greet(now)
        return message

    def _greet(self, now: float) -> None:
        if self._session is None and self._is_up and now >= self._hello_at:
            self._hello = self._key.hello(self.name, self._version)
            self._hello_at = now + _HELLO_S
            self._put([self._hello])

    def _on_event(self, event: int, value: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.connections += 1
            self._is_up, self._broken, self._hello_at = True, [], 0.0
            if self._session is not None:
                self._put([self._session.outgoing.seal(Packet.HERE, self._session.id, b"")])
        elif event == zmq.EVENT_DISCONNECTED:
            self._is_up = False
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH or value == _CRYPTOGRAPHIC:
            raise self._key_refused()
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:  # after which ZeroMQ does not try again
            if value == _MECHANISM_MISMATCH:
                raise self._disagreement()
            raise ParameterServerError(f"{self.address} is no parameter server: it does not speak ZeroMQ's protocol")

    def _on_broken(self, now: float) -> None:
        """Find out why handshakes break one after the other, if it is for a reason that stays."""
        self._broken = [*(at for at in self._broken if now - at < _BROKEN_S), now]
        if len(self._broken) < _BROKEN_HANDSHAKES or self._session is not None:
            return
        self._broken = []
        theirs, own = _mechanism_of(self.address), b"CURVE" if self._encrypts else b"PLAIN"
        if theirs in (b"CURVE", b"PLAIN") and theirs != own:
            raise self._disagreement()
        if theirs == own == b"CURVE":  # with a wrong key it just hangs up
            raise self._key_refused()

    def _key_refused(self) -> KeyRefusedError:
        return KeyRefusedError(
            f"the parameter server at {self.address} refused the key of {self.name}, so they belong to different runs: "
            "start servers and workers with one `dtrain run`, which hands out the key"
        )

    def _disagreement(self) -> ParameterServerError:
        this, that = ("encrypts", "does not") if self._encrypts else ("does not encrypt", "does")
        return ParameterServerError(
            f"{self.name} {this} and the parameter server at {self.address} {that}: give all processes the same option"
        )

    def _taken(self, frames: list[zmq.Frame]) -> Message | None:
        head = frames[0].buffer
        prefix = read_prefix(head)
        session = self._session
        if prefix.packet == Packet.CHALLENGE and session is None:
            proof, self._offered = self._key.answer(self._hello, bytes(head))
            self._put([proof])
        elif prefix.packet == Packet.HERE and self._offered is not None and prefix.session == self._offered.id:
            self._opened(self._offered, prefix, head, frames[1:])
            self._session, self._offered = self._offered, None
        elif prefix.packet == Packet.REFUSED and session is None:
            self._on_refusal(read_plain_packet(bytes(head)))
        elif prefix.packet == Packet.UNKNOWN and session is not None and prefix.session == session.id:
            self._session, self._hello_at = None, 0.0  # the server has forgotten this one: begin anew
        elif prefix.packet >= Packet.MESSAGE and session is not None and prefix.session == session.id:
            return self._opened(session, prefix, head, frames[1:])
        else:
            raise RefusedError("unknown session")
        return None

    def _on_refusal(self, said: Mapping[str, Any]) -> None:
        if str(said.get("nonce", "")).encode() not in self._hello:
            raise RefusedError("unknown session")
        if said.get("reason") == "version":
            raise VersionMismatchError(
                f"the parameter server at {self.address} runs dtrain {said.get('version')} and {self.name} runs "
                f"{self._version}: install the same version everywhere"
            )
        raise self._key_refused()


class Wakeup:
    """Ends another thread's `Poller.wait`: `set` may be called from any thread and never blocks."""

    def __init__(self) -> None:
        self._reader, self._writer = sockets.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def set(self) -> None:
        """Make the present or the next wait return; after close(), do nothing."""
        with contextlib.suppress(OSError):  # BlockingIOError: it is full, so the other will wake anyway
            self._writer.send(b"\0")

    def clear(self) -> None:
        """Take back every `set` so far; for the thread that waits."""
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def fileno(self) -> int:
        """The descriptor to poll."""
        return self._reader.fileno()

    def close(self) -> None:
        """Close both ends; a `set` that comes later does nothing."""
        self._reader.close()
        self._writer.close()


class Poller:
    """Waits for several endpoints and wake-ups at once, in the thread that owns them."""

    def __init__(self, *sources: ServerEndpoint | ClientEndpoint | Wakeup) -> None:
        self._poller = zmq.Poller()
        self._sources: dict[Any, ServerEndpoint | ClientEndpoint | Wakeup] = {}
        for source in sources:
            self.add(source)

    def add(self, source: ServerEndpoint | ClientEndpoint | Wakeup) -> None:
        """Wait for this one too."""
        for socket in _polled(source):
            self._poller.register(socket, zmq.POLLIN)
            self._sources[socket] = source

    def remove(self, source: ServerEndpoint | ClientEndpoint | Wakeup) -> None:
        """Wait no longer for this one; before it is closed."""
        for socket in _polled(source):
            self._poller.unregister(socket)
            del self._sources[socket]

    def wait(self, timeout_s: float) -> list[ServerEndpoint | ClientEndpoint | Wakeup]:
        """Return those with something to do, at latest after `timeout_s`: an endpoint's `receive()` is to be called
        until it gives None (which it may at once), a wake-up is cleared already."""
        ready = dict(self._poller.poll(max(0, math.ceil(timeout_s * 1000))))
        found = list(dict.fromkeys(self._sources[socket] for socket in ready))
        for source in found:
            if isinstance(source, Wakeup):
                source.clear()
        return found


def own_version() -> str:
    """Return the version of the package that this process runs."""
    import importlib.metadata

    try:
        return importlib.metadata.version("dtrain")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _polled(source: ServerEndpoint | ClientEndpoint | Wakeup) -> Sequence[Any]:
    return [source.fileno()] if isinstance(source, Wakeup) else source.sockets


def _mechanism_of(address: str) -> bytes:
    """Ask a ZeroMQ socket how it wants to shake hands (ZMTP 3.0, its greeting); empty if it does not say."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    greeting = b""
    with (
        contextlib.suppress(OSError),
        sockets.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S) as connection,
    ):
        connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03")  # not how we would: it would hang up at once
        while len(greeting) < 32 and (more := connection.recv(64)):
            greeting += more
    return greeting[12:32].rstrip(b"\0")


def _equal(these: Sequence[bytes], those: Sequence[bytes]) -> bool:
    return len(these) == len(those) and all(map(hmac.compare_digest, these, those))


def _resolved(host: str) -> str:
    try:
        return str(sockets.getaddrinfo(host, None, type=sockets.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ParameterServerError(f"no parameter server can listen at {host!r}: {error}") from error
