"""Whether another attempt is worth while after one has failed, and when; the same for a process that fails alone. Pure.

Both use up the same restarts. Whether they come to anything is judged apart: the attempts among each other, and the
lives of each rank.

A process says of itself, while it runs, what its failure means (Exited.restart_policy, ddp/monitoring/progress.py): 0,
it ends the attempt; 1, the others go on without it, as without a worker of an asynchronous run; 2, they wait for its
successor, as for a parameter server; 3, they meet its successor again, as generations.py has it; 4, as 3, but never
with another number of ranks: a lost or new host restarts all. A restart of it is one of those that the run has
(--max-restarts), as another attempt is. Without any left, the others go on without the first kind, and the run's end
then has that failure as its cause; the other kinds end the attempt, as any failure does. Where one of the third or
fourth kind may have failed only since another process did, the restart of that one counts for both.
"""

from __future__ import annotations

from collections.abc import Sequence

from launcher.frozen import dataclass, replace
from launcher.job.attempt import AttemptState
from launcher.job.events import Command, Notice, Send
from launcher.job.failure import SLACK_S, Failure, FailureKind, looks_like_consequence
from launcher.job.progress_messages import goes_on_without, left_out, starts_again
from launcher.job.timers import Timer, Timers
from launcher.placement.job_spec import JobSpec
from launcher.protocol.commands import RestartWorker
from launcher.protocol.message import MEETS_SUCCESSOR
from launcher.protocol.reports import Exited

__all__ = ["RestartDecision", "Restarts", "failed_attempt", "is_free", "judge"]

FUTILE_S = 30.0  # how long after its start a failure of the first attempt is taken for one of the program itself
PROGRESS_S = 60.0  # an attempt that ran so long, or saved a checkpoint, has made progress
LOOP = 5  # the same failure so often in a row without progress: a further attempt would end the same way
BACK_OFF_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
CONSEQUENCE_S = 1.0  # later what may only follow from another failure is started again: that may end the attempt
WITHOUT_IT = 1  # of Exited.restart_policy: the others go on
_FUTILE_ERRORS = {
    "SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError", "FileNotFoundError",
}  # fmt: skip
_FUTILE_CODES = {2, 126, 127}  # wrong usage, not executable, not found: argparse, the shell


@dataclass(frozen=True)
class FailedAttempt:
    """An attempt that has failed; `free`: through a host that the job can do without, or by --chaos, which costs no
    restart.

    With a `rank`, a process that failed while the attempt went on; `may_follow`: it is resilient, and failed as one
    does that has lost a peer. With a `lost_host`, one that the attempt went on without. `succeeds`: that of a worker
    whose rank another process had before it, in the same attempt.
    """

    cause: Failure
    ran_s: float
    saved: int  # checkpoints; for a process alone its steps as well, since the others have what came of them
    free: bool
    rank: int | None = None
    lost_host: str = ""
    may_follow: bool = False
    succeeds: bool = False

    @property
    def progress(self) -> bool:
        return self.saved > 0 or self.ran_s >= PROGRESS_S

    @property
    def signature(self) -> tuple[object, ...]:
        cause = self.cause
        return (cause.kind, cause.status, cause.error_type, cause.where)


@dataclass(frozen=True)
class RestartDecision:
    """`again_after_s` is None where there is to be no other attempt; `reason` then says why, if that is news."""

    again_after_s: float | None
    reason: str = ""


def failed_attempt(spec: JobSpec, cause: Failure, *, ran_s: float, saved: int, succeeds: bool = False) -> FailedAttempt:
    free = cause.injected or (spec.elastic and cause.kind is FailureKind.HOST_LOST)
    return FailedAttempt(cause, ran_s, saved, free, succeeds=succeeds)


def _restarts_used(past: Sequence[FailedAttempt]) -> int:
    """Return how many restarts it takes to go on after all of these."""
    return sum(not is_free(attempt, past) for attempt in past)


def is_free(one: FailedAttempt, past: Sequence[FailedAttempt]) -> bool:
    """Whether no restart is counted for it; where it may follow from the failure of another process, that one's is."""
    return one.free or (one.may_follow and any(_may_be_root(other, one) for other in past))


def _may_be_root(other: FailedAttempt, one: FailedAttempt) -> bool:
    if (other.rank in (None, one.rank) and not other.lost_host) or other.cause.attempt != one.cause.attempt:
        return False
    return abs(other.cause.at - one.cause.at) <= SLACK_S and not looks_like_consequence(other.cause)


def judge(spec: JobSpec, past: Sequence[FailedAttempt]) -> RestartDecision:
    """Decide after the last of the failed attempts, or of the processes that failed alone."""
    last = past[-1]
    counts = not is_free(last, past)
    if _restarts_used(past) > spec.max_restarts:
        restarts = "the one restart (--max-restarts) was used"
        if spec.max_restarts > 1:
            restarts = f"all {spec.max_restarts} restarts (--max-restarts) were used"
        return RestartDecision(None, restarts if spec.max_restarts else "")
    if last.cause.attempt == spec.first_attempt and counts and not last.succeeds and _is_futile(last.cause):
        return RestartDecision(None, "not tried again: a restart cannot fix that")
    if last.cause.injected:
        return RestartDecision(BACK_OFF_S[0])
    alike = [other for other in past if (other.rank, other.lost_host) == (last.rank, last.lost_host)]
    past = [other for other in alike if not other.cause.injected]
    fruitless = 0
    while fruitless < len(past) and not past[-1 - fruitless].progress:
        fruitless += 1
    recent = past[-LOOP:]
    if fruitless >= LOOP and len({attempt.signature for attempt in recent}) == 1 and counts:
        return RestartDecision(
            None, f"not tried again: the same failure came {LOOP} times in a row, without any progress"
        )
    return RestartDecision(BACK_OFF_S[min(max(0, fruitless - 1), len(BACK_OFF_S) - 1)])


def _is_futile(cause: Failure) -> bool:
    if cause.ran_s > FUTILE_S:
        return False
    if cause.kind is FailureKind.RAISED:
        return cause.error_type in _FUTILE_ERRORS
    if cause.kind is FailureKind.NEVER_STARTED:
        return True
    return cause.kind is FailureKind.EXITED and cause.status in _FUTILE_CODES


class Restarts:
    """`past` is what has failed before in the run; `count` is of restarts of single processes."""

    def __init__(self, spec: JobSpec, timers: Timers) -> None:
        self.count = 0
        self.past: list[FailedAttempt] = []
        self._spec = spec
        self._failed: list[tuple[Failure, FailedAttempt | None]] = []  # in this attempt, and what was counted for it
        self._timers = timers
        self._waiting: list[int] = []  # ranks that are to be started again, each at its Timer.RESTART
        self._starting: set[int] = set()  # ordered to start again
        self._lost_hosts: set[str] = set()  # whose ranks nobody has taken over yet
        self._last: tuple[str, list[Failure]] = ("", [])  # those that end the run, and why if that is news

    def begin(self) -> None:
        """Begin anew, with an attempt."""
        self._cancel()
        self._failed, self._starting, self._lost_hosts = [], set(), set()
        self._last = ("", [])

    @property
    def under_way(self) -> bool:
        """Whether a process is about to be started again, for which the others may wait."""
        return bool(self._waiting or self._starting)

    @property
    def waiting(self) -> Sequence[int]:
        """The ranks that have ended and are about to be started again."""
        return self._waiting

    def failed(self, attempt: AttemptState, failure: Failure, exited: Exited, now: float) -> list[Command] | None:
        """Decide on a process that has failed by itself while the attempt runs, and tell the user; None: it ends it."""
        rank = exited.rank
        self._starting.discard(rank)
        made = FailedAttempt(failure, failure.ran_s, exited.saved + exited.steps, free=failure.injected, rank=rank)
        looks_so = looks_like_consequence(failure)
        may_follow = looks_so and exited.restart_policy in MEETS_SUCCESSOR
        made = replace(made, may_follow=may_follow, succeeds=attempt.is_successor(rank))
        decision = judge(self._spec, [*self.past, made])
        if decision.again_after_s is not None:
            self.past.append(made)
            self._failed.append((failure, made))
            self.count += 1
            follows = is_free(made, self.past)
            wait_s = max(decision.again_after_s, CONSEQUENCE_S if looks_so and not follows else 0.0)
            self._timers.set((Timer.RESTART, rank), now + wait_s)
            self._waiting.append(rank)
            number = f"restart {_restarts_used(self.past)} of {self._spec.max_restarts}"
            why_free = "by --chaos, no restart is counted" if failure.injected else "it follows from another failure"
            return [Notice(starts_again(failure, why_free if follows else number, wait_s))]
        if exited.restart_policy != WITHOUT_IT:
            self._last = (decision.reason, [failure])
            return None
        if attempt.can_go_on_without(rank):
            attempt.leave_out(failure)
            self._failed.append((failure, None))
            return [Notice(left_out(failure, decision.reason))]
        self._last = (decision.reason, [*attempt.left_out, failure])
        attempt.failures += attempt.left_out  # one after the other they have ended it
        attempt.left_out = []
        return None

    def lost(self, attempt: AttemptState, failure: Failure, *, progress: int) -> tuple[float, Notice] | None:
        """Decide on a lost host without which the attempt can go on: when, and what to say; None: it ends it."""
        free, name = failure.injected or self._spec.elastic, failure.host
        made = FailedAttempt(failure, failure.ran_s, progress, free=free, lost_host=name)
        decision = judge(self._spec, [*self.past, made])
        if decision.again_after_s is None:
            self._last = (decision.reason, [failure])
            return None
        self.past.append(made)
        self._failed.append((failure, made))
        self._lost_hosts.add(name)
        gone = {worker.rank for worker in attempt.placement.workers if worker.host == name}
        self._timers.cancel(*((Timer.RESTART, rank) for rank in gone))
        self._waiting[:] = [rank for rank in self._waiting if rank not in gone]
        self._starting -= gone
        number = "" if free else f" (restart {_restarts_used(self.past)} of {self._spec.max_restarts})"
        return decision.again_after_s, Notice(goes_on_without(failure, number))

    def replaced(self) -> None:
        """Note that other hosts have taken over what lost ones had."""
        self._lost_hosts.clear()

    def judge_early(self, cause: Failure, *, succeeds: bool = False) -> RestartDecision:
        """Decide while an attempt is about to end by this cause: as if it had made progress, known only later."""
        reason, failures = self._last
        if any(failure is cause for failure in failures):
            return RestartDecision(None, reason)
        made = failed_attempt(self._spec, cause, ran_s=cause.ran_s, saved=1, succeeds=succeeds)
        return judge(self._spec, [*self.past, made])

    def attempt_failed(self, attempt: AttemptState, cause: Failure) -> RestartDecision:
        """Decide after an attempt that has ended by this cause."""
        ran_s = max(0.0, cause.at - attempt.began)
        succeeds = attempt.is_successor(cause.rank)
        self.past.append(failed_attempt(self._spec, cause, ran_s=ran_s, saved=attempt.saved, succeeds=succeeds))
        return judge(self._spec, self.past)

    def due(self, attempt: AttemptState, now: float) -> list[Command]:
        """Start those again whose time has come."""
        commands: list[Command] = []
        for rank in [rank for rank in self._waiting if self._timers.over((Timer.RESTART, rank), now)]:
            self._timers.cancel((Timer.RESTART, rank))
            self._waiting.remove(rank)
            self._starting.add(rank)
            order = RestartWorker(rank=rank, attempt=attempt.number, restart=attempt.start_again(rank, now))
            commands.append(Send(attempt.host_of(rank), order))
        return commands

    def started(self, rank: int) -> None:
        self._starting.discard(rank)

    def overtaken(self, attempt: AttemptState, failure: Failure) -> None:
        """Take a failure that ends the attempt: none of its processes is started again alone any more.

        It may be that of a process that was to be.

        What failed alone at that time may be its cause, or another of its consequences: then it is one of the attempt's
        failures, and no restart of its own is counted for it.
        """
        newest = {alone.rank: alone for alone, _ in self._failed}
        for alone, made in list(self._failed):
            likely = looks_like_consequence(alone) or looks_like_consequence(failure)
            together = alone is not failure and likely and abs(alone.at - failure.at) <= SLACK_S
            waits = alone.rank in self._waiting and alone is newest[alone.rank]
            waits |= alone.rank is None and alone.host in self._lost_hosts
            if together:
                attempt.left_out = [other for other in attempt.left_out if other is not alone]
                attempt.take_failure(alone)
            if alone is failure or together or waits:
                self._failed.remove((alone, made))
                self._uncount(made)
        self._cancel()

    def _uncount(self, made: FailedAttempt | None) -> None:
        kept = [past for past in self.past if past is not made]
        self.count -= sum(past.rank is not None for past in self.past) - sum(past.rank is not None for past in kept)
        self.past[:] = kept

    def _cancel(self) -> None:
        self._timers.cancel(*((Timer.RESTART, rank) for rank in self._waiting))
        self._waiting.clear()
