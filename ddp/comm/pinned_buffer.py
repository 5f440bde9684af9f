"""Copies between a device and the host for which neither waits longer than it must: through pinned memory, with events.

For parameter servers and central storage, whose gradients leave a device and whose parameters come back to it in every
step. On the CPU nobody makes a `PinnedBuffer`. Copies run on the device's current stream, in the order of what is
computed there: nothing else has to wait for them, and memory that they read may be given back at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ddp.torch_internals import foreach_copy

_WITH_STREAMS = frozenset({"cuda", "xpu"})


def device_with_stream(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """The device of all `tensors`, if it is one, and copies of pinned memory run beside the host there; else None."""
    devices = {tensor.device for tensor in tensors}
    return devices.pop() if len(devices) == 1 and has_stream(next(iter(devices))) else None


def has_stream(device: torch.device) -> bool:
    """Whether the device copies to and from pinned memory beside the host."""
    return device.type in _WITH_STREAMS


def recorded_event(device: torch.device, *, is_timed: bool = False) -> torch.Event:
    """An event of what the device's current stream has to do until now."""
    event = torch.Event(device, enable_timing=True) if is_timed else _event(device)
    _record(event, device)
    return event


class PinnedBuffer:
    """Host memory (numel,) that `device` copies to and from beside the host.

    Only `wait` hands the memory out, and all that write to it begin with it: none overwrites what a copy still reads.
    One thread at a time.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._memory = _pinned(numel, dtype)
        self._device = device
        self._event = _event(device)
        self._is_busy = False

    def wait(self) -> torch.Tensor:
        """Wait until the last copy is over; return the memory, which is the caller's until the next copy starts."""
        if self._is_busy:
            self._event.synchronize()
            self._is_busy = False
        return self._memory

    def start_fetching(self, tensors: Sequence[torch.Tensor]) -> None:
        """Start copying tensors of the device, one behind the other, to the beginning of the memory.

        They may be changed or let go by what the device does next.
        """
        memory = self.wait()
        _copy_to_host(memory[: _numel(tensors)], tensors)
        self._started()

    def finish_fetching(self, into: Sequence[torch.Tensor]) -> None:
        """Wait for what `start_fetching` began with, and write it to host tensors, as many elements together."""
        foreach_copy(list(into), _in_turn(self.wait()[: _numel(into)], into))

    def start_sending(self, values: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
        """Take host tensors into the memory and start copying them to those of the device, as many elements together.

        The host tensors may be changed as soon as this returns; what the device does next finds the values in place.
        """
        memory = self.wait()[: _numel(into)]
        foreach_copy(_in_turn(memory, values), list(values))
        _copy_to_device(memory, into)
        self._started()

    def _started(self) -> None:
        _record(self._event, self._device)
        self._is_busy = True


def _numel(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _in_turn(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of `flat`, one behind the other, with the shapes of `like`."""
    parts = torch.split(flat, [tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _pinned(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)


def _event(device: torch.device) -> torch.Event:
    return torch.Event(device)


def _record(event: torch.Event, device: torch.device) -> None:
    event.record(torch.accelerator.current_stream(device))


def _copy_to_host(memory: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Join tensors on their device, then copy them with one transfer."""
    rows = [tensor.reshape(-1) for tensor in tensors]
    memory.copy_(rows[0] if len(rows) == 1 else torch.cat(rows), non_blocking=True)


def _copy_to_device(memory: torch.Tensor, into: Sequence[torch.Tensor]) -> None:
    """Copy with one transfer, then part what has come on the device."""
    arrived = memory.to(into[0].device, non_blocking=True)
    foreach_copy(list(into), _in_turn(arrived, into))
