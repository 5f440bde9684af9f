"""The way of a run from phase to phase. Pure; job.py and workers.py say what has happened.

    gathering hosts -> opening the store -> running -> (a round of evidence) -> ending the attempt -> gathering ...
                                                                             -> stopping -> ended

Who can take part is known in gathering.py, where workers may live in fleet.py, what has become of each rank in
ranks.py, what the cause was in failure.py, and how the run ends in ending.py. In recovery/ stands whether there
is another attempt, which processes fail without ending it (restarts.py), and on which hosts it goes on (members.py).
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

from launcher.errors import PlacementError
from launcher.hosts.folding import StartError, some
from launcher.job.attempt import AttemptState
from launcher.job.ending import ANSWER_S, SLOW_S, advance_stop, fails_by_itself, say_if_slow, stop, why_failed
from launcher.job.events import Command, Notice, Send
from launcher.job.failures.failure import Failure, FailureKind, first_cause
from launcher.job.fleet import HostPhase, HostState
from launcher.job.gathering import Readiness, misfits
from launcher.job.orders import open_store, reserve_ports, start_workers
from launcher.job.ranks import ENDED, RankState
from launcher.job.recovery import members, restarts
from launcher.job.recovery.restarts import RestartDecision, failed_attempt, judge, judge_early
from launcher.job.run import Phase, Run
from launcher.job.timers import Timer
from launcher.placement.placement import place_job
from launcher.protocol.commands import EndAttempt
from launcher.protocol.reports import PortsReserved, StoreOpened

ROOT_WAIT_S = 1.0  # so long for what a lost connection is the consequence of


def advance(run: Run, now: float) -> list[Command]:
    """Leave the phase if its work is done."""
    commands: list[Command] = []
    if run.phase is Phase.GATHERING:
        commands = _gather(run, now)
    elif run.phase is Phase.EVIDENCE_ROUND:
        commands = _end_attempt_when_known(run, now)
    elif run.phase is Phase.ENDING:
        commands = say_if_slow(run, now) if run.fleet.busy else _attempt_over(run, now)
    elif not run.stops and run.evidence.over(now):
        commands = _looked(run, now) if run.evidence.looks else run.evidence.end(run.attempt)
    if run.phase is Phase.RUNNING:
        commands += _go_on(run, now)
    if run.attempt is not None:
        commands += run.chaos.advance(run.attempt, now, runs=run.phase is Phase.RUNNING)
    commands += _inspect(run, now)
    if run.phase is Phase.STOPPING:  # perhaps since just now, and with no host to wait for
        commands += advance_stop(run, now)
        if run.fleet.count(HostPhase.OUT) == len(run.fleet):
            run.phase = Phase.ENDED
    return commands


def _inspect(run: Run, now: float) -> list[Command]:
    """Begin what commands have asked for, or refuse it."""
    if run.attempt is None or run.phase is not Phase.RUNNING:
        commands = run.evidence.refuse_all(f"no worker can be looked at now: {run.progress}")
    else:
        commands = run.evidence.due(run.attempt, run.fleet, now)
    return commands if run.attempt is None else [*commands, *run.debuggers.due(run.attempt, run.fleet, now)]


def _go_on(run: Run, now: float) -> list[Command]:
    """Begin the generations that are due, start workers again, and those of hosts that have come."""
    ranks = run.current.ranks
    commands = _go_on_without(run, now) if ranks.count(RankState.LOST) else []
    if ranks.count(RankState.LOST) or run.phase is not Phase.RUNNING:
        return commands
    commands += restarts.due(run, now)
    return [*commands, *members.join(run, now)]


def _go_on_without(run: Run, now: float) -> list[Command]:
    """Have other hosts take the places of lost ones, or end the attempt where that cannot be."""
    ranks = run.current.ranks
    failure = next(iter(ranks.lost_hosts.values()))
    readiness = members.decide(run, now)
    if readiness is Readiness.WAIT:
        return []
    commands = members.go_on(run, now) if readiness is Readiness.BEGIN else None
    if commands is not None:
        return commands
    commands = fail(run, failure, now)
    if readiness is Readiness.TOO_FEW:
        commands += stop(run, now, no_restart_reason=run.gathering.why_not_again())
    return commands


def _gather(run: Run, now: float) -> list[Command]:
    """Begin an attempt if the hosts for it are ready, or find out that they will not be."""
    readiness = run.gathering.decide(now)
    if readiness is Readiness.WAIT:
        return run.gathering.show_how_far(run.progress, now)
    said = run.gathering.say_after_killed_runs()
    if readiness is Readiness.TOO_FEW:
        return [*said, *_cannot_begin(run, now)]
    return [*said, *run.gathering.show_how_far("", now), *_begin(run, now)]


def _cannot_begin(run: Run, now: float) -> list[Command]:
    """End, since too few hosts are ready in time."""
    attempt = run.attempt
    if attempt is None:
        return stop(run, now, error=StartError(run.gathering.why_not_ready(), len(run.fleet)))
    if not attempt.failures:  # it had ended to grow
        missing = next(s for s in map(run.fleet.states.__getitem__, attempt.members) if s.phase != HostPhase.READY)
        why = missing.reason or "it did not answer"
        attempt.take_failure(attempt.failure(FailureKind.HOST_LOST, missing.name, why, now))
    return stop(run, now, no_restart_reason=run.gathering.why_not_again())


def _begin(run: Run, now: float) -> list[Command]:
    """Make the next attempt of the hosts that are ready."""
    spec, last = run.spec, run.attempt
    previous = run.gathering.previous
    names = members.choose_members(previous, [state.name for state in run.fleet.ready()], spec.max_hosts)
    states = [run.fleet.states[name] for name in names]
    try:
        placement = place_job(spec, [state.offer() for state in states])
    except PlacementError as error:
        if commands := run.gathering.leave_out_misfits(states):
            return [*commands, *_gather(run, now)]
        if last is None or not last.failures:
            return stop(run, now, error=error)
        return stop(run, now, no_restart_reason=f"no further attempt: {error}")
    number = spec.first_attempt if last is None else last.number + 1
    commands = []
    if last is not None:
        commands.append(Notice(_attempt_begins(number, names, previous)))
        commands += run.gathering.count_absence(last.grown_for, names)
    run.attempt = AttemptState(
        number, names, placement, run.timers,
        began=now, stall_s=spec.stall_timeout_s, start_s=spec.start_timeout_s,
    )  # fmt: skip
    run.timers.cancel(Timer.GENERATION, Timer.COMPOSE, Timer.JOIN)
    run.hangs.begin()
    run.enter(Phase.OPENING_STORE)
    # A run of fixed size has what is left of its time. Any other may have used it up waiting for more hosts.
    fixed = last is None and not spec.elastic
    run.timers.set(Timer.PHASE, run.timers.at(Timer.GATHER) if fixed else now + spec.start_timeout_s)
    for state in states:
        run.fleet.occupy(state)
    ports = reserve_ports(spec, states, placement, number)
    run.attempt.ports_wanted = set(ports)
    store = Send(states[0].name, open_store(spec, states, number))
    return [*commands, store, *(Send(name, order) for name, order in ports.items())]


def _attempt_begins(number: int, members: Sequence[str], previous: Sequence[str]) -> str:
    now, before = set(members), set(previous)
    gone = [name for name in previous if name not in now]
    come = [name for name in members if name not in before]
    hosts = f"{len(members)} host{'s' if len(members) > 1 else ''}"
    without = f", without {some(gone)}" if gone else ""
    return f"attempt {number} begins on {hosts}{without}" + (f", with {some(come)}" if come else "")


def opened(run: Run, host: str, message: StoreOpened | PortsReserved, now: float) -> list[Command]:
    """Start the workers, once the store is open and all ports are known by which they reach each other."""
    attempt = run.current
    if run.phase is Phase.RUNNING and isinstance(message, StoreOpened):
        members.store_opened(run, host, message)
    if run.phase is not Phase.OPENING_STORE:
        return []
    if isinstance(message, StoreOpened):
        attempt.store = message
    else:
        attempt.ports[host] = message
        attempt.ports_wanted.discard(host)
    if attempt.store is None or attempt.ports_wanted:
        return []
    wait_s = 0.5 * max(0.0, run.timers.at(Timer.PHASE) - now)  # the other half is for imports of their own
    known = (run.spec, attempt.placement, attempt.store, attempt.ports)
    try:
        starts = [*start_workers(*known, run_key=run.run_key, wait_s=wait_s)]
    except PlacementError as error:
        return stop(run, now, error=error)
    run.phase = Phase.RUNNING  # the time for the start goes on
    return [*starts]


def grow_with(run: Run, state: HostState | None, now: float) -> list[Command]:
    """End the attempt if there is room in the next one for a host that has come, and it cannot join this one."""
    attempt = run.attempt
    if run.phase is not Phase.RUNNING or attempt is None or not run.spec.grow:
        return []
    if not attempt.all_started or attempt.ranks.count(*ENDED) or len(attempt.members) >= run.spec.max_hosts:
        return []
    if attempt.ranks.count(RankState.LOST) or members.suits(run):
        return []
    if state is None:
        known = set(attempt.members)
        state = next((s for s in run.fleet if s.phase is HostPhase.READY and s.name not in known), None)
    if state is None or state.name in attempt.members or misfits(run.spec, [state]):
        return []
    if state.name in run.fleet.busy:  # it joins
        return []
    attempt.grown_for = state.name
    notice = Notice(f"{state.name} has come; attempt {attempt.number} ends so that the next one can use it")
    return [notice, *_end_attempt(run, now)]


def fail(run: Run, failure: Failure, now: float) -> list[Command]:
    """Note a failure; the first one ends the attempt, after a look at where the others stand."""
    attempt = run.current
    if attempt.stopped_at is not None and failure.at >= attempt.stopped_at:
        # Where the user or a growing run stopped it, it may end as it likes; else it followed from another.
        if run.signum is None and not attempt.grown_for:
            attempt.secondary_failures.append(failure)
        return []
    attempt.take_failure(failure)
    restarts.overtake(run, failure)
    members.give_up(run)
    if run.phase in (Phase.OPENING_STORE, Phase.RUNNING):
        run.timers.set(Timer.SLOW_STOP, now + SLOW_S)
    if run.phase is Phase.OPENING_STORE:
        return _end_attempt(run, now)
    if run.phase is not Phase.RUNNING:
        return []
    commands = run.evidence.end(attempt)
    run.enter(Phase.EVIDENCE_ROUND)
    run.timers.set(Timer.ROOT, now + ROOT_WAIT_S)
    if failure.kind is FailureKind.HUNG:  # all ranks were looked at before
        return commands
    return [*commands, *run.evidence.begin(run.fleet.workers_of(attempt.members), now)]


def look_for_hangs(run: Run, now: float) -> list[Command]:
    """Look where all ranks are, if some may hang; not while others may wait for one that starts."""
    attempt = run.attempt
    if run.phase is not Phase.RUNNING or attempt is None or not attempt.is_whole:
        return []
    if run.evidence.under_way or run.evidence.looks or run.debuggers.any_open or not run.hangs.wants_look(attempt, now):
        return []
    return run.evidence.begin(run.fleet.workers_of(attempt.members), now, is_look=True)


def _looked(run: Run, now: float) -> list[Command]:
    """Act on ranks that hang, if the look that is over shows any."""
    number, found = run.evidence.end_look()
    found = tuple(each for each in found if run.current.ranks.get(each.rank) is not None)  # a host may be lost since
    if run.phase is Phase.RUNNING and (waiting := run.hangs.waiting(run.current, found, now)):
        return run.hangs.report_waiting(run.current, waiting, number)
    blame = run.hangs.blame(found, now)
    if run.phase is not Phase.RUNNING or blame is None or run.debuggers.any_open:
        return []
    if blame.hung:
        return run.hangs.act_on(run.current, blame, number, now)
    if not run.hangs.policy.acts:
        return run.hangs.report_circle(run.current, blame, number)
    message = f"no rank has shown a sign of life for {blame.silent_s:.0f} s, and all of them wait"
    return fail(run, run.current.failure(FailureKind.STALLED, "", message, now), now)


def _end_attempt_when_known(run: Run, now: float) -> list[Command]:
    """End the attempt once its evidence is there, and something that is no mere consequence of something else."""
    attempt = run.current
    if run.evidence.under_way and not run.evidence.over(now):
        return []
    if run.stops_with is not None:
        return stop(run, now, run.stops_with)
    commands = run.evidence.end(attempt)
    if attempt.first_root_at is None:
        if not run.timers.over(Timer.ROOT, now):
            return commands
        # The root may be a host that has sent nothing since: before long it does, or is lost.
        quiet = (run.fleet.states[name] for name in run.fleet.workers_of(run.evidence.unanswered))
        is_late = run.timers.over(Timer.ROOT, now - run.fleet.timeout_s)  # its clock may have stood still for a time
        if not is_late and any(state.alive_at + ROOT_WAIT_S <= run.timers.at(Timer.ROOT) for state in quiet):
            return commands
    return [*commands, *_end_attempt(run, now)]


def _end_attempt(run: Run, now: float) -> list[Command]:
    """Have all workers ended; for good, if there can be no other attempt."""
    attempt = run.current
    cause = first_cause(attempt.failures)
    if cause is not None:
        run.timers.set(Timer.SLOW_STOP, max(run.timers.at(Timer.SLOW_STOP), now + SLOW_S / 2))
    if run.preempted and not (cause is not None and fails_by_itself(cause)):
        return stop(run, now)
    run.preempted = False  # whatever it was warned of
    if cause is not None:
        decision = _judge_early(run, cause)
        if decision.again_after_s is None:
            return stop(run, now, no_restart_reason=decision.reason)
    attempt.stopped_at = now
    commands = run.evidence.end(attempt)
    run.enter(Phase.ENDING)
    run.kill_at = now + run.spec.grace_s
    run.timers.set(Timer.PHASE, run.kill_at + ANSWER_S)
    end = EndAttempt(attempt=attempt.number, signum=signal.SIGTERM)
    hosts = [*attempt.members, *sorted(run.fleet.busy - {*attempt.members})]  # some were about to join
    return [*commands, *(Send(name, end) for name in run.fleet.workers_of(hosts))]


def _judge_early(run: Run, cause: Failure) -> RestartDecision:
    """Decide about another attempt while this one is about to end."""
    attempt = run.current
    if any(failure is cause for failure in attempt.last_failures):
        return RestartDecision(None, attempt.no_restart_reason)
    return judge_early(run.spec, run.past, cause, succeeds=attempt.ranks.restarts_of(cause.rank) > 0)


def _attempt_over(run: Run, now: float) -> list[Command]:
    """Decide what comes after an attempt whose workers are gone everywhere."""
    attempt = run.current
    run.timers.cancel(Timer.SLOW_STOP)
    cause = first_cause(attempt.failures)
    if cause is None and attempt.finished:  # while we were about to grow
        return stop(run, now)
    delay_s, notices = 0.0, []
    if cause is not None:
        ran_s, succeeds = max(0.0, cause.at - attempt.began), attempt.ranks.restarts_of(cause.rank) > 0
        run.past.append(failed_attempt(run.spec, cause, ran_s=ran_s, saved=attempt.saved, succeeds=succeeds))
        decision = judge(run.spec, run.past)
        if decision.again_after_s is None:
            return stop(run, now, no_restart_reason=decision.reason)
        delay_s = decision.again_after_s
        notices = [Notice(_attempt_ended(attempt, delay_s))]
    commands = run.gathering.leave_out(attempt, cause)
    run.enter(Phase.GATHERING)
    run.gathering.again(attempt.members, now, delay_s)
    return [*notices, *commands, *_gather(run, now)]


def _attempt_ended(attempt: AttemptState, delay_s: float) -> str:
    when = f"; the next one begins in {delay_s:g} s" if delay_s else ""
    return f"attempt {attempt.number} failed: {why_failed(attempt)}{when}"


def look_then_stop(run: Run, now: float, signum: int) -> list[Command]:
    """Stop a run that seems hung, once it is known where the ranks stand."""
    attempt = run.current
    attempt.stopped_at = now
    run.stops_with = signum
    commands = run.evidence.end(attempt)
    run.enter(Phase.EVIDENCE_ROUND)
    return [*commands, *run.evidence.begin(run.fleet.workers_of(attempt.members), now)]
