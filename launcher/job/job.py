"""The job: a pure state machine. Events go in with the time, commands come out; nothing here waits or touches a file.

The controller owns it and calls `handle` from one loop. What each event means is here; the phases that it may lead to
are in lifecycle.py.
"""

from __future__ import annotations

import signal

from launcher.errors import HostError, StoreError
from launcher.job.attempt import AttemptState
from launcher.job.events import (
    AgentMessage,
    Asked,
    AskerLeft,
    AskerSent,
    AskerTook,
    Command,
    Connected,
    Discovered,
    Event,
    Lost,
    ReaderBlocked,
    Send,
    Signalled,
    Slept,
    StacksQuestion,
    SuspendSelf,
    Tick,
)
from launcher.job.failure import FailureKind, failure_of, what_happened
from launcher.job.host_state import HostPhase, HostState
from launcher.job.inspection.stacks import refuse
from launcher.job.lifecycle import ROOT_WAIT_S, Lifecycle
from launcher.job.outcome import Outcome, fails_by_itself
from launcher.job.progress_messages import Phase, progress, some
from launcher.job.recovery.generations import with_early_end
from launcher.job.timers import NEVER, Timer
from launcher.placement.job_spec import JobSpec
from launcher.protocol.commands import SignalWorkers
from launcher.protocol.message import Report
from launcher.protocol.reports import (
    Bye,
    Collected,
    DebuggerClosed,
    DebuggerOpened,
    Evidence,
    Exited,
    Facts,
    Failing,
    Hello,
    PortsReserved,
    Returned,
    Started,
    Stepped,
    StoreFailed,
    StoreOpened,
    Swept,
)
from launcher.protocol.two_way import ChannelData, ChannelTaken, Heartbeat

__all__ = ["ROOT_WAIT_S", "Job", "Phase"]


class Job:
    """See the module. `start` gives the first commands; `progress` says in a few words what the run is waiting for."""

    def __init__(self, spec: JobSpec, now: float, *, run_key: str = "") -> None:
        self.spec = spec
        self._run = Lifecycle(spec, now, run_key)
        self.fleet = self._run.fleet
        self._timers = self._run.timers
        self._suspended = False

    @property
    def phase(self) -> Phase:
        return self._run.phase

    @property
    def attempt(self) -> AttemptState | None:
        return self._run.attempt

    @property
    def began(self) -> float:
        return self._run.began

    @property
    def fails(self) -> bool:
        """Whether something has failed, and the attempt is not whole again."""
        return self._run.lacks_workers or (self.attempt is not None and bool(self.attempt.failures))

    @property
    def outcome(self) -> Outcome | None:
        return self._run.outcome

    @property
    def progress(self) -> str:
        return progress(self.phase, self.fleet, self.attempt)

    def start(self) -> list[Command]:
        return self.fleet.start()

    def deadline(self) -> float:
        """Return when the next Tick matters."""
        return self._timers.next_deadline()

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event; return what is to be done, in order."""
        if self.phase is Phase.ENDED:
            return []
        commands = [*self._take(event, now), *self._run.advance(now)]
        if self._run.stopping is None:
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
                return self._run.gathering.discovered(event.hosts, now)
            case ReaderBlocked():
                self.fleet.hear(self.fleet.states[event.host], None, now)
                if self.attempt is not None:
                    self.attempt.made_progress(now)
            case Slept():
                self.fleet.slept(event.seconds)
                self._timers.slept(event.seconds)
            case Signalled():
                return self._signalled(event.signum, now)
            case Tick():
                return self._ticked(now)
            case Asked():
                return self._asked(event)
            case AskerSent() | AskerTook():
                return self._run.debuggers.take(event)
            case AskerLeft():
                self._run.stacks.leave(event.asker)
                return self._run.debuggers.leave(event.asker)
        return []

    def _asked(self, asked: Asked) -> list[Command]:
        if isinstance(asked.question, StacksQuestion):
            self._run.stacks.ask(asked)  # `advance` begins the round
            return []
        if self.attempt is None or self.phase is not Phase.RUNNING:
            return refuse(asked.asker, f"no rank can be debugged now: {self.progress}")
        return self._run.debuggers.ask(asked, self.attempt, self.fleet)

    def _said(self, state: HostState, message: Report, now: float) -> list[Command]:
        """Take what a host says of itself, and of the attempt if it takes part."""
        match message:
            case Hello():
                return self._run.gathering.greeted(state, message)
            case Facts():
                commands = self._run.gathering.checked(state, message)
                return [*commands, *self._run.grow_with(state, now)] if state.phase is HostPhase.READY else commands
            case Bye():
                return self._bye(state, message, now)
        attempt = self.attempt
        if attempt is None or state.name not in self.fleet.busy or state.phase is HostPhase.CHECKING:
            return []
        match message:
            case Heartbeat():
                return self._beat(attempt, state, message, now)
            case Collected() | Evidence():
                self._run.evidence.take(state.name, message)
                return []
            case DebuggerOpened() | DebuggerClosed() | ChannelData() | ChannelTaken():
                return self._run.debuggers.said(state.name, message)
        if getattr(message, "attempt", None) != attempt.number:
            return []
        match message:
            case StoreOpened() | PortsReserved():
                return self._run.opened(state.name, message, now)
            case StoreFailed():
                return self._store_failed(attempt, state, message, now)
            case Started() | Failing() | Exited() if state.name not in attempt.members:
                return self._of_newcomer(attempt, state, message)
            case Started():
                attempt.take_start(message, now)
                self._run.started(message.rank, now)
                return self._run.grow_with(None, now) if attempt.all_started else []
            case Returned():
                attempt.made_progress(now)
            case Stepped():
                self._run.chaos.goes_on(message.rank, now, has_stepped=True)
            case Failing():
                return self._failing(attempt, state, message, now)
            case Exited():
                told = self._run.debuggers.exited(message.rank, _how_ended(state.name, message))
                return [*told, *self._exited(attempt, state, message, now)]
            case Swept():
                return self._swept(attempt, state, message)
        return []

    def _of_newcomer(
        self, attempt: AttemptState, state: HostState, message: Started | Failing | Exited
    ) -> list[Command]:
        """Take what happens to a worker that the others do not know: of a host that is to join, or was to."""
        if not self._run.compositions.joins(state.name):
            return []
        if isinstance(message, Started):
            self._run.compositions.started(attempt, state.name, message.rank)
            return []
        why = what_happened(failure_of(state.name, message, 0.0, attempt=attempt.number))
        return self._run.compositions.leave(attempt, state.name, why)

    def _lost(self, state: HostState, reason: str, now: float) -> list[Command]:
        """Give a host up. If it was quiet before, it went at some time after it was heard last."""
        silent = now - state.heard >= self.fleet.quiet_s
        was_coming = state.phase not in (HostPhase.READY, HostPhase.LEAVING)
        if state.phase is HostPhase.LEAVING and state.reason:
            reason = state.reason
        commands = self.fleet.lost(state, reason, now)
        self._after_link(state, now)
        commands += self._run.debuggers.lost(state.name, reason)
        had_workers = state.name in self.fleet.busy
        at = state.heard if silent else now
        return commands + self._gone(state, had_workers, reason, at, now, silent=silent, was_coming=was_coming)

    def _bye(self, state: HostState, bye: Bye, now: float) -> list[Command]:
        expected = state.phase is HostPhase.LEAVING
        reason = state.reason if expected else bye.reason or "its agent was told to end by somebody else"
        had_workers = state.name in self.fleet.busy
        commands = self.fleet.said_bye(state, bye, reason)
        self._after_link(state, now)
        commands += self._run.debuggers.lost(state.name, reason)
        if expected:
            return commands
        provoked_at = self.attempt.provoked_at.get(state.name) if self.attempt is not None else None
        at = now if provoked_at is None else min(now, provoked_at)
        return commands + self._gone(state, had_workers, reason, at, now)

    def _after_link(self, state: HostState, now: float) -> None:
        """Decide whether a host whose link has ended is tried again."""
        self._run.evidence.forget(state.name)
        needed = self.fleet.wanted(state) or self.fleet.dirty(state)
        if self._run.stopping is not None:
            self._run.stopping.left(state, now)
        elif needed and (self.spec.elastic or self.attempt is not None):
            self.fleet.try_again(state, now)
        else:
            self.fleet.give_up(state)

    def _gone(
        self, state: HostState, had_workers: bool, reason: str, at: float, now: float, *,
        silent: bool = False, was_coming: bool = False,
    ) -> list[Command]:  # fmt: skip
        """Draw the consequences of a host that has gone without an order to."""
        attempt = self.attempt
        if attempt is None or self.phase is Phase.GATHERING:
            self._run.gathering.problems.setdefault(state.name, reason)
            return self._run.gathering.say_unusable(state, reason) if was_coming and attempt is None else []
        if had_workers and self._run.compositions.joins(state.name):
            return self._run.compositions.leave(attempt, state.name, reason)
        if not had_workers or attempt.finished or not attempt.needs(state.name):
            return []
        failure = attempt.failure(FailureKind.HOST_LOST, state.name, reason, at, noticed=now)
        failure = self._run.chaos.name(failure, now)
        if self.phase is Phase.STOPPING and not silent:
            return []
        if silent:
            # It may have gone any time until its next heartbeat was due: what is known to have failed by then was
            # before it, and once the others are stopped nobody knows that it would have failed.
            known = min(attempt.first_root_at or NEVER, attempt.stopped_at or NEVER)
            if known <= at + self.fleet.quiet_s:
                attempt.secondary_failures += [failure] if attempt.first_root_at is not None else []
                return []
        return self._run.lose(failure, now)

    def _beat(self, attempt: AttemptState, state: HostState, beat: Heartbeat, now: float) -> list[Command]:
        saved = attempt.take_heartbeat(state.name, beat, now)
        if state.name in attempt.members:  # others are about to join, and not looked at
            self._run.hangs.heard(state.name, beat)
        if saved and self._run.preempted and self._run.stopping is None:
            return self._run.stop(now)
        return self._run.look_for_hangs(now)

    def _failing(self, attempt: AttemptState, state: HostState, failing: Failing, now: float) -> list[Command]:
        at = state.clock.corrected(failing.time)
        if failing.rank in attempt.ended or (attempt.stopped_at is not None and at >= attempt.stopped_at):
            return []  # if it is news, its end brings it
        failure = failure_of(state.name, failing, at, attempt=attempt.number)
        attempt.failing[failing.rank] = failure
        return self._run.fail(failure, now)

    def _exited(self, attempt: AttemptState, state: HostState, exited: Exited, now: float) -> list[Command]:
        exited = with_early_end(exited)
        known = attempt.failing.pop(exited.rank, None)
        at = state.clock.corrected(exited.time) if known is None else known.at
        attempt.take_exit(state.name, exited, at, now)
        commands = self._run.chaos.exited(exited, now)
        if exited.status == 0:
            self._run.hangs.ended(exited.rank)
        if known is not None and exited.status != 0:
            attempt.take_end(known, failure_of(state.name, exited, at, attempt=attempt.number))
        elif exited.status != 0:
            failed_before = exited.error is not None and attempt.stopped_at is not None and at < attempt.stopped_at
            if failed_before or not exited.provoked:
                failure = self._run.hangs.name(failure_of(state.name, exited, at, attempt=attempt.number))
                failure = self._run.chaos.name(failure, now)
                made_room = self._run.preempted and not fails_by_itself(failure)
                if exited.restart_policy and self.phase is Phase.RUNNING and not exited.provoked and not made_room:
                    return self._run.fail_alone(failure, exited, now)
                return self._run.fail(failure, now)
        if self.phase is not Phase.RUNNING:
            return commands
        if attempt.finished:
            return [*commands, *self._run.stop(now)]
        return [*commands, *(self._run.finished(exited.rank, now) if exited.status == 0 else [])]

    def _store_failed(self, attempt: AttemptState, state: HostState, message: StoreFailed, now: float) -> list[Command]:
        if self.phase is Phase.OPENING_STORE and attempt.number == self.spec.first_attempt:
            return self._run.stop(now, error=StoreError(f"{state.name}: {message.reason}"))
        at = state.clock.corrected(message.time)
        before_our_stop = attempt.stopped_at is None or at < attempt.stopped_at
        if attempt.finished or not before_our_stop:
            return []
        return self._run.fail(attempt.failure(FailureKind.STORE_LOST, state.name, message.reason, at), now)

    def _swept(self, attempt: AttemptState, state: HostState, swept: Swept) -> list[Command]:
        attempt.saved += swept.saved
        self.fleet.said_swept(state, swept)
        if not swept.left:
            return []
        return self._run.gathering.unusable(state, f"processes cannot be ended there: {', '.join(swept.left)}")

    def _signalled(self, signum: int, now: float) -> list[Command]:
        match signum:
            case signal.SIGUSR1 | signal.SIGUSR2:
                return self._warned(signum, now)
            case signal.SIGQUIT:
                self._run.shows_stacks |= not self._run.evidence.shows  # `advance` begins the round
                return []
            case signal.SIGTSTP:
                self._suspended = True
                return [*self.fleet.suspend(True, now), SuspendSelf()]
            case signal.SIGCONT:
                was_suspended, self._suspended = self._suspended, False
                return self.fleet.suspend(False, now) if was_suspended else []
        if self._run.stopping is None:
            is_second = self._run.stops_with is not None  # while it is looked where the ranks stand
            commands = self._told_to_stop(signum, now)
            return [*commands, *(self._run.hurry(now) if is_second and signum == signal.SIGINT else [])]
        return self._run.hurry(now) if signum == signal.SIGINT else []

    def _warned(self, signum: int, now: float) -> list[Command]:
        """Pass a signal on to the workers; one of both may say that the time of the run is nearly up."""
        run = self._run
        run.preempted |= signum == signal.SIGUSR1 and self.spec.requeue
        if run.preempted and self.phase in (Phase.GATHERING, Phase.OPENING_STORE):  # nothing is there to be saved
            return run.stop(now)
        if self.phase is not Phase.RUNNING:
            return []
        return [Send(name, SignalWorkers(signum=signum)) for name in self.fleet.workers_of(run.current.members)]

    def _told_to_stop(self, signum: int, now: float) -> list[Command]:
        attempt = self.attempt
        self._run.preempted &= signum == signal.SIGTERM  # which SLURM sends at the end; the others are somebody's will
        if attempt is not None and self.phase is Phase.GATHERING:
            # History; it is the signal that ends the run.
            attempt.failures, attempt.secondary_failures, attempt.evidence = [], [], ()
        if attempt is None or not attempt.failures:
            self._run.signum = signum
        if self.phase is Phase.RUNNING and attempt is not None:
            if attempt.seems_hung(now):
                return self._run.look_then_stop(now, signum)
            attempt.evidence = ()  # of a hang that is over
        return self._run.stop(now, signum)

    def _ticked(self, now: float) -> list[Command]:
        run, due = self._run, self._timers.due(now)
        commands: list[Command] = []
        if Timer.LOOK in due:
            for state in self.fleet.silent(now):
                commands += self._lost(state, f"nothing was heard from it for {now - state.heard:.0f} s", now)
        if run.stopping is None:
            self.fleet.fence(now)
        if run.stopping is None:
            if self._timers.over(Timer.PHASE, now):
                commands += self._too_slow(now)
        elif Timer.STOP in due:
            for state in self.fleet:
                if state.connected:
                    commands += self._lost(state, "it did not say that its workers are gone", now)
            commands += run.stopping.give_up_rest()
        if self.phase is Phase.RUNNING and Timer.STALL in due:
            commands += self._stalled(now)
        return commands + self.fleet.retries(now)

    def _stalled(self, now: float) -> list[Command]:
        attempt = self._run.current
        if (
            self._run.compositions.lost
            or self._run.debuggers.any_open
            or not attempt.all_started
            or self._run.restarts.under_way
            or not self._timers.over(Timer.STALL, now)
        ):
            return []
        message = f"no rank has made progress for {self.spec.stall_timeout_s:g} s"
        return self._run.fail(attempt.failure(FailureKind.STALLED, "", message, now), now)

    def _too_slow(self, now: float) -> list[Command]:
        """Act on the end of this phase's time."""
        attempt = self._run.current
        limit = f"{self.spec.start_timeout_s:g} s (--start-timeout-s)"
        if self.phase is Phase.ENDING:
            if never := self.fleet.never_fenced():
                reason = f"no further attempt: workers of the last one may still live on {some(never)}"
                return self._run.stop(now, no_restart_reason=reason)
            self._timers.set(Timer.PHASE, now + self.fleet.timeout_s)
            late = self.fleet.workers_of(sorted(self.fleet.busy))
            reason = "it did not say that its workers are gone"
        elif self.phase is Phase.OPENING_STORE:
            late, reason = [attempt.members[0]], f"the rendezvous store was not opened within {limit}"
        else:
            self._timers.cancel(Timer.PHASE)
            ranks = {w.host: w.rank for w in reversed(attempt.placement.workers) if w.rank not in attempt.started}
            late = [name for name in attempt.members if name in ranks]
            reason = f"rank {min(ranks.values(), default=0)} was not started within {limit}"
        is_first = attempt.number == self.spec.first_attempt and not attempt.fresh
        if late and is_first and self.phase is not Phase.ENDING:
            return self._run.stop(now, error=HostError(some(late), reason))
        states = [self.fleet.states[name] for name in late]
        return [command for state in states if state.connected for command in self._lost(state, reason, now)]


def _how_ended(host: str, exited: Exited) -> str:
    """Say of a rank that was debugged how it ended."""
    if exited.status == 0:
        return f"rank {exited.rank} has ended, with exit code 0"
    return what_happened(failure_of(host, exited, 0.0, attempt=exited.attempt))
