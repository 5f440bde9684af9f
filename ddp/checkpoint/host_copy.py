"""Copies a state into host memory, so that it can be written while training changes the original.

Called by `ddp.checkpoint`. Knows neither files nor ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["HostCopy"]

_PINNABLE = frozenset({"cuda", "xpu"})  # devices that copy to pinned host memory by themselves

_Copied = dict[tuple[torch.device, int, int], torch.Tensor]  # by device, address and size of the memory


class HostCopy:
    """Copies of values that a checkpoint may hold (`check_plain`), tensors in host memory.

    `of` does not wait for a device: the copy is done in the order of the current stream, and `wait`, in any thread,
    returns when all copies are there.
    """

    def __init__(self) -> None:
        self._events: list[Any] = []

    def of(self, value: Any) -> Any:
        """Return a copy of `value`, of the same types. Tensors that share memory do so in the copy as well."""
        copied: _Copied = {}
        result = self._copy(value, copied)
        for device in {device for device, *_ in copied if device.type in _PINNABLE}:
            self._events.append(torch.get_device_module(device).current_stream(device).record_event())
        return result

    def wait(self) -> None:
        """Block until devices have finished the copies."""
        for event in self._events:
            event.synchronize()

    def _copy(self, value: Any, copied: _Copied) -> Any:
        if isinstance(value, torch.Tensor):
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


def _copied_tensor(tensor: torch.Tensor, copied: _Copied) -> torch.Tensor:
    tensor = tensor.detach()
    is_plain = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    if not is_plain or tensor.device.type not in {"cpu", *_PINNABLE}:
        return tensor.to("cpu", copy=True)
    # The whole memory, once: torch.save writes it so, and parameters that are tied stay tied.
    storage = tensor.untyped_storage()
    key = (storage.device, storage.data_ptr(), storage.nbytes())
    flat = copied.get(key)
    if flat is None:
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        pins = storage.device.type in _PINNABLE
        flat = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=pins)
        flat.copy_(source, non_blocking=pins)
        if storage.nbytes():
            copied[key] = flat
    result = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return result.set_(flat.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
