"""Time the steps of one model on this rank, by the host's clock or a device's events. Never communicates."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal, get_args

import torch

from ddp.comm.pinned_buffer import recorded_event

# The moments of a step, in this order: its forward pass begins (the last one, if it accumulates over several), backward
# begins, backward has ended, all buckets have been sent, all have arrived.
Moment = Literal["forward", "backward", "backward ended", "sent", "arrived"]
_MOMENTS: tuple[Moment, ...] = get_args(Moment)
_RECENT = 200
_PAUSE = 3.0  # medians: a longer step includes an evaluation or a checkpoint


class HostClock:
    """Clock of the host; a moment is a number of seconds."""

    is_device = False
    late_steps = 0

    def now(self) -> float:
        return perf_counter()

    def is_over(self, moment: float) -> bool:
        return True

    def seconds(self, start: float, end: float) -> float:
        return end - start


class DeviceClock:
    """Clock of a device; a moment is an event on the caller's current stream, after the work queued before it.

    Read moments `late_steps` steps later: then the device has passed them, or has enough queued work meanwhile.
    """

    is_device = True
    late_steps = 2

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Any:
        return recorded_event(self._device, is_timed=True)

    def is_over(self, moment: Any) -> bool:
        """Return whether the device has passed the event, without waiting. It never passes one captured by a graph."""
        try:
            return bool(moment.query())
        except RuntimeError:
            return False

    def seconds(self, start: Any, end: Any) -> float:
        """Block until the device has passed both events; return the time between them."""
        start.synchronize()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


Clock = HostClock | DeviceClock


def clock_of(device: torch.device) -> Clock:
    return HostClock() if device.type == "cpu" else DeviceClock(device)


@dataclass(frozen=True)
class StepTimes:
    """One step of this rank, in seconds. `other_s` is the time before its last forward pass and after its averages.

    `forward_s` includes the time between forward and backward. `ready_s`, by parameter, counts from the start of
    backward; it is empty if buckets did not wait for its end.
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
    """The moments of one step (the previous step's end, those of `Moment`, its end), and those of its gradients."""

    clock: Clock
    moments: tuple[Any, ...]
    arrived: Mapping[int, Any]

    def times(self) -> StepTimes:
        """Read the moments. Blocks until a device has passed all of them."""
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
    """Records the moments of steps by `clock`; a step lasts from the previous step's averages to its own."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._before: Any = None
        self._at: dict[Moment, Any] = {}
        # The last steps, complete or not: their start, the end of backward, the arrival of the averages, their end.
        self._recent: deque[tuple[Any, Any, Any, Any]] = deque(maxlen=_RECENT)

    def mark(self, moment: Moment) -> None:
        """Record that the step has reached `moment`."""
        self._at.pop(moment, None)  # keeps the order in which moments came last
        self._at[moment] = self.clock.now()

    def restart(self) -> None:
        """Begin the next step now, after one that does not count."""
        self._at, self._before = {}, self.clock.now()

    def end_step(self, arrived: Mapping[int, Any]) -> TimedStep | None:
        """End the step and begin the next; return it, or None if a moment of it is missing.

        `arrived` has the moments at which gradients were ready.
        """
        at, before = self._at, self._before
        self.restart()
        now = self._before
        if before is None:
            return None
        self._recent.append((before, at["backward ended"], at["arrived"], now))
        if tuple(at) != _MOMENTS:  # there was a forward pass inside of backward, or none
            return None
        return TimedStep(self.clock, (before, *at.values(), now), arrived)

    def forget(self) -> None:
        """Forget the recent steps."""
        self._recent.clear()

    def recent_s(self) -> tuple[list[float], list[float]]:
        """Return the durations in seconds of the recent steps that are over, and this rank's computing time in each.

        Pauses between steps are left out.
        """
        seconds = self.clock.seconds
        over = [step for step in self._recent if self.clock.is_over(step[-1])]
        taken = [(seconds(before, end), seconds(ended, arrived)) for before, ended, arrived, end in over]
        longest_s = _PAUSE * statistics.median(step_s for step_s, _ in taken) if taken else 0.0
        steps = [(step_s, wire_s) for step_s, wire_s in taken if step_s <= longest_s]
        return [step_s for step_s, _ in steps], [step_s - wire_s for step_s, wire_s in steps]
