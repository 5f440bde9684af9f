"""The state of a run, without behaviour: each part has one owner, which changes it. Pure."""

from __future__ import annotations

from enum import Enum, auto

from launcher.errors import DtrainError
from launcher.hosts.folding import some
from launcher.job.attempt import AttemptState
from launcher.job.chaos import Chaos
from launcher.job.failures.failure import FailedAttempt
from launcher.job.fleet import Fleet, HostPhase
from launcher.job.gathering import Gathering
from launcher.job.inspection import Debuggers, EvidenceRounds
from launcher.job.ranks import RankState
from launcher.job.recovery.hangs import Hangs
from launcher.job.timers import NEVER, Timer, Timers
from launcher.placement.job_spec import JobSpec


class Phase(Enum):
    GATHERING = auto()
    OPENING_STORE = auto()
    RUNNING = auto()
    EVIDENCE_ROUND = auto()
    ENDING = auto()  # the attempt
    STOPPING = auto()  # the job
    ENDED = auto()


class Run:
    """`attempt` is the newest. `past` is what has failed before, in order."""

    def __init__(self, spec: JobSpec, now: float, run_key: str) -> None:
        self.spec = spec
        self.run_key = run_key  # a secret of the workers
        self.began = now
        self.phase = Phase.GATHERING
        self.timers = timers = Timers()
        self.fleet = Fleet(spec.hosts, timers, timeout_s=spec.heartbeat_timeout_s, join_s=spec.start_timeout_s, now=now)
        self.gathering = Gathering(spec, self.fleet, timers, now)
        self.attempt: AttemptState | None = None
        self.past: list[FailedAttempt] = []
        self.evidence = EvidenceRounds(timers)
        self.debuggers = Debuggers()
        self.hangs = Hangs(spec.hang, meets=not spec.roles.others)
        self.chaos = Chaos(spec.chaos, timers, now)
        self.preempted = False  # USR1 said that its time is nearly up, and to make room once it has saved
        self.signum: int | None = None  # the signal that ends the run
        self.stops_with: int | None = None  # what the workers get once it is known where they stand
        self.kill_at = NEVER  # once it stops, when hosts kill what still runs
        self.hurries = False  # it looks at no lost host again
        self.error: DtrainError | None = None  # why no worker was started
        self.no_restart_reason = ""

    @property
    def stops(self) -> bool:
        """Whether every host was ordered to end."""
        return self.phase in (Phase.STOPPING, Phase.ENDED)

    @property
    def current(self) -> AttemptState:
        """The attempt, in phases that have one."""
        assert self.attempt is not None
        return self.attempt

    @property
    def progress(self) -> str:
        """Short text on what the run is waiting for."""
        phase, fleet, attempt = self.phase, self.fleet, self.attempt
        out, ready = fleet.count(HostPhase.OUT), fleet.count(HostPhase.READY)
        if phase is Phase.GATHERING:
            waiting = (s.name for s in fleet if s.phase is not HostPhase.READY and s.phase is not HostPhase.OUT)
            names = some(waiting, len(fleet) - ready - out) or "the next try"
            again = f"attempt {attempt.number + 1}: " if attempt is not None else ""
            hosts = f"{ready} of {len(fleet)} hosts ready; " if len(fleet) > 1 else ""
            return f"{again}{hosts}waiting for {names}"
        if phase is Phase.OPENING_STORE:
            return "opening the rendezvous store"
        if phase is Phase.RUNNING and attempt is not None:
            world = attempt.world_size
            started = world - attempt.ranks.count(RankState.STARTING)
            return "" if started == world else f"{started} of {world} workers started"
        if phase is Phase.EVIDENCE_ROUND:
            return "looking where the ranks stand"
        if phase is Phase.ENDING and attempt is not None:
            waiting = (name for name in attempt.members if name in fleet.busy)
            return f"stopping; waiting for {some(waiting, len(fleet.busy))}"
        if phase is Phase.STOPPING:
            waiting = (state.name for state in fleet if state.phase is not HostPhase.OUT)
            return f"stopping; waiting for {some(waiting, len(fleet) - out)}"
        return ""

    def enter(self, phase: Phase) -> None:
        self.phase = phase
        self.timers.cancel(Timer.PHASE, Timer.ROOT)
