"""The wire format: packets of a session between holders of the run's key, safe from changes, replay and forgery.

A packet is a JSON header and the tensors' own memory: no tensor is copied in either direction, nothing is ever
unpickled, and numpy is not needed (bfloat16 and the 8-bit floats are sent as they are).

Two packets, each with an HMAC-SHA256 over all packets so far, set up a session with a fresh key for each direction:

    client: hello (version, name, nonce)    server: challenge (version, nonce, session)

The challenge proves the run's key to the client, the client's first packet in the session proves it to the server.
Every packet of a session is authenticated with AES-GMAC (AES-256-GCM that encrypts nothing): one tag over each tensor,
and one over the header, its sequence number and those tags. The endpoints carry the packets.

ZeroMQ's own handshake comes first, so a peer without the key cannot send a frame: it needs a password or, to encrypt,
CURVE keys, both derived from the run's key. CURVE alone would authenticate too, but it encrypts each frame before
sending its first byte: measured at 1 Gbit/s, a step of 100 MB then takes 1.5 times as long.
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import json
import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import zmq
from zmq.utils import z85

from ddp.errors import ArgumentError, UnsupportedError
from ddp.strategies.parameter_server.messages import MalformedError, Message

PROTOCOL_VERSION = 1
MAX_TENSORS = 4096  # of one message
KEY_BYTES = SESSION_BYTES = 32
TAG_BYTES = 16
_PROOF_BYTES = 32
MAX_HANDSHAKE_BYTES = 4096
_USER = b"dtrain"  # and the domain of ZAP
_MAGIC = b"dtps"
_PREFIX = struct.Struct("<4sBB32sQI")  # magic, version of the protocol, packet, session, sequence number, tensors
_NONCE = struct.Struct("<QI")  # sequence number, 0 for the header or 1 + the tensor's index

_NAMES = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz complex64 complex128 "
    "int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool"
)
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split() if hasattr(torch, name)}
_NAME_OF = {dtype: name for name, dtype in _DTYPES.items()}


class Packet(IntEnum):
    """The kind of a packet. Those below MESSAGE have their own proof or none, the others are authenticated."""

    HELLO = 1
    CHALLENGE = 2
    REFUSED = 4  # by the server, to a hello
    UNKNOWN = 5  # by the server: it does not have this session (any more)
    MESSAGE = 16
    HERE = 17  # by a client with a new session or connection: the session uses this connection now


class RefusedError(Exception):
    """A packet was refused; it is counted under `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Prefix:
    """The first bytes of every packet, the same in every version."""

    version: int
    packet: int
    session: bytes
    sequence: int
    tensors: int


def read_prefix(head: memoryview) -> Prefix:
    """Read the prefix of a packet's first frame; raises RefusedError("malformed")."""
    if len(head) < _PREFIX.size:
        raise RefusedError("malformed")
    magic, version, packet, session, sequence, tensors = _PREFIX.unpack_from(head)
    if magic != _MAGIC:
        raise RefusedError("malformed")
    return Prefix(version, packet, session, sequence, tensors)


class RunKey:
    """The key of a run and everything derived from it. Its repr reveals nothing."""

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ArgumentError(f"the key of the run has {len(key)} bytes, not {KEY_BYTES}")
        self._key = bytes(key)

    def __repr__(self) -> str:
        return "RunKey(...)"

    def derive(self, purpose: bytes) -> bytes:
        """Return 32 bytes for one purpose: HKDF-Expand with SHA-256 (RFC 5869); the run's key is random already."""
        return hmac.digest(self._key, b"dtrain ps " + purpose + b"\x01", "sha256")

    def password(self) -> bytes:
        """Return the password of an endpoint that does not encrypt."""
        return self.derive(b"password").hex().encode()

    def guard_client(self, socket: zmq.Socket[bytes], *, encrypt: bool) -> None:
        """Set a client socket's credentials."""
        if encrypt:
            socket.curve_publickey, socket.curve_secretkey = self._curve_pair("client")
            socket.curve_serverkey = self._curve_pair("server")[0]
        else:
            socket.plain_username, socket.plain_password = _USER, self.password()

    def guard_server(self, socket: zmq.Socket[bytes], *, encrypt: bool) -> list[bytes]:
        """Make a server's socket require credentials; return the mechanism and those that `answer_zap` accepts."""
        socket.set(zmq.ZAP_DOMAIN, _USER)
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        if encrypt:
            socket.curve_publickey, socket.curve_secretkey = self._curve_pair("server")
            socket.curve_server = True
            return [b"CURVE", z85.decode(self._curve_pair("client")[0])]
        socket.plain_server = True
        return [b"PLAIN", _USER, self.password()]

    def _curve_pair(self, side: str) -> tuple[bytes, bytes]:
        """Return the CURVE public and secret key of the "server" or "client" side, in Z85."""
        if not zmq.has("curve"):
            raise UnsupportedError("this build of pyzmq cannot encrypt (no CURVE): install pyzmq's wheel from PyPI")
        secret = z85.encode(self.derive(b"curve " + side.encode()))
        return zmq.curve_public(secret), secret

    def hello(self, name: str, version: str) -> bytes:
        """Make a client's first packet."""
        fields = {"version": version, "name": name, "nonce": os.urandom(32).hex()}
        return self._with_proof(_plain_packet(Packet.HELLO, fields), b"hello")

    def read_hello(self, packet: bytes) -> ClientHello:
        """Parse a hello; `is_proven` is whether it was made with this key."""
        fields = read_plain_packet(packet[:-_PROOF_BYTES])
        nonce, version, name = (fields.get(field) for field in ("nonce", "version", "name"))
        if not (isinstance(nonce, str) and isinstance(version, str) and isinstance(name, str)):
            raise RefusedError("malformed")
        return ClientHello(name, version, nonce, self._proven(packet, b"hello", b""))

    def challenge(self, hello: bytes, version: str) -> tuple[bytes, Session]:
        """Return the answer to a proven hello, and the session that starts with the client's first packet in it."""
        session = os.urandom(SESSION_BYTES)
        packet = _plain_packet(Packet.CHALLENGE, {"version": version, "nonce": os.urandom(32).hex()}, session)
        packet = self._with_proof(packet, b"challenge", hello)
        return packet, self._session(session, hello + packet, is_server=True)

    def accept(self, hello: bytes, challenge: bytes) -> Session:
        """Check a challenge to this hello; return the session. Raises RefusedError("key")."""
        if not self._proven(challenge, b"challenge", hello):
            raise RefusedError("key")
        session = read_prefix(memoryview(challenge)).session
        return self._session(session, hello + challenge, is_server=False)

    def _session(self, session: bytes, transcript: bytes, *, is_server: bool) -> Session:
        seen = hashlib.sha256(transcript).digest()
        keys = self.derive(b"to server" + seen), self.derive(b"to client" + seen)
        incoming, outgoing = keys if is_server else keys[::-1]
        return Session(session, Authenticator(outgoing), Authenticator(incoming))

    def _with_proof(self, packet: bytes, purpose: bytes, before: bytes = b"") -> bytes:
        return packet + hmac.digest(self.derive(purpose), before + packet, "sha256")

    def _proven(self, packet: bytes, purpose: bytes, before: bytes) -> bool:
        expected = self._with_proof(packet[:-_PROOF_BYTES], purpose, before)
        return hmac.compare_digest(expected, packet)


def answer_zap(zap: zmq.Socket[bytes], credentials: Sequence[bytes]) -> bool:
    """Answer one request of ZeroMQ's handshakes (ZAP, its RFC 27); return whether the peer has these credentials."""
    version, request, _, _, _, *shown = zap.recv_multipart()
    is_known = len(shown) == len(credentials) and all(map(hmac.compare_digest, shown, credentials))
    status = (b"200", b"OK") if is_known else (b"400", b"not the key of this run")
    zap.send_multipart([version, request, *status, b"", b""])
    return is_known


@dataclass(frozen=True)
class ClientHello:
    """A client's first packet, parsed."""

    name: str
    version: str
    nonce: str
    is_proven: bool


class Authenticator:
    """One direction of a session: its key, and the number of the last packet signed or verified."""

    def __init__(self, key: bytes) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._gcm = AESGCM(key)
        self._bad_tag = InvalidTag
        self.sequence = 0

    def sign(self, packet: Packet, session: bytes, header: bytes, frames: Sequence[zmq.Frame] = ()) -> bytes:
        """Return the first frame of a packet, the one before `frames`, which must stay as they are."""
        self.sequence += 1
        number, tag = self.sequence, self._gcm.encrypt
        prefix = _PREFIX.pack(_MAGIC, PROTOCOL_VERSION, packet, session, number, len(frames))
        tags = [tag(_NONCE.pack(number, index), b"", frame.buffer) for index, frame in enumerate(frames, 1)]
        head = b"".join((prefix, *tags, header))
        return head + tag(_NONCE.pack(number, 0), b"", head)

    def verify(self, prefix: Prefix, head: memoryview, frames: Sequence[zmq.Frame]) -> bytes:
        """Return the header of an authenticated packet; raises RefusedError if it was changed or replayed."""
        number = prefix.sequence
        if number <= self.sequence:
            raise RefusedError("replay")
        begin, end = _PREFIX.size + TAG_BYTES * len(frames), len(head) - TAG_BYTES
        if prefix.tensors != len(frames) or prefix.tensors > MAX_TENSORS or begin > end:
            raise RefusedError("malformed")
        check = self._gcm.decrypt
        try:
            check(_NONCE.pack(number, 0), head[end:], head[:end])
            for index, frame in enumerate(frames):
                at = _PREFIX.size + TAG_BYTES * index
                check(_NONCE.pack(number, index + 1), head[at : at + TAG_BYTES], frame.buffer)
        except self._bad_tag:
            raise RefusedError("tag") from None
        self.sequence = number
        return bytes(head[begin:end])


@dataclass(frozen=True, repr=False)
class Session:
    """One end of a session: signs outgoing packets and verifies incoming ones."""

    id: bytes
    outgoing: Authenticator
    incoming: Authenticator


def refusal(reason: str, *, nonce: str, version: str) -> bytes:
    """Make the server's answer to a hello that it refuses. Not authenticated: the two may share no key."""
    return _plain_packet(Packet.REFUSED, {"reason": reason, "nonce": nonce, "version": version})


def unknown(session: bytes) -> bytes:
    """Make the server's answer to a packet of a session that it does not have."""
    return _plain_packet(Packet.UNKNOWN, {}, session)


def read_plain_packet(packet: bytes) -> dict[str, Any]:
    """Return the fields of an unauthenticated packet, without its proof; raises RefusedError("malformed")."""
    if not _PREFIX.size < len(packet) <= MAX_HANDSHAKE_BYTES:
        raise RefusedError("malformed")
    try:
        fields = json.loads(packet[_PREFIX.size :])
    except (ValueError, RecursionError):
        raise RefusedError("malformed") from None
    if not isinstance(fields, dict):
        raise RefusedError("malformed")
    return fields


def _plain_packet(packet: Packet, fields: dict[str, Any], session: bytes = bytes(SESSION_BYTES)) -> bytes:
    prefix = _PREFIX.pack(_MAGIC, PROTOCOL_VERSION, packet, session, 0, 0)
    return prefix + json.dumps(fields, separators=(",", ":")).encode()


def encode(message: Message, *, copy: bool) -> tuple[bytes, list[zmq.Frame]]:
    """Return the header and one frame per tensor, which is the tensor's own memory and keeps it alive unless `copy`.

    Short and non-contiguous tensors are always copied. Raises ArgumentError for a tensor that is not dense and on the
    CPU, and for facts that JSON cannot represent.
    """
    if len(message.tensors) > MAX_TENSORS:
        raise ArgumentError(
            f"message {message.kind!r} has {len(message.tensors)} tensors, the most is {MAX_TENSORS}: "
            "put small ones into one flat tensor"
        )
    described, frames = [], []
    for tensor in message.tensors:
        name = _NAME_OF.get(tensor.dtype)
        if name is None or tensor.layout is not torch.strided or tensor.device.type != "cpu":
            raise ArgumentError(
                f"message {message.kind!r} has a {tensor.dtype} tensor ({tensor.layout}, on {tensor.device}); "
                f"only dense tensors on the CPU can be sent, of {', '.join(_DTYPES)}"
            )
        described.append([name, list(tensor.shape)])
        frames.append(_frame(tensor, copy=copy))
    try:
        header = json.dumps([message.kind, dict(message.facts), described], separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"the facts of message {message.kind!r} do not fit into JSON: {error}") from error
    return header.encode(), frames


def decode(header: bytes, frames: Sequence[zmq.Frame]) -> Message:
    """Decode a message from a header and one frame per tensor; raises MalformedError if they do not match."""
    try:
        kind, facts, described = json.loads(header)
        if not isinstance(kind, str) or not isinstance(facts, dict):
            raise MalformedError("no kind or no facts")
        tensors = tuple(_tensor(frame, name, shape) for frame, (name, shape) in zip(frames, described, strict=True))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise MalformedError(f"no message: {error}") from error
    return Message(kind, facts, tensors)


def _frame(tensor: torch.Tensor, *, copy: bool) -> zmq.Frame:
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    tensor = tensor.contiguous()
    if tensor.numel() == 0:
        return zmq.Frame(b"")
    # The only access to a tensor's memory without numpy, which lacks bfloat16 anyway.
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory._owner = tensor  # type: ignore[attr-defined]  # the address alone would not keep it
    return zmq.Frame(memory, copy=copy or tensor.nbytes < zmq.COPY_THRESHOLD)


def _tensor(frame: zmq.Frame, name: str, shape: list[int]) -> torch.Tensor:
    dtype = _DTYPES[name]
    if not all(type(size) is int and size >= 0 for size in shape):
        raise MalformedError(f"a tensor of shape {shape}")
    memory = frame.buffer
    expected, seen = math.prod(shape) * dtype.itemsize, memory.nbytes
    if expected != seen:
        raise MalformedError(f"a tensor of {name}{shape} in {seen} bytes, not {expected}")
    if expected == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    tensor = torch.frombuffer(memory, dtype=dtype)
    if tensor.data_ptr() % dtype.itemsize:  # short frames lie anywhere in what was read from the socket
        tensor = torch.frombuffer(bytearray(memory), dtype=dtype)
    return tensor.view(shape)
