"""What a run came to: the Outcome, from all that is known when every host is out. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from launcher.errors import DtrainError
from launcher.job.attempt import AttemptState
from launcher.job.cause import first_cause
from launcher.job.fleet import Fleet
from launcher.job.host_state import HostState
from launcher.job.outcome import Failure, FailureKind, Outcome
from launcher.placement.job_spec import JobSpec

__all__ = ["PREEMPTED", "conclude", "fails_by_itself"]

PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: not finished, start it again


def fails_by_itself(cause: Failure) -> bool:
    """Whether a worker has failed after USR1, rather than made room: by being killed by it, or by saying so."""
    if cause.kind is FailureKind.EXITED:
        return cause.status != PREEMPTED
    return cause.kind in (FailureKind.RAISED, FailureKind.KILLED) and cause.status != -signal.SIGUSR1


def conclude(
    spec: JobSpec,
    fleet: Fleet,
    attempt: AttemptState | None,
    *,
    error: DtrainError | None,
    signum: int | None,
    gave_up: str,
    lone_restarts: int,
    preempted: bool,
    began: float,
    now: float,
) -> Outcome:
    """`attempt` is the last one; `signum` the signal that ended the run, if one did.

    `preempted`: it was told that its time is up, which is why it ended if it had not finished by itself.
    """
    finished = attempt is not None and attempt.finished
    preempted = preempted and error is None and not finished
    failures = [] if attempt is None else attempt.failures
    cause = first_cause(failures)
    victims = failures if attempt is None else [*failures, *attempt.victims]
    left_out = [] if attempt is None else attempt.left_out
    if cause is None and finished and signum is None:  # the others came to their end, but not all ended well
        cause = first_cause(left_out)
    unchecked = [state for state in fleet if state.dirty]
    return Outcome(
        run_id=spec.run_id,
        exit_code=PREEMPTED if preempted else _exit_code(error, cause, signum),
        error=error,
        signum=signum,
        cause=cause,
        victims=_victims(victims, cause),
        stopped=0 if attempt is None else len(attempt.stopped),
        world_size=0 if attempt is None else attempt.world_size,
        hosts=len(fleet.used),
        attempts=0 if attempt is None else attempt.number + 1 - spec.first_attempt,
        gave_up=gave_up,
        preempted=preempted,
        left_out=tuple(left_out),
        lone_restarts=lone_restarts,
        evidence=() if attempt is None else attempt.evidence,
        swept=fleet.swept,
        left=tuple((host, tuple(processes)) for host, processes in fleet.left.items() if processes),
        unchecked=tuple((state.name, _why_unchecked(state, now)) for state in unchecked),
        duration_s=now - began,
    )


def _victims(failures: Sequence[Failure], cause: Failure | None) -> tuple[Failure, ...]:
    """Return what failed beside the cause; a host that was lost and then not reached again was lost once."""
    lost = {cause.host} if cause is not None and cause.kind is FailureKind.HOST_LOST else set()
    victims = []
    for failure in failures:
        if failure is cause or (failure.kind is FailureKind.HOST_LOST and failure.host in lost):
            continue
        if failure.kind is FailureKind.HOST_LOST:
            lost.add(failure.host)
        victims.append(failure)
    return tuple(victims)


def _exit_code(error: DtrainError | None, cause: Failure | None, signum: int | None) -> int:
    if error is not None:
        return error.exit_code
    if cause is not None:
        return cause.exit_code
    return 0 if signum is None else 128 + signum


def _why_unchecked(state: HostState, now: float) -> str:
    reason = state.reason or "it did not answer"
    if not state.leased or state.fenced_at is None or state.fenced_at == float("inf"):
        return reason
    if now >= state.fenced_at:
        return f"{reason}; having heard nothing from dtrain, it has ended its workers by itself"
    return f"{reason}; hearing nothing from dtrain, it ends its workers within {state.fenced_at - now:.0f} s"
