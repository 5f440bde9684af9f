"""Handle the reports of an attempt's hosts on its store and its workers. Pure."""

from __future__ import annotations

from launcher.errors import StoreError
from launcher.job.attempt import AttemptState
from launcher.job.ending import fails_by_itself, stop
from launcher.job.events import Command
from launcher.job.failures.failure import FailureKind, failure_of, what_happened
from launcher.job.fleet import HostPhase, HostState
from launcher.job.lifecycle import fail, grow_with, look_for_hangs, opened
from launcher.job.ranks import ENDED, JOINS, Rank, RankState
from launcher.job.recovery import members, restarts
from launcher.job.run import Phase, Run
from launcher.protocol.message import Report
from launcher.protocol.reports import (
    Exited,
    Failing,
    PortsReserved,
    Returned,
    Started,
    Stepped,
    StoreFailed,
    StoreOpened,
    Swept,
)
from launcher.protocol.two_way import Heartbeat


def take_report(run: Run, state: HostState, message: Report, now: float) -> list[Command]:
    """Take what a host says of the attempt, if it takes part."""
    attempt = run.attempt
    if attempt is None or state.name not in run.fleet.busy or state.phase is HostPhase.CHECKING:
        return []
    if isinstance(message, Heartbeat):
        return _beat(run, attempt, state, message, now)
    if getattr(message, "attempt", None) != attempt.number:
        return []
    match message:
        case StoreOpened() | PortsReserved():
            return opened(run, state.name, message, now)
        case StoreFailed():
            return _store_failed(run, attempt, state, message, now)
        case Started() | Failing() | Exited() if state.name not in attempt.members:
            return _of_newcomer(run, attempt, state, message)
        case Started() | Stepped() | Failing() | Exited():
            row = attempt.ranks.get(message.rank, state.name)
            return [] if row is None else _of_worker(run, attempt, state, row, message, now)
        case Returned():
            attempt.made_progress(now)
        case Swept():
            attempt.saved += message.saved
            run.fleet.said_swept(state, message)
            if message.left:
                left = ", ".join(message.left)
                return run.gathering.unusable(state, f"processes cannot be ended there: {left}")
    return []


def _beat(run: Run, attempt: AttemptState, state: HostState, beat: Heartbeat, now: float) -> list[Command]:
    saved = attempt.take_heartbeat(state.name, beat, now)
    if state.name in attempt.members:  # others are about to join, and not looked at
        run.hangs.heard(state.name, beat)
    if saved and run.preempted and not run.stops:
        return stop(run, now)
    return look_for_hangs(run, now)


def _store_failed(run: Run, attempt: AttemptState, state: HostState, message: StoreFailed, now: float) -> list[Command]:
    if run.phase is Phase.OPENING_STORE and attempt.number == run.spec.first_attempt:
        return stop(run, now, error=StoreError(f"{state.name}: {message.reason}"))
    at = state.clock.corrected(message.time)
    if attempt.finished or not attempt.runs_at(at):
        return []
    return fail(run, attempt.failure(FailureKind.STORE_LOST, state.name, message.reason, at), now)


def _of_newcomer(
    run: Run, attempt: AttemptState, state: HostState, message: Started | Failing | Exited
) -> list[Command]:
    """Take what happens to a worker that the others do not know: of a host that is to join, or was to."""
    if state.name not in attempt.ranks.by_host(*JOINS):
        return []
    if isinstance(message, Started):
        members.newcomer_started(run, state.name, message.rank)
        return []
    return members.leave(run, state.name, what_happened(failure_of(state.name, message, 0.0, attempt=attempt.number)))


def _of_worker(
    run: Run,
    attempt: AttemptState,
    state: HostState,
    row: Rank,
    message: Started | Stepped | Failing | Exited,
    now: float,
) -> list[Command]:
    match message:
        case Started():
            attempt.take_start(row, message, now)
            return grow_with(run, None, now) if attempt.all_started else []
        case Stepped():
            run.chaos.take_step(attempt, row)
            return []
        case Failing():
            at = state.clock.corrected(message.time)
            if row.state in ENDED or not attempt.runs_at(at):
                return []  # if it is news, its end brings it
            failure = failure_of(state.name, message, at, attempt=attempt.number)
            attempt.ranks.move(row, RankState.FAILING, failure)
            return fail(run, failure, now)
    ended = run.debuggers.exited(row.number, how_ended(state.name, message))
    return [*ended, *_exited(run, attempt, state, row, message, now)]


def _exited(run: Run, attempt: AttemptState, state: HostState, row: Rank, exited: Exited, now: float) -> list[Command]:
    if row.state in ENDED:
        return []
    exited = restarts.with_early_end(exited)
    known = row.failure if row.state is RankState.FAILING else None
    hung = row.failure if row.state is RankState.HUNG else None
    at = state.clock.corrected(exited.time) if known is None else known.at
    attempt.take_exit(row, exited, at, now)
    if known is not None and exited.status != 0:
        attempt.take_end(known, failure_of(state.name, exited, at, attempt=attempt.number))
    elif exited.status != 0:
        failed_before = exited.error is not None and attempt.stopped_at is not None and at < attempt.stopped_at
        if failed_before or not exited.provoked:
            injected = run.chaos.made(state.name, row.number, now)
            failure = failure_of(state.name, exited, at, attempt=attempt.number, hung=hung, injected=injected)
            made_room = run.preempted and not fails_by_itself(failure)
            if exited.restart_policy and run.phase is Phase.RUNNING and not exited.provoked and not made_room:
                commands = restarts.fail_alone(run, row, failure, exited, now)
                if commands is not None:
                    return [*commands, *(stop(run, now) if attempt.finished else [])]
            return fail(run, failure, now)
    if run.phase is not Phase.RUNNING:
        return []
    if attempt.finished:
        return stop(run, now)
    missed = restarts.missed_by(run, row) if exited.status == 0 else None
    return [] if missed is None else fail(run, missed, now)


def how_ended(host: str, exited: Exited) -> str:
    """Say of a rank that was debugged how it ended."""
    if exited.status == 0:
        return f"rank {exited.rank} has ended, with exit code 0"
    return what_happened(failure_of(host, exited, 0.0, attempt=exited.attempt))
