"""The messages between a parameter server and its clients: their kinds, and the type of each field.

Both ends check what they receive against these tables, once, before anything acts on it. What a client sends, and the
answer:

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
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any, get_args, get_origin

import torch

from ddp.comm.codec import decode
from ddp.strategies.parameter_server.transport.messages import MalformedError, Message

__all__ = ["CLIENT_MESSAGES", "SERVER_MESSAGES", "check_fields", "decode_value"]

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
