"""Encrypted records between node 0 and another node, once both are authenticated (handshake.py).

A record is one byte of kind, three bytes of length, then ChaCha20-Poly1305 of the data with that header authenticated.
The nonce is the record's number in its direction, and each direction has its own key: a record that was changed,
dropped, repeated or moved is an error. So is a truncated stream, since every regular end is a record: a closed
connection never means by itself that something is over.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from launcher.errors import ProtocolError

MAX_DATA_BYTES = 1 << 16
_HEADER = struct.Struct(">I")
_NONCE = struct.Struct(">4xQ")
_TAG_BYTES = 16


class Kind(IntEnum):
    """The kind of a record. The other end's agent is the one started by the last START."""

    GREETING = 1  # joiner: who it is (greeting.py)
    WELCOME = 2  # node 0: which node it is
    REFUSAL = 3  # node 0: why it cannot join, as text; final
    START = 4  # node 0: start an agent
    DATA = 5  # node 0: the rest of one whole write, for the agent's input; joiner: what the agent wrote, any cut
    PART = 6  # node 0: a write that goes on in the next record
    END = 7  # node 0: end the agent's input
    ENDED = 8  # joiner: the agent and its output have ended; its status and the end of its stderr
    RUN_END = 9  # node 0: the run is over; its exit code
    PING = 10  # node 0: are you alive?
    PONG = 11  # joiner: yes


@dataclass(frozen=True)
class Record:
    kind: Kind
    data: bytes = field(default=b"", repr=False)


class Encryptor:
    """Encrypts the records of one direction. Not thread-safe: each record has the next number."""

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        self._cipher = ChaCha20Poly1305(key)
        self._number = 0

    def encrypt(self, kind: Kind, data: bytes | memoryview = b"") -> bytes:
        """Return a record for data of at most MAX_DATA_BYTES."""
        assert len(data) <= MAX_DATA_BYTES
        header = _HEADER.pack(kind << 24 | len(data))
        nonce = _NONCE.pack(self._number)
        self._number += 1
        return header + self._cipher.encrypt(nonce, data, header)

    def encrypt_all(self, kind: Kind, data: bytes) -> Iterator[bytes]:
        """Yield records for data of any length; all but the last are of the kind PART."""
        view = memoryview(data)
        while len(view) > MAX_DATA_BYTES:
            yield self.encrypt(Kind.PART, view[:MAX_DATA_BYTES])
            view = view[MAX_DATA_BYTES:]
        yield self.encrypt(kind, view)


class Decryptor:
    """Decrypts the records of one direction, from pieces of any size."""

    def __init__(self, key: bytes) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        self._cipher = ChaCha20Poly1305(key)
        self._invalid = InvalidTag
        self._number = 0
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Record]:
        """Add the next bytes and return the records that they complete. Raises ProtocolError, then on every call."""
        self._buffer += data
        records = []
        at = 0
        while len(self._buffer) - at >= _HEADER.size:
            begin = at + _HEADER.size
            header = bytes(self._buffer[at:begin])
            kind, size = divmod(_HEADER.unpack(header)[0], 1 << 24)
            if size > MAX_DATA_BYTES:
                raise ProtocolError(f"an encrypted record of {size} bytes is over the limit")
            end = begin + size + _TAG_BYTES
            if len(self._buffer) < end:
                break
            records.append(self._open(kind, header, bytes(self._buffer[begin:end])))
            at = end
        del self._buffer[:at]
        return records

    def _open(self, kind: int, header: bytes, encrypted: bytes) -> Record:
        try:
            data = self._cipher.decrypt(_NONCE.pack(self._number), encrypted, header)
            record = Record(Kind(kind), data)
        except self._invalid as error:
            raise ProtocolError("an encrypted record was changed on the way") from error
        except ValueError as error:
            raise ProtocolError(f"an encrypted record of unknown kind {kind}") from error
        self._number += 1
        return record
