"""The messages between a parameter server and its clients: kinds, fields, and the format of gradients.

The client's messages and their answers:

    join -> joined | refused       its role, and the layout of its model; the step that training has reached
    value, ready -> filled         the first replica's values, if there is no snapshot
    value -> taken                 the same later, after they were changed by hand
    push -> pushed                 a chunk's gradient and hyperparameters; its values once the step is made
    pull -> pushed                 a chunk's values
    ask -> asked                   the state of unanswered gradients
    again -> pushed                an answer that was lost with a connection
    gather -> gathered             bytes of all replicas, for `strategy.reduce` (first server only)
    extras, fetch -> extras        replica 0's buffers and frozen parameters (first server only)
    state, load -> state, loaded   a chunk of the optimizer's state
    statistics -> statistics;  leave -> left;  anything malformed -> malformed

Both ends check received messages against these tables, once, before acting on them. Gradients and values are sent in
full or reduced precision, or as some rows only: "float32" is the parameters' own dtype; fp16 and bf16 are cast; int8
has a scale for each block of 256 (`ddp.compression.quantize`), and the rounding error is added to the next gradient.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin

import torch

from ddp.comm.codec import decode
from ddp.compression.quantize import dequantize, quantize, row_bytes
from ddp.strategies.sharding.chunk_gradient import ChunkGradient, Gradient, Rows
from ddp.strategies.sharding.partition import Chunk
from ddp.torch_internals import foreach_copy

Compression = Literal["float32", "fp16", "bf16", "int8"]
_BLOCK = 256
_SHORT = {"fp16": torch.float16, "bf16": torch.bfloat16}

Residuals = dict[int, torch.Tensor]  # by chunk, the accumulated error of rounding to int8


class MalformedError(ValueError):
    """The received data is not a message of this version, or does not fit the model."""


@dataclass(frozen=True, eq=False)
class Message:
    """A message: its kind, its facts as JSON (numbers, strings, lists, dicts with string keys), and dense CPU tensors.

    The tensors of a received message are contiguous, writable and not shared; their memory lives as long as they do.
    """

    kind: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    tensors: tuple[torch.Tensor, ...] = ()

    def __repr__(self) -> str:
        tensors = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in self.tensors[:4])
        more = ", ..." if len(self.tensors) > 4 else ""
        return f"Message({self.kind!r}, {dict(self.facts)!r}, [{tensors}{more}])"


_Fields = Mapping[str, Any]  # types as in annotations; a field whose type allows None may be missing
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


def check_fields(message: Message, kinds: Mapping[str, _Fields]) -> None:
    """Raise MalformedError, which names the field, unless the message is one of `kinds` with valid fields."""
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
        value = decode(message.tensors[0])
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


def write_gradient(
    chunk: Chunk, gradient: Gradient, compression: Compression, residuals: Residuals
) -> tuple[dict[str, Any], tuple[torch.Tensor, ...]]:
    """Return the facts and tensors of a gradient for a message."""
    if isinstance(gradient, torch.Tensor):
        gradient = ChunkGradient(gradient)
    facts: dict[str, Any] = {}
    tensors: list[torch.Tensor] = []
    if gradient.absent:
        facts["absent"] = sorted(gradient.absent)
    if gradient.flat is not None:
        facts["flat"] = compression
        tensors.append(_shortened(chunk, gradient, gradient.flat, compression, residuals))
    if gradient.sparse:
        facts["sparse"] = sorted(gradient.sparse)
        short = _sent_dtype(chunk, compression)
        for position in facts["sparse"]:
            rows = gradient.sparse[position]
            tensors += [rows.numbers.cpu(), rows.values.to("cpu", short)]
    return facts, tuple(tensors)


def _sent_dtype(chunk: Chunk, compression: Compression) -> torch.dtype:
    return chunk.dtype if chunk.dtype.itemsize <= 2 else _SHORT.get(compression, chunk.dtype)


def _shortened(
    chunk: Chunk, gradient: ChunkGradient, flat: torch.Tensor, compression: Compression, residuals: Residuals
) -> torch.Tensor:
    if compression != "int8" or chunk.dtype.itemsize <= 2 or not chunk.numel:
        return flat.to(_sent_dtype(chunk, compression))
    blocks = -(-chunk.numel // _BLOCK)
    if chunk.index not in residuals:
        residuals[chunk.index] = torch.zeros(blocks, _BLOCK, device="cpu")
    values = residuals[chunk.index]  # (blocks, 256) float32: the earlier rounding error, to which the gradient is added
    # The residual of an absent piece waits for its next gradient; in `flat` such a piece is uninitialized.
    left_out = [chunk.pieces[position].in_flat(values.view(-1)) for position in (*gradient.absent, *gradient.sparse)]
    owed = [piece.clone() for piece in left_out]
    values.view(-1)[: chunk.numel].add_(flat)
    for piece in left_out:
        piece.zero_()
    packed = torch.empty(row_bytes(blocks, _BLOCK), dtype=torch.uint8, device="cpu")
    quantize(values, packed, torch.empty_like(values))
    for piece, rest in zip(left_out, owed, strict=True):
        piece.copy_(rest)
    return packed


def read_gradient(chunk: Chunk, facts: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> Gradient:
    """Read the gradient of a message, in the chunk's dtype. Raises MalformedError if it does not fit the chunk."""
    left = list(tensors)
    absent, sparse = positions(chunk, facts.get("absent")), facts.get("sparse") or []
    if len(left) != (facts.get("flat") is not None) + 2 * len(sparse):
        raise MalformedError(f"a gradient of chunk {chunk.index} with {len(left)} tensors")
    flat = None if facts.get("flat") is None else _flat(chunk, facts["flat"], left.pop(0))
    rows = {position: _checked_rows(chunk, position, left.pop(0), left.pop(0)) for position in sparse}
    if flat is None and len(absent | positions(chunk, sparse)) < len(chunk.pieces):
        raise MalformedError(f"a gradient of chunk {chunk.index} in which pieces are missing")
    if not absent and not sparse and flat is not None:
        return flat
    return ChunkGradient(flat, absent, rows)


def positions(chunk: Chunk, found: Sequence[int] | None) -> frozenset[int]:
    """Return positions of pieces; raises MalformedError if the chunk has no such piece."""
    for position in found or ():
        if not 0 <= position < len(chunk.pieces):
            raise MalformedError(f"chunk {chunk.index} has no piece {position}")
    return frozenset(found or ())


def _flat(chunk: Chunk, compression: str, sent: torch.Tensor) -> torch.Tensor:
    blocks = -(-chunk.numel // _BLOCK)
    is_packed = compression == "int8" and sent.dtype == torch.uint8
    if sent.dim() != 1 or len(sent) != (row_bytes(blocks, _BLOCK) if is_packed else chunk.numel):
        raise MalformedError(f"a gradient of shape {tuple(sent.shape)} for the {chunk.numel} elements of {chunk.index}")
    if not is_packed:
        return sent.to(chunk.dtype)
    whole = torch.empty(blocks, _BLOCK, device="cpu")
    dequantize(sent, whole)
    return whole.view(-1)[: chunk.numel].to(chunk.dtype)


def _checked_rows(chunk: Chunk, position: int, numbers: torch.Tensor, values: torch.Tensor) -> Rows:
    positions(chunk, [position])
    shape = chunk.pieces[position].shape
    fits = numbers.dtype == torch.int64 and numbers.dim() == 1 and shape and values.shape == (len(numbers), *shape[1:])
    if not fits or bool(((numbers < 0) | (numbers >= shape[0])).any()):
        raise MalformedError(f"rows that piece {position} of chunk {chunk.index} does not have")
    return Rows(numbers, values.to(chunk.dtype))


def write_values(
    chunk: Chunk, values: torch.Tensor, compression: Compression, rows: Sequence[torch.Tensor | None] | None
) -> tuple[dict[str, Any], tuple[torch.Tensor, ...]]:
    """Return the facts and tensors of a chunk's values (numel,); with `rows`, only those rows of each piece."""
    short = _sent_dtype(chunk, "bf16" if compression == "int8" else compression)
    if rows is None:
        return {}, (values.to(short),)
    tensors: list[torch.Tensor] = []
    kinds: list[int] = []
    for piece, numbers in zip(chunk.pieces, rows, strict=True):
        whole = piece.in_flat(values)
        kinds.append(-1 if numbers is None else len(numbers))
        if numbers is None:
            tensors.append(whole.reshape(-1).to(short))
        elif len(numbers):
            tensors += [numbers, whole.index_select(0, numbers).to(short)]
    return {"rows": kinds}, tuple(tensors)


def read_values(
    chunk: Chunk, facts: Mapping[str, Any], tensors: Sequence[torch.Tensor], into: Sequence[torch.Tensor]
) -> None:
    """Write the values of a message to `into`, which has a view of each piece's rows in the parameter."""
    if facts.get("rows") is None:
        (flat,) = tensors
        foreach_copy(list(into), chunk.in_flat(flat))
        return
    left = list(tensors)
    for kind, piece, target in zip(facts["rows"], chunk.pieces, into, strict=True):
        if kind < 0:
            target.copy_(left.pop(0).view(piece.shape))
        elif kind:
            numbers = left.pop(0).to(target.device)
            target.index_copy_(0, numbers, left.pop(0).to(target.device, target.dtype))
