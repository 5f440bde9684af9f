"""Encrypted records: what travels between node 0 and another node once both have proved themselves (handshake.py).

A record is one byte of kind, three bytes of length, then ChaCha20-Poly1305 of the data with that header authenticated.
The nonce is the record's number in its direction, each direction has its own key: a record that was changed, left out,
repeated or moved is an error. A stream that is cut short is one as well, since every good end is a record: a closed
connection alone never means that something is over.
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
    """What a record is. The other end's agent is the one that START has started last."""

    GREETING = 1  # joiner: who it is (greeting.py)
    WELCOME = 2  # node 0: which node it is
    REFUSAL = 3  # node 0: why it cannot join, in words; final
    START = 4  # node 0: start an agent
    DATA = 5  # node 0: the rest of one whole write, for the agent's input; joiner: what the agent wrote, any cut
    PART = 6  # node 0: a write that goes on in the next record
    END = 7  # node 0: end the agent's input
    ENDED = 8  # joiner: the agent and its output have ended; its status and last words
    RUN_END = 9  # node 0: the run is over; its exit code
    PING = 10  # node 0: is anybody there?
    PONG = 11  # joiner: yes


@dataclass(frozen=True)
class Record:
    kind: Kind
    data: bytes = field(default=b"", repr=False)


class Encryptor:
    """Makes the records of one direction. Not for several threads at once: each record has the next number."""

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        self._cipher = ChaCha20Poly1305(key)
        self._number = 0

    def encrypt(self, kind: Kind, data: bytes | memoryview = b"") -> bytes:
        """Return a record of at most MAX_DATA_BYTES."""
        assert len(data) <= MAX_DATA_BYTES
        header = _HEADER.pack(kind << 24 | len(data))
        nonce = _NONCE.pack(self._number)
        self._number += 1
        return header + self._cipher.encrypt(nonce, data, header)

    def encrypt_all(self, kind: Kind, data: bytes) -> Iterator[bytes]:
        """Yield the records of data of any length, all but the last of which are of the kind PART."""
        view = memoryview(data)
        while len(view) > MAX_DATA_BYTES:
            yield self.encrypt(Kind.PART, view[:MAX_DATA_BYTES])
            view = view[MAX_DATA_BYTES:]
        yield self.encrypt(kind, view)


class Decryptor:
    """Turns the bytes of one direction into records, however they were cut."""

    def __init__(self, key: bytes) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        self._cipher = ChaCha20Poly1305(key)
        self._invalid = InvalidTag
        self._number = 0
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Record]:
        """Take the next bytes and return the records that they complete. Raises ProtocolError, then and ever after."""
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
            raise ProtocolError("what arrived is not what was sent: somebody or something changed it") from error
        except ValueError as error:
            raise ProtocolError(f"an encrypted record of unknown kind {kind}") from error
        self._number += 1
        return record
