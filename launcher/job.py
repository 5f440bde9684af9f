"""The job: a pure state machine. Events go in with the time, commands come out; nothing here waits or touches a file.

    joining -> (every host has answered) -> opening the store -> running -> stopping -> ended

The controller owns it and calls `handle` from one loop. All decisions of a run are here: whether it can start, when it
stops, what the cause was, and the exit code.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from enum import Enum, auto

from launcher.errors import DtrainError, HostError, PlacementError, StartError, StoreError
from launcher.events import Close, Command, Connected, Event, Lost, Said, Signalled, Tell, Unread
from launcher.hoststate import HostPhase, HostState
from launcher.orders import mismatch, open_store, prepare, start_workers
from launcher.outcome import Failure, FailureKind, Outcome
from launcher.placement import Placement, place
from launcher.protocol import (
    Bye,
    Exited,
    Facts,
    Hello,
    Report,
    SignalWorkers,
    Started,
    Stop,
    StoreFailed,
    StoreOpened,
)
from launcher.protocol import Command as AgentCommand
from launcher.spec import JobSpec

__all__ = ["ANSWER_S", "HEARTBEAT_TIMEOUT_S", "Job", "Phase"]

HEARTBEAT_TIMEOUT_S = 60.0
ANSWER_S = 15.0  # how long past the grace period a host may take to say that its workers are gone


class Phase(Enum):
    JOINING = auto()
    OPENING_STORE = auto()
    RUNNING = auto()
    STOPPING = auto()
    ENDED = auto()


@dataclass
class _Run:
    """What is known of the workers of this attempt."""

    ordered: bool = False  # the hosts were told to start them
    started: dict[int, int] = field(default_factory=dict)  # rank -> pid
    exited: dict[int, Exited] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)


class Job:
    """See the module. `progress` says in a few words what the run is waiting for, or is empty."""

    def __init__(self, spec: JobSpec, now: float) -> None:
        self.spec = spec
        self.phase = Phase.JOINING
        self.outcome: Outcome | None = None
        self.placement: Placement | None = None
        self._hosts = {host.name: HostState(host, heard=now) for host in spec.hosts}
        self._began = now
        self._start_deadline = now + spec.start_timeout_s
        self._problems: dict[str, str] = {}
        self._run = _Run()
        self._error: DtrainError | None = None  # why no worker was started
        self._signum: int | None = None  # the signal that told us to stop
        self._stopped_at: float | None = None
        self._give_up_at: float | None = None
        self._swept = 0
        self._left: dict[str, list[str]] = {}

    @property
    def progress(self) -> str:
        total = len(self._hosts)
        if self.phase is Phase.JOINING:
            waiting = [state.host.name for state in self._hosts.values() if state.facts is None and state.alive]
            return f"{total - len(waiting)} of {total} hosts ready; waiting for {_some(waiting)}"
        if self.phase is Phase.OPENING_STORE:
            return "opening the rendezvous store"
        if self.phase is Phase.RUNNING and self.placement is not None:
            started, world = len(self._run.started), self.placement.world_size
            return "" if started == world else f"{started} of {world} workers started"
        if self.phase is Phase.STOPPING:
            return f"stopping; waiting for {_some([s.host.name for s in self._hosts.values() if s.alive])}"
        return ""

    def deadline(self) -> float | None:
        """Return when the next Tick matters, or None."""
        if self.phase is Phase.STOPPING:
            return self._give_up_at
        times = [state.heard + HEARTBEAT_TIMEOUT_S for state in self._hosts.values() if state.watched]
        if not self._all_started():
            times.append(self._start_deadline)
        return min(times, default=None)

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event; return what is to be done, in order."""
        if self.phase is Phase.ENDED:
            return []
        if isinstance(event, Connected):
            return self._connected(event)
        if isinstance(event, Said):
            return self._said(self._hosts[event.host], event.message, now)
        if isinstance(event, Lost):
            return self._lost(self._hosts[event.host], event.reason, now)
        if isinstance(event, Unread):
            self._hosts[event.host].heard = now
            return []
        if isinstance(event, Signalled):
            return self._signalled(event.signum, now)
        return self._ticked(now)

    # ---- hosts that join, speak and vanish ----

    def _connected(self, event: Connected) -> list[Command]:
        state = self._hosts[event.host]
        if not state.alive:
            return [Close(event.host)]
        state.phase = HostPhase.GREETING
        state.our_address = event.our_address
        return []

    def _said(self, state: HostState, message: Report, now: float) -> list[Command]:
        if not state.alive:
            return []
        state.hear(message, now)
        if isinstance(message, Hello):
            return self._greeted(state, message, now)
        if isinstance(message, Facts):
            return self._checked(state, message, now)
        if isinstance(message, StoreOpened):
            return self._start(message) if self.phase is Phase.OPENING_STORE else []
        if isinstance(message, StoreFailed):
            return self._store_failed(state, message, now)
        if isinstance(message, Started):
            self._run.started[message.rank] = message.pid
        elif isinstance(message, Exited):
            return self._exited(state, message, now)
        elif isinstance(message, Bye):
            return self._bye(state, message, now)
        return []

    def _greeted(self, state: HostState, hello: Hello, now: float) -> list[Command]:
        problem = mismatch(self.spec, hello)
        if problem is not None:
            return self._unusable(state, problem, now)
        state.phase = HostPhase.CHECKING
        return [Tell(state.host.name, prepare(self.spec, state.host))]

    def _checked(self, state: HostState, facts: Facts, now: float) -> list[Command]:
        if facts.problems:
            return self._unusable(state, "; ".join(facts.problems), now)
        state.facts = facts
        state.phase = HostPhase.READY
        return self._when_all_answered(now)

    def _unusable(self, state: HostState, reason: str, now: float) -> list[Command]:
        """Note why a host that has joined cannot be used; it is told to end at once."""
        self._problems[state.host.name] = reason
        if self.phase is Phase.STOPPING:
            return []
        state.phase = HostPhase.READY
        return [
            Tell(state.host.name, Stop(signum=signal.SIGTERM, grace_s=0.0)),
            *self._when_all_answered(now),
        ]

    def _lost(self, state: HostState, reason: str, now: float) -> list[Command]:
        if not state.alive:
            return []
        waited = state.phase is HostPhase.READY
        state.phase = HostPhase.GONE
        commands: list[Command] = [Close(state.host.name)]
        if self.phase is Phase.JOINING:
            self._problems.setdefault(state.host.name, reason)
            return commands + self._when_all_answered(now)
        if self.phase is Phase.STOPPING:
            if waited and self._run.ordered and not state.said_bye:
                self._left[state.host.name] = [f"unknown: {reason}"]
            return commands + self._end_when_all_gone(now)
        return commands + self._host_lost(state, reason, now)

    def _when_all_answered(self, now: float) -> list[Command]:
        if self.phase is not Phase.JOINING:
            return []
        states = list(self._hosts.values())
        if any(state.alive and state.phase is not HostPhase.READY for state in states):
            return []
        if self._problems:
            self._error = StartError(self._problems, len(states))
            return self._stop(now, signal.SIGTERM)
        try:
            self.placement = place(
                [state.offer() for state in states],
                nproc=self.spec.nproc,
                gpus_per_proc=self.spec.gpus_per_proc,
                oversubscribe=self.spec.oversubscribe,
            )
        except PlacementError as error:
            self._error = error
            return self._stop(now, signal.SIGTERM)
        self.phase = Phase.OPENING_STORE
        return [Tell(states[0].host.name, open_store(self.spec, states))]

    def _start(self, store: StoreOpened) -> list[Command]:
        assert self.placement is not None
        self.phase = Phase.RUNNING
        self._run.ordered = True
        return list(start_workers(self.spec, self.placement, store))

    # ---- how it ends ----

    def _store_failed(self, state: HostState, message: StoreFailed, now: float) -> list[Command]:
        if self.phase is Phase.OPENING_STORE:
            self._error = StoreError(f"{state.host.name}: {message.reason}")
            return self._stop(now, signal.SIGTERM)
        at = state.corrected(message.time)
        before_our_stop = self._stopped_at is None or at < self._stopped_at  # workers may notice it sooner than we do
        if self._run.ordered and before_our_stop and not self._all_finished():
            self._fail(
                Failure(
                    kind=FailureKind.STORE_LOST,
                    host=state.host.name,
                    message=message.reason,
                    at=at,
                    ran_s=now - self._began,
                )
            )
        return self._stop(now, signal.SIGTERM) if self.phase is Phase.RUNNING else []

    def _exited(self, state: HostState, exited: Exited, now: float) -> list[Command]:
        self._run.exited[exited.rank] = exited
        self._run.started.setdefault(exited.rank, exited.pid)
        if exited.status != 0:
            at = state.corrected(exited.time)
            failed_before = exited.error is not None and self._stopped_at is not None and at < self._stopped_at
            if failed_before or not exited.provoked:
                self._fail(_failure(state.host.name, exited, at))
                if self.phase is Phase.RUNNING:
                    return self._stop(now, signal.SIGTERM)
        if self.phase is Phase.RUNNING and self._all_finished():
            return self._stop(now, signal.SIGTERM)
        return []

    def _all_started(self) -> bool:
        return self.placement is not None and len(self._run.started) == self.placement.world_size

    def _all_finished(self) -> bool:
        """Whether every worker has ended by itself and well; one that its agent stopped unasked has not."""
        ended = self._run.exited.values()
        all_ended = self.placement is not None and len(ended) == self.placement.world_size
        return all_ended and all(exited.status == 0 and not exited.provoked for exited in ended)

    def _fail(self, failure: Failure) -> None:
        if self._signum is None or (self._stopped_at is not None and failure.at < self._stopped_at):
            self._run.failures.append(failure)

    def _signalled(self, signum: int, now: float) -> list[Command]:
        if signum in (signal.SIGUSR1, signal.SIGUSR2):
            return self._tell_all(SignalWorkers(signum=signum)) if self.phase is Phase.RUNNING else []
        if self._signum is None and not self._run.failures and self._error is None and not self._all_finished():
            self._signum = signum
        if self.phase is not Phase.STOPPING:
            return self._stop(now, signum)
        if signum == signal.SIGINT:
            assert self._give_up_at is not None
            self._give_up_at = min(self._give_up_at, now + ANSWER_S)
            return self._tell_all(Stop(signum=signal.SIGKILL, grace_s=0.0))
        return []

    def _stop(self, now: float, signum: int) -> list[Command]:
        """Go to STOPPING: every joined host is told, the others are given up."""
        self.phase = Phase.STOPPING
        self._stopped_at = now
        self._give_up_at = now + self.spec.grace_s + ANSWER_S
        commands: list[Command] = []
        for state in self._hosts.values():
            if state.phase in (HostPhase.CHECKING, HostPhase.READY):
                commands.append(Tell(state.host.name, Stop(signum=signum, grace_s=self.spec.grace_s)))
            elif state.alive:  # it has not even greeted: the end of its stream ends it
                state.phase = HostPhase.GONE
                commands.append(Close(state.host.name))
        return commands + self._end_when_all_gone(now)

    def _bye(self, state: HostState, bye: Bye, now: float) -> list[Command]:
        state.said_bye = True
        state.phase = HostPhase.GONE
        self._swept += bye.swept
        if bye.left:
            self._left[state.host.name] = bye.left
        if self.phase is Phase.JOINING:
            self._problems.setdefault(state.host.name, "its agent was told to end by somebody else")
            return [Close(state.host.name), *self._when_all_answered(now)]
        commands: list[Command] = [Close(state.host.name)]
        if self.phase is not Phase.STOPPING:
            return commands + self._host_lost(state, "its agent was told to end by somebody else", now)
        return commands + self._end_when_all_gone(now)

    def _host_lost(self, state: HostState, reason: str, now: float) -> list[Command]:
        name, ran_s = state.host.name, now - self._began
        self._fail(Failure(kind=FailureKind.HOST_LOST, host=name, message=reason, at=now, ran_s=ran_s))
        return self._stop(now, signal.SIGTERM)

    def _ticked(self, now: float) -> list[Command]:
        if self.phase is Phase.STOPPING:
            if self._give_up_at is None or now < self._give_up_at:
                return []
            commands: list[Command] = []
            for state in self._hosts.values():
                if state.alive:
                    commands += self._lost(state, "it did not say that its workers are gone", now)
            return commands
        commands = []
        for state in list(self._hosts.values()):
            if state.watched and now >= state.heard + HEARTBEAT_TIMEOUT_S:
                commands += self._lost(state, f"nothing was heard from it for {now - state.heard:.0f} s", now)
        if now >= self._start_deadline and not self._all_started():
            commands += self._too_slow(now)
        return commands

    def _too_slow(self, now: float) -> list[Command]:
        limit = f"{self.spec.start_timeout_s:g} s (--start-timeout-s)"
        if self.phase is Phase.JOINING:
            commands: list[Command] = []
            for state in self._hosts.values():
                if state.alive and state.phase is not HostPhase.READY:
                    did = "was not reached" if state.phase is HostPhase.CONNECTING else "did not answer"
                    commands += self._lost(state, f"{did} within {limit}", now)
            return commands
        if self.phase is Phase.OPENING_STORE:
            self._error = HostError(next(iter(self._hosts)), f"the rendezvous store was not opened within {limit}")
            return self._stop(now, signal.SIGTERM)
        if self.phase is Phase.RUNNING and self.placement is not None:
            late = {w.host: w.rank for w in reversed(self.placement.workers) if w.rank not in self._run.started}
            names = _some(list(reversed(late)))
            self._error = HostError(names, f"rank {min(late.values())} was not started within {limit}")
            return self._stop(now, signal.SIGTERM)
        return []

    def _tell_all(self, message: AgentCommand) -> list[Command]:
        return [
            Tell(state.host.name, message)
            for state in self._hosts.values()
            if state.phase in (HostPhase.CHECKING, HostPhase.READY)
        ]

    def _end_when_all_gone(self, now: float) -> list[Command]:
        if any(state.alive for state in self._hosts.values()):
            return []
        self.phase = Phase.ENDED
        cause = min(self._run.failures, key=lambda failure: failure.at, default=None)
        failed = {failure.rank for failure in self._run.failures}
        stopped = [e for e in self._run.exited.values() if e.provoked and e.rank not in failed]
        self.outcome = Outcome(
            run_id=self.spec.run_id,
            exit_code=self._exit_code(cause),
            error=self._error,
            signum=self._signum,
            cause=cause,
            other_failures=max(0, len(self._run.failures) - 1),
            stopped=len(stopped),
            world_size=self.placement.world_size if self.placement is not None else 0,
            hosts=len(self._hosts),
            swept=self._swept,
            left=tuple((host, tuple(left)) for host, left in self._left.items()),
            duration_s=now - self._began,
        )
        return []

    def _exit_code(self, cause: Failure | None) -> int:
        if self._error is not None:
            return self._error.exit_code
        if cause is not None:
            return cause.exit_code
        if self._signum is not None:
            return 128 + self._signum
        return 0


def _failure(host: str, exited: Exited, at: float) -> Failure:
    error = exited.error or {}
    if exited.pid == 0:
        kind = FailureKind.NEVER_STARTED
    elif exited.error is not None:
        kind = FailureKind.RAISED
    else:
        kind = FailureKind.KILLED if exited.status < 0 else FailureKind.EXITED
    return Failure(
        kind=kind,
        host=host,
        rank=exited.rank,
        pid=exited.pid,
        status=exited.status,
        ran_s=exited.ran_s,
        at=at,
        error_type=error.get("type", ""),
        message=error.get("message", ""),
        where=error.get("where", ""),
        provoked=exited.provoked,
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
