"""The clocks by which steps are timed: the host's, and a device's, whose events nobody waits for in a step."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

from ddp.comm.pinned_buffer import recorded_event

__all__ = ["Clock", "DeviceClock", "HostClock", "clock_of"]


class HostClock:
    """A moment is a number of seconds."""

    is_device = False
    late_steps = 0

    def now(self) -> float:
        return perf_counter()

    def is_over(self, moment: float) -> bool:
        return True

    def seconds(self, start: float, end: float) -> float:
        return end - start


class DeviceClock:
    """A moment is an event on the current stream of the calling thread: when the device has done what was asked before.

    Moments should be read `late_steps` steps later: then the device has passed them, or has enough to do meanwhile.
    """

    is_device = True
    late_steps = 2

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Any:
        return recorded_event(self._device, is_timed=True)

    def is_over(self, moment: Any) -> bool:
        """Whether the device has come by it; does not wait. It never comes by what a graph has captured."""
        try:
            return bool(moment.query())
        except RuntimeError:
            return False

    def seconds(self, start: Any, end: Any) -> float:
        """Blocks until the device has come by both."""
        start.synchronize()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


Clock = HostClock | DeviceClock


def clock_of(device: torch.device) -> Clock:
    return HostClock() if device.type == "cpu" else DeviceClock(device)
