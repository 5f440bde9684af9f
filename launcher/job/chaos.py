"""Faults on purpose (`--chaos`): when, whom they hit, and what each of them costs. Pure.

One fault is under way at a time, and until training goes on the time to the next ones stands still. It goes on when
each process that was started for it has made a step, or, in a run in which none has counted steps before, is started;
where the world has shrunk, when the others are told of that.
What a fault ends costs no restart of --max-restarts. Lost are finished steps that have to be made again: none where the
others live on, else those since the newest checkpoint.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Collection
from dataclasses import dataclass, replace

from launcher.job.attempt import AttemptState, lost_steps
from launcher.job.events import Command, Notice, Send
from launcher.job.failure import Failure, FailureKind
from launcher.job.ranks import ENDED
from launcher.job.timers import Timer, Timers
from launcher.placement.chaos_plan import ChaosPlan, Fault
from launcher.protocol.commands import KillWorker, LoseHost
from launcher.protocol.reports import Exited

__all__ = ["Chaos", "FaultCost"]


@dataclass(frozen=True)
class FaultCost:
    """One fault. Times are seconds after the fault, None if it did not come to that; `at_s` after the run's begin."""

    action: str
    target: str  # "rank 3 on sim1", "host sim1"
    at_s: float
    detection_s: float | None = None
    recovery_s: float | None = None
    steps_lost: int | None = None


@dataclass
class _UnderWay:
    host: str
    rank: int | None
    at: float
    is_detected: bool = False
    lacking: frozenset[int] = frozenset()  # ranks that have to go on


class Chaos:
    """`costs` has the faults so far, in order."""

    def __init__(self, plan: ChaosPlan | None, timers: Timers, began: float) -> None:
        self.costs: list[FaultCost] = []
        self._plan = plan
        self._timers = timers
        self._began = began
        self._random = random.Random(None if plan is None else plan.seed)
        self._is_announced = False
        self._under_way: _UnderWay | None = None
        self._stepping: set[int] = set()  # ranks that have ever counted a step
        self._training: set[int] = set()  # ranks whose present process has
        self._exits: dict[int, Exited] = {}  # by rank, since the fault

    @property
    def seed(self) -> int:
        return 0 if self._plan is None else self._plan.seed

    def due(self, attempt: AttemptState, now: float) -> list[Command]:
        """Make the faults that are due; to be called while all workers of an attempt run and none is to be started."""
        if self._plan is None or self._under_way is not None or attempt.ranks.count(*ENDED):
            return []
        commands: list[Command] = []
        if not self._is_announced:
            self._is_announced = True
            commands.append(Notice(f"--chaos: the faults begin, with seed {self._plan.seed}"))
            for number, fault in enumerate(self._plan.faults):
                self._timers.set((Timer.CHAOS, number), now + fault.every_s)
        for number, fault in enumerate(self._plan.faults):
            if self._timers.over((Timer.CHAOS, number), now):
                self._timers.set((Timer.CHAOS, number), now + fault.every_s * self._patience)
                return [*commands, *self._make(fault, attempt, now)]
        return commands

    @property
    def _patience(self) -> int:
        """How many times as long to wait for the next fault: more each time, as long as no process makes a step.

        It may take longer to start than the time between two faults, and would never come to one.
        """
        return 1 if self._stepping else 2 ** min(len(self.costs), 10)

    def _make(self, fault: Fault, attempt: AttemptState, now: float) -> list[Command]:
        if fault.target == "host":
            host = self._random.choice(attempt.members)
            rank, what, order = None, f"host {host}", Send(host, LoseHost())
        else:
            workers = attempt.placement.workers
            if fault.action == "stop":  # of another one, nobody would know that it does not go on (hangs/watch.py)
                workers = tuple(worker for worker in workers if len(workers) > 1 and worker.rank in self._training)
            if not workers:
                return [Notice("--chaos: no worker is stopped this time: that takes two, and one that has made a step")]
            worker = self._random.choice(workers)
            host, rank, what = worker.host, worker.rank, f"rank {worker.rank} on {worker.host}"
            signum = signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP
            order = Send(host, KillWorker(rank=worker.rank, attempt=attempt.number, signum=signum))
        self._under_way = _UnderWay(host, rank, now)
        self._exits = {}
        self.costs.append(FaultCost(fault.action, what, now - self._began))
        return [Notice(f"--chaos: {fault.action} {what}"), order]

    def name(self, failure: Failure, now: float) -> Failure:
        """Return a failure, marked as one that was made if it is that of the fault under way."""
        fault = self._under_way
        if fault is None or fault.is_detected:
            return failure
        is_host = failure.kind is FailureKind.HOST_LOST and fault.rank is None
        if failure.host != fault.host or not (is_host or (fault.rank is not None and failure.rank == fault.rank)):
            return failure
        fault.is_detected = True
        fault.lacking = frozenset() if failure.rank is None else frozenset({failure.rank})
        self._note(detection_s=now - fault.at)
        return replace(failure, injected=True, killer="--chaos")

    def others_take_over(self, ranks: Collection[int], now: float) -> None:
        """Take a generation without the lost host: these ranks are new in it, and no step is lost."""
        fault = self._under_way
        self._training -= {*ranks}
        if fault is None or not fault.is_detected or fault.rank is not None:
            return
        fault.lacking = frozenset(ranks)
        self._note(steps_lost=0)
        if not ranks:
            self._end(fault, now)
            self._note(recovery_s=now - fault.at)

    def exited(self, exited: Exited, now: float) -> list[Command]:
        """Take the end of a worker, whose steps may be lost.

        A stopped one goes on once another has ended well: nobody waits for it any more, so that nobody would notice.
        """
        fault = self._under_way
        self._training.discard(exited.rank)
        self._exits[exited.rank] = exited
        if fault is None or fault.rank is None or fault.is_detected or exited.status != 0:
            return []
        if exited.rank == fault.rank:
            self._under_way = None  # it had ended before
        elif self.costs[-1].action == "stop":
            self._end(fault, now)
            return [Send(fault.host, KillWorker(rank=fault.rank, attempt=exited.attempt, signum=signal.SIGCONT))]
        return []

    def attempt_begins(self, attempt: AttemptState, now: float) -> None:
        """All processes start again."""
        self._training.clear()
        if (fault := self._under_way) is None:
            return
        if fault.is_detected:
            fault.lacking = frozenset(range(attempt.world_size))
            self._note(steps_lost=lost_steps(self._exits))
        else:  # something else was quicker
            self._end(fault, now)

    def goes_on(self, rank: int, now: float, *, has_stepped: bool) -> None:
        """Take the start of a process, or its first step."""
        if has_stepped:
            self._stepping.add(rank)
            self._training.add(rank)
        fault = self._under_way
        if fault is None or not fault.is_detected or (rank in self._stepping and not has_stepped):
            return
        if rank not in fault.lacking:
            return
        fault.lacking -= {rank}
        if not fault.lacking:
            self._end(fault, now)
            lost = self.costs[-1].steps_lost
            knows = self._stepping and all(each.unsaved is not None for each in self._exits.values())
            self._note(recovery_s=now - fault.at, steps_lost=0 if lost is None and knows else lost)

    def _end(self, fault: _UnderWay, now: float) -> None:
        """Let the time to the next faults go on."""
        assert self._plan is not None
        self._under_way = None
        for number in range(len(self._plan.faults)):
            name = (Timer.CHAOS, number)
            self._timers.set(name, self._timers.at(name) + now - fault.at)

    def _note(self, **known: float | int | None) -> None:
        self.costs[-1] = replace(self.costs[-1], **known)  # type: ignore[arg-type]  # each has its field's type
