"""The way of a run from phase to phase. Pure; job.py owns it, and says what has happened.

    gathering hosts -> opening the store -> running -> (a round of evidence) -> ending the attempt -> gathering ...
                                                                             -> stopping -> ended

Who can take part is known in gathering.py, where workers may live in fleet.py, what an attempt has come to in
attempt.py, what the cause was in failure.py, how the run ends in stopping.py and outcome.py. In recovery/ stands
whether there is another attempt and which processes fail without ending it (restarts.py), whom the others meet again
then (generations.py), and on which hosts (compositions.py).
"""

from __future__ import annotations

import signal

from launcher.errors import DtrainError, PlacementError
from launcher.hosts.folding import StartError
from launcher.job.attempt import AttemptState, choose_members
from launcher.job.chaos import Chaos
from launcher.job.events import Command, Notice, Send
from launcher.job.evidence_round import EvidenceRounds
from launcher.job.failure import Failure, FailureKind, first_cause
from launcher.job.fleet import Fleet
from launcher.job.gathering import Gathering, Readiness, misfits
from launcher.job.host_state import HostPhase, HostState
from launcher.job.inspection.debuggers import Debuggers
from launcher.job.inspection.stacks import StackQuestions
from launcher.job.orders import open_store, reserve_ports, start_workers
from launcher.job.outcome import Outcome, build_outcome, fails_by_itself
from launcher.job.progress_messages import Phase, attempt_begins, attempt_ended, progress
from launcher.job.recovery import compositions
from launcher.job.recovery.generations import Generations
from launcher.job.recovery.hangs import Hangs
from launcher.job.recovery.restarts import Restarts
from launcher.job.stopping import ANSWER_S, Stopping
from launcher.job.timers import Timer, Timers
from launcher.placement.job_spec import JobSpec
from launcher.placement.placement import place_job
from launcher.protocol.commands import EndAttempt
from launcher.protocol.message import MEETS_SUCCESSOR
from launcher.protocol.reports import Exited, PortsReserved, StoreOpened

__all__ = ["ROOT_WAIT_S", "Lifecycle"]

ROOT_WAIT_S = 1.0  # so long for what a lost connection is the consequence of


class Lifecycle:
    """`attempt` is the newest; `stopping` is set once the run ends."""

    def __init__(self, spec: JobSpec, now: float, run_key: str) -> None:
        self.spec = spec
        self._run_key = run_key  # for the workers' eyes only
        self.phase = Phase.GATHERING
        self.timers = timers = Timers()
        self.fleet = Fleet(spec.hosts, timers, timeout_s=spec.heartbeat_timeout_s, join_s=spec.start_timeout_s, now=now)
        self.gathering = Gathering(spec, self.fleet, timers, now)
        self.evidence = EvidenceRounds(timers)
        self.stacks = StackQuestions(self.evidence)
        self.debuggers = Debuggers()
        self.hangs = Hangs(spec.hang, meets=not spec.roles.others)
        self.chaos = Chaos(spec.chaos, timers, now)
        self.restarts = Restarts(spec, timers)
        self.generations = Generations(spec, timers)
        self.compositions = compositions.Compositions(
            spec, self.fleet, timers, self.gathering, self.generations, self.restarts, run_key
        )
        self.stopping: Stopping | None = None
        self.attempt: AttemptState | None = None
        self.outcome: Outcome | None = None
        self.preempted = False  # USR1 said that its time is nearly up, and to make room once it has saved
        self.signum: int | None = None  # the signal that ends the run
        self.stops_with: int | None = None  # what the workers get once it is known where they stand
        self.shows_stacks = False  # the user wants to see where the ranks stand, once no other round is under way
        self._error: DtrainError | None = None  # why no worker was started
        self._no_restart_reason = ""
        self.began = now

    @property
    def lacks_workers(self) -> bool:
        """Whether a worker or host has failed for which the others wait, or its place is taken."""
        return bool(self.compositions.lost or self.restarts.under_way or self.generations.missing)

    @property
    def current(self) -> AttemptState:
        """The attempt, in phases that have one."""
        assert self.attempt is not None
        return self.attempt

    def advance(self, now: float) -> list[Command]:
        """Leave the phase if its work is done."""
        commands: list[Command] = []
        if self.phase is Phase.GATHERING:
            commands = self._gather(now)
        elif self.phase is Phase.EVIDENCE_ROUND:
            commands = self._end_attempt_when_known(now)
        elif self.phase is Phase.ENDING and not self.fleet.busy:
            commands = self._attempt_over(now)
        elif self.stopping is None and self.evidence.over(now):
            commands = self._looked(now) if self.evidence.looks else self.evidence.end(self.attempt)
        if self.phase is Phase.RUNNING:
            commands += self._go_on(now)
        commands += self._inspect(now)
        if self.stopping is not None:  # perhaps since just now, and with nobody to wait for
            commands += self.stopping.advance(now)
            if self.stopping.done and self.phase is Phase.STOPPING:
                self._end(now)
        return commands

    def _inspect(self, now: float) -> list[Command]:
        """Begin what commands have asked for, or tell them why not."""
        if self.attempt is None or self.phase is not Phase.RUNNING:
            doing = progress(self.phase, self.fleet, self.attempt)
            commands = self.stacks.refuse_all(f"no worker can be looked at now: {doing}")
            self.shows_stacks = False
        elif self.shows_stacks and not self.evidence.under_way:
            commands = self.ask_for_evidence(now, asked=True)
            self.shows_stacks = False
        else:
            commands = self.stacks.due(self.attempt, self.fleet, now)
        return commands if self.attempt is None else [*commands, *self.debuggers.due(self.attempt, self.fleet, now)]

    def _go_on(self, now: float) -> list[Command]:
        """Begin the generations that are due, and start workers again."""
        attempt = self.current
        commands = self._go_on_without(now) if self.compositions.lost else []
        if self.compositions.lost or self.phase is not Phase.RUNNING:
            return commands
        if news := self.generations.due(attempt, now):
            commands += [Send(name, news) for name in self.fleet.workers_of(attempt.members)]
        if not self.generations.untold:
            commands += self.restarts.due(attempt, now)
        if attempt.all_started and not self.restarts.under_way:
            commands += self.chaos.due(attempt, now)
        return [*commands, *self.compositions.join(attempt, now)]

    def _go_on_without(self, now: float) -> list[Command]:
        """Have other hosts take the places of lost ones, or end the attempt where that cannot be."""
        attempt, failure = self.current, next(iter(self.compositions.lost.values()))
        readiness = self.compositions.decide(attempt, now)
        if readiness is compositions.Readiness.WAIT:
            return []
        commands = None
        if readiness is compositions.Readiness.COMPOSE:
            commands = self.compositions.go_on(attempt, now)
        if commands is not None and not self.compositions.lost:
            self.chaos.others_take_over({*attempt.ranks} - attempt.started, now)
        if commands is None:
            commands = self.fail(failure, now)
            if readiness is compositions.Readiness.TOO_FEW:
                commands += self.stop(now, no_restart_reason=self.gathering.why_not_again())
        return commands

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self.timers.cancel(Timer.PHASE, Timer.ROOT)

    def _gather(self, now: float) -> list[Command]:
        """Begin an attempt if the hosts for it are ready, or find out that they will not be."""
        readiness = self.gathering.decide(now)
        if readiness is Readiness.WAIT:
            return self.gathering.show_how_far(progress(self.phase, self.fleet, self.attempt), now)
        said = self.gathering.say_after_killed_runs()
        if readiness is Readiness.TOO_FEW:
            return [*said, *self._cannot_begin(now)]
        return [*said, *self.gathering.show_how_far("", now), *self._begin(now)]

    def _cannot_begin(self, now: float) -> list[Command]:
        """End, since too few hosts are ready in time."""
        attempt = self.attempt
        if attempt is None:
            return self.stop(now, error=StartError(self.gathering.why_not_ready(), len(self.fleet)))
        if not attempt.failures:  # it had ended to grow
            missing = next(s for s in map(self.fleet.states.__getitem__, attempt.members) if s.phase != HostPhase.READY)
            why = missing.reason or "it did not answer"
            attempt.take_failure(attempt.failure(FailureKind.HOST_LOST, missing.name, why, now))
        return self.stop(now, no_restart_reason=self.gathering.why_not_again())

    def _begin(self, now: float) -> list[Command]:
        """Make the next attempt of the hosts that are ready."""
        spec, last = self.spec, self.attempt
        previous = self.gathering.previous
        members = choose_members(previous, [state.name for state in self.fleet.ready()], spec.max_hosts)
        states = [self.fleet.states[name] for name in members]
        try:
            placement = place_job(spec, [state.offer() for state in states])
        except PlacementError as error:
            if commands := self.gathering.leave_out_misfits(states):
                return [*commands, *self._gather(now)]
            if last is None or not last.failures:
                return self.stop(now, error=error)
            return self.stop(now, no_restart_reason=f"no further attempt: {error}")
        number = spec.first_attempt if last is None else last.number + 1
        commands = []
        if last is not None:
            commands.append(Notice(attempt_begins(number, members, previous)))
            commands += self.gathering.count_absence(last.grown_for, members)
        self.attempt = AttemptState(
            number, members, placement, self.timers,
            began=now, stall_s=spec.stall_timeout_s, start_s=spec.start_timeout_s,
        )  # fmt: skip
        self.restarts.begin()
        self.generations.begin()
        self.hangs.begin()
        self.chaos.attempt_begins(self.attempt, now)
        self.compositions.begin()
        self._enter(Phase.OPENING_STORE)
        # A run of fixed size has what is left of its time. Any other may have used it up waiting for more hosts.
        fixed = last is None and not spec.elastic
        self.timers.set(Timer.PHASE, self.timers.at(Timer.GATHER) if fixed else now + spec.start_timeout_s)
        for state in states:
            self.fleet.occupy(state)
        ports = reserve_ports(spec, states, placement, number)
        self.attempt.ports_wanted = set(ports)
        store = Send(states[0].name, open_store(spec, states, number))
        return [*commands, store, *(Send(name, order) for name, order in ports.items())]

    def opened(self, host: str, message: StoreOpened | PortsReserved, now: float) -> list[Command]:
        """Start the workers, once the store is open and all ports are known by which they reach each other."""
        attempt = self.current
        if self.phase is Phase.RUNNING and isinstance(message, StoreOpened):
            self.compositions.opened(attempt, host, message)
        if self.phase is not Phase.OPENING_STORE:
            return []
        if isinstance(message, StoreOpened):
            attempt.store = message
        else:
            attempt.ports[host] = message
            attempt.ports_wanted.discard(host)
        if attempt.store is None or attempt.ports_wanted:
            return []
        wait_s = 0.5 * max(0.0, self.timers.at(Timer.PHASE) - now)  # the other half is for imports of their own
        known = (self.spec, attempt.placement, attempt.store, attempt.ports)
        try:
            starts = [*start_workers(*known, run_key=self._run_key, wait_s=wait_s)]
        except PlacementError as error:
            return self.stop(now, error=error)
        self.phase = Phase.RUNNING  # the time for the start goes on
        return [*starts]

    def grow_with(self, state: HostState | None, now: float) -> list[Command]:
        """End the attempt if there is room in the next one for a host that has come, and it cannot join this one."""
        attempt = self.attempt
        if self.phase is not Phase.RUNNING or attempt is None or not self.spec.grow:
            return []
        if not attempt.all_started or attempt.ended or len(attempt.members) >= self.spec.max_hosts:
            return []
        if self.compositions.lost or self.compositions.suits(attempt):
            return []
        if state is None:
            members = set(attempt.members)
            state = next((s for s in self.fleet if s.phase is HostPhase.READY and s.name not in members), None)
        if state is None or state.name in attempt.members or misfits(self.spec, [state]):
            return []
        if state.name in self.fleet.busy:  # it joins
            return []
        attempt.grown_for = state.name
        notice = Notice(f"{state.name} has come; attempt {attempt.number} ends so that the next one can use it")
        return [notice, *self._end_attempt(now)]

    def fail(self, failure: Failure, now: float) -> list[Command]:
        """Note a failure; the first one ends the attempt, after a look at where the others stand."""
        attempt = self.current
        if attempt.stopped_at is not None and failure.at >= attempt.stopped_at:
            # Told to stop by the user, or for growing, it may end as it likes; else it followed from another.
            if self.signum is None and not attempt.grown_for:
                attempt.secondary_failures.append(failure)
            return []
        attempt.take_failure(failure)
        self.restarts.overtaken(attempt, failure)
        self.compositions.begin()
        if self.phase is Phase.OPENING_STORE:
            return self._end_attempt(now)
        if self.phase is not Phase.RUNNING:
            return []
        commands = self.evidence.end(attempt)
        self._enter(Phase.EVIDENCE_ROUND)
        self.timers.set(Timer.ROOT, now + ROOT_WAIT_S)
        if failure.kind is FailureKind.HUNG:  # all ranks were looked at before
            return commands
        return [*commands, *self.ask_for_evidence(now, asked=False)]

    def lose(self, failure: Failure, now: float) -> list[Command]:
        """Take the loss of a host: the attempt goes on, if the others can meet again without it."""
        if self.phase is Phase.RUNNING and not self.preempted:
            gone = [worker.rank for worker in self.current.placement.workers if worker.host == failure.host]
            commands = self.compositions.lose(self.current, failure, now)
            if commands is not None:
                self.hangs.lose(failure.host, gone)
                return commands
        return self.fail(failure, now)

    def fail_alone(self, failure: Failure, exited: Exited, now: float) -> list[Command]:
        """Start a process again whose failure does not end the attempt, or go on without it, if that can be."""
        attempt, is_resilient = self.current, exited.restart_policy in MEETS_SUCCESSOR
        if is_resilient and not self.generations.can_meet(attempt, exited.rank, self.restarts.waiting):
            return self.fail(failure, now)
        commands = self.restarts.failed(attempt, failure, exited, now)
        if commands is None:
            return self.fail(failure, now)
        if is_resilient:
            self.generations.begin_next(failure, now)
        return [*commands, *(self.stop(now) if attempt.finished else [])]

    def started(self, rank: int, now: float) -> None:
        """Take the start of a worker, perhaps again."""
        self.chaos.goes_on(rank, now, has_stepped=False)
        self.restarts.started(rank)
        self.generations.started(rank)

    def finished(self, rank: int, now: float) -> list[Command]:
        """Take the successful end of a worker: the attempt ends if it was to meet one that is being replaced."""
        lost = next(iter(self.compositions.lost.values()), None)
        failure = self.generations.missed_by(self.current, rank) or lost
        if failure is None:
            return []
        return self.fail(failure, now)

    def ask_for_evidence(self, now: float, *, asked: bool) -> list[Command]:
        """Ask where the ranks stand; `asked`: the user wants to see it."""
        return self.evidence.begin(self.fleet.workers_of(self.current.members), now, asked=asked)

    def look_for_hangs(self, now: float) -> list[Command]:
        """Look where all ranks are, if some may hang; not while others may wait for one that is to be started."""
        attempt = self.attempt
        if self.phase is not Phase.RUNNING or attempt is None or not attempt.all_started:
            return []
        looks = self.evidence.under_way or self.evidence.looks
        is_busy = self.lacks_workers or looks or self.debuggers.any_open
        if is_busy or not self.hangs.wants_look(now):
            return []
        return self.evidence.begin(self.fleet.workers_of(attempt.members), now, is_look=True)

    def _looked(self, now: float) -> list[Command]:
        """Act on ranks that hang, if the look that is over shows any."""
        number, found = self.evidence.end_look()
        if self.phase is Phase.RUNNING and (waiting := self.hangs.waiting(self.current, found, now)):
            return self.hangs.tell(self.current, waiting, number)
        blame = self.hangs.blame(found, now)
        if self.phase is not Phase.RUNNING or blame is None or self.debuggers.any_open:
            return []
        if blame.hung:
            return self.hangs.take(self.current, blame, number)
        if not self.hangs.policy.acts:
            return []
        message = f"no rank has shown a sign of life for {blame.silent_s:.0f} s, and all of them wait"
        return self.fail(self.current.failure(FailureKind.STALLED, "", message, now), now)

    def _end_attempt_when_known(self, now: float) -> list[Command]:
        """End the attempt once its evidence is there, and something that is no mere consequence of something else."""
        attempt = self.current
        if self.evidence.under_way and not self.evidence.over(now):
            return []
        if self.stops_with is not None:
            return self.stop(now, self.stops_with)
        commands = self.evidence.end(attempt)
        if attempt.first_root_at is None:
            if not self.timers.over(Timer.ROOT, now):
                return commands
            # The root may be a host of which nothing is heard since: before long it speaks, or is lost.
            quiet = (self.fleet.states[name] for name in self.fleet.workers_of(self.evidence.unanswered))
            if any(state.heard + ROOT_WAIT_S <= self.timers.at(Timer.ROOT) for state in quiet):
                return commands
        return [*commands, *self._end_attempt(now)]

    def _end_attempt(self, now: float) -> list[Command]:
        """Have all workers ended; for good, if there can be no other attempt."""
        attempt = self.current
        cause = first_cause(attempt.failures)
        if self.preempted and not (cause is not None and fails_by_itself(cause)):
            return self.stop(now)
        self.preempted = False  # whatever it was warned of
        if cause is not None:
            decision = self.restarts.judge_early(cause, succeeds=attempt.is_successor(cause.rank))
            if decision.again_after_s is None:
                return self.stop(now, no_restart_reason=decision.reason)
        attempt.stopped_at = now
        commands = self.evidence.end(attempt)
        self._enter(Phase.ENDING)
        self.timers.set(Timer.PHASE, now + self.spec.grace_s + ANSWER_S)
        end = EndAttempt(attempt=attempt.number, signum=signal.SIGTERM)
        hosts = [*attempt.members, *sorted(self.fleet.busy - {*attempt.members})]  # some were about to join
        return [*commands, *(Send(name, end) for name in self.fleet.workers_of(hosts))]

    def _attempt_over(self, now: float) -> list[Command]:
        """Decide what comes after an attempt whose workers are gone everywhere."""
        attempt = self.current
        cause = first_cause(attempt.failures)
        if cause is None and attempt.finished:  # while we were about to grow
            return self.stop(now)
        delay_s, notices = 0.0, []
        if cause is not None:
            decision = self.restarts.attempt_failed(attempt, cause)
            if decision.again_after_s is None:
                return self.stop(now, no_restart_reason=decision.reason)
            delay_s = decision.again_after_s
            notices = [Notice(attempt_ended(attempt.number, cause, delay_s))]
        commands = self.gathering.leave_out(attempt, cause)
        self._enter(Phase.GATHERING)
        self.gathering.again(attempt.members, now, delay_s)
        return [*notices, *commands, *self._gather(now)]

    def look_then_stop(self, now: float, signum: int) -> list[Command]:
        """Stop, for which somebody has grown tired of waiting, once it is known where the ranks stand."""
        attempt = self.current
        attempt.stopped_at = now
        self.stops_with = signum
        commands = self.evidence.end(attempt)
        self._enter(Phase.EVIDENCE_ROUND)
        return [*commands, *self.ask_for_evidence(now, asked=False)]

    def stop(
        self, now: float, signum: int = signal.SIGTERM, *,
        error: DtrainError | None = None, no_restart_reason: str | None = None,
    ) -> list[Command]:  # fmt: skip
        """Have every host ended; `error`: no worker was started."""
        self._error = error or self._error
        if no_restart_reason is not None:
            self._no_restart_reason = no_restart_reason
        if self.attempt is not None and self.attempt.stopped_at is None:
            self.attempt.stopped_at = now
        commands = self.evidence.end(self.attempt)
        self._enter(Phase.STOPPING)
        self.gathering.closed = True
        self.stopping = Stopping(self.fleet, self.timers, grace_s=self.spec.grace_s, now=now)
        return [*commands, *self.stopping.begin(signum, now)]

    def hurry(self, now: float) -> list[Command]:
        """Have everything killed that is being stopped."""
        return [] if self.stopping is None else self.stopping.hurry(now)

    def _end(self, now: float) -> None:
        self.phase = Phase.ENDED
        self.outcome = build_outcome(
            self.spec,
            self.fleet,
            self.attempt,
            error=self._error,
            signum=self.signum,
            no_restart_reason=self._no_restart_reason,
            worker_restarts=self.restarts.count,
            faults=self.chaos.costs,
            preempted=self.preempted,
            began=self.began,
            now=now,
        )
