"""Processes whose failure does not end the attempt: started again alone, left out, or not. Pure; owned by job.py.

A process says of itself, while it runs, how it stands (Exited.standing, ddp.monitoring): the others go on without it,
as without a worker of an asynchronous run; or they wait for its successor, as for a parameter server. A restart of it
is one of those that the run has (--max-restarts), as another attempt is. Without any left, the others go on without the
first kind, and the run's end then has that failure as its cause; the second kind ends the attempt, as any failure does.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from launcher.job.attempt import AttemptState
from launcher.job.cause import SLACK_S, looks_like_consequence
from launcher.job.events import Command, Tell
from launcher.job.outcome import Failure
from launcher.job.restart_policy import Past, judge, restarts_used
from launcher.placement.job_spec import JobSpec
from launcher.protocol import Exited, RestartWorker

__all__ = ["CONSEQUENCE_S", "WITHOUT_IT", "Decision", "Fate", "Lone"]

CONSEQUENCE_S = (
    1.0  # what may only follow from another failure is started again that much later: it may end the attempt
)
WITHOUT_IT = 1  # of Exited.standing: the others go on


class Fate(Enum):
    AGAIN = auto()
    LEFT_OUT = auto()
    ENDS = auto()  # the attempt, and the run with it


@dataclass(frozen=True)
class Decision:
    """`reason` says why it is not started again, if that is news; it is restart number `restart`, in `after_s`."""

    fate: Fate
    reason: str = ""
    restart: int = 0
    after_s: float = 0.0


class Lone:
    """Shares `past` with the job. `restarts` counts those of single processes."""

    def __init__(self, spec: JobSpec, past: list[Past]) -> None:
        self.restarts = 0
        self._spec = spec
        self._past = past
        self._failed: list[tuple[Failure, Past | None]] = []  # in this attempt, and what was counted for it
        self._due: dict[int, float] = {}  # by rank, when it is to be started again
        self._starting: set[int] = set()  # told to start again
        self._last: tuple[str, list[Failure]] = ("", [])  # those that end the run, and why if that is news

    def begin(self) -> None:
        """Begin anew, with an attempt."""
        self._failed, self._due, self._starting = [], {}, set()
        self._last = ("", [])

    @property
    def under_way(self) -> bool:
        """Whether a process is about to be started again, for which the others may wait."""
        return bool(self._due or self._starting)

    @property
    def deadline(self) -> float:
        return min(self._due.values(), default=float("inf"))

    def failed(self, attempt: AttemptState, failure: Failure, exited: Exited, now: float) -> Decision:
        """Decide on a process that has failed by itself while the attempt runs."""
        rank = exited.rank
        self._starting.discard(rank)
        made = Past(failure, failure.ran_s, exited.saved + exited.steps, free=False, rank=rank)
        verdict = judge(self._spec, [*self._past, made])
        if verdict.again_after_s is not None:
            self._past.append(made)
            self._failed.append((failure, made))
            self.restarts += 1
            wait_s = max(verdict.again_after_s, CONSEQUENCE_S if looks_like_consequence(failure) else 0.0)
            self._due[rank] = now + wait_s
            return Decision(Fate.AGAIN, restart=restarts_used(self._past), after_s=wait_s)
        if exited.standing != WITHOUT_IT:
            self._last = (verdict.reason, [failure])
            return Decision(Fate.ENDS)
        if attempt.can_go_on_without(rank):
            attempt.leave_out(failure)
            self._failed.append((failure, None))
            return Decision(Fate.LEFT_OUT, verdict.reason)
        self._last = (verdict.reason, [*attempt.left_out, failure])
        attempt.failures += attempt.left_out  # one after the other they have ended it
        attempt.left_out = []
        return Decision(Fate.ENDS)

    def last_word(self, cause: Failure) -> str | None:
        """Return why there is to be no other attempt after one that ended by this cause, if that is decided."""
        reason, failures = self._last
        return reason if any(failure is cause for failure in failures) else None

    def due(self, attempt: AttemptState, now: float) -> list[Command]:
        """Start those again whose time has come."""
        commands: list[Command] = []
        for rank in [rank for rank, at in self._due.items() if at <= now]:
            del self._due[rank]
            self._starting.add(rank)
            order = RestartWorker(rank=rank, attempt=attempt.number, restart=attempt.start_again(rank, now))
            commands.append(Tell(attempt.placement.workers[rank].host, order))
        return commands

    def started(self, rank: int) -> None:
        self._starting.discard(rank)

    def overtaken(self, attempt: AttemptState, failure: Failure) -> None:
        """Take a failure that ends the attempt: none of its processes is started again alone any more.

        What failed alone at that time may be its cause, or another of its consequences: then it is one of the attempt's
        failures, and no restart of its own is counted for it.
        """
        for lone, made in list(self._failed):
            likely = looks_like_consequence(lone) or looks_like_consequence(failure)
            together = likely and abs(lone.at - failure.at) <= SLACK_S
            if together:
                attempt.left_out = [other for other in attempt.left_out if other is not lone]
                attempt.take_failure(lone)
            if together or lone.rank in self._due:
                self._failed.remove((lone, made))
                self._uncount(made)
        self._due.clear()

    def _uncount(self, made: Past | None) -> None:
        kept = [past for past in self._past if past is not made]
        self.restarts -= len(self._past) - len(kept)
        self._past[:] = kept

    def slept(self, seconds: float) -> None:
        """Take a time out of the reckoning in which nobody listened."""
        self._due = {rank: at + seconds for rank, at in self._due.items()}
