"""The job: a pure state machine. Events go in with the time, commands come out; nothing here waits or touches a file.

The controller owns it and calls `handle` from one loop. What each event means is here; the phases that it may lead to
are in lifecycle.py.
"""

from __future__ import annotations

import signal

from launcher.errors import HostError
from launcher.hosts.folding import some
from launcher.hosts.host import Host
from launcher.job.attempt import AttemptState
from launcher.job.ending import Outcome, build_outcome, give_up_hosts, hurry, retry_or_give_up, stop
from launcher.job.events import (
    AgentMessage,
    Asked,
    AskerLeft,
    AskerSent,
    Command,
    Connected,
    DebuggerQuestion,
    Discovered,
    Event,
    Lost,
    ReaderBlocked,
    Send,
    Sending,
    Signalled,
    Slept,
    StacksQuestion,
    SuspendSelf,
    Tick,
)
from launcher.job.failures.failure import FailureKind
from launcher.job.fleet import HostPhase, HostState
from launcher.job.inspection import TERMINAL, refuse
from launcher.job.lifecycle import advance, fail, grow_with, look_then_stop
from launcher.job.ranks import JOINS, RankState
from launcher.job.recovery import members
from launcher.job.run import Phase, Run
from launcher.job.timers import NEVER, Timer
from launcher.job.workers import take_report
from launcher.placement.job_spec import JobSpec
from launcher.protocol.commands import SignalWorkers
from launcher.protocol.message import Report
from launcher.protocol.reports import Bye, Collected, DebuggerClosed, DebuggerOpened, Evidence, Facts, Hello
from launcher.protocol.two_way import ChannelData, ChannelTaken


class Job:
    """See the module. `start` gives the first commands; `progress` says in a few words what the run is waiting for."""

    def __init__(self, spec: JobSpec, now: float, *, run_key: str = "") -> None:
        self.spec = spec
        self.run = Run(spec, now, run_key)
        self.fleet = self.run.fleet
        self.outcome: Outcome | None = None
        self._timers = self.run.timers
        self._suspended = False

    @property
    def phase(self) -> Phase:
        return self.run.phase

    @property
    def attempt(self) -> AttemptState | None:
        return self.run.attempt

    @property
    def hosts(self) -> list[Host]:
        """The hosts that had workers."""
        return [state.host for state in self.fleet if state.name in self.fleet.used]

    @property
    def began(self) -> float:
        return self.run.began

    @property
    def fails(self) -> bool:
        """Whether something has failed, and the attempt is not whole again."""
        return self.attempt is not None and (self.attempt.lacks_workers or bool(self.attempt.failures))

    @property
    def progress(self) -> str:
        return self.run.progress

    def start(self) -> list[Command]:
        return self.fleet.start()

    def deadline(self) -> float:
        """Return when the next Tick matters."""
        return self._timers.next_deadline()

    def handle(self, event: Event, now: float) -> list[Command]:
        """Handle one event; return what to do, in order."""
        if self.phase is Phase.ENDED:
            return []
        commands = [*self._take(event, now), *advance(self.run, now)]
        if self.run.phase is Phase.ENDED:
            self.outcome = build_outcome(self.run, now)
        if not self.run.stops:
            commands += self.fleet.open_untried()
        if self._timers.over(Timer.BEAT, now):  # where event follows event, there is no Tick between them
            commands += self.fleet.heartbeats(now)
        return commands

    def _take(self, event: Event, now: float) -> list[Command]:
        match event:
            case Connected() | AgentMessage() | Lost():
                state = self.fleet.states[event.host]
                if event.link != state.link or state.phase in (HostPhase.AWAY, HostPhase.OUT):
                    return []  # of a link that was given up
                if isinstance(event, Lost):
                    return self._lost(state, event.reason, now)
                if isinstance(event, AgentMessage):
                    self.fleet.hear(state, event.message, now)
                    return self._said(state, event.message, now)
                if state.phase is HostPhase.CONNECTING:
                    self.fleet.connected(state, event.our_address, now)
            case Discovered():
                return self.run.gathering.discovered(event.hosts, now)
            case ReaderBlocked():
                self.fleet.hear(self.fleet.states[event.host], None, now)
                if self.attempt is not None:
                    self.attempt.made_progress(now)
            case Sending() if self.attempt is None:
                self._timers.slept(event.seconds)
            case Slept():
                self.fleet.slept(event.seconds)
                self._timers.slept(event.seconds)
            case Signalled():
                return self._signalled(event.signum, now)
            case Tick():
                return self._ticked(now)
            case Asked():
                return self._asked(event)
            case AskerSent():
                return self.run.debuggers.pass_on(event)
            case AskerLeft():
                self.run.evidence.leave(event.asker)
                return self.run.debuggers.leave(event.asker)
        return []

    def _asked(self, asked: Asked) -> list[Command]:
        match asked.question:
            case StacksQuestion() as question:
                self.run.evidence.ask(asked.asker, question)  # `advance` begins the round
            case DebuggerQuestion() as question:
                if self.attempt is None or self.phase is not Phase.RUNNING:
                    return refuse([asked.asker], f"no rank can be debugged now: {self.progress}")
                return self.run.debuggers.ask(asked.asker, question, self.attempt, self.fleet)
        return []

    def _said(self, state: HostState, message: Report, now: float) -> list[Command]:
        """Take what a host says of itself, of what it was asked, and of the attempt if it takes part."""
        match message:
            case Hello():
                return self.run.gathering.greeted(state, message)
            case Facts():
                commands = self.run.gathering.checked(state, message)
                return [*commands, *grow_with(self.run, state, now)] if state.phase is HostPhase.READY else commands
            case Bye():
                return self._bye(state, message, now)
            case Collected() | Evidence():
                self.run.evidence.take(state.name, message, self.attempt)
                return []
            case DebuggerOpened() | DebuggerClosed() | ChannelData() | ChannelTaken():
                return self.run.debuggers.said(state.name, message)
        return take_report(self.run, state, message, now)

    def _lost(self, state: HostState, reason: str, now: float) -> list[Command]:
        """Give a host up. If it was quiet before, it went at some time after it last sent something."""
        silent = now - state.alive_at >= self.fleet.quiet_s
        was_coming = state.phase not in (HostPhase.READY, HostPhase.LEAVING)
        if state.phase is HostPhase.LEAVING and state.reason:
            reason = state.reason
        commands = [*self.fleet.lost(state, reason, now), *self._after_link(state, reason, now)]
        had_workers = state.name in self.fleet.busy
        at = state.alive_at if silent else now
        return commands + self._gone(state, had_workers, reason, at, now, silent=silent, was_coming=was_coming)

    def _bye(self, state: HostState, bye: Bye, now: float) -> list[Command]:
        expected = state.phase is HostPhase.LEAVING
        reason = state.reason if expected else bye.reason or "its agent was ended by another program than dtrain"
        had_workers = state.name in self.fleet.busy
        commands = [*self.fleet.said_bye(state, bye, reason), *self._after_link(state, reason, now)]
        if expected:
            return commands
        stopped = [] if self.attempt is None else self.attempt.ranks.by_host(RankState.STOPPED).get(state.name, [])
        at = min((row.ended_at for row in stopped), default=now)
        return commands + self._gone(state, had_workers, reason, min(now, at), now)

    def _after_link(self, state: HostState, reason: str, now: float) -> list[Command]:
        """Decide whether a host whose link has ended is tried again; end what waits for it."""
        self.run.evidence.forget(state.name)
        needed = self.fleet.wanted(state) or self.fleet.dirty(state)
        if self.run.stops:
            retry_or_give_up(self.run, state, now)
        elif needed and (self.spec.elastic or self.attempt is not None):
            self.fleet.try_again(state, now)
        else:
            self.fleet.give_up(state)
        return self.run.debuggers.lost(state.name, reason)

    def _gone(
        self, state: HostState, had_workers: bool, reason: str, at: float, now: float, *,
        silent: bool = False, was_coming: bool = False,
    ) -> list[Command]:  # fmt: skip
        """Draw the consequences of a host that has gone without an order to."""
        attempt = self.attempt
        if attempt is None or self.phase is Phase.GATHERING:
            self.run.gathering.problems.setdefault(state.name, reason)
            return self.run.gathering.say_unusable(state, reason) if was_coming and attempt is None else []
        if had_workers and state.name in attempt.ranks.by_host(*JOINS):
            return members.leave(self.run, state.name, reason)
        if not had_workers or attempt.finished or not attempt.needs(state.name):
            return []
        injected = self.run.chaos.made(state.name, None, now)
        failure = attempt.failure(FailureKind.HOST_LOST, state.name, reason, at, noticed=now, injected=injected)
        if self.phase is Phase.STOPPING and not silent:
            return []
        if silent:
            # It may have gone any time until its next heartbeat was due: what is known to have failed by then was
            # before it, and once the others are stopped it is unknown that it would have failed.
            known = min(attempt.first_root_at or NEVER, attempt.stopped_at or NEVER)
            if known <= at + self.fleet.quiet_s:
                attempt.secondary_failures += [failure] if attempt.first_root_at is not None else []
                return []
        commands = None
        if self.phase is Phase.RUNNING and not self.run.preempted:
            commands = members.lose_host(self.run, failure, now)
        return fail(self.run, failure, now) if commands is None else commands

    def _signalled(self, signum: int, now: float) -> list[Command]:
        match signum:
            case signal.SIGUSR1 | signal.SIGUSR2:
                return self._warned(signum, now)
            case signal.SIGQUIT:
                self.run.evidence.ask(TERMINAL, StacksQuestion())
                return []
            case signal.SIGTSTP:
                self._suspended = True
                return [*self.fleet.suspend(True, now), SuspendSelf()]
            case signal.SIGCONT:
                was_suspended, self._suspended = self._suspended, False
                return self.fleet.suspend(False, now) if was_suspended else []
        is_second = self.run.stops or self.run.stops_with is not None  # while it looks where ranks stand
        commands = [] if self.run.stops else self._stopped_by(signum, now)
        if is_second and signum == signal.SIGINT and self.run.stops:
            commands += hurry(self.run, now)
        return commands

    def _warned(self, signum: int, now: float) -> list[Command]:
        """Pass a signal on to the workers; one of both may say that the time of the run is nearly up."""
        run = self.run
        run.preempted |= signum == signal.SIGUSR1 and self.spec.requeue
        if run.preempted and self.phase in (Phase.GATHERING, Phase.OPENING_STORE):  # nothing is there to be saved
            return stop(run, now)
        if self.phase is not Phase.RUNNING:
            return []
        return [Send(name, SignalWorkers(signum=signum)) for name in self.fleet.workers_of(run.current.members)]

    def _stopped_by(self, signum: int, now: float) -> list[Command]:
        attempt = self.attempt
        self.run.preempted &= signum == signal.SIGTERM  # which SLURM sends at the end; a user sends the others
        if self.run.stops_with is not None:  # by another signal: a further one only ends the look
            return stop(self.run, now, self.run.stops_with)
        if attempt is not None and self.phase is Phase.GATHERING:
            # History; it is the signal that ends the run.
            attempt.failures, attempt.secondary_failures, attempt.evidence = [], [], ()
        if attempt is None or not attempt.failures:
            self.run.signum = signum
        if self.phase is Phase.RUNNING and attempt is not None:
            if attempt.seems_hung(now):
                return look_then_stop(self.run, now, signum)
            attempt.evidence = ()  # of a hang that is over
        return stop(self.run, now, signum)

    def _ticked(self, now: float) -> list[Command]:
        run, due = self.run, self._timers.due(now)
        commands: list[Command] = []
        if Timer.LOOK in due:
            for state in self.fleet.silent(now):
                commands += self._lost(state, f"nothing was heard from it for {now - state.heard:.0f} s", now)
        if not run.stops:
            self.fleet.fence(now)
            if self._timers.over(Timer.PHASE, now):
                commands += self._too_slow(now)
        elif Timer.STOP in due:
            for state in self.fleet:
                if state.connected:
                    commands += self._lost(state, "it did not say that its workers are gone", now)
            commands += give_up_hosts(run, *(phase for phase in HostPhase if phase is not HostPhase.OUT))
        if self.phase is Phase.RUNNING and Timer.STALL in due:
            commands += self._stalled(now)
        return commands + self.fleet.retries(now)

    def _stalled(self, now: float) -> list[Command]:
        attempt = self.run.current
        if (
            attempt.ranks.count(RankState.LOST)
            or self.run.debuggers.any_open
            or not attempt.all_started
            or attempt.restarts_one
            or not self._timers.over(Timer.STALL, now)
        ):
            return []
        message = f"no rank has made progress for {self.spec.stall_timeout_s:g} s"
        return fail(self.run, attempt.failure(FailureKind.STALLED, "", message, now), now)

    def _too_slow(self, now: float) -> list[Command]:
        """Act on the end of this phase's time."""
        attempt = self.run.current
        limit = f"{self.spec.start_timeout_s:g} s (--start-timeout-s)"
        if self.phase is Phase.ENDING:
            if never := self.fleet.never_fenced():
                reason = f"no further attempt: workers of the last one may still live on {some(never)}"
                return stop(self.run, now, no_restart_reason=reason)
            self._timers.set(Timer.PHASE, now + self.fleet.timeout_s)
            late = self.fleet.workers_of(sorted(self.fleet.busy))
            reason = "it did not say that its workers are gone"
        elif self.phase is Phase.OPENING_STORE:
            late, reason = [attempt.members[0]], f"the rendezvous store was not opened within {limit}"
        else:
            self._timers.cancel(Timer.PHASE)
            starting = {row.number for row in attempt.ranks.of(RankState.STARTING)}
            ranks = {w.host: w.rank for w in reversed(attempt.placement.workers) if w.rank in starting}
            late = [name for name in attempt.members if name in ranks]
            reason = f"rank {min(ranks.values(), default=0)} was not started within {limit}"
        is_first = attempt.number == self.spec.first_attempt and not attempt.fresh
        if late and is_first and self.phase is not Phase.ENDING:
            return stop(self.run, now, error=HostError(some(late), reason))
        states = [self.fleet.states[name] for name in late]
        return [command for state in states if state.connected for command in self._lost(state, reason, now)]
