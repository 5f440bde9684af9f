"""One worker after another in the same place, while all others of the attempt go on. Owned by attempt.py.

What a dead worker left on this host (children, daemons, what holds its ports or its GPU's memory) is ended first, and
nothing of anybody else. Never waits, and starts nothing itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from launcher.agent.run_tag import RunTag
from launcher.agent.worker import Worker
from launcher.machine.processes import Sweep
from launcher.protocol import RestartWorker

__all__ = ["Cleared", "WorkerRestarts"]


@dataclass(frozen=True)
class Cleared:
    """An order to start a worker again whose place is free now, but for what cannot be ended there."""

    order: RestartWorker
    left: Sequence[str]


class WorkerRestarts:
    """The places of one attempt that are to be cleared; `step` after each `pause_s`."""

    def __init__(self, run_tag: RunTag, *, grace_s: float) -> None:
        self._run_tag = run_tag
        self._grace_s = grace_s
        self._sweeps: dict[int, Sweep] = {}  # by rank, those under way
        self._due: dict[int, float] = {}  # when they are to go on
        self._left: dict[int, list[str]] = {}  # by rank, what could not be ended
        self._orders: dict[int, RestartWorker] = {}
        self.swept = 0  # processes that outlived their worker and were ended

    @property
    def pause_s(self) -> float:
        if self._orders.keys() - self._sweeps.keys():
            return 0.0
        return max(0.0, min(self._due.values(), default=float("inf")) - time.monotonic())

    def clear(self, worker: Worker) -> None:
        """Begin to end what a dead worker has left."""
        variable = f"TORCHELASTIC_ERROR_FILE={worker.files.error}"
        listing = partial(self._run_tag.left_by, worker.number, variable)
        self._sweeps[worker.rank] = Sweep(listing, grace_s=self._grace_s, adopted=False)
        self._due[worker.rank] = time.monotonic()

    def take(self, order: RestartWorker) -> None:
        """Have a worker's place cleared for the next one."""
        self._orders[order.rank] = order

    def step(self) -> list[Cleared]:
        """Go on with all that is due; return the orders that can be carried out."""
        now = time.monotonic()
        for rank, sweep in list(self._sweeps.items()):
            if now < self._due[rank]:
                continue
            if not sweep.step():
                self._due[rank] = now + sweep.pause_s
                continue
            self.swept += sweep.ended
            self._left[rank] = [process.describe() for process in sweep.left]
            del self._sweeps[rank], self._due[rank]
        ready = [rank for rank in self._orders if rank not in self._sweeps]
        return [Cleared(self._orders.pop(rank), self._left.pop(rank, [])) for rank in ready]

    def stop(self) -> None:
        """Give all of it up: everything is to end, and is swept then."""
        self.swept += sum(sweep.ended for sweep in self._sweeps.values())
        self._sweeps, self._due, self._orders = {}, {}, {}
