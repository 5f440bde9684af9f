"""What travels between the device of a worker and pinned memory: gradients of a step, and the values that come back.

Made and called by the client, if all parameters lie on one device whose copies run beside the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle

import torch

from ddp.comm.pinned_buffer import PinnedBuffer
from ddp.strategies.sharding.chunk_gradient import Gradient, start_flattening
from ddp.strategies.sharding.partition import Chunk, Partition

__all__ = ["DeviceCopies"]

_VALUES = 4  # chunks that come back and are under way to the device together


class DeviceCopies:
    """Pinned memory for the gradients of all chunks, which are sent from there, and for the values of a few."""

    def __init__(self, partition: Partition, device: torch.device) -> None:
        self._partition = partition
        self._device = device
        self._gradients: dict[int, PinnedBuffer] = {}  # by chunk; an evaluator has none
        self._flattened: dict[int, Callable[[], Gradient]] = {}
        sizes: dict[torch.dtype, int] = {}
        for chunk in partition.chunks:
            sizes[chunk.dtype] = max(chunk.numel, sizes.get(chunk.dtype, 0))
        self._values = {
            dtype: cycle([PinnedBuffer(numel, dtype, device) for _ in range(_VALUES)]) for dtype, numel in sizes.items()
        }

    def start(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Start copying the gradients of all chunks, from those of all parameters, which may change afterwards."""
        for chunk in self._partition.chunks:
            if chunk.index not in self._gradients:
                self._gradients[chunk.index] = PinnedBuffer(chunk.numel, chunk.dtype, self._device)
            self._flattened[chunk.index] = start_flattening(chunk, gradients, self._gradients[chunk.index])

    def gradient_of(self, chunk: Chunk) -> Gradient:
        """Wait until a chunk's gradient is here; return it, in host memory that stays as it is until the next start."""
        return self._flattened.pop(chunk.index)()

    def install(self, chunk: Chunk, values: torch.Tensor, into: Sequence[torch.Tensor]) -> None:
        """Start copying a chunk's values (numel,) to the pieces of its parameters; `values` may change afterwards."""
        next(self._values[chunk.dtype]).start_sending(chunk.in_flat(values), into)
