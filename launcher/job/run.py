"""What the job knows of a run, and nothing that acts: each part has one owner, who changes it. Pure."""

from __future__ import annotations

from launcher.errors import DtrainError
from launcher.job.attempt import AttemptState
from launcher.job.chaos import Chaos
from launcher.job.debuggers import Debuggers
from launcher.job.evidence_round import EvidenceRounds
from launcher.job.fleet import Fleet
from launcher.job.gathering import Gathering
from launcher.job.outcome import Outcome
from launcher.job.progress_messages import Phase
from launcher.job.recovery.hangs import Hangs
from launcher.job.recovery.judgement import FailedAttempt
from launcher.job.stopping import Stopping
from launcher.job.timers import Timers
from launcher.placement.job_spec import JobSpec


class Run:
    """`attempt` is the newest; `stopping` is set once the run ends. `past` is what has failed before, in order."""

    def __init__(self, spec: JobSpec, now: float, run_key: str) -> None:
        self.spec = spec
        self.run_key = run_key  # for the workers' eyes only
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
        self.stopping: Stopping | None = None
        self.outcome: Outcome | None = None
        self.preempted = False  # USR1 said that its time is nearly up, and to make room once it has saved
        self.signum: int | None = None  # the signal that ends the run
        self.stops_with: int | None = None  # what the workers get once it is known where they stand
        self.error: DtrainError | None = None  # why no worker was started
        self.no_restart_reason = ""

    @property
    def current(self) -> AttemptState:
        """The attempt, in phases that have one."""
        assert self.attempt is not None
        return self.attempt
