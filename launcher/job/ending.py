"""The end of a run: every host is stopped and reports, a lost one is searched once more; then the outcome. Pure.

job.py makes the Outcome when every host is OUT, which Timer.STOP bounds. output/report.py puts it into sentences,
cli/main.py ends with its exit code.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Sequence

from launcher.errors import DtrainError
from launcher.frozen import dataclass
from launcher.hangs.collectives import compare
from launcher.hangs.positions import one_place, ranks_outside
from launcher.hosts.folding import some
from launcher.job.attempt import AttemptState
from launcher.job.chaos import FaultCost
from launcher.job.events import Command, Notice
from launcher.job.failures.failure import (
    SLACK_S,
    Failure,
    FailureKind,
    all_timed_out,
    first_cause,
    looks_like_consequence,
    what_happened,
)
from launcher.job.fleet import HostPhase, HostState
from launcher.job.ranks import RankState
from launcher.job.run import Phase, Run
from launcher.job.timers import NEVER, Timer
from launcher.protocol.reports import Bye, Evidence

ANSWER_S = 15.0  # how long past the grace period a host may take to say that its workers are gone
SLOW_S = 1.0  # after a failure or a Ctrl-C, until the user is shown what is waited for
CHECK_S = 3.0  # to reach a lost host again at the end and look what is left there
PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: not finished, start it again


@dataclass(frozen=True)
class MissingRank:
    """A rank that was at `where`, a line of the user's code, while the others had waited for it in `awaited_in`."""

    rank: int
    host: str
    where: str
    awaited_in: str


@dataclass(frozen=True)
class Outcome:
    """The end of a run: of its last attempt, and how many there were."""

    run_id: str
    exit_code: int
    error: DtrainError | None  # why no worker was started
    signum: int | None  # the signal that ended the run
    cause: Failure | None  # the first failure that was not a consequence of our stopping, and that ended the run
    secondary_failures: tuple[Failure, ...]  # what failed after it by itself
    stopped: int  # workers that ended because we stopped them
    world_size: int
    hosts: int  # that workers were started on, in any attempt
    attempts: int
    no_restart_reason: str  # why no further attempt was made, where one could have been; else empty
    evidence: tuple[Evidence, ...]  # where the ranks stood when the cause was noticed
    swept: int  # processes that outlived their workers and were ended
    left: tuple[tuple[str, tuple[str, ...]], ...]  # by host, the processes that could not be ended
    unchecked: tuple[tuple[str, str], ...]  # hosts that could not be scanned at the end, each with the reason
    duration_s: float
    preempted: bool = False  # it ended to make room; start it again
    left_out: tuple[Failure, ...] = ()  # processes of the last attempt that the others went on without
    faults: tuple[FaultCost, ...] = ()  # of --chaos
    worker_restarts: int = 0  # of single processes, in all attempts
    forked: int = 0  # workers of the last attempt that had their packages imported before they began
    by_exec: tuple[tuple[str, float], ...] = ()  # why others were not forked, and how much longer that takes, in s
    stdin_rank: int | None = None  # which rank had this command's standard input
    # Ranks that had ended by themselves, with 0, if the cause may be a consequence of that.
    finished_ranks: tuple[int, ...] = ()
    collectives: tuple[str, ...] = ()  # in which the ranks disagreed when it was noticed, a line for each
    devices: tuple[str, ...] = ()  # what had gone wrong with GPUs then: `node1: Xid 79 of 0000:3b:00: ...`
    missing: tuple[MissingRank, ...] = ()  # those that the others had waited for until a collective's timeout
    warm: tuple[tuple[str, Bye], ...] = ()  # what each host said of processes that are kept warm


def fails_by_itself(cause: Failure) -> bool:
    """Return whether a worker has failed after USR1, rather than made room: by being killed by it, or by saying so."""
    if cause.kind is FailureKind.EXITED:
        return cause.status != PREEMPTED
    return cause.kind in (FailureKind.RAISED, FailureKind.KILLED) and cause.status != -signal.SIGUSR1


def stop(run: Run, now: float, signum: int = signal.SIGTERM, *,
    error: DtrainError | None = None, no_restart_reason: str | None = None,
) -> list[Command]:  # fmt: skip
    """Stop the hosts that joined, give the others up; but those that may hold something of the run.

    `error`: no worker was started.
    """
    fleet, timers = run.fleet, run.timers
    run.error = error or run.error
    if no_restart_reason is not None:
        run.no_restart_reason = no_restart_reason
    if run.attempt is not None and run.attempt.stopped_at is None:
        run.attempt.stopped_at = now
    commands = run.evidence.end(run.attempt)
    run.enter(Phase.STOPPING)
    run.gathering.closed = True
    run.kill_at = now + run.spec.grace_s
    timers.set(Timer.STOP, run.kill_at + ANSWER_S)
    if signum == signal.SIGINT:
        timers.set(Timer.SLOW_STOP, now + SLOW_S)
    for state in fleet:
        dirty = fleet.dirty(state)
        if state.phase is HostPhase.AWAY and dirty:
            fleet.try_again(state, now, afresh=True)
        elif state.phase is HostPhase.READY or (state.phase is HostPhase.CHECKING and not dirty):
            commands += fleet.stop(state, signum)
        elif state.phase not in (HostPhase.LEAVING, HostPhase.OUT) and not dirty:
            commands += fleet.give_up(state)  # it has not even greeted: the end of its stream ends it
    return [*commands, *fleet.retries(now), *advance_stop(run, now)]


def hurry(run: Run, now: float) -> list[Command]:
    """Have everything killed, and look at no host again."""
    run.hurries = True
    run.timers.cancel(Timer.SLOW_STOP)
    run.timers.set(Timer.STOP, min(run.timers.at(Timer.STOP), now + ANSWER_S))
    commands: list[Command] = []
    for state in run.fleet:
        if state.greeted:
            commands += run.fleet.stop(state)
        elif state.phase is not HostPhase.OUT:
            commands += run.fleet.give_up(state)
    return commands


def retry_or_give_up(run: Run, state: HostState, now: float) -> None:
    """Try a host again whose link has ended while the run stops, if something of the run may be left there."""
    if run.fleet.dirty(state) and not run.hurries and not run.timers.over(Timer.STOP, now):
        run.fleet.try_again(state, now)
    else:
        run.fleet.give_up(state)


def give_up_hosts(run: Run, *phases: HostPhase) -> list[Command]:
    """Give up the hosts in these phases."""
    return [c for state in run.fleet if state.phase in phases for c in run.fleet.give_up(state)]


def advance_stop(run: Run, now: float) -> list[Command]:
    """Give hosts up whose time is over; say what is waited for."""
    fleet, timers = run.fleet, run.timers
    if not fleet.count(HostPhase.GREETING, HostPhase.CHECKING, HostPhase.LEAVING):
        if timers.at(Timer.CHECK) == NEVER:  # no host is left but such as were lost
            timers.set(Timer.CHECK, now + CHECK_S)
        return give_up_hosts(run, HostPhase.AWAY, HostPhase.CONNECTING) if timers.over(Timer.CHECK, now) else []
    return say_if_slow(run, now)


def say_if_slow(run: Run, now: float) -> list[Command]:
    """Say, once, what has failed and what is waited for, if the workers take long to end."""
    if not run.timers.over(Timer.SLOW_STOP, now):
        return []
    run.timers.cancel(Timer.SLOW_STOP)
    attempt = None if run.signum is not None else run.attempt
    failed = "" if attempt is None else why_failed(attempt)
    text = _what_is_waited_for(run, f", because {failed}" if failed else "", now)
    return [Notice(text)] if text else []


def _what_is_waited_for(run: Run, why: str, now: float) -> str:
    """Say it; the text is another one than the report's, which comes next."""
    states = run.fleet.states
    leaving = [state.name for state in run.fleet if state.phase is HostPhase.LEAVING]
    names = leaving if run.stops else sorted(run.fleet.busy)
    lost = [name for name in names if states[name].fenced_at is not None]
    if lost:
        return f"waiting until the workers on {some(lost)} are certainly gone (--heartbeat-timeout-s){why}"
    left_s = run.kill_at - now
    if left_s < SLOW_S or not names:
        return ""
    advice = "; a second Ctrl-C kills at once" if run.signum == signal.SIGINT else ""
    kills = f"what still runs in {left_s:.0f} s is killed (--grace-s)"
    return f"waiting for the workers on {some(names)} to end{why}; {kills}{advice}"


def build_outcome(run: Run, now: float) -> Outcome:
    """Return the outcome of a run that has ended."""
    spec, fleet, attempt = run.spec, run.fleet, run.attempt
    finished = attempt is not None and attempt.finished
    preempted = run.preempted and run.error is None and not finished
    failures = [] if attempt is None else attempt.failures
    cause = first_cause(failures)
    secondary_failures = failures if attempt is None else [*failures, *attempt.secondary_failures]
    left_out = [] if attempt is None else attempt.left_out
    if cause is None and finished and run.signum is None:  # the others finished, but not all of them successfully
        cause = first_cause(left_out)
    unchecked = [state for state in fleet if fleet.dirty(state)]
    return Outcome(
        run_id=spec.run_id,
        exit_code=PREEMPTED if preempted else _exit_code(run.error, cause, run.signum),
        error=run.error,
        signum=run.signum,
        cause=cause,
        secondary_failures=_secondary_failures(secondary_failures, cause),
        finished_ranks=() if attempt is None or cause is None else _finished_ranks(attempt, cause),
        missing=() if attempt is None else _missing(attempt),
        stopped=0 if attempt is None else attempt.ranks.count(RankState.STOPPED),
        world_size=0 if attempt is None else attempt.world_size,
        hosts=len(fleet.used),
        attempts=0 if attempt is None else attempt.number + 1 - spec.first_attempt,
        no_restart_reason=run.no_restart_reason,
        preempted=preempted,
        left_out=tuple(left_out),
        worker_restarts=sum(one.rank is not None for one in run.past),
        faults=tuple(run.chaos.costs),
        evidence=() if attempt is None else attempt.evidence,
        collectives=() if attempt is None or (cause is None and run.signum is None) else _compare_collectives(attempt),
        devices=()
        if cause is None or attempt is None
        else tuple(f"{host}: {line}" for host, found in attempt.devices.items() for line in found),
        swept=fleet.swept,
        left=tuple((host, tuple(processes)) for host, processes in fleet.left.items() if processes),
        unchecked=tuple((state.name, _why_unchecked(state, fleet.timeout_s, now)) for state in unchecked),
        duration_s=now - run.began,
        forked=0 if attempt is None else attempt.forked,
        by_exec=() if attempt is None else tuple(attempt.by_exec.items()),
        stdin_rank=spec.stdin_rank,
        warm=tuple(fleet.byes.items()),
    )


def _compare_collectives(attempt: AttemptState) -> tuple[str, ...]:
    ended = {rank: exited.collectives for rank, exited in attempt.ranks.exits().items() if exited.collectives}
    running = {each.rank: each.collectives for each in attempt.evidence if each.collectives}
    return compare({**ended, **running}, [*ended])


def _missing(attempt: AttemptState) -> tuple[MissingRank, ...]:
    """Return the ranks that were elsewhere when most that failed had waited in vain: they still ran, or waited too."""
    failures = attempt.failures
    if not all_timed_out(failures):
        return ()
    ((awaited_in, number),) = Counter(failure.inside for failure in failures).most_common(1)
    failed = {failure.rank for failure in failures}
    asked = {each.rank: each for each in attempt.evidence if each.rank not in failed}
    rows = [row for rank in ranks_outside([*asked.values()]) if (row := attempt.ranks.get(rank)) is not None]
    if rows:
        return tuple(MissingRank(r.number, r.host, one_place(asked[r.number]), awaited_in) for r in rows)
    others = [each for each in failures if each.inside != awaited_in and each.where and each.rank is not None]
    if not awaited_in or 2 * number <= len(failures):
        return ()
    return tuple(MissingRank(f.rank or 0, f.host, f"{f.where}, inside {f.inside}", awaited_in) for f in others)


def why_failed(attempt: AttemptState) -> str:
    """Say in one line what failed first, or who did not come; empty if nothing has failed."""
    if missing := _missing(attempt):
        return did_not_come(missing)
    cause = first_cause(attempt.failures)
    return "" if cause is None else what_happened(cause)


def did_not_come(missing: Sequence[MissingRank]) -> str:
    """Name the ranks that the failed ones had waited for, and where they were."""
    first = missing[0]
    alike = [each for each in missing if each.where == first.where]
    ranks = some([str(each.rank) for each in alike])
    who, was = (f"rank {ranks}", "it was") if len(alike) == 1 else (f"ranks {ranks}", "they were")
    hosts = some([*dict.fromkeys(each.host for each in alike)])
    what = "backward" if first.awaited_in.endswith("run_backward") else first.awaited_in or "the others"
    more = len(missing) - len(alike)
    others = f"; nor did {more} rank{'' if more == 1 else 's'} in other places" if more else ""
    return f"{who} on {hosts} did not come to {what}: {was} at {first.where}{others}"


def _finished_ranks(attempt: AttemptState, cause: Failure) -> tuple[int, ...]:
    if not looks_like_consequence(cause):
        return ()
    done = attempt.ranks.of(RankState.DONE)
    return tuple(sorted(row.number for row in done if row.ended_at <= cause.at + SLACK_S))


def _secondary_failures(failures: Sequence[Failure], cause: Failure | None) -> tuple[Failure, ...]:
    """Return what failed beside the cause; a host that was lost and then not reached again was lost once."""
    lost = {cause.host} if cause is not None and cause.kind is FailureKind.HOST_LOST else set()
    secondary_failures = []
    for failure in failures:
        if failure.kind is FailureKind.HOST_LOST and failure.host in lost:
            continue
        if cause is not None and (failure is cause or (failure.pid and _process(failure) == _process(cause))):
            continue
        if failure.kind is FailureKind.HOST_LOST:
            lost.add(failure.host)
        secondary_failures.append(failure)
    return tuple(secondary_failures)


def _process(failure: Failure) -> tuple[str, int, int]:
    return failure.host, failure.attempt, failure.pid


def _exit_code(error: DtrainError | None, cause: Failure | None, signum: int | None) -> int:
    if error is not None:
        return error.exit_code
    if cause is not None:
        return cause.exit_code
    return 0 if signum is None else 128 + signum


def _why_unchecked(state: HostState, timeout_s: float, now: float) -> str:
    """Say why a host could not be looked at, and what its agent and guard do by themselves; not that they have."""
    reason = state.reason or "it did not answer"
    if not state.leased or state.fenced_at is None or state.fenced_at == float("inf"):
        return reason
    if now >= state.fenced_at:
        rule = f"a host ends its workers by itself {timeout_s:g} s after it last heard from dtrain"
        return f"{reason}; {rule}, one that is stopped, frozen, paused or asleep when it goes on"
    left_s = max(1.0, state.fenced_at - now)
    return f"{reason}; if it still runs, it ends its workers by itself within {left_s:.0f} s"
