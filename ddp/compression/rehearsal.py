"""A group that sends nothing and a bucket of random gradients, for rehearsing a compressor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ddp.compression.compressor import Bucket, completed, real
from ddp.compression.row_exchange import BucketRows


class RehearsalGroup(dist.ProcessGroup):
    """Replaces a group of `size` ranks and its row exchange: counts bytes and sends nothing."""

    def __init__(self, size: int) -> None:
        super().__init__(0, size)  # type: ignore[call-arg]  # the stub lacks this constructor
        self.sent_bytes = 0

    def allreduce(self, tensors: Sequence[torch.Tensor]) -> Any:  # type: ignore[override]  # all that is called here
        """Count the bytes, and leave the tensors as they are."""
        self.sent_bytes += sum(tensor.nbytes for tensor in tensors)

    def start(self, _: dist.ProcessGroup, rows: BucketRows) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket's rows as if all ranks had sent the same."""
        memory = rows.memory
        self.sent_bytes += memory.send.nbytes
        memory.received.copy_(memory.send)
        memory.send.copy_(rows.average(memory.received))
        return completed(rows.deliver(memory.send))

    def leave(self) -> None:
        """Do nothing."""


def bucket_like(parameters: Iterable[torch.Tensor], most_bytes: int) -> Bucket:
    """Make a bucket of random gradients with the shapes of the largest parameters, in host memory and one real dtype.

    It has `most_bytes` at most: of a parameter that is too large, only some rows are used, at least one. The random
    numbers come from a separate generator, so that the user's are not affected.
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
    """A flat bucket, and views of it with the shapes of parameters."""

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
