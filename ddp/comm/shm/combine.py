"""Combines the parts of all ranks, in the order of the ranks: rank 0 + rank 1 + ...

Element by element, so that the result of an element depends on the ranks' values of it alone, never on the limits of
chunks and slices. Half precision, bfloat16 and float8 are combined in float32 and rounded once (gloo rounds each
partial sum); bool is combined logically.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from ddp.errors import ArgumentError

_STEPS: dict[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_BITWISE = ("BAND", "BOR", "BXOR")
# torch has no sums of these; their bits are those of the signed ones.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


@lru_cache(maxsize=256)
def reduction_of(name: str, dtype: torch.dtype) -> torch.dtype | None:
    """Check that values of `dtype` can be combined so; return the dtype to combine them in if it differs.

    Raises ArgumentError.
    """
    if name not in _STEPS:
        raise ArgumentError(f"the backend shm cannot combine by {name}: it has {', '.join(_STEPS)}; use gloo or NCCL")
    exact = not dtype.is_floating_point and not dtype.is_complex
    if (name in _BITWISE and not exact) or (name == "AVG" and exact) or (name in ("MIN", "MAX") and dtype.is_complex):
        raise ArgumentError(f"the backend shm cannot combine {dtype} by {name}: convert the tensor first")
    if name in ("MIN", "MAX") and dtype in _SIGNED:
        raise ArgumentError(f"the backend shm cannot combine {dtype} by {name}: convert the tensor first")
    if dtype.is_floating_point and dtype.itemsize < 4:
        return torch.float32
    return _SIGNED.get(dtype)


def combine(name: str, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Write the combined values of `parts`, one flat tensor per rank, to `out`, which may only alias the first part.

    With two parts it may alias either.
    """
    step = _STEPS[name]
    wide = reduction_of(name, out.dtype)
    if wide is not None and not wide.is_floating_point:
        parts, out, wide = [part.view(wide) for part in parts], out.view(wide), None
    if wide is None:
        if len(parts) == 1:
            out.copy_(parts[0])
            return
        step(parts[0], parts[1], out=out)
        for part in parts[2:]:
            step(out, part, out=out)
        if name == "AVG":
            out.div_(len(parts))
        return
    total = parts[0].to(wide)
    for part in parts[1:]:
        step(total, part.to(wide), out=total)
    if name == "AVG":
        total.div_(len(parts))
    out.copy_(total)
