"""Numbers and tensors of every replica made one: as bytes for any way to gather them, and combined again.

`ddp.strategy` calls it for `strategy.reduce`. What arrives is JSON and raw numbers; nothing is unpickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from ddp.comm.objects import device_of
from ddp.errors import ArgumentError

__all__ = ["Operation", "combine", "encode", "gather_bytes"]

Operation = Literal["sum", "mean", "max", "min"]

_BLOCK_BYTES = 512  # a payload that fits, as that of a few numbers does, takes one collective
_LENGTH_BYTES = 8


def encode(operation: str, value: Any) -> torch.Tensor:
    """Return the bytes (n,) uint8 of a value: a number, a tensor, or dicts, lists and tuples of them.

    Raises ArgumentError for anything else, and for an operation that there is not.
    """
    if operation not in get_args(Operation):
        raise ArgumentError(f"reduce({operation!r}): it must be one of {', '.join(map(repr, get_args(Operation)))}")
    tensors: list[torch.Tensor] = []
    header = json.dumps([operation, _describe(value, "value", tensors)]).encode()
    parts = [len(header).to_bytes(_LENGTH_BYTES, "little"), header]
    words = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
    return torch.cat([words, *(_bytes_of(tensor) for tensor in tensors)])


def combine(value: Any, payloads: Sequence[torch.Tensor]) -> Any:
    """Return what the operation makes of the replicas' payloads, in the form and on the devices of the own `value`.

    Integers stay exact; other numbers are added in float64 and rounded once (`math.fsum`), so that the result is
    the same bits on every replica. Raises ArgumentError, the same on every replica, if their forms differ.
    """
    told = [_Told(payload) for payload in payloads]
    first = told[0]
    for replica, other in enumerate(told):
        if other.operation != first.operation:
            raise ArgumentError(
                f"replica 0 calls reduce({first.operation!r}) where replica {replica} calls reduce({other.operation!r})"
            )
        if _form(other.tree) != _form(first.tree):
            raise ArgumentError(
                f"reduce({first.operation!r}): replica {replica} gives {_form(other.tree)}, replica 0 "
                f"{_form(first.tree)}; all replicas must give values of the same form"
            )
    return _combined(first.operation, value, [each.tree for each in told], [iter(each.tensors) for each in told])


def gather_bytes(payload: torch.Tensor, group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
    """Return the payloads (n,) uint8 of all ranks of a group, on the CPU. Every rank must call it; blocks."""
    if dist.get_world_size(group) == 1:
        return [payload]
    device = device_of(group)
    room = _BLOCK_BYTES - _LENGTH_BYTES
    block = torch.zeros(_BLOCK_BYTES, dtype=torch.uint8)
    block[:_LENGTH_BYTES].view(torch.int64)[0] = len(payload)
    block[_LENGTH_BYTES : _LENGTH_BYTES + min(room, len(payload))] = payload[:room]
    blocks = [each.cpu() for each in _all_gather(block.to(device), group)]
    lengths = [int(each[:_LENGTH_BYTES].view(torch.int64)) for each in blocks]
    whole = [each[_LENGTH_BYTES : _LENGTH_BYTES + length] for each, length in zip(blocks, lengths, strict=True)]
    longest = max(lengths)
    if longest > room:
        rest = torch.zeros(longest - room, dtype=torch.uint8)
        rest[: max(0, len(payload) - room)] = payload[room:]
        for rank, more in enumerate(_all_gather(rest.to(device), group)):
            whole[rank] = torch.cat([whole[rank], more.cpu()[: max(0, lengths[rank] - room)]])
    return whole


def _all_gather(mine: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    return every


def _describe(value: Any, name: str, tensors: list[torch.Tensor]) -> list[Any]:
    """A tree for JSON, with the tensors put aside in its order."""
    if isinstance(value, torch.Tensor):
        if value.is_complex() or value.layout is not torch.strided:
            raise ArgumentError(f"reduce: {name} is a {value.dtype} {value.layout} tensor; give a dense one of numbers")
        tensors.append(value.detach())
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape)]
    if isinstance(value, bool | int):
        return ["int", int(value)]
    if isinstance(value, float):
        return ["float", value]
    if isinstance(value, Mapping):
        return ["dict", [[str(key), _describe(item, f"{name}[{key!r}]", tensors)] for key, item in value.items()]]
    if isinstance(value, list | tuple):
        items = [_describe(item, f"{name}[{index}]", tensors) for index, item in enumerate(value)]
        return ["list", items]
    if hasattr(value, "item") and not hasattr(value, "__len__"):  # numpy's numbers
        return _describe(value.item(), name, tensors)
    raise ArgumentError(
        f"reduce: {name} is a {type(value).__name__}; give a number, a tensor, or dicts or lists of them"
    )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


class _Told:
    """What one replica said."""

    def __init__(self, payload: torch.Tensor) -> None:
        length = int(payload[:_LENGTH_BYTES].clone().view(torch.int64))
        end = _LENGTH_BYTES + length
        self.operation, self.tree = json.loads(bytes(payload[_LENGTH_BYTES:end].tolist()))
        self.tensors: list[torch.Tensor] = []
        rest = payload[end:]
        for dtype, shape in _tensors(self.tree):
            count = math.prod(shape) * dtype.itemsize
            self.tensors.append(rest[:count].clone().view(dtype).view(shape))
            rest = rest[count:]


def _tensors(tree: list[Any]) -> list[tuple[torch.dtype, list[int]]]:
    if tree[0] == "tensor":
        return [(getattr(torch, tree[1]), tree[2])]
    if tree[0] in ("dict", "list"):
        items = [item[1] for item in tree[1]] if tree[0] == "dict" else tree[1]
        return [found for item in items for found in _tensors(item)]
    return []


def _form(tree: list[Any]) -> str:
    """A tree without its numbers, in words."""
    kind = tree[0]
    if kind == "tensor":
        return f"{tree[1]}{tree[2]}"
    if kind == "dict":
        return "{" + ", ".join(f"{key}: {_form(item)}" for key, item in tree[1]) + "}"
    if kind == "list":
        return "[" + ", ".join(map(_form, tree[1])) + "]"
    return "a number"


def _combined(operation: str, value: Any, trees: Sequence[list[Any]], tensors: Sequence[Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return _of_tensors(operation, [next(each) for each in tensors]).to(value.device)
    if isinstance(value, Mapping):
        inner = [[item[1] for item in tree[1]] for tree in trees]
        items = zip(value.items(), zip(*inner, strict=True), strict=True)
        return {key: _combined(operation, item, list(parts), tensors) for (key, item), parts in items}
    if isinstance(value, list | tuple):
        parts = zip(value, zip(*(tree[1] for tree in trees), strict=True), strict=True)
        found = [_combined(operation, item, list(each), tensors) for item, each in parts]
        return found if isinstance(value, list) else tuple(found)
    return _of_numbers(operation, [tree[1] for tree in trees])


def _of_numbers(operation: str, numbers: Sequence[float]) -> float:
    if operation in ("max", "min"):
        if any(number != number for number in numbers):
            return math.nan
        return max(numbers) if operation == "max" else min(numbers)
    are_whole = all(isinstance(number, int) for number in numbers)
    total = sum(numbers) if are_whole else math.fsum(numbers) if all(map(math.isfinite, numbers)) else sum(numbers)
    return total if operation == "sum" else total / len(numbers)


def _of_tensors(operation: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Each (...), of one shape and dtype."""
    dtype = tensors[0].dtype
    found: torch.Tensor
    if operation in ("max", "min"):
        choose: Callable[..., torch.Tensor] = torch.amax if operation == "max" else torch.amin
        return choose(torch.stack(list(tensors)), 0)
    exact = torch.float64 if dtype.is_floating_point else torch.int64
    found = torch.stack([tensor.to(exact) for tensor in tensors]).sum(0)
    if operation == "sum":
        return found.to(torch.int64 if dtype == torch.bool else dtype)
    mean = found.double() / len(tensors)
    return mean.to(dtype) if dtype.is_floating_point else mean
