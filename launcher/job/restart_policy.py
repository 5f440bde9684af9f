"""Whether another attempt is worth while after one has failed, and when; the same for a process that fails alone. Pure.

Both use up the same restarts. Whether they come to anything is judged apart: the attempts among each other, and the
lives of each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.job.outcome import Failure, FailureKind
from launcher.placement.job_spec import JobSpec

__all__ = ["Past", "Verdict", "judge", "judge_early", "past_of", "restarts_used"]

FUTILE_S = 30.0  # how long after its start a failure of the first attempt is taken for one of the program itself
PROGRESS_S = 60.0  # an attempt that ran so long, or saved a checkpoint, has made progress
LOOP = 5  # the same failure so often in a row without progress: a further attempt would end the same way
BACK_OFF_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
_FUTILE_ERRORS = {
    "SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError", "FileNotFoundError",
}  # fmt: skip
_FUTILE_CODES = {2, 126, 127}  # wrong usage, not executable, not found: argparse, the shell


@dataclass(frozen=True)
class Past:
    """An attempt that has failed; `free`: through a host that the job can do without, which costs no restart.

    With a `rank`, a process that failed while the attempt went on.
    """

    cause: Failure
    ran_s: float
    saved: int  # checkpoints; for a process alone its steps as well, since the others have what came of them
    free: bool
    rank: int | None = None

    @property
    def progress(self) -> bool:
        return self.saved > 0 or self.ran_s >= PROGRESS_S

    @property
    def signature(self) -> tuple[object, ...]:
        cause = self.cause
        return (cause.kind, cause.status, cause.error_type, cause.where)


@dataclass(frozen=True)
class Verdict:
    """`again_after_s` is None where there is to be no other attempt; `reason` then says why, if that is news."""

    again_after_s: float | None
    reason: str = ""


def judge_early(spec: JobSpec, past: Sequence[Past], cause: Failure) -> Verdict:
    """Decide while an attempt is about to end by this cause: as if it had made progress, which is known later only."""
    return judge(spec, [*past, past_of(spec, cause, ran_s=cause.ran_s, saved=1)])


def past_of(spec: JobSpec, cause: Failure, *, ran_s: float, saved: int) -> Past:
    free = spec.elastic and cause.kind is FailureKind.HOST_LOST
    return Past(cause, ran_s, saved, free)


def restarts_used(past: Sequence[Past]) -> int:
    """Return how many restarts it takes to go on after all of these."""
    return sum(not attempt.free for attempt in past)


def judge(spec: JobSpec, past: Sequence[Past]) -> Verdict:
    """Decide after the last of the failed attempts, or of the processes that failed alone."""
    last = past[-1]
    if restarts_used(past) > spec.max_restarts:
        restarts = "the one restart (--max-restarts) was used"
        if spec.max_restarts > 1:
            restarts = f"all {spec.max_restarts} restarts (--max-restarts) were used"
        return Verdict(None, restarts if spec.max_restarts else "")
    if last.cause.attempt == spec.first_attempt and not last.free and _is_futile(last.cause):
        return Verdict(None, "not tried again: no restart can mend that")
    past = [other for other in past if other.rank == last.rank]
    fruitless = 0
    while fruitless < len(past) and not past[-1 - fruitless].progress:
        fruitless += 1
    recent = past[-LOOP:]
    if fruitless >= LOOP and len({attempt.signature for attempt in recent}) == 1 and not last.free:
        return Verdict(None, f"not tried again: the same failure came {LOOP} times in a row, without any progress")
    return Verdict(BACK_OFF_S[min(max(0, fruitless - 1), len(BACK_OFF_S) - 1)])


def _is_futile(cause: Failure) -> bool:
    if cause.ran_s > FUTILE_S:
        return False
    if cause.kind is FailureKind.RAISED:
        return cause.error_type in _FUTILE_ERRORS
    if cause.kind is FailureKind.NEVER_STARTED:
        return True
    return cause.kind is FailureKind.EXITED and cause.status in _FUTILE_CODES
