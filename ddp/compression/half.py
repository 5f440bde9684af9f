"""A compressor that sends gradients in 16 bits and sums them in 32; keeps no state between steps.

Torch's hooks of the same names let the backend add in 16 bits, which rounds n-1 times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ddp.compression.compressor import Bucket, completed
from ddp.compression.row_compressor import RowCompressor
from ddp.errors import ArgumentError


@dataclass(frozen=True)
class Half:
    """Send each value in 16 bits, and add up in float32. `dtype`: torch.bfloat16, or torch.float16 with a GradScaler.

    A gradient too large for float16 becomes infinite on every rank, and the GradScaler skips the step. 16-bit buckets
    keep their dtype. Raises ArgumentError for another dtype.
    """

    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.dtype not in (torch.bfloat16, torch.float16):
            raise ArgumentError(f"Half(dtype={self.dtype}): torch.bfloat16 or torch.float16")

    def compressor(self, group: dist.ProcessGroup, parameters: Mapping[str, torch.Tensor] | None) -> HalfCompressor:
        """Make a compressor for one model, for `make_compression` and the wrapper."""
        return HalfCompressor(group, self.dtype, parameters)


class HalfCompressor(RowCompressor):
    """Averages buckets with `dtype` on the wire: one rounding on each rank, one after the sum in float32.

    Every rank divides before it rounds, so a sum in float16 does not overflow; a gradient too large for float16
    becomes infinite on every rank, which torch's GradScaler handles. Infinities and NaNs are kept. A 16-bit bucket
    keeps its dtype.
    """

    def __init__(
        self, group: dist.ProcessGroup, dtype: torch.dtype, parameters: Mapping[str, torch.Tensor] | None
    ) -> None:
        super().__init__(group, "bf16" if dtype is torch.bfloat16 else "fp16", parameters)
        self._dtype = dtype

    def reduce(self, bucket: Bucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        numel = buffer.numel()
        if self._size == 1 or numel == 0:
            return completed(buffer)
        dtype = buffer.dtype if buffer.dtype.itemsize <= self._dtype.itemsize else self._dtype
        memory = self._memory(bucket, -(-numel // self._size) * dtype.itemsize)
        flat = memory.send.view(dtype).view(-1)
        with torch.no_grad():
            flat[:numel].copy_(buffer.div_(self._size))
            flat[numel:].zero_()

        def average(received: torch.Tensor) -> torch.Tensor:
            first, *others = received.view(dtype)
            with self._scratch(first) as total, self._scratch(first) as term:
                total.copy_(first)
                for other in others:
                    total.add_(term.copy_(other))
                first.copy_(total)
            return received[0]

        def deliver(gathered: torch.Tensor) -> torch.Tensor:
            return buffer.copy_(gathered.view(dtype).view(-1)[:numel])

        return self._start(bucket, memory, average, deliver)

    def state_dict(self) -> dict[str, Any]:
        return {"method": self._name, "parameters": {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._read(state, ())
