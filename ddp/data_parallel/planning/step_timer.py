"""Times the steps of one model on this rank, by the host's clock or a device's events. It never communicates."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal, get_args

import torch

from ddp.comm.pinned_buffer import recorded_event

# What a step comes by, in this order: its forward pass begins (the last one, if it accumulates over several), backward
# begins, backward has ended, all buckets have been sent, all have arrived.
Moment = Literal["forward", "backward", "backward ended", "sent", "arrived"]
_MOMENTS: tuple[Moment, ...] = get_args(Moment)
_RECENT = 200
_PAUSE = 3.0  # medians: what takes longer is no step, but an evaluation or a checkpoint besides


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
        """Return whether the device has come by it, without waiting. It never comes by what a graph has captured."""
        try:
            return bool(moment.query())
        except RuntimeError:
            return False

    def seconds(self, start: Any, end: Any) -> float:
        """Block until the device has come by both; return the time between them."""
        start.synchronize()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


Clock = HostClock | DeviceClock


def clock_of(device: torch.device) -> Clock:
    return HostClock() if device.type == "cpu" else DeviceClock(device)


@dataclass(frozen=True)
class StepTimes:
    """One step of this rank, in seconds. `other_s` is what came before its last forward pass and after its averages.

    `forward_s` has what lies between forward and backward, too. `ready_s`, by parameter, counts from the start of
    backward; it is empty where buckets did not wait for its end.
    """

    forward_s: float
    backward_s: float
    wire_s: float
    other_s: float
    ready_s: Mapping[int, float]

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s + self.wire_s + self.other_s


@dataclass(frozen=True)
class TimedStep:
    """The moments of one step: the end of the one before, those of `Moment`, and its end; and of its gradients."""

    clock: Clock
    moments: tuple[Any, ...]
    arrived: Mapping[int, Any]

    def times(self) -> StepTimes:
        """Read the moments. On a device that blocks until it has come by all of them."""
        seconds = self.clock.seconds
        before, forward, backward, ended, _, all_arrived, end = self.moments
        return StepTimes(
            forward_s=seconds(forward, backward),
            backward_s=seconds(backward, ended),
            wire_s=seconds(ended, all_arrived),
            other_s=seconds(before, forward) + seconds(all_arrived, end),
            ready_s={index: seconds(backward, when) for index, when in self.arrived.items()},
        )


class StepTimer:
    """Notes the moments of steps by `clock`, each step from the averages of the one before to its own."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._before: Any = None
        self._at: dict[Moment, Any] = {}
        # Of the last steps, whole or not: their start, the end of backward, the arrival of the averages, their end.
        self._recent: deque[tuple[Any, Any, Any, Any]] = deque(maxlen=_RECENT)

    def mark(self, moment: Moment) -> None:
        """Note that this moment is now."""
        self._at.pop(moment, None)  # so that they are in the order in which they came last
        self._at[moment] = self.clock.now()

    def restart(self) -> None:
        """Let the next step begin now, after one that does not count."""
        self._at, self._before = {}, self.clock.now()

    def end_step(self, arrived: Mapping[int, Any]) -> TimedStep | None:
        """End the step, and begin the next; return it, or None if a part of it was not seen.

        `arrived` has the moments of the clock at which gradients were ready.
        """
        at, before = self._at, self._before
        self.restart()
        now = self._before
        if before is None:
            return None
        self._recent.append((before, at["backward ended"], at["arrived"], now))
        if tuple(at) != _MOMENTS:  # there was a forward pass inside of the backward pass, or none
            return None
        return TimedStep(self.clock, (before, *at.values(), now), arrived)

    def forget(self) -> None:
        """Forget the recent steps."""
        self._recent.clear()

    def recent_s(self) -> tuple[list[float], list[float]]:
        """Return the seconds of the recent steps that are over, and of what this rank computed in each.

        Pauses between steps are left out.
        """
        seconds = self.clock.seconds
        over = [step for step in self._recent if self.clock.is_over(step[-1])]
        taken = [(seconds(before, end), seconds(ended, arrived)) for before, ended, arrived, end in over]
        longest_s = _PAUSE * statistics.median(step_s for step_s, _ in taken) if taken else 0.0
        steps = [(step_s, wire_s) for step_s, wire_s in taken if step_s <= longest_s]
        return [step_s for step_s, _ in steps], [step_s - wire_s for step_s, wire_s in steps]
