"""The compositions of an attempt, its generations: which ranks meet again after one of them was replaced. Pure.

A resilient process (Exited.restart_policy 3 or 4) that fails is replaced as restarts.py has it, while all others of the
attempt live on and meet its successor. Each such failure begins a generation. Its number goes to every worker at once,
before the back-off of the successor, which may fail again meanwhile: then the next number follows. Numbers only grow in
an attempt, and begin at 0 with it. Of failures one right after the other only the newest number is told, for each one
costs a message to every host.

A generation takes all ranks of the failed one's world, and one at least that has lived on, for the others have nothing
to go on with. Once a rank has ended for good, there can be no other generation. Generations of other hosts are in
compositions.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from launcher.job.attempt import AttemptState
from launcher.job.failure import Failure
from launcher.job.timers import NEVER, Timer, Timers
from launcher.placement.job_spec import JobSpec
from launcher.protocol.commands import NextGeneration
from launcher.protocol.message import MEETS_SUCCESSOR
from launcher.protocol.reports import Exited

__all__ = ["Generations", "with_early_end"]

PAUSE_S = 0.02  # between two numbers that are told


def with_early_end(exited: Exited) -> Exited:
    """Return the end of a worker, as a failure if it left a resilient function without an exit code that says so.

    The others of its world wait for it. A process that returns from the function first says that it is an ordinary one.
    """
    if exited.status != 0 or exited.provoked or exited.restart_policy not in MEETS_SUCCESSOR:
        return exited
    message = (
        "it left @ddp.resilient early: the process ended with code 0 before the function had returned, and the others "
        "wait for it; return from the function on all ranks"
    )
    return replace(exited, status=1, error={**(exited.error or {}), "type": "SystemExit", "message": message})


class Generations:
    """`number` is the newest generation of the attempt."""

    def __init__(self, spec: JobSpec, timers: Timers) -> None:
        self.number = 0
        self._told_at = -NEVER
        self._timers = timers
        self._roles = spec.roles
        self._missing: dict[int, Failure] = {}  # ranks that failed and do not run again yet

    def begin(self) -> None:
        """Begin anew, with an attempt."""
        self.number, self._told_at = 0, -NEVER
        self._missing = {}
        self._timers.cancel(Timer.GENERATION)

    def can_meet(self, attempt: AttemptState, rank: int, waiting: Collection[int]) -> bool:
        """Whether the others of a failed rank's world can meet its successor.

        That takes one that lives on, and none that has ended but those `waiting` to be started again.
        """
        gone = attempt.ended - {rank, *waiting}
        away = attempt.ended | self._missing.keys() | {rank}
        alive = (other for other in attempt.ranks if other not in away)
        one_lives = any(self._in_one_world(attempt, rank, other) for other in alive)
        return one_lives and not any(self._in_one_world(attempt, rank, other) for other in gone)

    def begin_next(self, failure: Failure, now: float) -> None:
        """Begin the generation in which the others meet the successor of a failed rank."""
        assert failure.rank is not None
        self.number += 1
        self._missing[failure.rank] = failure
        self._timers.set(Timer.GENERATION, max(now, self._told_at + PAUSE_S))

    @property
    def untold(self) -> bool:
        """Whether the workers do not know the newest one yet: until they do, no successor is to start."""
        return self._timers.at(Timer.GENERATION) < NEVER

    def number_at_once(self, now: float) -> int:
        """Return another number, of which the workers are told at once."""
        self._timers.cancel(Timer.GENERATION)
        self._told_at = now
        self.number += 1
        return self.number

    @property
    def missing(self) -> Collection[int]:
        """The ranks that have failed and do not run again yet."""
        return self._missing.keys()

    def wait_for(self, ranks: Iterable[int], failure: Failure) -> None:
        """Note that the others are to meet these ranks, which do not run yet since others failed there."""
        self._missing |= dict.fromkeys(ranks, failure)

    def forget(self, ranks: Iterable[int]) -> None:
        """Note that nobody is to meet these ranks any more."""
        for rank in ranks:
            self._missing.pop(rank, None)

    def due(self, attempt: AttemptState, now: float) -> NextGeneration | None:
        """Return what the workers are to be told now."""
        if not self._timers.over(Timer.GENERATION, now):
            return None
        self._timers.cancel(Timer.GENERATION)
        self._told_at = now
        return NextGeneration(attempt=attempt.number, number=self.number)

    def started(self, rank: int) -> None:
        self._missing.pop(rank, None)

    def missed_by(self, attempt: AttemptState, rank: int) -> Failure | None:
        """Return the failure of a rank that one which has finished successfully will not meet again."""
        return next((f for other, f in self._missing.items() if self._in_one_world(attempt, rank, other)), None)

    def _in_one_world(self, attempt: AttemptState, *ranks: int) -> bool:
        """Whether these ranks run the same command: each command has a world, WORLD_SIZE, of its own."""
        roles = (attempt.role_of(rank) for rank in ranks)
        return len({role if self._roles.command(role) else "" for role in roles}) == 1
