"""How long the last steps of this rank took, and how long it waited in them. It never communicates."""

from __future__ import annotations

import statistics
from collections import deque
from time import perf_counter

__all__ = ["RecentSteps"]

_MOST = 200
_PAUSE = 3.0  # medians: what takes longer is no step, but an evaluation or a checkpoint besides


class RecentSteps:
    """Times of the last steps in seconds, each from the averages of one to those of the next, optimizer first."""

    def __init__(self) -> None:
        self._taken: deque[tuple[float, float]] = deque(maxlen=_MOST)  # each step, and what of it was waiting
        self._before: float | None = None

    def ended(self, waited_s: float) -> None:
        """A step ends now, and this rank has waited so long in it for the others' gradients."""
        now = perf_counter()
        if self._before is not None:
            self._taken.append((now - self._before, waited_s))
        self._before = now

    def times_s(self) -> tuple[list[float], list[float]]:
        """Each step, and what of it this rank did not wait. Pauses between steps are left out."""
        longest_s = _PAUSE * statistics.median(step_s for step_s, _ in self._taken) if self._taken else 0.0
        steps = [(step_s, waited_s) for step_s, waited_s in self._taken if step_s <= longest_s]
        return [step_s for step_s, _ in steps], [step_s - waited_s for step_s, waited_s in steps]
