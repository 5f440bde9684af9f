"""Memory that compressors use again in every step: fresh memory costs a page fault for every 4 KiB.

Measured, these faults cost as much as all the arithmetic of a compressor. Casts inside an operation allocate too, so
compressors cast with `copy_` into memory from here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

__all__ = ["BucketMemories", "BucketMemory", "Scratch"]


@dataclass(eq=False)
class BucketMemory:
    """Memory for one bucket on its way, uint8 of shape (n, row bytes).

    `send` is filled by the caller; `busy` is its last use.
    """

    send: torch.Tensor
    received: torch.Tensor
    busy: torch.futures.Future[torch.Tensor] | None = None


class BucketMemories:
    """The memory of each bucket of one compressor, used again in every step."""

    def __init__(self) -> None:
        self._memories: dict[int, BucketMemory] = {}

    def take(self, index: int, shape: tuple[int, int], device: torch.device) -> BucketMemory:
        """Return memory for bucket `index`: what it had last time, if that fits and is not in use any more."""
        wire = self._memories.get(index)
        is_free = wire is not None and (wire.busy is None or wire.busy.done())
        if wire is None or not is_free or wire.send.shape != shape or wire.send.device != device:
            send = torch.empty(shape, dtype=torch.uint8, device=device)
            wire = self._memories[index] = BucketMemory(send, torch.empty_like(send))
        elif wire.busy is not None and device.type != "cpu":
            wire.busy.wait()  # the stream waits, not this thread
        return wire


class Scratch:
    """Memory for intermediate values, of which a few threads need some at a time.

    On CUDA it is torch's allocator that keeps it, which knows what stream still uses it.
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    @contextmanager
    def lend(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Lend uninitialised memory in float32, of the shape and on the device of `tensor`."""
        if tensor.device.type != "cpu":
            yield torch.empty_like(tensor, dtype=torch.float32)
            return
        numel = tensor.numel()
        try:
            memory = self._free.pop()
        except IndexError:
            memory = torch.empty(numel, dtype=torch.float32)
        if memory.numel() < numel:
            memory = torch.empty(numel, dtype=torch.float32)
        yield memory[:numel].view(tensor.shape)
        self._free.append(memory)
