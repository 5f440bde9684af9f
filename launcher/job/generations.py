"""The compositions of an attempt, its generations: which ranks meet again after one of them was replaced. Pure.

A resilient process (Exited.restart_policy 3) that fails is replaced as restarts.py has it, while all others of the
attempt live on and meet its successor. Each such failure begins a generation. Its number goes to every worker at once,
before the back-off of the successor, which may fail again meanwhile: then the next number follows. Numbers only grow in
an attempt, and begin at 0 with it.

A generation takes all ranks of the failed one's world, and one at least that has lived on, for the others have nothing
to go on with. Once a rank has ended for good, there can be no other generation.
"""

from __future__ import annotations

from collections.abc import Collection

from launcher.job.attempt import AttemptState
from launcher.job.failure import Failure
from launcher.placement.job_spec import JobSpec
from launcher.protocol import NextGeneration

__all__ = ["RESILIENT", "Generations"]

RESILIENT = 3  # of Exited.restart_policy


class Generations:
    """`number` is the newest generation of the attempt."""

    def __init__(self, spec: JobSpec) -> None:
        self.number = 0
        self._roles = spec.roles
        self._missing: dict[int, Failure] = {}  # ranks that failed and do not run again yet

    def begin(self) -> None:
        """Begin anew, with an attempt."""
        self.number = 0
        self._missing = {}

    def can_meet(self, attempt: AttemptState, rank: int, waiting: Collection[int]) -> bool:
        """Whether the others of a failed rank's world can meet its successor.

        That takes one that lives on, and none that has ended but those `waiting` to be started again.
        """
        ranks = (other for other in range(attempt.world_size) if other != rank)
        others = [other for other in ranks if self._in_one_world(attempt, rank, other)]
        gone = attempt.ended - {*waiting}
        one_lives = any(other not in attempt.ended and other not in self._missing for other in others)
        return one_lives and not any(other in gone for other in others)

    def next(self, attempt: AttemptState, failure: Failure) -> NextGeneration:
        """Begin the generation in which the others meet the successor of a failed rank; return what they are told."""
        assert failure.rank is not None
        self.number += 1
        self._missing[failure.rank] = failure
        return NextGeneration(attempt=attempt.number, number=self.number)

    def started(self, rank: int) -> None:
        self._missing.pop(rank, None)

    def missed_by(self, attempt: AttemptState, rank: int) -> Failure | None:
        """Return the failure of a rank that one which has finished successfully will not meet again."""
        return next((f for other, f in self._missing.items() if self._in_one_world(attempt, rank, other)), None)

    def _in_one_world(self, attempt: AttemptState, *ranks: int) -> bool:
        """Whether these ranks run the same command: each command has a world, WORLD_SIZE, of its own."""
        roles = (attempt.placement.workers[rank].role for rank in ranks)
        return len({role if self._roles.command(role) else "" for role in roles}) == 1
