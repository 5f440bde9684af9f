"""Restarts a failed worker alone, while all others of the attempt continue. Owned by attempt.py.

First it ends what the dead worker left on this host (children, daemons, holders of its ports or its GPU's memory), and
nothing of other workers. Never blocks, and starts nothing itself.
"""

from __future__ import annotations

import time
from functools import partial

from launcher.agent.cleanup.run_tag import RunTag
from launcher.agent.workers.worker import Worker
from launcher.machine.processes import Sweep
from launcher.protocol.commands import RestartWorker


class _Place:
    """The place of a dead worker: `sweep` ends its leftovers, next at `due`, and is None once that is done.

    `left` describes what could not be ended; `order` starts the next worker there.
    """

    def __init__(self, sweep: Sweep | None = None, due: float = 0.0) -> None:
        self.sweep = sweep
        self.due = due
        self.left = ""
        self.order: RestartWorker | None = None


class WorkerRestarts:
    """The places of one attempt to be cleared; call `step` after each `pause_s`."""

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
        """Start to end the leftovers of a dead worker."""
        variable = f"TORCHELASTIC_ERROR_FILE={worker.files.error}"
        listing = partial(self._run_tag.left_by, worker.number, variable)
        sweep = Sweep(listing, grace_s=self._grace_s, adopted=False)
        self._places[worker.rank] = _Place(sweep, time.monotonic())

    def add(self, order: RestartWorker) -> None:
        """Add an order to restart a worker once the dead one's place is cleared."""
        self._places.setdefault(order.rank, _Place()).order = order

    def step(self) -> list[tuple[RestartWorker, str]]:
        """Advance all that is due; return the orders that can be carried out, and processes that could not be ended."""
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
        """Abandon all of it: everything ends now, and is swept then."""
        self.swept += sum(place.sweep.ended for place in self._places.values() if place.sweep)
        self._places.clear()
