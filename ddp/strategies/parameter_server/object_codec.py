"""Nested dicts, lists, numbers and tensors as two tensors of bytes, and back: what a message can carry.

The first is JSON, the second all tensors one after the other, however many and small they are. Nothing is unpickled.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch

from ddp.errors import ArgumentError

__all__ = ["pack", "unpack"]

_ALIGN_BYTES = 16


def pack(value: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a value as bytes (m,) and (n,) uint8.

    Raises ArgumentError for what is neither None, a number, a string, a tensor, nor a dict, list or tuple of them.
    """
    parts: list[torch.Tensor] = []
    tree = json.dumps(_describe(value, parts)).encode()
    nothing = [torch.empty(0, dtype=torch.uint8)]
    return torch.frombuffer(bytearray(tree), dtype=torch.uint8), torch.cat(nothing + parts)


def unpack(tree: torch.Tensor, data: torch.Tensor) -> Any:
    """Return the value of which `pack` has made these bytes."""
    return _build(json.loads(bytes(tree.tolist())), _Reader(data))


class _Reader:
    def __init__(self, data: torch.Tensor) -> None:
        self._data = data
        self._at = 0

    def take(self, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        part = self._data[self._at : self._at + size]
        self._at += -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
        return part.clone().view(dtype).view(shape)


def _describe(value: Any, parts: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if value.is_sparse:
            value = value.coalesce()
            return {"sparse": [list(value.shape), _of(value.indices(), parts), _of(value.values(), parts)]}
        return {"tensor": _of(value, parts)}
    if isinstance(value, dict):
        return {"dict": [[key, _describe(item, parts)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return {"list" if isinstance(value, list) else "tuple": [_describe(item, parts) for item in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ArgumentError(f"the optimizer keeps a {type(value).__name__}, which cannot be sent to a parameter server")


def _of(tensor: torch.Tensor, parts: list[torch.Tensor]) -> list[Any]:
    """Put a tensor's bytes aside, padded; return its dtype and shape."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    parts += [flat, torch.zeros(-len(flat) % _ALIGN_BYTES, dtype=torch.uint8)]
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def _build(tree: Any, reader: _Reader) -> Any:
    if not isinstance(tree, dict):
        return tree
    ((kind, inner),) = tree.items()
    if kind == "tensor":
        return _tensor(inner, reader)
    if kind == "sparse":
        shape, indices, values = inner
        return torch.sparse_coo_tensor(
            _tensor(indices, reader), _tensor(values, reader), shape, is_coalesced=True, check_invariants=True
        )
    if kind == "dict":
        return {key: _build(item, reader) for key, item in inner}
    items = [_build(item, reader) for item in inner]
    return tuple(items) if kind == "tuple" else items


def _tensor(described: list[Any], reader: _Reader) -> torch.Tensor:
    dtype, shape = described
    return reader.take(getattr(torch, dtype), shape)
