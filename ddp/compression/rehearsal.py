"""What a compressor can rehearse with: a group that sends nothing, and a bucket of made-up gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ddp.compression.compressor import Bucket, real

__all__ = ["Rehearsal", "RehearsalGroup", "bucket_like"]


@dataclass(frozen=True)
class Rehearsal:
    """Seconds of this rank before its rows leave and for the rows that come; `wire_bytes`: of the rows that leave."""

    before_s: float
    after_s: float
    wire_bytes: int


class RehearsalGroup(dist.ProcessGroup):
    """In the place of a group of `size` ranks, for a compressor that only rehearses: nothing is sent."""

    def __init__(self, size: int) -> None:
        super().__init__(0, size)  # type: ignore[call-arg]  # the stub does not know this constructor
        self.summed_bytes = 0

    def allreduce(self, tensors: Sequence[torch.Tensor]) -> Any:  # type: ignore[override]  # all that is called here
        """Count the bytes, and leave the tensors as they are."""
        self.summed_bytes += sum(tensor.nbytes for tensor in tensors)


def bucket_like(parameters: Iterable[torch.Tensor], most_bytes: int) -> Bucket:
    """Gradients as the largest parameters have them, in host memory, of one real dtype, of `most_bytes` in all.

    A parameter that is too large loses rows of its first dimension; one row is the least. Numbers are drawn from a
    generator of its own: those of the user stay as they are.
    """
    largest = sorted((real(each.detach()) for each in parameters if each.numel()), key=torch.numel, reverse=True)
    dtype = largest[0].dtype if largest else torch.float32
    left = most_bytes // dtype.itemsize
    shapes: list[torch.Size] = []
    for each in largest:
        rows, *others = each.shape or (1,)
        row_numel = each.numel() // rows
        rows = max(min(rows, left // row_numel), int(not shapes))
        if rows:
            shapes.append(torch.Size([rows, *others]))
            left -= shapes[-1].numel()
    numels = [shape.numel() for shape in shapes]
    generator = torch.Generator("cpu").manual_seed(0)
    flat = torch.randn(sum(numels), generator=generator, dtype=torch.float32, device="cpu").to(dtype)
    parts = torch.split(flat, numels) if numels else ()
    return _MadeUpBucket(flat, [part.view(shape) for part, shape in zip(parts, shapes, strict=True)])


@dataclass(frozen=True)
class _MadeUpBucket:
    """A bucket, flat, and views of it with the shapes of parameters."""

    flat: torch.Tensor
    views: list[torch.Tensor]

    def index(self) -> int:
        return 0

    def buffer(self) -> torch.Tensor:
        return self.flat

    def gradients(self) -> list[torch.Tensor]:
        return self.views

    def parameters(self) -> list[torch.Tensor]:
        return self.views

    def is_last(self) -> bool:
        return True
