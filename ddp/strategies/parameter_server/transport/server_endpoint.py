"""The server's end of its connections: lets clients of the run in, and keeps a session for each."""

from __future__ import annotations

import hmac
import socket as sockets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from ddp.errors import ParameterServerError
from ddp.strategies.parameter_server.transport.auth import (
    MAX_HANDSHAKE_BYTES,
    Packet,
    Prefix,
    RefusedError,
    Session,
    read_prefix,
    refusal,
    unknown,
)
from ddp.strategies.parameter_server.transport.endpoint import CRYPTOGRAPHIC, FAILED, USER, Endpoint, EndpointOptions
from ddp.strategies.parameter_server.transport.messages import MAX_TENSORS, PROTOCOL_VERSION, Message

__all__ = ["MAX_HALF_OPEN", "Peer", "ServerEndpoint"]

MAX_HALF_OPEN = 64
HALF_OPEN_S = 10.0
_DOMAIN = b"dtrain"
_ZAP = "inproc://zeromq.zap.01"


@dataclass
class Peer:
    """A client with a session, as a server knows it; `heard_s` is the monotonic time of its last packet."""

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
        self._half_open: dict[bytes, tuple[Session, str, float]] = {}
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
        self._socket.set(zmq.ZAP_DOMAIN, _DOMAIN)
        self._socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)  # a send says so if nobody is there
        if self._options.encrypt:
            public, self._socket.curve_secretkey = self._key.curve_pair("server")
            self._socket.curve_publickey = public
            self._socket.curve_server = True
            self._credentials = [b"CURVE", z85.decode(self._key.curve_pair("client")[0])]
        else:
            self._socket.plain_server = True
            self._credentials = [b"PLAIN", USER, self._key.password()]

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
            if self._zap in ready:
                self._answer_zap()
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
        return known is not None and self._put([known.route, *self._signed(known.session, message, copy=copy)])

    def _taken(self, frames: list[zmq.Frame], now: float) -> tuple[bytes, Message] | None:
        route, head = frames[0].bytes, frames[1].buffer if len(frames) > 1 else memoryview(b"")
        try:
            if len(frames) > 2 + MAX_TENSORS:
                raise RefusedError("malformed")
            prefix = read_prefix(head)
            if prefix.packet < Packet.MESSAGE:
                self._shake_hands(route, prefix, head, now)
                return None
            if prefix.version != PROTOCOL_VERSION:
                raise RefusedError("malformed")
            peer = self._peers.get(prefix.session)
            if peer is None:
                self._put([route, unknown(prefix.session)])
                raise RefusedError("unknown session")
            message = self._verified(peer.session, prefix, head, frames[2:])
        except RefusedError as refused:
            self.refused[refused.reason] += 1
            return None
        peer.route, peer.heard_s = route, now
        return None if message is None else (prefix.session, message)

    def _shake_hands(self, route: bytes, prefix: Prefix, head: memoryview, now: float) -> None:
        if len(head) > MAX_HANDSHAKE_BYTES or prefix.packet not in (Packet.HELLO, Packet.PROOF):
            raise RefusedError("malformed")
        if prefix.packet == Packet.HELLO:
            self._greet(route, prefix, bytes(head), now)
        else:
            self._admit(route, prefix, bytes(head), now)

    def _greet(self, route: bytes, prefix: Prefix, packet: bytes, now: float) -> None:
        hello, version = self._key.read_hello(packet), self._options.version
        reason = "version" if (prefix.version, hello.version) != (PROTOCOL_VERSION, version) else "key"
        if reason == "version" or not hello.is_proven:
            self._put([route, refusal(reason, nonce=hello.nonce, version=version)])
            raise RefusedError(reason)
        for session, (_, _, until) in list(self._half_open.items()):
            if until < now or len(self._half_open) >= MAX_HALF_OPEN:  # the oldest first
                del self._half_open[session]
                self.refused["half-open"] += 1
        challenge, made = self._key.challenge(packet, version)
        self._half_open[made.id] = made, hello.name, now + HALF_OPEN_S
        self._put([route, challenge])

    def _admit(self, route: bytes, prefix: Prefix, packet: bytes, now: float) -> None:
        made, name, _ = self._half_open.get(prefix.session, (None, "", 0.0))
        if made is None:
            raise RefusedError("unknown session")
        if not self._key.is_proof(packet, made.transcript):
            raise RefusedError("key")
        del self._half_open[made.id]
        self._peers[made.id] = Peer(name, route, made, now)
        self._put([route, made.outgoing.sign(Packet.HERE, made.id, b"")])

    def _answer_zap(self) -> None:
        """Let in whom the run's key has made the password of (ZAP, ZeroMQ's RFC 27), nobody else."""
        version, request, *_ = frames = self._zap.recv_multipart()
        status = (b"200", b"OK")
        if not _equal(frames[5:], self._credentials):
            status = (b"400", b"not the key of this run")
            self.refused["key"] += 1
        self._zap.send_multipart([version, request, *status, b"", b""])

    def _count_failures(self) -> None:
        for event, value in self._events():
            if event & FAILED and event != zmq.EVENT_HANDSHAKE_FAILED_AUTH:  # those that ZAP has counted
                self.refused["key" if value == CRYPTOGRAPHIC else "handshake"] += 1


def _equal(these: Sequence[bytes], those: Sequence[bytes]) -> bool:
    return len(these) == len(those) and all(map(hmac.compare_digest, these, those))
