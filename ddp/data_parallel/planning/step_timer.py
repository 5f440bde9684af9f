"""Takes the times of this rank's first steps. It never communicates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ddp.data_parallel.planning.clock import Clock

__all__ = ["Moment", "StepTimer", "StepTimes", "TimedStep"]

# What a step comes by, in this order: its forward pass begins (the last one, if it accumulates over several), backward
# begins, backward has ended, all buckets have been sent, all have arrived.
Moment = Literal["forward", "backward", "backward ended", "sent", "arrived"]
_MOMENTS: tuple[Moment, ...] = get_args(Moment)


@dataclass(frozen=True)
class StepTimes:
    """One step of this rank, in seconds. `other_s` is what came before its last forward pass and after its averages.

    `forward_s` has what lies between forward and backward, too. `ready_s`, by parameter, counts from the start of
    backward; it is empty where buckets did not wait for its end.
    """

    forward_s: float
    backward_s: float
    sending_s: float
    waiting_s: float
    other_s: float
    ready_s: Mapping[int, float]

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s + self.sending_s + self.waiting_s + self.other_s


@dataclass(frozen=True)
class TimedStep:
    """The moments of one step: the end of the one before, those of `Moment`, and its end; and of its gradients."""

    clock: Clock
    moments: tuple[Any, ...]
    arrived: Mapping[int, Any]

    def times(self) -> StepTimes:
        """Read the moments. On a device that blocks until it has come by all of them."""
        seconds = self.clock.seconds
        before, forward, backward, ended, sent, all_arrived, end = self.moments
        return StepTimes(
            forward_s=seconds(forward, backward),
            backward_s=seconds(backward, ended),
            sending_s=seconds(ended, sent),
            waiting_s=seconds(sent, all_arrived),
            other_s=seconds(before, forward) + seconds(all_arrived, end),
            ready_s={index: seconds(backward, when) for index, when in self.arrived.items()},
        )


class StepTimer:
    """Notes the moments of steps by `clock`, each from the end of the one before to its own."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._before: Any = None
        self._at: dict[Moment, Any] = {}

    def mark(self, moment: Moment) -> None:
        """This moment is now."""
        self._at.pop(moment, None)  # so that they are in the order in which they came last
        self._at[moment] = self._clock.now()

    def end_step(self, arrived: Mapping[int, Any]) -> TimedStep | None:
        """Return the step that ends now, None if not all of it was seen; the next one begins.

        `arrived` has the moments of the clock at which gradients were ready.
        """
        at, before, now = self._at, self._before, self._clock.now()
        self._at, self._before = {}, now
        if before is None or tuple(at) != _MOMENTS:  # or there was a forward pass inside of the backward pass
            return None
        return TimedStep(self._clock, (before, *at.values(), now), arrived)
