"""The memory of the simulated device and its pinned memory: host memory behind storages that look like any other.

Queued operations refer to the bytes below a storage and not to the storage: they keep nothing alive, as on a device.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from testbed.simulated_device.queues import Op, Scheduler, Stream

_POISON = 0xFF  # not a number in every floating type, -1 in the others


class ReadTooEarly(Exception):
    """The host has used memory that a transfer still reads or writes, or read what another stream still computes."""


@dataclass
class Block:
    """Bytes. `writes` are the last operations that write to them, by stream."""

    raw: torch.Tensor
    writes: dict[Stream, Op]
    is_pinned: bool


@dataclass(frozen=True)
class Transfer:
    """A copy between pinned memory, from address `low` to `high`, and the device."""

    op: Op
    low: int
    high: int
    is_to_host: bool


class Memory:
    """Allocates, finds the bytes of a tensor, and knows the transfers of pinned memory that are not over."""

    _blocks: ClassVar[dict[int, Block]] = {}  # by address; ddp keeps some tensors for the life of a process

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._transfers: list[Transfer] = []

    def allocate(
        self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, *, is_pinned: bool = False
    ) -> torch.Tensor:
        """Return a plain tensor over new memory, which is not a number; once freed it is poisoned, in stream order."""
        if 0 in shape:
            return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
        numel = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        raw = torch.full((numel * dtype.itemsize,), _POISON, dtype=torch.uint8, device="cpu")
        view = raw.numpy()[:]  # which the storage keeps, so that its end is known
        block = self._blocks[raw.data_ptr()] = Block(raw, {}, is_pinned)
        weakref.finalize(view, self._free, raw.data_ptr(), self._scheduler.current).atexit = False
        storage = torch.frombuffer(view, dtype=torch.uint8).untyped_storage()
        result = torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, tuple(shape), tuple(strides))
        del block
        return result

    def _free(self, address: int, stream: Stream) -> None:
        block = self._blocks.pop(address)
        if not block.is_pinned:  # the allocator of pinned memory waits for its transfers

            def poison(_: Op) -> bool:
                block.raw.fill_(_POISON)
                return True

            self._scheduler.freed.append((stream, poison))

    def holds(self, address: int) -> bool:
        """Return whether an address of a storage is one of the device's memory."""
        block = self._blocks.get(address)
        return block is not None and not block.is_pinned

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        low = tensor.data_ptr()
        now = self._blocks.copy()  # at once: another thread, or a finalizer in this one, may change it
        pinned = [(address, block) for address, block in now.items() if block.is_pinned]
        return any(address <= low < address + len(block.raw) for address, block in pinned)

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        return self._blocks.get(tensor.untyped_storage().data_ptr())

    def below(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a plain tensor over the same bytes that does not keep the storage alive."""
        block = self.block_of(tensor)
        shape, strides = tensor.size(), tensor.stride()
        if block is None:
            assert tensor.numel() == 0, "memory that was freed, or is not the device's"
            return torch.empty_strided(shape, strides, dtype=tensor.dtype, device="cpu")
        empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return empty.set_(block.raw.untyped_storage(), tensor.storage_offset(), shape, strides)

    def note_write(self, tensor: torch.Tensor, op: Op) -> None:
        if (block := self.block_of(tensor)) is not None:
            block.writes[op.stream] = op

    def check_written(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        """Raise ReadTooEarly if an operation that writes one of these has not run, although the host has waited."""
        blocks = [block for tensor in tensors if (block := self.block_of(tensor)) is not None]
        for stream, op in itertools.chain.from_iterable(block.writes.copy().items() for block in blocks):
            if not op.is_done:
                raise ReadTooEarly(f"{what} reads at {caller()} what the stream {stream.name} still writes")

    def note_transfer(self, host: torch.Tensor, op: Op, *, is_to_host: bool) -> None:
        low, high = _range(host)
        self._transfers.append(Transfer(op, low, high, is_to_host))

    def check_host(self, tensors: Sequence[torch.Tensor], written: Sequence[torch.Tensor], what: str) -> None:
        """Raise ReadTooEarly if a transfer to one of the tensors, or from one that is written, is not over."""
        self._transfers = [each for each in self._transfers if not each.op.is_done]
        for transfer, tensor in itertools.product(self._transfers, tensors):
            is_written = any(tensor is each for each in written)
            low, high = _range(tensor)
            if low < transfer.high and transfer.low < high and (is_written or transfer.is_to_host):
                does, way = ("writes", "uses") if is_written else ("reads", "writes")
                raise ReadTooEarly(f"{what} {does} at {caller()} pinned memory that a transfer still {way}")

    @property
    def has_transfers(self) -> bool:
        return bool(self._transfers)


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.numel() == 0:
        return 0, 0
    low = tensor.data_ptr()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return low, low + extent * tensor.dtype.itemsize


def caller() -> str:
    """Return file, line and function of the nearest frame that is neither torch's nor this package's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        "/torch/" in frame.f_code.co_filename or __package__ in frame.f_globals["__name__"]
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
