"""Decide whether and when another attempt follows a failed one; and restart single processes. Pure.

Both use up the same restarts. Whether they come to anything is judged apart: the attempts among each other, and the
processes of each rank.

When a process fails alone, another takes its place, or the others go on without it. A process says of itself, while it
runs, what its failure means (Exited.restart_policy, ddp/monitoring/progress.py): 0, it ends the attempt; 1, the others
go on without it, as without a worker of an asynchronous run; 2, they wait for its successor, as for a parameter
server; 3, they meet its successor again, in another generation; 4, as 3, but never with another number of ranks: a
lost or new host restarts all. A restart of it is one of those that the run has (--max-restarts), as another attempt
is. Without any left, the others go on without the first kind, and the run's end then has that failure as its cause;
the other kinds end the attempt, as any failure does. Where one of the third or fourth kind may have failed only since
another process did, the restart of that one counts for both.

Each failure of the third or fourth kind begins a generation. Its number goes to every worker at once, before the
back-off of the successor, which may fail again meanwhile: then the next number follows. Of failures one right after the
other only the newest number is sent, for each one costs a message to every host. A generation takes all ranks of the
failed one's world, and one at least that has lived on, for the others have nothing to go on with. Once a rank has ended
for good, there can be no other generation. Those of other hosts are in members.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from launcher.frozen import dataclass, replace
from launcher.job.attempt import AttemptState
from launcher.job.events import Command, Notice, Send
from launcher.job.failures.failure import (
    SLACK_S,
    FailedAttempt,
    Failure,
    FailureKind,
    looks_like_consequence,
    what_happened,
)
from launcher.job.ranks import ENDED, Rank, RankState
from launcher.job.run import Run
from launcher.job.timers import NEVER, Timer
from launcher.placement.job_spec import JobSpec
from launcher.placement.roles import Roles
from launcher.protocol.commands import NextGeneration, RestartWorker
from launcher.protocol.message import MEETS_SUCCESSOR
from launcher.protocol.reports import Exited

FUTILE_S = 30.0  # how long after its start a failure of the first attempt is taken for one of the program itself
LOOP = 5  # the same failure so often in a row without progress: a further attempt would end the same way
BACK_OFF_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
_FUTILE_ERRORS = {
    "SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError", "FileNotFoundError",
}  # fmt: skip
_FUTILE_CODES = {2, 126, 127}  # wrong usage, not executable, not found: argparse, the shell
CONSEQUENCE_S = 1.0  # later what may only follow from another failure is started again: that may end the attempt
WITHOUT_IT = 1  # of Exited.restart_policy: the others go on
PAUSE_S = 0.02  # between two numbers that are sent
_ENDED_FOR_GOOD = tuple(state for state in ENDED if state is not RankState.WAITING)


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
    """Return whether it counts no restart; if it may follow from the failure of another process, that one counts."""
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


# ---- a process that fails alone ----


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


def fail_alone(run: Run, row: Rank, failure: Failure, exited: Exited, now: float) -> list[Command] | None:
    """Go on after a process has failed by itself while the attempt runs; None: it ends the attempt."""
    attempt, meets = run.current, exited.restart_policy in MEETS_SUCCESSOR
    if meets and not _can_meet(run.spec.roles, attempt, row):
        return None
    looks_so = looks_like_consequence(failure)
    made = FailedAttempt(
        failure, failure.ran_s, exited.saved + exited.steps, free=failure.injected, rank=row.number,
        may_follow=looks_so and meets, succeeds=row.restarts > 0,
    )  # fmt: skip
    decision = judge(run.spec, [*run.past, made])
    if decision.again_after_s is not None:
        run.past.append(made)
        follows = is_free(made, run.past)
        wait_s = max(decision.again_after_s, CONSEQUENCE_S if looks_so and not follows else 0.0)
        run.timers.set((Timer.RESTART, row.number), now + wait_s)
        attempt.ranks.move(row, RankState.WAITING, failure if meets else row.failure)
        if meets:
            attempt.generation += 1
            run.timers.set(Timer.GENERATION, max(now, attempt.announced_at + PAUSE_S))
        number = f"restart {restarts_used(run.past)} of {run.spec.max_restarts}"
        why_free = "by --chaos, no restart is counted" if failure.injected else "it follows from another failure"
        return [Notice(_starts_again(failure, why_free if follows else number, wait_s))]
    last = [failure]
    if exited.restart_policy == WITHOUT_IT:
        if attempt.ranks.can_do_without(row):
            attempt.leave_out(row, failure)
            return [Notice(_left_out(failure, decision.reason))]
        last = [*attempt.left_out, failure]
        for each in attempt.left_out:  # one after the other they have ended it
            attempt.take_failure(each)
        attempt.left_out = []
    attempt.last_failures, attempt.no_restart_reason = last, decision.reason
    return None


def _starts_again(failure: Failure, restart: str, delay_s: float) -> str:
    """Say that a process alone is started again; `restart` counts it."""
    when = f" in {delay_s:g} s" if delay_s else ""
    return f"{what_happened(failure)}; only this worker restarts{when} ({restart})"


def _left_out(failure: Failure, reason: str) -> str:
    """Say that the others go on without a process; `reason` is why it is not started again, if that is news."""
    why = f" ({reason})" if reason else ""
    return f"{what_happened(failure)}; the other workers continue without it{why}"


def _can_meet(roles: Roles, attempt: AttemptState, failed: Rank) -> bool:
    """Return whether the others of its world can meet a successor: one lives on, and none has ended for good."""

    def in_its_world(rows: Iterable[Rank]) -> bool:
        return any(row is not failed and _in_one_world(roles, failed, row) for row in rows)

    one_lives = in_its_world(row for row in attempt.ranks if row.state not in ENDED and not row.is_awaited)
    return one_lives and not in_its_world(attempt.ranks.of(*_ENDED_FOR_GOOD))


def _in_one_world(roles: Roles, one: Rank, other: Rank) -> bool:
    """Return whether two ranks run the same command: each command has a world, WORLD_SIZE, of its own."""
    commands = (row.worker.role if roles.command(row.worker.role) else "" for row in (one, other))
    return next(commands) == next(commands)


def missed_by(run: Run, row: Rank) -> Failure | None:
    """Return the failure of a rank or host that a rank which has finished successfully will not meet again."""
    ranks, roles = run.current.ranks, run.spec.roles
    missing = [other.failure for other in ranks.awaited if _in_one_world(roles, row, other)]
    return next(iter([*missing, *ranks.lost_hosts.values()]), None)


def due(run: Run, now: float) -> list[Command]:
    """Tell the workers of the newest generation, and start those again whose time has come; in this order."""
    attempt, timers = run.current, run.timers
    commands: list[Command] = []
    if timers.over(Timer.GENERATION, now):
        timers.cancel(Timer.GENERATION)
        attempt.announced_at = now
        news = NextGeneration(attempt=attempt.number, number=attempt.generation)
        commands += [Send(host, news) for host in run.fleet.workers_of(attempt.members)]
    if timers.at(Timer.GENERATION) < NEVER:  # the workers do not know the newest one yet
        return commands
    for row in attempt.ranks.of(RankState.WAITING):
        if timers.over((Timer.RESTART, row.number), now):
            timers.cancel((Timer.RESTART, row.number))
            restart = attempt.start_again(row, now)
            commands.append(Send(row.host, RestartWorker(rank=row.number, attempt=attempt.number, restart=restart)))
    return commands


def overtake(run: Run, failure: Failure) -> None:
    """Take a failure that ends the attempt: none of its processes is started again alone any more.

    It may be that of a process that was to be.

    What failed alone at that time may be its cause, or another of its consequences: then it is one of the attempt's
    failures, and no restart of its own is counted for it.
    """
    attempt = run.current
    alone = [made.cause for made in run.past if not made.is_whole and made.cause.attempt == attempt.number]
    alone += attempt.left_out
    waiting = {row.number for row in attempt.ranks.of(RankState.WAITING)}
    newest, lost = {each.rank: each for each in alone}, attempt.ranks.lost_hosts
    for each in alone:
        likely = looks_like_consequence(each) or looks_like_consequence(failure)
        together = each is not failure and likely and abs(each.at - failure.at) <= SLACK_S
        waits = each.host in lost if each.rank is None else each.rank in waiting and each is newest[each.rank]
        if together:
            attempt.left_out = [other for other in attempt.left_out if other is not each]
            attempt.take_failure(each)
        if each is failure or together or waits:
            run.past[:] = [made for made in run.past if made.cause is not each]
    for row in attempt.ranks.of(RankState.WAITING):
        run.timers.cancel((Timer.RESTART, row.number))
        attempt.ranks.move(row, RankState.FAILED)
