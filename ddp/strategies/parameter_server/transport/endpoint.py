"""What both ends of a parameter server's connections share: ZeroMQ sockets over TCP, authenticated with the run's key.

Owns the sockets, their contexts and the sessions; `server` and `client` own what the messages mean. An endpoint
belongs to one thread, which no call keeps beyond its timeout. Messages of a session arrive in order and at most once.
A connection that breaks is made anew and keeps its session, but what was under way may be lost: who waits for an
answer asks again.

A peer without the key gets no frame in: the ZeroMQ handshake itself wants a password (or CURVE keys) derived from
the run's key. Routes are ROUTER's own numbers, one a connection, so there is no routing id to take over; a session's
route is where its last authenticated packet came from.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from ddp.errors import ArgumentError
from ddp.strategies.parameter_server.transport.auth import Packet, Prefix, RefusedError, RunKey, Session
from ddp.strategies.parameter_server.transport.messages import MalformedError, Message, decode, encode

__all__ = ["CRYPTOGRAPHIC", "FAILED", "OUT", "USER", "Endpoint", "EndpointOptions", "own_version"]

_HEADER_BYTES = 1 << 20
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 2_000, 10_000
_HANDSHAKE_MS = 10_000
_RECONNECT_MS, _RECONNECT_MAX_MS = 50, 1_000
IN, OUT, _NOBLOCK = int(zmq.POLLIN), int(zmq.POLLOUT), int(zmq.NOBLOCK)  # enums cost microseconds
USER = b"dtrain"
CRYPTOGRAPHIC = 0x11000001  # ZMQ_PROTOCOL_ERROR_ZMTP_...
FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


@dataclass(frozen=True)
class EndpointOptions:
    """What both ends of a connection have alike. `queue_messages` wait at most in each of its directions."""

    key: bytes = field(repr=False)  # of the run
    encrypt: bool = False
    max_frame_bytes: int = 64 << 20
    queue_messages: int = 256
    version: str = field(default_factory=lambda: own_version())


class Endpoint:
    """What both ends share: one context with one socket and its monitor, opened in __init__, closed by close().

    `sockets` are readable when there is something to do: `receive()` is to be called then until it gives None, which
    it may at once.
    """

    def __init__(self, options: EndpointOptions, kind: int) -> None:
        self.refused: Counter[str] = Counter()  # packets and connections not taken, by reason
        self._options = options
        self._key = RunKey(options.key)
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)  # until close() says otherwise: one never closed must not hang the exit
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
        self._monitor = self._socket.get_monitor_socket(FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self.sockets: list[zmq.Socket[bytes]] = []
        self._poller = zmq.Poller()
        self._watch(self._socket)
        self._watch(self._monitor)

    def _watch(self, socket: zmq.Socket[bytes]) -> None:
        self.sockets.append(socket)
        self._poller.register(socket, IN)

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
        while int(self._monitor.get(zmq.EVENTS)) & IN:
            event = parse_monitor_message(self._monitor.recv_multipart())
            yield int(event["event"]), int(event["value"])

    def _frames(self) -> list[zmq.Frame]:
        """Return the frames of the next packet, which is there already."""
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


def own_version() -> str:
    """Return the version of the package that this process runs."""
    import importlib.metadata

    try:
        return importlib.metadata.version("dtrain")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
