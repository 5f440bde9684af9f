"""A client's end of the connection to one server: connects, shakes hands, and says why if it cannot."""

from __future__ import annotations

import contextlib
import socket as sockets
import time
from collections.abc import Mapping
from typing import Any

import zmq

from ddp.errors import KeyRefusedError, ParameterServerError, VersionMismatchError
from ddp.strategies.parameter_server.transport.auth import Packet, RefusedError, Session, read_plain_packet, read_prefix
from ddp.strategies.parameter_server.transport.endpoint import CRYPTOGRAPHIC, OUT, USER, Endpoint, EndpointOptions
from ddp.strategies.parameter_server.transport.messages import Message

__all__ = ["ClientEndpoint"]

_HELLO_S = 2.0  # a hello without an answer is said again
_BROKEN_HANDSHAKES, _BROKEN_S = 3, 5.0  # so many within this time: neither CURVE nor another mechanism says why
_FRESH_S = 1.0  # what a thread sees that was away for longer says nothing about when it happened
_PROBE_S = 1.0
_MECHANISM_MISMATCH = 0x11000002  # ZMQ_PROTOCOL_ERROR_ZMTP_...


class ClientEndpoint(Endpoint):
    """A client's end for one server; connects by itself, and again whenever the connection breaks.

    `connections` counts the connections made: when it goes up, what was under way may be lost.
    """

    def __init__(self, options: EndpointOptions, address: str, *, name: str) -> None:
        super().__init__(options, zmq.DEALER)
        self.address, self.name = address, name
        self.connections = 0
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
        if self._options.encrypt:
            self._socket.curve_publickey, self._socket.curve_secretkey = self._key.curve_pair("client")
            self._socket.curve_serverkey = self._key.curve_pair("server")[0]
        else:
            self._socket.plain_username, self._socket.plain_password = USER, self._key.password()
        self._socket.set(zmq.IPV6, int("[" in self.address))
        try:
            self._socket.connect(self.address)
        except zmq.ZMQError as error:
            raise ParameterServerError(f"{self.address!r} is no address of a parameter server: {error}") from error

    def receive(self, timeout_s: float = 0.0) -> Message | None:
        """Return the next message, or None after `timeout_s`; connects meanwhile.

        Raises KeyRefusedError, VersionMismatchError or, when the two do not agree about encryption or the other end is
        no parameter server, ParameterServerError.
        """
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
        if session is None or not int(self._socket.get(zmq.EVENTS)) & OUT:  # before the work of signing it
            return False
        return self._put(self._signed(session, message, copy=copy))

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
            self._hello = self._key.hello(self.name, self._options.version)
            self._hello_at = now + _HELLO_S
            self._put([self._hello])

    def _on_event(self, event: int, value: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.connections += 1
            self._is_up, self._broken, self._hello_at = True, [], 0.0
            if self._session is not None:
                self._put([self._session.outgoing.sign(Packet.HERE, self._session.id, b"")])
        elif event == zmq.EVENT_DISCONNECTED:
            self._is_up = False
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH or value == CRYPTOGRAPHIC:
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
        theirs, own = _mechanism_of(self.address), b"CURVE" if self._options.encrypt else b"PLAIN"
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
        this, that = ("encrypts", "does not") if self._options.encrypt else ("does not encrypt", "does")
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
            self._verified(self._offered, prefix, head, frames[1:])
            self._session, self._offered = self._offered, None
        elif prefix.packet == Packet.REFUSED and session is None:
            self._on_refusal(read_plain_packet(bytes(head)))
        elif prefix.packet == Packet.UNKNOWN and session is not None and prefix.session == session.id:
            self._session, self._hello_at = None, 0.0  # the server has forgotten this one: begin anew
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
