"""Times what compressing costs each rank, when a model is wrapped that may be compressed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ddp.comm.channel import Channel
from ddp.compression.compressors import named
from ddp.compression.row_compressor import RowCompressor
from ddp.data_parallel.planning.link_cost import CompressionCost
from ddp.data_parallel.planning.measure_link import agree

__all__ = ["measure_compression"]

_TIMES = 3


def measure_compression(
    channel: Channel, names: Sequence[str], parameters: Sequence[torch.Tensor], bucket_bytes: int
) -> list[CompressionCost]:
    """Compress and take back a bucket as large as those of a model with `parameters` will be, with each method.

    Every rank must call it; blocks. All ranks work at once, as in training, and the slowest counts. Nothing is sent but
    the figures.
    """
    like = parameters[0]
    numel = max(1, min(bucket_bytes, sum(each.nbytes for each in parameters)) // like.itemsize)
    costs = []
    with channel.report.waiting("measurement of compression"):
        for name in names:
            compressor = named(name).compressor(channel.group, None)
            assert isinstance(compressor, RowCompressor)
            bucket = _Bucket(torch.randn(numel, dtype=torch.float32, device=like.device).to(like.dtype))
            agree(channel, [0.0])  # so that all begin at once
            tries = [compressor.rehearse(bucket) for _ in range(_TIMES)]  # the first one takes fresh memory
            compressor.close()
            nbytes = bucket.gradient.nbytes
            before_s, after_s = agree(channel, [min(t.before_s for t in tries), min(t.after_s for t in tries)])
            costs.append(CompressionCost(name, tries[0].wire_bytes / nbytes, before_s / nbytes, after_s / nbytes))
    return costs


@dataclass(frozen=True)
class _Bucket:
    """A bucket of one gradient, of one dimension."""

    gradient: torch.Tensor

    def index(self) -> int:
        return 0

    def buffer(self) -> torch.Tensor:
        return self.gradient

    def gradients(self) -> list[torch.Tensor]:
        return [self.gradient]

    def parameters(self) -> list[torch.Tensor]:
        return [self.gradient]

    def is_last(self) -> bool:
        return True
