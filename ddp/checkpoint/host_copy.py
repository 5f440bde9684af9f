"""Copies a state into host memory, so that it can be written while training changes the original.

Called by `ddp.checkpoint`. Knows neither files nor ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack, to_dlpack

from ddp.comm.pinned_buffer import has_stream, recorded_event

__all__ = ["HostCopy", "HostMemory", "tensors_in"]

_ALIGNMENT = 64  # bytes

_Copied = dict[tuple[torch.device, int, int], torch.Tensor]  # by device, address and size of the memory


class HostCopy:
    """Copies of values that a checkpoint may hold (`check_plain`), tensors in host memory.

    `of` does not wait for a device: the copy is done in the order of the current stream, and `wait`, in any thread,
    returns when all copies are there. Copies from devices lie in `memory`, whose last user this one replaces. With
    `device_types`, tensors on other devices are not copied, but passed on as they are.
    """

    def __init__(self, memory: HostMemory | None = None, *, device_types: Collection[str] | None = None) -> None:
        self._memory = memory or HostMemory()
        self._memory.free()
        self._device_types = device_types
        self._events: list[torch.Event] = []

    def of(self, value: Any) -> Any:
        """Return a copy of `value`, of the same types. Tensors that share memory do so in the copy as well."""
        copied = self._from_devices(value)
        self._events += [recorded_event(device) for device in {device for device, *_ in copied}]
        return self._copy(value, copied)

    def wait(self) -> None:
        """Block until devices have finished the copies."""
        for event in self._events:
            event.synchronize()

    def _from_devices(self, value: Any) -> _Copied:
        """The memory of tensors on devices that copy beside the host, to be copied when an event comes."""
        storages = {}
        for tensor in tensors_in(value):
            if has_stream(tensor.device) and _is_plain(tensor) and self._takes(tensor):
                storage = tensor.untyped_storage()
                if storage.nbytes():
                    storages[_key(storage)] = storage
        taken = self._memory.take([storage.nbytes() for storage in storages.values()])
        for memory, storage in zip(taken, storages.values(), strict=True):
            memory.copy_(_bytes_of(storage), non_blocking=memory.is_pinned())
        # torch.save writes the whole memory of a tensor, which must not be that of all others.
        alone = [from_dlpack(to_dlpack(memory)) for memory in taken]
        return dict(zip(storages, alone, strict=True))

    def _takes(self, tensor: torch.Tensor) -> bool:
        return self._device_types is None or tensor.device.type in self._device_types

    def _copy(self, value: Any, copied: _Copied) -> Any:
        if isinstance(value, torch.Tensor):
            if not self._takes(value):
                return value
            result = _copied_tensor(value, copied).requires_grad_(value.requires_grad)
            return nn.Parameter(result, value.requires_grad) if isinstance(value, nn.Parameter) else result
        if isinstance(value, Mapping):
            items: Any = copy.copy(value)  # with its attributes, as the versions of modules beside a state_dict
            for key in value:
                items[key] = self._copy(value[key], copied)
            return items
        if isinstance(value, list | tuple | set) and not isinstance(value, torch.Size):
            return type(value)([self._copy(item, copied) for item in value])
        return value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors of a value that a checkpoint may hold."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple | set):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def _key(storage: torch.UntypedStorage) -> tuple[torch.device, int, int]:
    return storage.device, storage.data_ptr(), storage.nbytes()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copied_tensor(tensor: torch.Tensor, copied: _Copied) -> torch.Tensor:
    tensor = tensor.detach()
    if not _is_plain(tensor) or not (tensor.device.type == "cpu" or has_stream(tensor.device)):
        return tensor.to("cpu", copy=True)
    # The whole memory, once: torch.save writes it so, and parameters that are tied stay tied.
    storage = tensor.untyped_storage()
    flat = copied.get(_key(storage))
    if flat is None:
        flat = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu").copy_(_bytes_of(storage))
        if storage.nbytes():
            copied[_key(storage)] = flat
    result = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return result.set_(flat.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


class HostMemory:
    """Pinned memory for copies from devices, in few blocks that are kept for the next copy.

    Their sizes are powers of two, and they are given back to torch when the object is. torch's allocator rounds each
    request for pinned memory up to a power of two, and keeps what is given back: with a request for each tensor, GPT-2
    (124M) with AdamW would take 1.66 times its bytes, in blocks as here 1.01 times. A tensor alone, or a few large
    ones, may still take up to twice their bytes.
    """

    def __init__(self) -> None:
        self._blocks: list[_Block] = []

    def free(self) -> None:
        """Let what was taken be taken again: nobody may use it any more."""
        for block in self._blocks:
            block.used = 0

    def take(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return pinned memory of so many bytes each (size,), ordinary memory where the system pins no more.

        The largest are placed first, each in the first block with room for it. A new block has the largest power of two
        that the rest fills.
        """
        taken = [torch.empty(0, dtype=torch.uint8, device="cpu")] * len(sizes)
        needs = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        rest, may_pin = sum(needs), True
        for at in sorted(range(len(sizes)), key=lambda at: -needs[at]):
            need = needs[at]
            block = next((block for block in self._blocks if block.used + need <= len(block.memory)), None)
            if block is None and may_pin and need:
                try:
                    block = _Block(_pinned(max(1 << (need - 1).bit_length(), 1 << (rest.bit_length() - 1))))
                    self._blocks.append(block)
                except RuntimeError:
                    may_pin = False
            if block is None:
                taken[at] = torch.empty(sizes[at], dtype=torch.uint8, device="cpu")
            else:
                taken[at] = block.memory[block.used : block.used + sizes[at]]
                block.used += need
            rest -= need
        return taken


@dataclass
class _Block:
    memory: torch.Tensor  # (bytes,)
    used: int = 0


def _pinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
