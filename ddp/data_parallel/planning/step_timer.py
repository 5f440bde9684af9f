"""Takes the times of this rank's first steps. It never communicates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Literal, get_args

__all__ = ["Moment", "StepTimer", "StepTimes"]

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


class StepTimer:
    """Notes the moments of steps, each from the end of the one before to its own."""

    def __init__(self) -> None:
        self._before: float | None = None
        self._at: dict[Moment, float] = {}

    def mark(self, moment: Moment) -> None:
        """This moment is now."""
        self._at[moment] = perf_counter()

    def end_step(self, arrived: Mapping[int, float]) -> StepTimes | None:
        """Return the times of the step that ends now, None if not all of it was seen; the next one begins.

        `arrived` has the times of `perf_counter` at which gradients were ready.
        """
        at, before, now = self._at, self._before, perf_counter()
        self._at, self._before = {}, now
        if before is None or len(at) < len(_MOMENTS):
            return None
        forward, backward, ended, sent, all_arrived = (at[moment] for moment in _MOMENTS)
        if forward > backward:  # a forward pass inside of the backward pass
            return None
        return StepTimes(
            forward_s=backward - forward,
            backward_s=ended - backward,
            sending_s=sent - ended,
            waiting_s=all_arrived - sent,
            other_s=forward - before + now - all_arrived,
            ready_s={index: when - backward for index, when in arrived.items()},
        )
