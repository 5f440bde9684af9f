"""Times what compressing costs each rank, when a model is wrapped that may be compressed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddp.comm.channel import Channel
from ddp.compression.compressors import named
from ddp.compression.rehearsal import RehearsalGroup, bucket_like
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
    bucket = bucket_like(parameters, bucket_bytes)
    nbytes = bucket.buffer().nbytes
    if not nbytes:
        return []
    costs = []
    with channel.report.waiting("measurement of compression"):
        for name in names:
            compressor = named(name).compressor(RehearsalGroup(channel.group.size()), None)
            assert isinstance(compressor, RowCompressor)
            agree(channel, [0.0])  # so that all begin at once
            tries = [compressor.rehearse(bucket) for _ in range(_TIMES)]  # the first one takes fresh memory
            compressor.close()
            before_s, after_s = agree(channel, [min(t.before_s for t in tries), min(t.after_s for t in tries)])
            costs.append(CompressionCost(name, tries[0].wire_bytes / nbytes, before_s / nbytes, after_s / nbytes))
    return costs
