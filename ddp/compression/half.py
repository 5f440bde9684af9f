"""Gradients travel in 16 bits and are summed in 32: a compressor that keeps no state between steps.

`ddp.compression` makes it. Torch's hooks of the same names let the backend add in 16 bits, which rounds n-1 times.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from ddp.compression.memory import BucketMemories, Scratch
from ddp.compression.row_exchange import BucketRows, RowExchange, open_exchange
from ddp.compression.state import Bucket, completed, need_method

__all__ = ["HalfCompressor"]


class HalfCompressor:
    """Averages buckets over `group` with `dtype` on the wire: one rounding on each rank, one after the sum in float32.

    Every rank divides before it rounds, so a sum in float16 does not overflow; a gradient too large for float16
    becomes infinite on every rank, which torch's GradScaler handles. Infinite and NaN stay what they are. A bucket
    that is of 16 bits already keeps its dtype.
    """

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype, *, name: str) -> None:
        self._group: dist.ProcessGroup | None = group
        self._size = group.size()
        self._dtype = dtype
        self._name = name
        self._exchange: RowExchange | None = open_exchange(group)
        self._memories = BucketMemories()
        self._scratch = Scratch()

    def reduce(self, bucket: Bucket) -> torch.futures.Future[torch.Tensor]:
        """Start averaging; the future has the bucket's own buffer, with the averages in it."""
        buffer = bucket.buffer()
        numel = buffer.numel()
        if self._size == 1 or numel == 0:
            return completed(buffer)
        assert self._group is not None
        assert self._exchange is not None
        dtype = buffer.dtype if buffer.dtype.itemsize <= self._dtype.itemsize else self._dtype
        row_bytes = -(-numel // self._size) * dtype.itemsize
        wire = self._memories.take(bucket.index(), (self._size, row_bytes), buffer.device)
        flat = wire.send.view(dtype).view(-1)
        with torch.no_grad():
            flat[:numel].copy_(buffer.div_(self._size))
            flat[numel:].zero_()

        def average(received: torch.Tensor) -> torch.Tensor:
            first, *others = received.view(dtype)
            with self._scratch.lend(first) as total, self._scratch.lend(first) as term:
                total.copy_(first)
                for other in others:
                    total.add_(term.copy_(other))
                first.copy_(total)
            return received[0]

        def deliver(gathered: torch.Tensor) -> torch.Tensor:
            return buffer.copy_(gathered.view(dtype).view(-1)[:numel])

        return self._exchange.start(self._group, BucketRows(f"bucket {bucket.index()}", wire, average, deliver))

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs: only which method it was."""
        return {"method": self._name, "buckets": []}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that `state` came from the same method."""
        need_method(state, self._name)

    def close(self) -> None:
        """Let go of the group, before it is destroyed."""
        self._group = None
        if self._exchange is not None:
            self._exchange.leave()
        self._exchange = None
