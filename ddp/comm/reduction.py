"""Reduces numbers and tensors over the replicas: encodes them as bytes for any way to gather them, and combines them.

Sums of large tensors may be all-reduced separately, by `sum_of_all`. Called by `strategy.reduce`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from ddp.comm.codec import decode, encode
from ddp.comm.objects import device_of
from ddp.errors import ArgumentError
from ddp.monitoring.stall_report import finish, waiting_for_peers

Operation = Literal["sum", "mean", "max", "min"]
_LARGE_BYTES = 64 << 10  # larger tensors are reduced separately: gathering needs one copy for each replica
_PIECE_NUMEL = 8 << 20  # elements added at once: 64 MB


def payload_of(operation: str, value: Any, *, large_apart: bool = False) -> torch.Tensor:
    """Return the bytes (n,) uint8 of a value: a number, a tensor, or dicts, lists and tuples of them.

    With `large_apart`, large tensors of a sum or mean are not included: `combine` adds them up separately. Raises
    ArgumentError for anything else, and for an unknown operation.
    """
    if operation not in get_args(Operation):
        raise ArgumentError(f"reduce({operation!r}): it must be one of {', '.join(map(repr, get_args(Operation)))}")
    return encode((operation, _plain(value, "value", large_apart=large_apart and operation in ("sum", "mean"))))


def combine(value: Any, payloads: Sequence[torch.Tensor]) -> Any:
    """Combine the replicas' payloads by the operation; the result has the form and devices of this replica's `value`.

    Integers stay exact; other numbers are added in float64 and rounded once (`math.fsum`), so that the result is
    bitwise equal on every replica. Raises ArgumentError, the same on every replica, if their forms differ. With
    payloads of `large_apart` every rank of the default group must call it; it blocks.
    """
    given = [decode(payload) for payload in payloads]
    operation, first = given[0]
    for replica, (other_operation, other) in enumerate(given):
        if other_operation != operation:
            raise ArgumentError(
                f"replica 0 calls reduce({operation!r}) where replica {replica} calls reduce({other_operation!r})"
            )
        if _form(other) != _form(first):
            raise ArgumentError(
                f"reduce({operation!r}): replica {replica} gives {_form(other)}, replica 0 "
                f"{_form(first)}; all replicas must give values of the same form"
            )
    return _combined(operation, value, [values for _, values in given])


def sum_of_all(tensor: torch.Tensor, *, divisor: int = 1) -> torch.Tensor:
    """Return the sum of a tensor over the ranks by `divisor`, as `combine` does, in all-reduces of up to 64 MB.

    Adds in float64, or in int64. Every rank must call it with a tensor of the same form; blocks.
    """
    exact, dtype = _dtypes_of(tensor.dtype, is_mean=divisor > 1)
    total = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    pieces = (torch.split(each.detach().reshape(-1), _PIECE_NUMEL) for each in (tensor, total))
    with waiting_for_peers("the sum of a large tensor"):
        for own, place in zip(*pieces, strict=True):
            piece = own.to(device_of(), exact, copy=True)
            finish(dist.all_reduce(piece, async_op=True), device=piece.device)
            place.copy_(piece if divisor == 1 else piece.double() / divisor)
    return total


def _dtypes_of(dtype: torch.dtype, *, is_mean: bool) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtype in which tensors are added, and that of their sum or mean."""
    if dtype.is_floating_point:
        return torch.float64, dtype
    return torch.int64, torch.float64 if is_mean else torch.int64 if dtype == torch.bool else dtype


def _plain(value: Any, name: str, *, large_apart: bool) -> Any:
    """Convert `value` to dicts with string keys, lists, integers, floats and dense tensors, or their forms."""
    if isinstance(value, torch.Tensor):
        if value.is_complex() or value.layout is not torch.strided:
            raise ArgumentError(f"reduce: {name} is a {value.dtype} {value.layout} tensor; give a dense one of numbers")
        return {f"a large {_form(value)}": 0} if large_apart and value.nbytes > _LARGE_BYTES else value
    if isinstance(value, bool | int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{name}[{key!r}]", large_apart=large_apart) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{name}[{index}]", large_apart=large_apart) for index, item in enumerate(value)]
    if hasattr(value, "item") and not hasattr(value, "__len__"):  # numpy's numbers
        return _plain(value.item(), name, large_apart=large_apart)
    raise ArgumentError(
        f"reduce: {name} is a {type(value).__name__}; give a number, a tensor, or dicts or lists of them"
    )


def _form(value: Any) -> str:
    """Describe a value's structure, without its numbers."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_form(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_form, value)) + "]"
    return "a number"


def _combined(operation: str, value: Any, given: Sequence[Any]) -> Any:
    """Combine `given`, the plain values of all replicas, which all have the form of `value`."""
    if isinstance(value, torch.Tensor):
        if isinstance(given[0], Mapping):  # its form
            return sum_of_all(value, divisor=len(given) if operation == "mean" else 1)
        return _of_tensors(operation, given).to(value.device)
    if isinstance(value, Mapping):
        return {key: _combined(operation, item, [each[str(key)] for each in given]) for key, item in value.items()}
    if isinstance(value, list | tuple):
        found = [_combined(operation, item, [each[index] for each in given]) for index, item in enumerate(value)]
        return found if isinstance(value, list) else tuple(found)
    return _of_numbers(operation, given)


def _of_numbers(operation: str, numbers: Sequence[float]) -> float:
    if operation in ("max", "min"):
        if any(number != number for number in numbers):
            return math.nan
        return max(numbers) if operation == "max" else min(numbers)
    total = exact_sum(numbers)
    return total if operation == "sum" else total / len(numbers)


def exact_sum(numbers: Sequence[float]) -> float:
    """Add integers exactly, and other numbers in float64, rounded once: their order does not matter."""
    if all(isinstance(number, int) for number in numbers):
        return sum(numbers)
    try:
        return math.fsum(numbers)
    except (ValueError, OverflowError):  # inf and -inf, or beyond float64
        return sum(numbers)


def _of_tensors(operation: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Combine tensors (...) of one shape and dtype."""
    dtype = tensors[0].dtype
    found: torch.Tensor
    if operation in ("max", "min"):
        choose: Callable[..., torch.Tensor] = torch.amax if operation == "max" else torch.amin
        return choose(torch.stack(list(tensors)), 0)
    exact, dtype = _dtypes_of(dtype, is_mean=operation == "mean")
    found = torch.stack([tensor.to(exact) for tensor in tensors]).sum(0)
    return (found if operation == "sum" else found.double() / len(tensors)).to(dtype)
