"""Who waits for whom at one server: pure decisions on numbers of steps, without tensors or sockets.

The modes:

- "sync": the gradients of all replicas for a step make one step, and nobody goes on before it is made. With backup
  workers b, those of the first n-b do, and what comes later is dropped (Chen et al. 2016, "Revisiting Distributed
  Synchronous SGD", arXiv:1604.00981).
- "async": every gradient is a step, as it comes (Recht et al. 2011; Dean et al. 2012, "Large Scale Distributed Deep
  Networks").
- "bounded": the same, but who is more than `staleness` steps ahead of the slowest waits (stale synchronous parallel: Ho
  et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server").
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Member", "Mode", "Pace"]

Mode = Literal["sync", "async", "bounded"]


@dataclass
class Member:
    """One replica as a server knows it. `clock` is the number of steps that it has pushed whole, or joined at."""

    clock: int = 0
    has_joined: bool = False
    has_finished: bool = False
    is_lost: bool = False  # silent for too long; it may speak again
    past: int = -1  # the last step that it is certainly through with
    pushed: dict[int, int] = field(default_factory=dict)  # the last step of each chunk that came from it

    @property
    def is_active(self) -> bool:
        """Whether it trains, or is about to."""
        return not self.has_finished and not self.is_lost


class Pace:
    """The members of a run at one server, and when they may go on."""

    def __init__(self, mode: Mode, replicas: int, *, staleness: int = 0, backup_workers: int = 0) -> None:
        self.mode = mode
        self.staleness = staleness
        self.backup_workers = backup_workers
        self.members = [Member() for _ in range(replicas)]

    @property
    def replicas(self) -> int:
        return len(self.members)

    @property
    def waits_for_all(self) -> bool:
        """Whether no step is made without every replica that has not finished."""
        return self.mode == "sync" and not self.backup_workers

    @property
    def is_over(self) -> bool:
        """Whether every replica has said that it is through."""
        return all(member.has_finished for member in self.members)

    @property
    def step(self) -> int:
        """How far the training is: the largest number of steps that a replica has made."""
        return max(member.clock for member in self.members)

    def begin_at(self, step: int) -> None:
        """Let all members begin after `step` steps, which a snapshot holds."""
        for member in self.members:
            member.clock = step
            member.past = step - 1

    def join(self, replica: int, *, done: int, sync_step: int) -> int:
        """Take a replica in, first or again, which has made `done` steps in its life; return its next step.

        A new life begins where training is: in sync mode at `sync_step`, which is not complete yet, else with the
        slowest of the others, so that nobody has to wait for it.
        """
        member = self.members[replica]
        member.has_joined, member.has_finished, member.is_lost = True, False, False
        if done:  # the same life, at a server that has another one
            member.clock = max(member.clock, done)
        elif self.mode == "sync":
            member.clock = sync_step
        else:
            member.clock = max(member.clock, self._slowest(besides=replica))
        member.past = max(done, member.clock) - 1
        return member.clock

    def hear(self, replica: int) -> None:
        """Take back that a replica is lost. It has no arrears: the others have gone on without it."""
        member = self.members[replica]
        if member.is_lost:
            member.is_lost = False
            if self.mode != "sync":
                member.clock = max(member.clock, self._slowest(besides=replica))

    def push(self, replica: int, step: int, chunk: int) -> bool:
        """Note that a gradient came. Whether it is new: a message may come twice when a connection broke."""
        member = self.members[replica]
        member.past = max(member.past, step - 1)
        if step <= member.pushed.get(chunk, -1):
            return False
        member.pushed[chunk] = step
        return True

    def complete(self, replica: int, step: int) -> None:
        """Note that a replica has pushed all of a step."""
        member = self.members[replica]
        member.clock = max(member.clock, step + 1)

    def due(self, pending: Mapping[int, Collection[int]]) -> int | None:
        """Return the step of a chunk to be made now, of which enough gradients are there. Only in sync mode.

        `pending` has, by step, the replicas whose gradients came.
        """
        if not pending:
            return None
        step = min(pending)
        came = pending[step]
        if not self.missing(step, came):
            return step
        still = sum(not member.has_finished for member in self.members)
        if self.backup_workers and len(came) >= max(1, still - self.backup_workers):
            return step
        return None

    def missing(self, step: int, came: Collection[int]) -> list[int]:
        """The replicas whose gradient for a step is still to come."""
        return [
            replica
            for replica, member in enumerate(self.members)
            if replica not in came
            and member.past < step
            and not member.has_finished
            and not (member.is_lost and self.backup_workers)
        ]

    def may_go_on(self, replica: int) -> bool:
        """Whether a replica that has pushed a step may begin the next one."""
        if self.mode != "bounded":
            return True
        return self.members[replica].clock - self._slowest() <= self.staleness

    def _slowest(self, besides: int | None = None) -> int:
        """The smallest clock of those that train; for one that joins, of the others that are there already."""
        members = [member for member in self.members if member.is_active]
        if besides is not None:
            members = [member for member in members if member.has_joined and member is not self.members[besides]]
        return min((member.clock for member in members), default=0)
