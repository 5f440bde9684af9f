"""What a parameter server and its clients say to each other: the kinds of messages, their fields, and their bytes.

What a client sends, and the answer:

    join -> joined | refused       its role, and the layout of its model; the step that training has reached
    value, ready -> filled         the first replica's values, if there is no snapshot
    value -> taken                 the same later, when it has changed them by hand
    push -> pushed                 a chunk's gradient and hyperparameters; its values once the step is made
    pull -> pushed                 a chunk's values
    ask -> asked                   the state of the gradients that have no answer yet
    again -> pushed                an answer that was lost with a connection
    gather -> gathered             bytes of all replicas, for `strategy.reduce` (first server only)
    extras, fetch -> extras        buffers and frozen parameters, which are replica 0's (first server only)
    state, load -> state, loaded   a chunk of the optimizer's state
    statistics -> statistics;  leave -> left;  anything malformed -> malformed

Both ends check what they receive against these tables, once, before anything acts on it. As bytes, a message is a
header of JSON and the tensors' own memory: neither way copies a tensor, nothing is ever unpickled, and numpy is not
needed (bfloat16 and the 8-bit floats travel as they are). Only messages that were authenticated are decoded.
"""

from __future__ import annotations

import ctypes
import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin

import torch
import zmq

from ddp.comm.codec import decode as decode_plain
from ddp.errors import ArgumentError

PROTOCOL_VERSION = 1
MAX_TENSORS = 4096  # of one message

_NAMES = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz complex64 complex128 "
    "int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool"
)
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split() if hasattr(torch, name)}
_NAME_OF = {dtype: name for name, dtype in _DTYPES.items()}


class MalformedError(ValueError):
    """Bytes that are no message of this version."""


@dataclass(frozen=True, eq=False)
class Message:
    """One message: what it is, its facts as JSON (numbers, texts, lists, dicts with text keys), and dense CPU tensors.

    The tensors of a received message are contiguous, writable and its own; they live as long as they are used.
    """

    kind: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    tensors: tuple[torch.Tensor, ...] = ()

    def __repr__(self) -> str:
        tensors = ", ".join(f"{_NAME_OF.get(t.dtype, t.dtype)}{list(t.shape)}" for t in self.tensors[:4])
        more = ", ..." if len(self.tensors) > 4 else ""
        return f"Message({self.kind!r}, {dict(self.facts)!r}, [{tensors}{more}])"


_Fields = Mapping[str, Any]  # types as annotations have them; a field of a union with None may be missing
_ChunkSteps = list[tuple[int, int]]
_CHUNK_STEP: _Fields = {"chunk": int, "step": int}
_REQUEST: _Fields = {"request": int | None}

CLIENT_MESSAGES: Mapping[str, _Fields] = {
    "join": {"role": str, "replica": int, "digest": str, "done": int, "gathers": int, "memory": dict[str, Any] | None},
    "heartbeat": {},
    "memory": {},
    "value": {"chunk": int, **_REQUEST},
    "ready": {},
    "push": {
        **_CHUNK_STEP,
        "groups": list[dict[str, Any]],
        "is_last": bool | None,
        "shared": bool | None,
        "absent": list[int] | None,
        "flat": str | None,
        "sparse": list[int] | None,
    },
    "pull": _CHUNK_STEP,
    "again": _CHUNK_STEP,
    "ask": {"outstanding": _ChunkSteps},
    "gather": {"number": int, **_REQUEST},
    "extras": {"names": list[str]},
    "fetch": {"names": list[str], **_REQUEST},
    "state": {"chunk": int, **_REQUEST},
    "load": {"chunk": int, **_REQUEST},
    "statistics": _REQUEST,
    "fail": {"error": str},
    "leave": {},
}
SERVER_MESSAGES: Mapping[str, _Fields] = {
    "joined": {
        "step": int,
        "is_filled": bool,
        "gathered": int,
        "memory": dict[str, Any] | None,
        "reads_gradients": bool,
    },
    "refused": {},
    "wait": {},
    "unknown": {},
    "malformed": {"problem": str},
    "filled": {},
    "taken": _REQUEST,
    "pushed": {
        **_CHUNK_STEP,
        "made": int | None,
        "training": tuple[int, bool] | None,
        "shared": bool | None,
        "rows": list[int] | None,
    },
    "asked": {"missing": _ChunkSteps, "answered": _ChunkSteps, "waits_for": list[int]},
    "gathered": {"number": int, "is_lost": bool, "lengths": list[int], **_REQUEST},
    "extras": {"names": list[str], **_REQUEST},
    "state": _REQUEST,
    "loaded": _REQUEST,
    "statistics": {"counts": dict[str, Any], **_REQUEST},
    "left": {},
}
_LARGEST_INT = 1 << 53  # no count comes near it


def encode(message: Message, *, copy: bool) -> tuple[bytes, list[zmq.Frame]]:
    """Return the header and a frame a tensor, which is the tensor's own memory and keeps it alive unless `copy`.

    Short tensors are copied anyway, and those that are not contiguous. Raises ArgumentError for a tensor that is not
    dense and on the CPU, and for facts that JSON cannot hold.
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
                f"only dense tensors on the CPU travel, of {', '.join(_DTYPES)}"
            )
        described.append([name, list(tensor.shape)])
        frames.append(_frame(tensor, copy=copy))
    try:
        header = json.dumps([message.kind, dict(message.facts), described], separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"the facts of message {message.kind!r} do not fit into JSON: {error}") from error
    return header.encode(), frames


def decode(header: bytes, frames: Sequence[zmq.Frame]) -> Message:
    """Make the message of a header and one frame a tensor; raises MalformedError if they do not fit each other."""
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
    # The only way to a tensor's memory without numpy, which lacks bfloat16 anyway.
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
        return torch.empty(shape, dtype=dtype)
    tensor = torch.frombuffer(memory, dtype=dtype)
    if tensor.data_ptr() % dtype.itemsize:  # short frames lie anywhere in what was read from the socket
        tensor = torch.frombuffer(bytearray(memory), dtype=dtype)
    return tensor.view(shape)


def check_fields(message: Message, kinds: Mapping[str, _Fields]) -> None:
    """Raise MalformedError, which names the field, unless the message is one of `kinds` with fields of its types."""
    fields = kinds.get(message.kind)
    if fields is None:
        raise MalformedError(f"there is no message {message.kind!r}")
    for name in message.facts.keys() - fields.keys():
        raise MalformedError(f"message {message.kind!r} has no field {name!r}")
    for name, expected in fields.items():
        value = message.facts.get(name)
        if not _is_of(value, expected):
            text = expected.__name__ if type(expected) is type else str(expected)
            raise MalformedError(f"field {name!r} of message {message.kind!r} is {reprlib.repr(value)}, not {text}")


def decode_value(message: Message, expected: Any) -> Any:
    """Return the value, of a type `expected`, that a message carries as its only tensor; raises MalformedError."""
    if [(tensor.dim(), tensor.dtype) for tensor in message.tensors] != [(1, torch.uint8)]:
        raise MalformedError(f"message {message.kind!r} carries no value")
    try:
        value = decode_plain(message.tensors[0])
    except ValueError as error:
        raise MalformedError(f"the value of message {message.kind!r} cannot be read: {error}") from error
    if not _is_of(value, expected):
        raise MalformedError(f"the value of message {message.kind!r} is {reprlib.repr(value)}, not {expected}")
    return value


def _is_of(value: Any, expected: Any) -> bool:
    if type(expected) is type:  # a bool is no int here
        return type(value) is expected and not (isinstance(value, int) and abs(value) > _LARGEST_INT)
    origin, arguments = get_origin(expected), get_args(expected)
    if origin is dict:
        return type(value) is dict
    if origin is list:
        return type(value) is list and all(_is_of(item, arguments[0]) for item in value)
    if origin is tuple:
        return type(value) is list and len(value) == len(arguments) and all(map(_is_of, value, arguments))
    return any(_is_of(value, choice) for choice in arguments)
