"""What a parameter server and its clients say to each other, as bytes: a header of JSON and the tensors' own memory.

Called by the endpoints, only for messages that were authenticated. Neither way copies a tensor, nothing is
ever unpickled, and numpy is not needed (bfloat16 and the 8-bit floats travel as they are).
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import zmq

from ddp.errors import ArgumentError

__all__ = ["MAX_TENSORS", "PROTOCOL_VERSION", "MalformedError", "Message", "decode", "encode"]

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
