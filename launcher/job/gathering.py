"""Gather hosts: decide which can be used, and when an attempt can start with them. Pure; owned by job.py.

A run of fixed size waits until every host has answered, and begins only with all of them. An elastic one, and any
attempt after the first, begins with the hosts it can have: once enough are ready, the others have a short time left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto

from launcher.errors import PlacementError
from launcher.hosts.folding import lines_by_reason, some
from launcher.hosts.host import Host, HostKind
from launcher.job.attempt import AttemptState
from launcher.job.events import Command, Notice, Send
from launcher.job.failures.failure import Failure, FailureKind
from launcher.job.fleet import Fleet, HostPhase, HostState
from launcher.job.orders import mismatch, prepare
from launcher.job.timers import NEVER, Timer, Timers
from launcher.placement.job_spec import JobSpec
from launcher.placement.placement import place_job
from launcher.protocol.message import STEP_TIMES
from launcher.protocol.reports import Facts, Hello

LAST_CALL_S = (15.0, 3.0)  # for hosts that are on their way once enough are ready: at first, and after an attempt
OTHER_REASONS_S = 4.0  # for what else is wrong, once it is certain that the run cannot start; a closed port takes 3 s
LARGE = 16  # hosts; of fewer, nothing is said as long as they come
SHOWN = 4  # reasons in that
SHOW_S = (2.0, 10.0)  # how far a large start is: the first time, and then again and again
STEP_TIMES_OF_ALL = 80  # of workers, from all hosts between two heartbeats, if each has one: what we can take in
MAX_FAILED = 2  # a host that ends so many attempts in a row is left out


class Readiness(Enum):
    WAIT = auto()
    BEGIN = auto()
    TOO_FEW = auto()  # and there will not be more in time
    IMPOSSIBLE = auto()  # in this attempt


class Gathering:
    """`previous` are the members of the attempt before; `problems` why hosts could not be used, by name.

    `closed`: there will be no other attempt.
    """

    def __init__(self, spec: JobSpec, fleet: Fleet, timers: Timers, now: float) -> None:
        self.problems: dict[str, str] = {}
        self.previous: tuple[str, ...] = ()
        self.closed = False
        self._spec = spec
        self._fleet = fleet
        self._timers = timers
        timers.set(Timer.PAUSE, now)
        timers.set(Timer.GATHER, now + spec.start_timeout_s)
        if len(fleet) >= LARGE:
            timers.set(Timer.SHOW, now + SHOW_S[0])
        self._after_killed_runs: dict[str, Facts] = {}  # what hosts said of earlier runs, not shown yet
        self._not_shown: dict[str, str] = {}  # why hosts cannot be used, where many are to be shown as one

    def again(self, previous: tuple[str, ...], now: float, delay_s: float) -> None:
        """Reset after an attempt."""
        self.previous = previous
        self._timers.set(Timer.PAUSE, now + delay_s)
        self._timers.set(Timer.GATHER, now + delay_s + self._spec.start_timeout_s)
        self._timers.cancel(Timer.LAST_CALL)

    @property
    def _fixed(self) -> bool:
        return not self._spec.elastic and not self.previous

    def greeted(self, state: HostState, hello: Hello) -> list[Command]:
        """Ask a host whether the job can start there."""
        if state.phase is not HostPhase.GREETING:
            return []
        problem = mismatch(self._spec, hello)
        self._fleet.greeted(state, hello.agent_identity)
        if problem is not None:
            return self.unusable(state, problem)
        fleet = self._fleet
        lease_s = fleet.timeout_s if state.leased else 0.0
        prepared = prepare(
            self._spec,
            state.host,
            lost_agents=state.lost_agents,
            lease_s=lease_s,
            heartbeat_s=fleet.heartbeat_s,
            step_times=max(1, min(STEP_TIMES, STEP_TIMES_OF_ALL // len(fleet))),
        )
        return [Send(state.name, prepared)]

    def checked(self, state: HostState, facts: Facts) -> list[Command]:
        """Take the answer; the host is READY if it can be used."""
        if state.phase is not HostPhase.CHECKING:
            return []
        if facts.killed_runs:
            self._after_killed_runs[state.name] = facts
        if facts.left or facts.problems:
            self._fleet.could_not_clean(state, facts)
            left = [f"processes of an earlier attempt cannot be ended: {', '.join(facts.left)}"] if facts.left else []
            return self.unusable(state, "; ".join([*left, *facts.problems]))
        self._fleet.checked(state, facts)
        self.problems.pop(state.name, None)
        return self._fleet.stop(state) if self.closed or not self._fleet.wanted(state) else []

    def unusable(self, state: HostState, reason: str) -> list[Command]:
        """Note why a host that has joined cannot be used; it is stopped at once."""
        self.problems[state.name] = reason
        return [*self._fleet.stop(state, reason=reason), *self.say_unusable(state, reason)]

    def say_unusable(self, state: HostState, reason: str) -> list[Command]:
        """Say that a host cannot be used, where the run goes on without it; once."""
        if self.closed or self._fixed or state.tries > 1:
            return []
        if self._timers.at(Timer.SHOW) < NEVER:
            self._not_shown[state.name] = reason
            return []
        return [Notice(f"{state.name} cannot be used for now: {reason}", is_error=True)]

    def leave_out(self, attempt: AttemptState, cause: Failure | None) -> list[Command]:
        """Count which hosts ended attempts; dismiss those that did so too often in a row, if others are enough."""
        ended = [failure for failure in attempt.failures if failure.kind is FailureKind.HOST_LOST]
        ended += [cause] if cause is not None else []
        failed = {failure.host for failure in ended if not failure.injected}
        commands: list[Command] = []
        for state in map(self._fleet.states.__getitem__, attempt.members):
            if not self._fleet.wanted(state) and state.phase is HostPhase.READY and state.name not in self._fleet.busy:
                commands += self._fleet.stop(state)
            why = f"it ended {MAX_FAILED} attempts in a row"
            commands += self._count(state, why, failed=state.name in failed)
        return commands

    def count_loss(self, name: str, *, failed: bool) -> list[Command]:
        """Count it against a host if an attempt that goes on had to do without it, before it had come to anything."""
        return self._count(self._fleet.states[name], f"it was lost {MAX_FAILED} times in a row", failed=failed)

    def count_absence(self, name: str, members: Sequence[str]) -> list[Command]:
        """Count it against a host if an attempt was ended for it, and it is not there for the next one."""
        if not name or name in members:
            return []
        why = f"for {MAX_FAILED} attempts that ended for it, it was gone again"
        return self._count(self._fleet.states[name], why, failed=True)

    def _count(self, state: HostState, why: str, *, failed: bool) -> list[Command]:
        """Count a failure of a host, or end its row of them; dismiss it after too many, if others are enough."""
        self._fleet.count_failed(state, failed=failed)
        others = self._fleet.count(HostPhase.READY) - (state.phase is HostPhase.READY)
        if state.failed_attempts < MAX_FAILED or not self._fleet.wanted(state) or others < self._spec.min_hosts:
            return []
        return self._leave_out(state, why)

    def leave_out_misfits(self, states: Sequence[HostState]) -> list[Command]:
        """Do without the hosts on which the workers do not fit, if others are enough; else return nothing."""
        problems = misfits(self._spec, states)
        if self.possible - len(problems) < self._spec.min_hosts:
            return []
        self.problems.update(problems)
        return [c for name, why in problems.items() for c in self._leave_out(self._fleet.states[name], why)]

    def _leave_out(self, state: HostState, why: str) -> list[Command]:
        self._fleet.drop(state, why)
        notice = Notice(f"{state.name} is excluded from further attempts: {why}", is_error=True)
        if state.phase is HostPhase.READY:  # with workers, it stays until their attempt is over
            return [notice, *([] if self._fleet.works(state) else self._fleet.stop(state))]
        if state.phase is HostPhase.AWAY and not self._fleet.dirty(state):
            self._fleet.give_up(state)
        return [notice]

    def discovered(self, hosts: Sequence[Host], now: float) -> list[Command]:
        """Take in who is there now: newcomers are tried, who is no longer named is used in no further attempt."""
        if self.closed:
            return []
        named = {host.name: host for host in hosts}
        commands: list[Command] = []
        for state in list(self._fleet):
            if state.name not in named and self._fleet.wanted(state):
                commands += self._leave_out(state, "it is no longer named by --hosts-script")
        for host in hosts:
            state = self._fleet.add(host, now)
            if state.link == 0:
                commands.append(self._fleet.open(state))
            elif not self._fleet.wanted(state):
                self._fleet.want(state, now)
        return commands

    @property
    def possible(self) -> int:
        """Number of hosts that may still take part."""
        return len(self._fleet) - len(self._fleet.dropped)

    def decide(self, now: float) -> Readiness:
        fleet, least, timers = self._fleet, self._spec.min_hosts, self._timers
        if not timers.over(Timer.PAUSE, now):
            return Readiness.WAIT
        too_late = timers.over(Timer.GATHER, now)
        ready = fleet.count(HostPhase.READY)
        if self._fixed:
            if self.problems and timers.at(Timer.HOPELESS) == NEVER:  # none of those is tried again
                timers.set(Timer.HOPELESS, now + OTHER_REASONS_S)
            if fleet.coming and not too_late and not timers.over(Timer.HOPELESS, now):
                return Readiness.WAIT
            return Readiness.BEGIN if ready == len(fleet) else Readiness.TOO_FEW
        if ready < least:
            timers.cancel(Timer.LAST_CALL)
            return Readiness.WAIT if self.possible >= least and not too_late else Readiness.TOO_FEW
        if timers.at(Timer.LAST_CALL) == NEVER:
            again, asked = bool(self.previous), self._spec.last_call_s
            timers.set(Timer.LAST_CALL, now + (LAST_CALL_S[again] if asked is None or again else asked))
        no_one_more = ready == self.possible or not fleet.coming or self._first_choice(ready)
        return Readiness.BEGIN if no_one_more or too_late or timers.over(Timer.LAST_CALL, now) else Readiness.WAIT

    def show_how_far(self, progress: str, now: float) -> list[Command]:
        """Show how far the start of a large run is, and what is wrong so far; the second also where it begins."""
        waits = self._timers.over(Timer.SHOW, now)
        if not waits and (progress or not self._not_shown):
            return []
        reasons = self._in_order(self.problems if self._fixed else self._not_shown)
        lines = lines_by_reason(reasons, ": " if self._fixed else " cannot be used for now: ")
        self._not_shown.clear()
        if waits:
            self._timers.set(Timer.SHOW, now + SHOW_S[1])
        more = [f"and {len(lines) - SHOWN} other reasons"] if len(lines) > SHOWN else []
        notices = [Notice(progress)] if progress else []
        return [*notices, Notice("\n".join([*lines[:SHOWN], *more]), is_error=True)] if lines else [*notices]

    def say_after_killed_runs(self) -> list[Command]:
        """Say what the hosts have found and ended of earlier runs; once for all of them."""
        found, self._after_killed_runs = self._after_killed_runs, {}
        left = any(facts.not_ended for facts in found.values())
        return [Notice(_after_killed_runs(found), is_error=left)] if found else []

    def _first_choice(self, ready: int) -> bool:
        """Say whether as many hosts as can take part are ready, of those named first or in the last attempt."""
        most = min(self._spec.max_hosts, self.possible)
        if ready < most:
            return False
        first = self.previous or tuple(self._fleet.states)[:most]
        return len(first) == most and all(self._fleet.states[name].phase is HostPhase.READY for name in first)

    def why_not_ready(self) -> dict[str, str]:
        """Return, by host, why the run cannot begin."""
        limit = f"within {self._spec.start_timeout_s:g} s (--start-timeout-s)"
        if self._timers.at(Timer.HOPELESS) < self._timers.at(Timer.GATHER):
            limit = "before the start was given up because of the other hosts"
        reasons = dict(self.problems)
        for state in self._fleet:
            if state.phase is HostPhase.CONNECTING:
                reasons.setdefault(state.name, f"was not reached {limit}")
            elif state.phase is HostPhase.GREETING and state.host.kind is HostKind.SSH:
                shell = "does a start-up file of its shell, such as .bashrc, wait for something?"
                reasons.setdefault(state.name, f"let us in, but no agent answered {limit}; {shell}")
            elif state.phase in (HostPhase.GREETING, HostPhase.CHECKING):
                reasons.setdefault(state.name, f"did not answer {limit}")
            elif state.name in self._fleet.coming:
                reasons.setdefault(state.name, f"was not tried {limit}")
        return self._in_order(reasons)

    def _in_order(self, reasons: Mapping[str, str]) -> dict[str, str]:
        return {name: reasons[name] for name in self._fleet.states if name in reasons}

    def why_not_again(self) -> str:
        """Say why there is no further attempt."""
        ready, least = self._fleet.count(HostPhase.READY), self._spec.min_hosts
        missing = [
            f"{state.name}: {state.reason or 'it did not answer'}"
            for state in self._fleet
            if state.phase is not HostPhase.READY
        ]
        limit = f"{self._spec.start_timeout_s:g} s (--start-timeout-s)"
        were = "no host was" if least == 1 else f"{ready} of at least {least} hosts were"
        return f"{were} ready for another attempt within {limit}: {some(missing)}"


def misfits(spec: JobSpec, states: Sequence[HostState]) -> dict[str, str]:
    """Return, by host, why the workers meant for it do not fit there."""
    problems = {}
    for state in states:
        try:
            place_job(spec, [state.offer()])
        except PlacementError as error:
            problems[state.name] = str(error).removeprefix(f"{state.name}: ")
    return problems


def _after_killed_runs(found: Mapping[str, Facts]) -> str:
    """Say what was found of earlier runs, by host."""
    runs, ended = (sum(numbers) for numbers in zip(*((f.killed_runs, f.ended) for f in found.values()), strict=True))
    what = "an earlier run that was" if runs == 1 else f"{runs} earlier runs that were"
    processes = f"{ended} process{'' if ended == 1 else 'es'} and " if ended else ""
    left = [
        f"; still there on {host}: {', '.join(facts.not_ended)}" for host, facts in found.items() if facts.not_ended
    ]
    return f"removed what {what} killed had left on {some(found)}: {processes}temporary folders{''.join(left)}"
