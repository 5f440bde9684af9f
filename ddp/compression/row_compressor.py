"""The base of compressors that send buckets as rows of bytes: their exchange, and memory reused in every step.

New memory costs a page fault for every 4 KiB. Measured, these faults cost as much as all the arithmetic of a
compressor. Casts inside an operation allocate too, so compressors cast with `copy_` into this memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ddp.compression.compressor import Bucket, Compressor
from ddp.compression.rehearsal import RehearsalGroup
from ddp.compression.row_exchange import BucketRows, RowExchange, RowMemory, open_exchange


class RowCompressor(Compressor):
    """Subclasses fill the rows of a bucket in `reduce`, and pass them to `_start` with functions for received rows."""

    def __init__(self, group: dist.ProcessGroup, name: str, parameters: Mapping[str, torch.Tensor] | None) -> None:
        super().__init__(group, name, parameters)
        self._exchange: RowExchange | RehearsalGroup | None = (
            group
            if isinstance(group, RehearsalGroup)
            else open_exchange(group, is_on_host=not parameters or any(each.is_cpu for each in parameters.values()))
        )
        self._memories: dict[int, RowMemory] = {}
        self._free: list[torch.Tensor] = []

    def close(self) -> None:
        super().close()
        if self._exchange is not None:
            self._exchange.leave()
        self._exchange = None

    def _memory(self, bucket: Bucket, row_bytes: int) -> RowMemory:
        """Return memory for `bucket`: that of the last time, if it fits and is no longer in use."""
        shape, device = (self._size, row_bytes), bucket.buffer().device
        memory = self._memories.get(bucket.index())
        is_free = memory is not None and (memory.busy is None or memory.busy.done())
        if memory is None or not is_free or memory.send.shape != shape or memory.send.device != device:
            send = torch.empty(shape, dtype=torch.uint8, device=device)
            memory = self._memories[bucket.index()] = RowMemory(send, torch.empty_like(send))
        elif memory.busy is not None and device.type != "cpu":
            memory.busy.wait()  # the stream waits, not this thread
        return memory

    def _start(
        self,
        bucket: Bucket,
        memory: RowMemory,
        average: Callable[[torch.Tensor], torch.Tensor],
        deliver: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.futures.Future[torch.Tensor]:
        """Start averaging the rows in `memory.send`. See `BucketRows` for the functions."""
        assert self._group is not None
        assert self._exchange is not None
        return self._exchange.start(self._group, BucketRows(f"bucket {bucket.index()}", memory, average, deliver))

    @contextmanager
    def _scratch(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Lend uninitialized float32 memory with the shape and device of `tensor`. Thread-safe.

        On CUDA, torch's allocator manages it, which tracks the streams that use it.
        """
        if tensor.device.type != "cpu":
            yield torch.empty_like(tensor, dtype=torch.float32)
            return
        numel = tensor.numel()
        try:
            memory = self._free.pop()
        except IndexError:
            memory = torch.empty(numel, dtype=torch.float32, device="cpu")
        if memory.numel() < numel:
            memory = torch.empty(numel, dtype=torch.float32, device="cpu")
        yield memory[:numel].view(tensor.shape)
        self._free.append(memory)
