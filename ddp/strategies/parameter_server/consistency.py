"""Decides which workers wait for others at one server: pure functions of step numbers, without tensors or sockets.

The modes:

- "sync": the gradients of all replicas for a step make one step, and no worker continues before it is made. With b
  backup workers, the first n-b gradients do, and later ones are dropped (Chen et al. 2016, "Revisiting Distributed
  Synchronous SGD", arXiv:1604.00981).
- "async": every gradient is a step, as it arrives (Recht et al. 2011; Dean et al. 2012, "Large Scale Distributed Deep
  Networks").
- "bounded": the same, but a worker more than `staleness` steps ahead of the slowest waits (stale synchronous parallel:
  Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server").
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["sync", "async", "bounded"]


@dataclass
class WorkerProgress:
    """A server's record of one replica. `clock` is the number of steps that it has fully pushed, or joined at."""

    clock: int = 0
    has_joined: bool = False
    has_finished: bool = False
    is_lost: bool = False  # silent for too long; it may come back
    past: int = -1  # the last step that it has certainly completed
    pushed: dict[int, int] = field(default_factory=dict)  # the last step of each chunk that came from it

    @property
    def is_active(self) -> bool:
        """Whether it trains, or is about to start."""
        return not self.has_finished and not self.is_lost


class Consistency:
    """The workers of a run at one server, and when they may continue."""

    def __init__(self, mode: Mode, replicas: int, *, staleness: int = 0, backup_workers: int = 0) -> None:
        self.mode = mode
        self.staleness = staleness
        self.backup_workers = backup_workers
        self.workers = [WorkerProgress() for _ in range(replicas)]

    @property
    def waits_for_all(self) -> bool:
        """Whether each step needs every replica that has not finished."""
        return self.mode == "sync" and not self.backup_workers

    @property
    def is_over(self) -> bool:
        """Whether every replica has reported that it finished."""
        return all(worker.has_finished for worker in self.workers)

    @property
    def step(self) -> int:
        """The progress of the training: the largest number of steps that a replica has made."""
        return max(worker.clock for worker in self.workers)

    def begin_at(self, step: int) -> None:
        """Start all workers after `step` steps, those of a snapshot."""
        for worker in self.workers:
            worker.clock = step
            worker.past = step - 1

    def join(self, replica: int, *, done: int, sync_step: int) -> int:
        """Add a replica, first or again; return its next step. `done` is its step if the server was restarted, else 0.

        A restarted replica starts where training is: in sync mode at `sync_step`, which is not complete yet, else with
        the slowest of the others, so that no worker has to wait for it. The steps that a replica made before count, up
        to the bound: its first step is not checked.
        """
        worker = self.workers[replica]
        came_back = done and not worker.has_joined  # the server was restarted, not the worker
        worker.has_joined, worker.has_finished, worker.is_lost = True, False, False
        if came_back and self.mode != "sync":
            worker.clock = done  # the snapshot's step is the foremost worker's
        elif done:
            worker.clock = max(worker.clock, done)
        elif self.mode == "sync":
            worker.clock = sync_step
        else:
            slowest = self._slowest(besides=replica)
            worker.clock = max(worker.clock, slowest)
            if self.mode == "bounded" and self._others(replica):
                worker.clock = min(worker.clock, slowest + self.staleness)
                worker.pushed = {chunk: min(step, worker.clock - 1) for chunk, step in worker.pushed.items()}
        worker.past = max(done, worker.clock) - 1
        return worker.clock

    def hear(self, replica: int) -> None:
        """Mark a replica as not lost. The bound does not make the others wait until it has caught up."""
        worker = self.workers[replica]
        if worker.is_lost:
            worker.is_lost = False
            if self.mode == "bounded":
                worker.clock = max(worker.clock, self._slowest(besides=replica))

    def push(self, replica: int, step: int, chunk: int) -> bool:
        """Record a gradient; return whether it is new. A message may arrive twice if a connection broke."""
        worker = self.workers[replica]
        worker.past = max(worker.past, step - 1)
        if step <= worker.pushed.get(chunk, -1):
            return False
        worker.pushed[chunk] = step
        return True

    def complete(self, replica: int, step: int) -> None:
        """Record that a replica has pushed all of a step."""
        worker = self.workers[replica]
        worker.clock = max(worker.clock, step + 1)

    def due(self, pending: Mapping[int, Collection[int]]) -> int | None:
        """Return the step of a chunk that has enough gradients to be made now, or None. Only in sync mode.

        `pending` has, by step, the replicas whose gradients arrived.
        """
        if not pending:
            return None
        step = min(pending)
        came = pending[step]
        if not self.missing(step, came):
            return step
        still = sum(not worker.has_finished for worker in self.workers)
        if self.backup_workers and len(came) >= max(1, still - self.backup_workers):
            return step
        return None

    def missing(self, step: int, came: Collection[int]) -> list[int]:
        """Return the replicas whose gradient for a step is missing."""
        return [
            replica
            for replica, worker in enumerate(self.workers)
            if replica not in came
            and worker.past < step
            and not worker.has_finished
            and not (worker.is_lost and self.backup_workers)
        ]

    def may_go_on(self, replica: int) -> bool:
        """Return whether a replica that has pushed a step may start the next one."""
        if self.mode != "bounded":
            return True
        return self.workers[replica].clock - self._slowest() <= self.staleness

    def _slowest(self, besides: int | None = None) -> int:
        """Return the smallest clock of the replicas that train; for one that joins, of the others already there."""
        workers = self._others(besides) if besides is not None else [w for w in self.workers if w.is_active]
        return min((worker.clock for worker in workers), default=0)

    def _others(self, replica: int) -> list[WorkerProgress]:
        """Return the other replicas that train and have joined already."""
        me = self.workers[replica]
        return [worker for worker in self.workers if worker.is_active and worker.has_joined and worker is not me]
