"""Encodes plain values as bytes and decodes them: the only format for objects between processes.

The bytes are a length, a JSON tree, and the tensors that the tree refers to, one after the other. Nothing is unpickled,
and no name in the bytes selects code to run.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from typing import Any

import torch

from ddp.errors import ArgumentError

PLAIN = "None, numbers, strings, bytes, tensors, and tuples, lists, sets and dicts of them"

_LENGTH_BYTES = 8
_ALIGN_BYTES = 16
_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "tuple"}
_FROM_ITEMS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def encode(value: Any) -> torch.Tensor:
    """Return the bytes (n,) uint8 of a value, in host memory.

    Raises ArgumentError, which names the place in the value, if it is not `PLAIN`.
    """
    parts: list[torch.Tensor] = []
    tree = json.dumps(_describe(value, "", parts)).encode()
    head = len(tree).to_bytes(_LENGTH_BYTES, "little") + tree
    head += bytes(-len(head) % _ALIGN_BYTES)
    return torch.cat([torch.frombuffer(bytearray(head), dtype=torch.uint8), *parts])


def decode(payload: torch.Tensor) -> Any:
    """Return the value that was encoded as these bytes. Tensors are new, and in host memory.

    Raises ValueError for bytes that are not from `encode`.
    """
    try:
        end = _LENGTH_BYTES + int.from_bytes(payload[:_LENGTH_BYTES].numpy().tobytes(), "little")
        tree = json.loads(payload[_LENGTH_BYTES:end].numpy().tobytes())
        return _Reader(payload[end + -end % _ALIGN_BYTES :]).build(tree)
    except (TypeError, LookupError, AttributeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"these {len(payload)} bytes hold no value: {error}") from error


def _describe(value: Any, place: str, parts: list[torch.Tensor]) -> Any:
    """Return a tree for JSON; tensors go to `parts`, and {kind: content} represents types that JSON lacks."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            return {"tensor": _put(value, parts)}
        if value.layout is torch.sparse_coo:
            value = value.detach().coalesce()
            return {"sparse": [list(value.shape), _put(value.indices(), parts), _put(value.values(), parts)]}
    if kind in (dict, OrderedDict):
        items = [
            [_describe(key, place, parts), _describe(item, f"{place}[{key!r}]", parts)] for key, item in value.items()
        ]
        return {"dict": items}
    if kind in _SEQUENCES:
        return {_SEQUENCES[kind]: [_describe(item, f"{place}[{index}]", parts) for index, item in enumerate(value)]}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind is torch.dtype:
        return {"dtype": str(value).removeprefix("torch.")}
    what = f"a {value.layout} tensor" if isinstance(value, torch.Tensor) else f"a {kind.__name__}"
    raise ArgumentError(f"value{place} is {what}, which cannot be sent")


def _put(tensor: torch.Tensor, parts: list[torch.Tensor]) -> list[Any]:
    """Add a tensor's padded bytes to `parts`; return its dtype and shape."""
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
    parts += [flat, torch.zeros(-len(flat) % _ALIGN_BYTES, dtype=torch.uint8, device="cpu")]
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


class _Reader:
    """Builds a value from its tree, and reads the tensors in the order in which they were added."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data
        self._at = 0

    def build(self, tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        ((kind, content),) = tree.items()
        if kind == "tensor":
            return self._take(content)
        if kind == "sparse":
            shape, indices, values = content
            return torch.sparse_coo_tensor(
                self._take(indices), self._take(values), shape, device="cpu", is_coalesced=True, check_invariants=True
            )
        if kind == "dict":
            return {self.build(key): self.build(item) for key, item in content}
        if kind == "bytes":
            return bytes.fromhex(content)
        if kind == "complex":
            return complex(*content)
        if kind == "dtype":
            return _dtype(content)
        return _FROM_ITEMS[kind](self.build(item) for item in content)

    def _take(self, described: list[Any]) -> torch.Tensor:
        dtype, shape = _dtype(described[0]), described[1]
        if any(length < 0 for length in shape):
            raise ValueError(f"{shape} is not the shape of a tensor")
        size = math.prod(shape) * dtype.itemsize
        part = self._data[self._at : self._at + size]
        self._at += -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
        return part.clone().view(dtype).view(shape)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of tensors")
    return found
