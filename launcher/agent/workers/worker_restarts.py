"""Starts a failed worker again alone, while all others of the attempt go on. Owned by attempt.py.

What a dead worker left on this host (children, daemons, what holds its ports or its GPU's memory) is ended first, and
nothing of anybody else. Never waits, and starts nothing itself.
"""

from __future__ import annotations

import time
from functools import partial

from launcher.agent.cleanup.run_tag import RunTag
from launcher.agent.workers.worker import Worker
from launcher.machine.processes import Sweep
from launcher.protocol.commands import RestartWorker

__all__ = ["WorkerRestarts"]


class _Place:
    """Where a worker died: `sweep` ends what it left, its next step at `due`, and is None when that is done.

    `left` could not be ended; `order` starts the next worker there.
    """

    def __init__(self, sweep: Sweep | None = None, due: float = 0.0) -> None:
        self.sweep = sweep
        self.due = due
        self.left = ""
        self.order: RestartWorker | None = None


class WorkerRestarts:
    """The places of one attempt that are to be cleared; `step` after each `pause_s`."""

    def __init__(self, run_tag: RunTag, *, grace_s: float) -> None:
        self._run_tag = run_tag
        self._grace_s = grace_s
        self._places: dict[int, _Place] = {}  # by rank
        self.swept = 0  # processes that outlived their worker and were ended

    @property
    def pause_s(self) -> float:
        due = [place.due if place.sweep else 0.0 for place in self._places.values() if place.sweep or place.order]
        return max(0.0, min(due, default=float("inf")) - time.monotonic())

    def clear(self, worker: Worker) -> None:
        """Begin to end what a dead worker has left."""
        variable = f"TORCHELASTIC_ERROR_FILE={worker.files.error}"
        listing = partial(self._run_tag.left_by, worker.number, variable)
        sweep = Sweep(listing, grace_s=self._grace_s, adopted=False)
        self._places[worker.rank] = _Place(sweep, time.monotonic())

    def add(self, order: RestartWorker) -> None:
        """Have a dead worker's place cleared for the next one."""
        self._places.setdefault(order.rank, _Place()).order = order

    def step(self) -> list[tuple[RestartWorker, str]]:
        """Go on with all that is due; return the orders that can be carried out, and what could not be ended there."""
        now = time.monotonic()
        ready = []
        for rank, place in list(self._places.items()):
            if (sweep := place.sweep) is not None and now >= place.due:
                if sweep.step():
                    self.swept += sweep.ended
                    place.left = ", ".join(process.describe() for process in sweep.left)
                    place.sweep = None
                place.due = now + sweep.pause_s
            if place.sweep is None and place.order is not None:
                ready.append((place.order, place.left))
                del self._places[rank]
        return ready

    def stop(self) -> None:
        """Give all of it up: everything is to end, and is swept then."""
        self.swept += sum(place.sweep.ended for place in self._places.values() if place.sweep)
        self._places.clear()
