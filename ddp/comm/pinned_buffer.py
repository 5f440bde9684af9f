"""Asynchronous copies between a device and the host: through pinned memory, with events.

For parameter servers and central storage, which copy gradients from a device and parameters back to it in every step.
Not used on the CPU. Copies run on the device's current stream, in the order of the computation there: nothing else has
to wait for them, and memory that they read may be freed at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ddp.torch_internals import foreach_copy

_WITH_STREAMS = frozenset({"cuda", "xpu"})


def device_with_stream(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """Return the device of all `tensors`, if it is a single one with asynchronous copies; else None."""
    devices = {tensor.device for tensor in tensors}
    return devices.pop() if len(devices) == 1 and has_stream(next(iter(devices))) else None


def has_stream(device: torch.device) -> bool:
    """Return whether the device copies to and from pinned memory asynchronously."""
    return device.type in _WITH_STREAMS


def recorded_event(device: torch.device, *, is_timed: bool = False) -> torch.Event:
    """Return an event after all work that is queued on the device's current stream."""
    event = torch.Event(device, enable_timing=True) if is_timed else _event(device)
    _record(event, device)
    return event


class PinnedBuffer:
    """Host memory (numel,) that `device` copies to and from asynchronously.

    Only `wait` returns the memory, and all methods that write to it call it first, so that none overwrites memory that
    a copy still reads. Not thread-safe.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._memory = _pinned(numel, dtype)
        self._device = device
        self._event = _event(device)
        self._is_busy = False

    def wait(self) -> torch.Tensor:
        """Wait for the last copy; return the memory, which is the caller's until the next copy starts."""
        if self._is_busy:
            self._event.synchronize()
            self._is_busy = False
        return self._memory

    def start_fetching(self, tensors: Sequence[torch.Tensor]) -> None:
        """Start copying tensors of the device, concatenated, to the start of the memory.

        Later operations of the device may change or free them.
        """
        memory = self.wait()
        _copy_to_host(memory[: _numel(tensors)], tensors)
        self._started()

    def finish_fetching(self, into: Sequence[torch.Tensor]) -> None:
        """Wait for `start_fetching`, and write its data to host tensors with the same number of elements in all."""
        foreach_copy(list(into), _in_turn(self.wait()[: _numel(into)], into))

    def start_sending(self, values: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
        """Start copying host tensors to tensors of the device with the same number of elements in all.

        The host tensors may be changed as soon as this returns; later operations of the device see the new values.
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
    """Return consecutive views of `flat` with the shapes of `like`."""
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
    """Copy with one transfer, then split on the device."""
    arrived = memory.to(into[0].device, non_blocking=True)
    foreach_copy(list(into), _in_turn(arrived, into))
