"""How long the last steps of this rank took, and how long it waited in them. It never communicates."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Any

from ddp.data_parallel.planning.clock import Clock
from ddp.data_parallel.planning.step_timer import Moment

__all__ = ["RecentSteps"]

_MOST = 200
_PAUSE = 3.0  # medians: what takes longer is no step, but an evaluation or a checkpoint besides


class RecentSteps:
    """The last steps, each from the averages of one to those of the next, optimizer first.

    By the moments of `clock`, which are read when somebody asks for times.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # Where each began and ended, and what of it was waiting.
        self._taken: deque[tuple[Any, Any, Any, Any]] = deque(maxlen=_MOST)
        self._before: Any = None
        self._at: dict[Moment, Any] = {}

    def mark(self, moment: Moment) -> None:
        """This moment of a step is now. On a device, which waits by itself from "sent" to "arrived"."""
        if self._clock.is_device and moment in ("sent", "arrived"):
            self._at[moment] = self._clock.now()

    def ended(self, waited_s: float) -> None:
        """A step ends now, and the host has waited so long in it for the others' gradients."""
        now = self._clock.now()
        waited = (self._at["sent"], self._at["arrived"]) if self._clock.is_device else (0.0, waited_s)
        if self._before is not None:
            self._taken.append((self._before, now, *waited))
        self._before = now

    def times_s(self) -> tuple[list[float], list[float]]:
        """Each step that is over, and what of it this rank did not wait. Pauses between steps are left out."""
        seconds = self._clock.seconds
        over = [step for step in self._taken if self._clock.is_over(step[1])]
        taken = [(seconds(before, end), seconds(sent, arrived)) for before, end, sent, arrived in over]
        longest_s = _PAUSE * statistics.median(step_s for step_s, _ in taken) if taken else 0.0
        steps = [(step_s, waited_s) for step_s, waited_s in taken if step_s <= longest_s]
        return [step_s for step_s, _ in steps], [step_s - waited_s for step_s, waited_s in steps]
