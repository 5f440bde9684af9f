"""Whether another attempt is worth while after one has failed, and when; the same for a process that fails alone. Pure.

Both use up the same restarts. Whether they come to anything is judged apart: the attempts among each other, and the
processes of each rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from launcher.frozen import dataclass
from launcher.job.failure import SLACK_S, Failure, FailureKind, looks_like_consequence
from launcher.placement.job_spec import JobSpec

FUTILE_S = 30.0  # how long after its start a failure of the first attempt is taken for one of the program itself
PROGRESS_S = 60.0  # an attempt that ran so long, or saved a checkpoint, has made progress
LOOP = 5  # the same failure so often in a row without progress: a further attempt would end the same way
BACK_OFF_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
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
    def is_whole(self) -> bool:
        """Whether it is an attempt that has failed, rather than a process or host of one."""
        return self.rank is None and not self.lost_host

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


def restarts_used(past: Sequence[FailedAttempt]) -> int:
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
    if restarts_used(past) > spec.max_restarts:
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


def judge_early(
    spec: JobSpec, past: Sequence[FailedAttempt], cause: Failure, *, succeeds: bool = False
) -> RestartDecision:
    """Decide while an attempt is about to end by this cause: as if it had made progress, known only later."""
    return judge(spec, [*past, failed_attempt(spec, cause, ran_s=cause.ran_s, saved=1, succeeds=succeeds)])


def _is_futile(cause: Failure) -> bool:
    if cause.ran_s > FUTILE_S:
        return False
    if cause.kind is FailureKind.RAISED:
        return cause.error_type in _FUTILE_ERRORS
    if cause.kind is FailureKind.NEVER_STARTED:
        return True
    return cause.kind is FailureKind.EXITED and cause.status in _FUTILE_CODES
