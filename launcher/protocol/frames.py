"""Encodes messages as frames, and decodes them."""

from __future__ import annotations

import json
import struct
from typing import Any

from launcher.decode import decode_dataclass, parse_json
from launcher.errors import ProtocolError
from launcher.protocol import commands, reports, two_way  # noqa: F401  their classes are the messages
from launcher.protocol.message import (
    MAX_HEADER_BYTES,
    MAX_NOISE_BYTES,
    MAX_PAYLOAD_BYTES,
    PREAMBLE,
    PROTOCOL,
    Command,
    Message,
    Report,
)

_LENGTHS = struct.Struct(">II")
_END = b"\n"
# json.dumps would create one each time. A dataclass in a message becomes an object of its fields.
_to_json = json.JSONEncoder(separators=(",", ":"), default=vars).encode
_KINDS: dict[str, type[Message]] = {cls.kind: cls for way in (Command, Report) for cls in way.__subclasses__()}


def encode(message: Message) -> bytes:
    """Return the frame of a message."""
    fields: dict[str, Any] = dict(vars(message))
    payload: bytes = fields.pop("data", b"")
    fields["kind"] = message.kind
    header = _to_json(fields).encode()
    return b"".join((_LENGTHS.pack(len(header), len(payload)), header, payload, _END))


class Decoder:
    """Decodes one direction of a stream into messages, in pieces of any size."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._begun = False
        self.noise = b""  # data before the preamble

    def feed(self, data: bytes) -> list[Message]:
        """Decode the next bytes and return the messages that they complete.

        Raises ProtocolError for lengths, JSON or fields that this version does not send.
        """
        self._buffer += data
        if not self._begun and not self._skip_noise():
            return []
        messages = []
        at = 0
        while len(self._buffer) - at >= _LENGTHS.size:
            header_bytes, payload_bytes = _LENGTHS.unpack_from(self._buffer, at)
            if header_bytes > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
                raise ProtocolError(f"a frame of {header_bytes} + {payload_bytes} bytes is over the limit")
            end_of_header = at + _LENGTHS.size + header_bytes
            end = end_of_header + payload_bytes
            if len(self._buffer) < end + len(_END):
                break
            header = bytes(self._buffer[at + _LENGTHS.size : end_of_header])
            messages.append(_message(header, bytes(self._buffer[end_of_header:end])))
            at = end + len(_END)
        del self._buffer[:at]
        return messages

    def _skip_noise(self) -> bool:
        start = self._buffer.find(PREAMBLE)
        if start < 0:
            if len(self._buffer) > MAX_NOISE_BYTES:
                raise ProtocolError("over 1 MiB of other text precedes the agent's greeting")
            self.noise = bytes(self._buffer)
            return False
        self.noise = bytes(self._buffer[:start])
        del self._buffer[: start + len(PREAMBLE)]
        self._begun = True
        return True


def _message(header: bytes, payload: bytes) -> Message:
    try:
        fields = parse_json(header)
        cls = _KINDS[fields.pop("kind")]
        if payload:
            fields["data"] = payload
        return decode_dataclass(cls, fields)
    except (ProtocolError, KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(f"a frame is not a message of protocol {PROTOCOL}: {error}") from error
