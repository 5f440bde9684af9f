"""Stands in for a device whose copies run as late as they may: when someone waits for them, or the device computes.

Its tensors lie in host memory. A copy to the host takes what the tensors hold when it is started, since a device does
one thing after the other, and writes it late; a copy to the device reads host memory late. So who reads too early sees
old numbers, and who overwrites too early sends the wrong ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from ddp.comm import pinned_buffer


class LateDevice:
    """See the module. `copies` counts those that were started, `waits` how often the host waited for one."""

    def __init__(self) -> None:
        self.copies = self.waits = 0
        self._queue: list[Callable[[], None]] = []
        self._done = 0

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Let all pinned memory and events be those of this device; forward passes are computed on it."""
        to_host, to_device = pinned_buffer._copy_to_host, pinned_buffer._copy_to_device

        def late_to_host(memory: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
            now = [tensor.clone() for tensor in tensors]
            self._start(lambda: to_host(memory, now))

        def late_to_device(memory: torch.Tensor, into: Sequence[torch.Tensor]) -> None:
            self._start(torch.no_grad()(lambda: to_device(memory, into)))

        patch.setattr(pinned_buffer, "_pinned", lambda numel, dtype: torch.full((numel,), 99, dtype=dtype))
        patch.setattr(pinned_buffer, "_event", lambda _: _Event(self))
        patch.setattr(pinned_buffer, "_record", lambda event, _: event.record())
        patch.setattr(pinned_buffer, "_copy_to_host", late_to_host)
        patch.setattr(pinned_buffer, "_copy_to_device", late_to_device)
        patch.setattr(pinned_buffer, "_WITH_STREAMS", {"cpu"})
        nn.modules.module.register_module_forward_pre_hook(lambda *_: self.catch_up())

    def catch_up(self) -> None:
        """Run all copies, as before anything that the device computes."""
        self.run(len(self._queue))

    def run(self, until: int) -> None:
        while self._done < until:
            self._queue[self._done]()
            self._done += 1

    def _start(self, copy: Callable[[], None]) -> None:
        self.copies += 1
        self._queue.append(copy)

    @property
    def started(self) -> int:
        return len(self._queue)


class _Event:
    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._at = 0

    def record(self) -> None:
        self._at = self._device.started

    def synchronize(self) -> None:
        self._device.waits += 1
        self._device.run(self._at)
