"""Messages between node 0 and a node started by hand, and the check that it belongs to this run. Pure.

All of them are sent in encrypted records, after both ends are authenticated.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from launcher import __version__
from launcher.decode import decode_json
from launcher.errors import ProtocolError
from launcher.protocol.message import PROTOCOL
from launcher.transport.tcp.encrypted_records import MAX_DATA_BYTES

_VALUE_CHARS = 2000  # of each value; longer ones are sent as their beginning and a digest
_NAMES = 64
_SHOWN_CHARS = 160
_MISSING = "(nothing)"


@dataclass(frozen=True)
class Greeting:
    """A node: `id` identifies this process of dtrain on it when it dials again."""

    version: str
    protocol: int
    node_rank: int | None  # None: any
    hostname: str
    pid: int
    id: str
    command: dict[str, str]  # what must be the same on all nodes, by name

    @classmethod
    def ours(cls, node_rank: int | None, command: Mapping[str, str]) -> Greeting:
        return cls(
            version=__version__,
            protocol=PROTOCOL,
            node_rank=node_rank,
            hostname=socket.gethostname(),
            pid=os.getpid(),
            id=secrets.token_hex(16),
            command=shortened(command),
        )

    @classmethod
    def decode(cls, data: bytes) -> Greeting:
        """Decode a greeting. Raises ProtocolError."""
        greeting = decode_json(cls, data)
        if len(greeting.command) > _NAMES:
            raise ProtocolError(f"the node's command has {len(greeting.command)} parts")
        return greeting

    @property
    def who(self) -> str:
        return f"{printable(self.hostname)} (pid {self.pid})"


@dataclass(frozen=True)
class Welcome:
    """The answer to an admitted node: its node rank, and the name of node 0's machine."""

    node_rank: int
    host: str


@dataclass(frozen=True)
class Ended:
    """The end of an agent: its exit status, None if there was none, and the end of its stderr."""

    status: int | None
    words: str


@dataclass(frozen=True)
class RunEnd:
    """The end of the run, as reported by node 0."""

    exit_code: int
    text: str

    @classmethod
    def decode(cls, data: bytes) -> RunEnd:
        """Decode the end of a run, without control characters. Raises ProtocolError."""
        run_end = decode_json(cls, data)
        return replace(run_end, text=without_controls(run_end.text))


def encode(message: Greeting | Welcome | Ended | RunEnd) -> bytes:
    """Return the data of a record. Raises ProtocolError."""
    data = json.dumps(asdict(message), separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
    if len(data) > MAX_DATA_BYTES:
        what = "this node's command" if isinstance(message, Greeting) else f"a {type(message).__name__}"
        raise ProtocolError(f"{what} takes {len(data)} bytes to send, over the limit")
    return data


def differences(expected: Mapping[str, str], greeting: Greeting) -> list[str]:
    """Return a line for each part of the command that differs between node 0 (`expected`) and the node."""
    here = shortened(expected)
    there = greeting.command
    node = printable(greeting.hostname)
    lines = []
    for name in dict.fromkeys([*here, *there]):
        ours, theirs = here.get(name, _MISSING), there.get(name, _MISSING)
        if ours != theirs:
            shown_ours, shown_theirs = _around_difference(ours, theirs)
            lines.append(f"{printable(name)}: {shown_ours} on node 0, {shown_theirs} on {node}")
    return lines


def shortened(command: Mapping[str, str]) -> dict[str, str]:
    """Shorten the values for sending; different ones stay different."""
    return {name: _shortened(value) for name, value in command.items()}


def _shortened(value: str) -> str:
    value = value.encode("utf-8", "replace").decode()  # an argument that is not UTF-8 contains surrogates
    if len(value) <= _VALUE_CHARS:
        return value
    digest = hashlib.sha256(value.encode()).hexdigest()
    return f"{value[:_VALUE_CHARS]}... ({len(value)} characters, SHA-256 {digest})"


def _around_difference(one: str, other: str) -> tuple[str, str]:
    """Return both texts for a line; of long ones, the part from which they differ."""
    if max(len(one), len(other)) <= _SHOWN_CHARS:
        return printable(one), printable(other)
    shorter = min(len(one), len(other))
    same = next((at for at in range(shorter) if one[at] != other[at]), shorter)
    begin = max(0, same - _SHOWN_CHARS // 2)
    cut = slice(begin, begin + _SHOWN_CHARS)
    ours, theirs = ("..." * (begin > 0) + printable(text[cut]) for text in (one, other))
    return ours, theirs


def printable(text: str) -> str:
    """Return a text from another machine without control characters, cut to a line."""
    return "".join(c if c.isprintable() else "?" for c in text[:_SHOWN_CHARS])


def without_controls(text: str) -> str:
    """Return lines from another machine without control characters."""
    return "\n".join("".join(c if c.isprintable() else "?" for c in line) for line in text.splitlines())


def where_at(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
