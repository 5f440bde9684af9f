"""Nested dicts, lists, numbers and tensors as JSON and a list of tensors, and back: what a message can carry."""

from __future__ import annotations

from typing import Any

import torch

from ddp.errors import ArgumentError

__all__ = ["pack", "unpack"]


def pack(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a tree for JSON; tensors are put into `tensors`, dense and on the CPU, in the order of the tree.

    Raises ArgumentError for what is neither None, a number, a string, a tensor, nor a dict, list or tuple of them.
    """
    if isinstance(value, torch.Tensor):
        if value.is_sparse:
            value = value.coalesce()
            tensors += [value.indices().cpu(), value.values().cpu()]
            return {"sparse": list(value.shape)}
        tensors.append(value.detach().cpu().contiguous())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, dict):
        return {"dict": [[key, pack(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return {"list" if isinstance(value, list) else "tuple": [pack(item, tensors) for item in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ArgumentError(f"the optimizer keeps a {type(value).__name__}, which cannot be sent to a parameter server")


def unpack(tree: Any, tensors: list[torch.Tensor]) -> Any:
    """Return the value of a tree that `pack` made; takes its tensors from the front of `tensors`."""
    if not isinstance(tree, dict):
        return tree
    ((kind, inner),) = tree.items()
    if kind == "tensor":
        return tensors.pop(0)
    if kind == "sparse":
        indices, values = tensors.pop(0), tensors.pop(0)
        return torch.sparse_coo_tensor(indices, values, inner, is_coalesced=True, check_invariants=True)
    if kind == "dict":
        return {key: unpack(item, tensors) for key, item in inner}
    items = [unpack(item, tensors) for item in inner]
    return tuple(items) if kind == "tuple" else items
