"""The job: a pure state machine. Events go in with the time, commands come out; nothing here waits or touches a file.

    gathering hosts -> opening the store -> running -> (collecting evidence) -> ending the attempt -> gathering ...
                                                                             -> stopping -> ended

The controller owns it and calls `handle` from one loop. All decisions of a run are here and in what it asks: when an
attempt can begin and with whom (gathering.py), where workers may live (fleet.py), what an attempt has come to
(attempt.py), what the cause was (cause.py), whether there is another (restart_policy.py), which processes fail without
ending it (worker_restarts.py), how the run ends (stopping.py, build_outcome.py).
"""

from __future__ import annotations

import signal

from launcher.errors import DtrainError, HostError, PlacementError, StoreError
from launcher.hosts.folding import StartError
from launcher.job.attempt import AttemptState, choose_members, failure_of
from launcher.job.build_outcome import conclude, fails_by_itself
from launcher.job.cause import first_cause
from launcher.job.events import (
    Command,
    Connected,
    Discovered,
    Event,
    Lost,
    Notice,
    Said,
    Signalled,
    Slept,
    SuspendSelf,
    Tell,
    Unread,
)
from launcher.job.evidence_round import Collecting
from launcher.job.fleet import NEVER, Fleet
from launcher.job.gathering import Gathering, Verdict, fit, misfits
from launcher.job.host_state import HostPhase, HostState
from launcher.job.orders import open_store, reserve_ports, start_workers
from launcher.job.outcome import Failure, FailureKind, Outcome
from launcher.job.phase import Phase, progress
from launcher.job.progress_messages import attempt_begins, attempt_ended, left_out, some, starts_again
from launcher.job.restart_policy import Past, judge, judge_early, past_of
from launcher.job.stopping import ANSWER_S, Stopping
from launcher.job.worker_restarts import Fate, Lone
from launcher.placement.job_spec import JobSpec
from launcher.protocol import (
    Bye,
    Collected,
    EndAttempt,
    Evidence,
    Exited,
    Facts,
    Heartbeat,
    Hello,
    PortsReserved,
    Report,
    SignalWorkers,
    Started,
    StoreFailed,
    StoreOpened,
    Swept,
)

__all__ = ["ROOT_WAIT_S", "Job", "Phase"]

ROOT_WAIT_S = 1.0  # so long for what a lost connection is the consequence of


class Job:
    """See the module. `start` gives the first commands; `progress` says in a few words what the run is waiting for."""

    def __init__(self, spec: JobSpec, now: float, *, run_key: str = "") -> None:
        self.spec = spec
        self._run_key = run_key  # for the workers' eyes only
        self.phase = Phase.GATHERING
        self.outcome: Outcome | None = None
        self.attempt: AttemptState | None = None
        self.fleet = Fleet(spec.hosts, timeout_s=spec.heartbeat_timeout_s, join_s=spec.start_timeout_s, now=now)
        self._gathering = Gathering(spec, self.fleet, now)
        self._stopping: Stopping | None = None
        self._began = now
        self._since = now  # when this phase began
        self._until = NEVER  # when this phase must have ended, if it is one between gathering and stopping
        self._next_beat = self._next_look = now + self.fleet.beat_s
        self._ticked_at = now
        self._past: list[Past] = []
        self._lone = Lone(spec, self._past)
        self._gave_up = ""
        self._collecting = Collecting()
        self._error: DtrainError | None = None  # why no worker was started
        self._signum: int | None = None  # the signal that told us to stop
        self._suspended = False
        self._preempted = False  # told by USR1 that its time is nearly up, and to make room once it has saved

    def start(self) -> list[Command]:
        return self.fleet.start()

    @property
    def progress(self) -> str:
        return progress(self.phase, self.fleet, self.attempt)

    def deadline(self) -> float:
        """Return when the next Tick matters."""
        retry = self.fleet.next_retry()
        times = [self._next_look, self._collecting.until, NEVER if retry is None else retry]
        if self.phase is Phase.GATHERING:
            times += self._gathering.deadlines()
        elif self._stopping is not None:
            times += self._stopping.deadlines()
        else:
            times.append(self._until)
            fence = self.fleet.next_fence()
            if fence is not None:
                times.append(fence)
            if self.phase is Phase.COLLECTING:
                times.append(self._since + ROOT_WAIT_S)
            elif self.phase is Phase.RUNNING:
                times += [self._stalled_at(), self._lone.deadline]
        # What was due at the last tick has had its effect, or waits for something else.
        return min(self._next_beat, *(time for time in times if time > self._ticked_at))

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event; return what is to be done, in order."""
        if self.phase is Phase.ENDED:
            return []
        if isinstance(event, Connected | Said | Lost):
            state = self.fleet.states[event.host]
            if event.link != state.link or state.phase in (HostPhase.AWAY, HostPhase.OUT):
                return []  # of a link that was given up
            commands = self._heard(state, event, now)
        elif isinstance(event, Unread):
            self._unread(self.fleet.states[event.host], now)
            commands = []
        elif isinstance(event, Discovered):
            commands = self._gathering.discovered(event.hosts, now)
        elif isinstance(event, Slept):
            self._slept(event.seconds)
            commands = []
        elif isinstance(event, Signalled):
            commands = self._signalled(event.signum, now)
        else:
            commands = self._ticked(now)
        commands += self._advance(now)
        if self._stopping is None:
            commands += self.fleet.open_untried()
        if now >= self._next_beat:  # where event follows event, there is no Tick between them
            self._next_beat = now + self.fleet.beat_s
            commands += self.fleet.heartbeats(now)
        return commands

    def _advance(self, now: float) -> list[Command]:
        """Leave the phase if its work is done."""
        commands: list[Command] = []
        if self.phase is Phase.GATHERING:
            commands = self._gather(now)
        elif self.phase is Phase.COLLECTING:
            commands = self._end_attempt_when_known(now)
        elif self.phase is Phase.ENDING and not self.fleet.busy:
            commands = self._attempt_over(now)
        elif self._stopping is None and self._collecting.over(now):
            commands = self._collecting.end(self.attempt)
        if self.phase is Phase.RUNNING and self.attempt is not None:
            commands += self._lone.due(self.attempt, now)
        if self._stopping is not None:  # perhaps since just now, and with nobody to wait for
            commands += self._stopping.advance(now)
            if self._stopping.done and self.phase is Phase.STOPPING:
                self._end(now)
        return commands

    def _enter(self, phase: Phase, now: float, limit_s: float) -> None:
        self.phase = phase
        self._since = now
        self._until = now + limit_s

    # ---- hosts that join, speak and vanish ----

    def _heard(self, state: HostState, event: Connected | Said | Lost, now: float) -> list[Command]:
        if isinstance(event, Lost):
            return self._lost(state, event.reason, now)
        if isinstance(event, Connected):
            if state.phase is HostPhase.CONNECTING:
                self.fleet.connected(state, event.our_address, now)
            return []
        state.hear(event.message, now)
        return self._said(state, event.message, now)

    def _said(self, state: HostState, message: Report, now: float) -> list[Command]:
        if isinstance(message, Hello):
            return self._gathering.greeted(state, message)
        if isinstance(message, Facts):
            commands = self._gathering.checked(state, message)
            return [*commands, *self._grow_with(state, now)] if state.phase is HostPhase.READY else commands
        if isinstance(message, Bye):
            return self._bye(state, message, now)
        if self.attempt is None or state.attempt is None or state.phase is HostPhase.CHECKING:
            return []
        if isinstance(message, Heartbeat):
            self.attempt.take_progress(state.name, message.progress, now)
            saved = self.attempt.take_saved(state.name, message.saved)
            return self._stop(now, signal.SIGTERM) if saved and self._preempted and self._stopping is None else []
        if isinstance(message, Collected | Evidence):
            self._collecting.take(state.name, message)
            return []
        if getattr(message, "attempt", None) != self.attempt.number:
            return []
        if isinstance(message, StoreOpened | PortsReserved):
            return self._opened(state, message, now)
        if isinstance(message, StoreFailed):
            return self._store_failed(state, message, now)
        if isinstance(message, Started):
            self.attempt.take_start(message, now)
            self._lone.started(message.rank)
            return self._grow_with(None, now) if self.attempt.all_started else []
        if isinstance(message, Exited):
            return self._exited(state, message, now)
        if isinstance(message, Swept):
            return self._swept_attempt(state, message)
        return []

    def _lost(self, state: HostState, reason: str, now: float) -> list[Command]:
        """Give a host up. If it was quiet before, it went at some time after it was heard last."""
        silent = now - state.heard >= self.fleet.quiet_s
        was_coming = state.phase not in (HostPhase.READY, HostPhase.LEAVING)
        if state.phase is HostPhase.LEAVING and state.reason:
            reason = state.reason
        commands = self.fleet.lost(state, reason, now)
        self._after_link(state, now)
        at = state.heard if silent else now
        return commands + self._gone(state, state.attempt, reason, at, now, silent=silent, was_coming=was_coming)

    def _bye(self, state: HostState, bye: Bye, now: float) -> list[Command]:
        told = state.phase is HostPhase.LEAVING
        reason = state.reason if told else bye.reason or "its agent was told to end by somebody else"
        was_in = state.attempt
        commands = self.fleet.said_bye(state, bye)
        state.reason = reason
        self._after_link(state, now)
        if told:
            return commands
        provoked_at = self.attempt.provoked_at(state.name) if self.attempt is not None else None
        at = now if provoked_at is None else min(now, provoked_at)
        return commands + self._gone(state, was_in, reason, at, now)

    def _after_link(self, state: HostState, now: float) -> None:
        """Decide whether a host whose link has ended is tried again."""
        self._collecting.forget(state.name)
        if self._stopping is not None:
            self._stopping.left(state, now)
        elif (state.wanted or state.dirty) and (self.spec.elastic or self.attempt is not None):
            self.fleet.try_again(state, now)
        else:
            self.fleet.move(state, HostPhase.OUT)

    def _gone(
        self, state: HostState, was_in: int | None, reason: str, at: float, now: float, *,
        silent: bool = False, was_coming: bool = False,
    ) -> list[Command]:  # fmt: skip
        """Draw the consequences of a host that has gone without having been told to."""
        attempt = self.attempt
        if attempt is None or self.phase is Phase.GATHERING:
            self._gathering.problems.setdefault(state.name, reason)
            return self._gathering.say_unusable(state, reason) if was_coming and attempt is None else []
        if was_in != attempt.number or attempt.finished or not attempt.needs(state.name):
            return []
        failure = attempt.failure(FailureKind.HOST_LOST, state.name, reason, at)
        if self.phase is Phase.STOPPING and not silent:
            return []
        if silent:
            # It may have gone any time until its next heartbeat was due: what is known to have failed by then was
            # before it, and once the others are stopped nobody knows that it would have failed.
            known = min(attempt.first_root_at or NEVER, attempt.stopped_at or NEVER)
            if known <= at + self.fleet.quiet_s:
                attempt.victims += [failure] if attempt.first_root_at is not None else []
                return []
        return self._fail(failure, now)

    # ---- gathering ----

    def _gather(self, now: float) -> list[Command]:
        """Begin an attempt if the hosts for it are ready, or find out that they will not be."""
        verdict = self._gathering.decide(now)
        if verdict is Verdict.WAIT:
            return self._gathering.say_how_far(self.progress, now)
        if verdict is Verdict.TOO_FEW:
            return self._cannot_begin(now)
        return [*self._gathering.say_how_far("", now), *self._begin(now)]

    def _cannot_begin(self, now: float) -> list[Command]:
        """End, since too few hosts are ready in time."""
        attempt = self.attempt
        if attempt is None:
            self._error = StartError(self._gathering.why_not_ready(), len(self.fleet))
            return self._stop(now, signal.SIGTERM)
        self._gave_up = self._gathering.why_not_again()
        if not attempt.failures:  # it had ended to grow
            missing = next(s for s in map(self.fleet.states.__getitem__, attempt.members) if s.phase != HostPhase.READY)
            why = missing.reason or "it did not answer"
            attempt.take_failure(attempt.failure(FailureKind.HOST_LOST, missing.name, why, now))
        return self._stop(now, signal.SIGTERM)

    def _begin(self, now: float) -> list[Command]:
        """Make the next attempt of the hosts that are ready."""
        previous = self._gathering.previous
        ready = [state.name for state in self.fleet.ready()]
        members = choose_members(previous, ready, self.spec.max_hosts)
        states = [self.fleet.states[name] for name in members]
        try:
            placement = fit(self.spec, states)
        except PlacementError as error:
            if commands := self._gathering.leave_out_misfits(states):
                return [*commands, *self._gather(now)]
            if self.attempt is None or not self.attempt.failures:
                self._error = error
            else:
                self._gave_up = f"no further attempt: {error}"
            return self._stop(now, signal.SIGTERM)
        number = self.spec.first_attempt if self.attempt is None else self.attempt.number + 1
        # A run of fixed size has what is left of its time; for any other, a last call may have used it up.
        fixed = self.attempt is None and not self.spec.elastic
        start_by = self._gathering.until if fixed else now + self.spec.start_timeout_s
        notice: list[Command] = []
        if self.attempt is not None:
            notice.append(Notice(attempt_begins(number, members, previous)))
            notice += self._gathering.count_absence(self.attempt.grown_for, members)
        self.attempt = AttemptState(number, members, placement, began=now)
        self._lone.begin()
        self._enter(Phase.OPENING_STORE, now, start_by - now)
        for state in states:
            self.fleet.occupy(state, number)
        ports = reserve_ports(self.spec, states, placement, number)
        self.attempt.ports_wanted = set(ports)
        store = Tell(states[0].name, open_store(self.spec, states, number))
        return [*notice, store, *(Tell(name, order) for name, order in ports.items())]

    def _opened(self, state: HostState, message: StoreOpened | PortsReserved, now: float) -> list[Command]:
        """Start the workers, once the store is open and all ports are known that they are to tell each other."""
        attempt = self.attempt
        assert attempt is not None
        if self.phase is not Phase.OPENING_STORE:
            return []
        if isinstance(message, StoreOpened):
            attempt.store = message
        else:
            attempt.ports[state.name] = message
            attempt.ports_wanted.discard(state.name)
        if attempt.store is None or attempt.ports_wanted:
            return []
        try:
            starts = list(
                start_workers(
                    self.spec, attempt.placement, attempt.store, attempt.ports, attempt.number, run_key=self._run_key
                )
            )
        except PlacementError as error:
            self._error = error
            return self._stop(now, signal.SIGTERM)
        self.phase = Phase.RUNNING  # the time for the start goes on
        self._since = now
        return [*starts]

    def _grow_with(self, state: HostState | None, now: float) -> list[Command]:
        """End the attempt if there is room in the next one for a host that has come."""
        attempt = self.attempt
        if self.phase is not Phase.RUNNING or attempt is None or not self.spec.grow:
            return []
        if not attempt.all_started or attempt.any_ended or len(attempt.members) >= self.spec.max_hosts:
            return []
        if state is None:
            members = set(attempt.members)
            state = next((s for s in self.fleet if s.phase is HostPhase.READY and s.name not in members), None)
        if state is None or state.name in attempt.members or misfits(self.spec, [state]):
            return []
        attempt.grown_for = state.name
        notice = Notice(f"{state.name} has come; attempt {attempt.number} ends so that the next one can use it")
        return [notice, *self._end_attempt(now)]

    # ---- running, and what fails ----

    def _exited(self, state: HostState, exited: Exited, now: float) -> list[Command]:
        attempt = self.attempt
        assert attempt is not None
        at = state.clock.corrected(exited.time)
        attempt.take_exit(state.name, exited, at, now)
        if exited.status != 0:
            failed_before = exited.error is not None and attempt.stopped_at is not None and at < attempt.stopped_at
            if failed_before or not exited.provoked:
                failure = failure_of(state.name, exited, at, attempt=attempt.number)
                made_room = self._preempted and not fails_by_itself(failure)
                if exited.standing and self.phase is Phase.RUNNING and not exited.provoked and not made_room:
                    return self._failed_alone(failure, exited, now)
                return self._fail(failure, now)
        if self.phase is Phase.RUNNING and attempt.finished:
            return self._stop(now, signal.SIGTERM)
        return []

    def _failed_alone(self, failure: Failure, exited: Exited, now: float) -> list[Command]:
        """Start a process again whose failure does not end the attempt, or go on without it, if that can be."""
        attempt = self.attempt
        assert attempt is not None
        decision = self._lone.failed(attempt, failure, exited, now)
        if decision.fate is Fate.ENDS:
            return self._fail(failure, now)
        if decision.fate is Fate.AGAIN:
            restart = f"restart {decision.restart} of {self.spec.max_restarts}"
            return [Notice(starts_again(failure, restart, decision.after_s))]
        notice = Notice(left_out(failure, decision.reason))
        return [notice, *(self._stop(now, signal.SIGTERM) if attempt.finished else [])]

    def _store_failed(self, state: HostState, message: StoreFailed, now: float) -> list[Command]:
        attempt = self.attempt
        assert attempt is not None
        if self.phase is Phase.OPENING_STORE and attempt.number == self.spec.first_attempt:
            self._error = StoreError(f"{state.name}: {message.reason}")
            return self._stop(now, signal.SIGTERM)
        at = state.clock.corrected(message.time)
        before_our_stop = attempt.stopped_at is None or at < attempt.stopped_at
        if attempt.finished or not before_our_stop:
            return []
        return self._fail(attempt.failure(FailureKind.STORE_LOST, state.name, message.reason, at), now)

    def _fail(self, failure: Failure, now: float) -> list[Command]:
        """Note a failure; the first one ends the attempt, after a look at where the others stand."""
        attempt = self.attempt
        assert attempt is not None
        if attempt.stopped_at is not None and failure.at >= attempt.stopped_at:
            # Told to stop by the user, or for growing, it may end as it likes; else it is counted as a victim.
            if self._signum is None and not attempt.grown_for:
                attempt.victims.append(failure)
            return []
        attempt.take_failure(failure)
        self._lone.overtaken(attempt, failure)
        if self.phase is Phase.OPENING_STORE:
            return self._end_attempt(now)
        if self.phase is not Phase.RUNNING:
            return []
        commands = self._collecting.end(self.attempt)
        self._enter(Phase.COLLECTING, now, NEVER)
        return [*commands, *self._collect(now, asked=False)]

    def _collect(self, now: float, *, asked: bool) -> list[Command]:
        assert self.attempt is not None
        where = [name for name in self.attempt.members if self.fleet.states[name].works]
        return self._collecting.begin(where, now, asked=asked)

    def _end_attempt_when_known(self, now: float) -> list[Command]:
        """End the attempt once its evidence is there, and something that is no mere consequence of something else."""
        attempt = self.attempt
        assert attempt is not None
        if self._collecting.under_way and not self._collecting.over(now):
            return []
        commands = self._collecting.end(attempt)
        if attempt.first_root_at is None:
            if now < self._since + ROOT_WAIT_S:
                return commands
            # The root may be a host of which nothing is heard since: before long it speaks, or is lost.
            quiet = (self.fleet.states[name] for name in self._collecting.unanswered)
            if any(state.works and state.heard <= self._since for state in quiet):
                return commands
        return [*commands, *self._end_attempt(now)]

    def _end_attempt(self, now: float) -> list[Command]:
        """Have all workers ended; for good, if there can be no other attempt."""
        attempt = self.attempt
        assert attempt is not None
        cause = first_cause(attempt.failures)
        if self._preempted and not (cause is not None and fails_by_itself(cause)):
            return self._stop(now, signal.SIGTERM)
        self._preempted = False  # whatever it was warned of
        if cause is not None:
            verdict = judge_early(self.spec, self._past, cause)
            last_word = self._lone.last_word(cause)
            if verdict.again_after_s is None or last_word is not None:
                self._gave_up = verdict.reason if last_word is None else last_word
                return self._stop(now, signal.SIGTERM)
        attempt.stopped_at = now
        commands = self._collecting.end(self.attempt)
        self._enter(Phase.ENDING, now, self.spec.grace_s + ANSWER_S)
        end = EndAttempt(attempt=attempt.number, signum=signal.SIGTERM)
        return [*commands, *(Tell(name, end) for name in attempt.members if self.fleet.states[name].works)]

    def _swept_attempt(self, state: HostState, swept: Swept) -> list[Command]:
        assert self.attempt is not None
        self.attempt.saved += swept.saved
        self.fleet.said_swept(state, swept)
        if not swept.left:
            return []
        return self._gathering.unusable(state, f"processes cannot be ended there: {', '.join(swept.left)}")

    def _attempt_over(self, now: float) -> list[Command]:
        """Decide what comes after an attempt whose workers are gone everywhere."""
        attempt = self.attempt
        assert attempt is not None
        cause = first_cause(attempt.failures)
        if cause is None and attempt.finished:  # while we were about to grow
            return self._stop(now, signal.SIGTERM)
        delay_s, notices = 0.0, []
        if cause is not None:
            ran_s = max(0.0, cause.at - attempt.began)
            self._past.append(past_of(self.spec, cause, ran_s=ran_s, saved=attempt.saved))
            verdict = judge(self.spec, self._past)
            if verdict.again_after_s is None:
                self._gave_up = verdict.reason
                return self._stop(now, signal.SIGTERM)
            delay_s = verdict.again_after_s
            notices = [Notice(attempt_ended(attempt.number, cause, delay_s))]
        commands = self._gathering.leave_out(attempt, cause)
        self._enter(Phase.GATHERING, now, NEVER)
        self._gathering.again(attempt.members, now, delay_s)
        return [*notices, *commands, *self._gather(now)]

    # ---- signals ----

    def _signalled(self, signum: int, now: float) -> list[Command]:
        if signum in (signal.SIGUSR1, signal.SIGUSR2):
            self._preempted |= signum == signal.SIGUSR1 and self.spec.requeue
            if self._preempted and self.phase in (Phase.GATHERING, Phase.OPENING_STORE):  # nothing is there to be saved
                return self._stop(now, signal.SIGTERM)
            return self._pass_on(signum)
        if signum == signal.SIGQUIT:
            if self.phase is Phase.RUNNING and not self._collecting.under_way:
                return self._collect(now, asked=True)
            return []
        if signum == signal.SIGTSTP:
            self._suspended = True
            return [*self.fleet.suspend(True, now), SuspendSelf()]
        if signum == signal.SIGCONT:
            was_suspended, self._suspended = self._suspended, False
            return self.fleet.suspend(False, now) if was_suspended else []
        if self._stopping is None:
            return self._told_to_stop(signum, now)
        return self._stopping.hurry(now) if signum == signal.SIGINT else []

    def _pass_on(self, signum: int) -> list[Command]:
        if self.phase is not Phase.RUNNING or self.attempt is None:
            return []
        message = SignalWorkers(signum=signum)
        return [Tell(name, message) for name in self.attempt.members if self.fleet.states[name].works]

    def _told_to_stop(self, signum: int, now: float) -> list[Command]:
        attempt = self.attempt
        self._preempted &= signum == signal.SIGTERM  # which SLURM sends at the end; the others are somebody's will
        if attempt is not None and self.phase is Phase.GATHERING:
            attempt.failures, attempt.victims = [], []  # they are history; it is the signal that ends the run
        if attempt is None or not attempt.failures:
            self._signum = signum
        return self._stop(now, signum)

    # ---- stopping ----

    def _stop(self, now: float, signum: int) -> list[Command]:
        """Have every host ended."""
        if self.attempt is not None and self.attempt.stopped_at is None:
            self.attempt.stopped_at = now
        commands = self._collecting.end(self.attempt)
        self._enter(Phase.STOPPING, now, NEVER)
        self._gathering.closed = True
        self._stopping = Stopping(self.fleet, until=now + self.spec.grace_s + ANSWER_S)
        return [*commands, *self._stopping.begin(signum, now)]

    def _end(self, now: float) -> None:
        self.phase = Phase.ENDED
        self.outcome = conclude(
            self.spec,
            self.fleet,
            self.attempt,
            error=self._error,
            signum=self._signum,
            gave_up=self._gave_up,
            lone_restarts=self._lone.restarts,
            preempted=self._preempted,
            began=self._began,
            now=now,
        )

    # ---- time ----

    def _unread(self, state: HostState, now: float) -> None:
        state.heard = now
        if self.attempt is not None:
            self.attempt.progressed_at = now

    def _slept(self, seconds: float) -> None:
        self.fleet.slept(seconds)
        self._until += seconds
        self._since += seconds
        self._gathering.slept(seconds)
        if self._stopping is not None:
            self._stopping.slept(seconds)
        self._collecting.slept(seconds)
        self._lone.slept(seconds)
        if self.attempt is not None:
            self.attempt.progressed_at += seconds

    def _ticked(self, now: float) -> list[Command]:
        commands: list[Command] = []
        self._ticked_at = now
        if now >= self._next_look:
            self._next_look = now + self.fleet.beat_s
            for state in self.fleet.silent(now):
                reason = f"nothing was heard from it for {now - state.heard:.0f} s"
                commands += self._lost(state, reason, now)
        if self._stopping is None:
            self.fleet.fence(now)
        if self._stopping is not None and now >= self._stopping.until:
            for state in self.fleet:
                if state.connected:
                    commands += self._lost(state, "it did not say that its workers are gone", now)
            commands += self._stopping.give_up_rest()
        elif now >= self._until:
            commands += self._too_slow(now)
        if self.phase is Phase.RUNNING and now >= self._stalled_at():
            commands += self._stalled(now)
        return commands + self.fleet.retries(now)

    def _stalled_at(self) -> float:
        attempt = self.attempt
        if self.spec.stall_timeout_s is None or attempt is None or not attempt.all_started or self._lone.under_way:
            return NEVER
        return attempt.progressed_at + self.spec.stall_timeout_s

    def _stalled(self, now: float) -> list[Command]:
        assert self.attempt is not None
        message = f"no rank has made progress for {self.spec.stall_timeout_s:g} s"
        return self._fail(self.attempt.failure(FailureKind.STALLED, "", message, now), now)

    def _too_slow(self, now: float) -> list[Command]:
        """Act on the end of this phase's time."""
        attempt = self.attempt
        assert attempt is not None
        limit = f"{self.spec.start_timeout_s:g} s (--start-timeout-s)"
        states = self.fleet.states
        if self.phase is Phase.ENDING:
            if never := self.fleet.never_fenced():
                self._gave_up = f"no further attempt: workers of the last one may still live on {some(never)}"
                return self._stop(now, signal.SIGTERM)
            self._until = now + self.fleet.timeout_s
            late = [name for name in sorted(self.fleet.busy) if states[name].works]
            reason = "it did not say that its workers are gone"
        elif self.phase is Phase.OPENING_STORE:
            late, reason = [attempt.members[0]], f"the rendezvous store was not opened within {limit}"
        else:
            self._until = NEVER
            ranks = {w.host: w.rank for w in reversed(attempt.placement.workers) if w.rank not in attempt.started}
            late = [name for name in attempt.members if name in ranks]
            reason = f"rank {min(ranks.values(), default=0)} was not started within {limit}"
        if late and attempt.number == self.spec.first_attempt and self.phase is not Phase.ENDING:
            self._error = HostError(some(late), reason)
            return self._stop(now, signal.SIGTERM)
        return [command for name in late if states[name].connected for command in self._lost(states[name], reason, now)]
