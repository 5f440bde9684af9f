"""Inject faults (`--chaos`): decide when and where, and measure what each of them costs. Pure.

One fault is under way at a time; the time to the next one stops until training continues: until all ranks run again and
have made a step, except those that have never counted one. A fault uses up no restart of --max-restarts. Lost steps are
finished ones that must be made again: none if the other ranks go on, else those since the newest checkpoint.
"""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass

from launcher.job.attempt import AttemptState
from launcher.job.events import Command, Notice, Send
from launcher.job.ranks import ENDED, Rank, RankState
from launcher.job.timers import NEVER, Timer, Timers
from launcher.placement.chaos_plan import ChaosPlan, Fault
from launcher.protocol.commands import KillWorker, LoseHost


@dataclass
class FaultCost:
    """The cost of a fault. Times are seconds after it, None if that did not happen; `at_s` is since the run's start."""

    action: str
    target: str  # "rank 3 on sim1", "host sim1"
    at_s: float
    detection_s: float | None = None
    recovery_s: float | None = None
    steps_lost: int | None = None


@dataclass
class _Fault:
    """The fault under way, in an attempt; `newest` is the newest that was seen since, `changes` those of its table."""

    cost: FaultCost
    host: str
    rank: int | None
    at: float
    attempt: AttemptState
    newest: AttemptState
    changes: int = -1


class Chaos:
    """`costs` has the faults so far, in order."""

    def __init__(self, plan: ChaosPlan | None, timers: Timers, began: float) -> None:
        self.costs: list[FaultCost] = []
        self._plan = plan or ChaosPlan((), 0)
        self._timers = timers
        self._began = began
        self._random = random.Random(self._plan.seed)
        self._under_way: _Fault | None = None
        self._stepping: set[int] = set()  # ranks that have ever counted a step

    def take_step(self, attempt: AttemptState, row: Rank) -> None:
        """Take the first step of a process."""
        self._stepping.add(row.number)
        attempt.ranks.stepped(row)

    def made(self, host: str, rank: int | None, now: float) -> bool:
        """Take the news that a host is lost, or that a rank has failed; return whether the fault under way did that."""
        fault = self._under_way
        if fault is None or fault.cost.detection_s is not None or (fault.host, fault.rank) != (host, rank):
            return False
        fault.cost.detection_s = now - fault.at
        return True

    def advance(self, attempt: AttemptState, now: float, *, runs: bool) -> list[Command]:
        """See whether training goes on after a fault, and make those that are due; `runs`: the workers do."""
        fault, ranks = self._under_way, attempt.ranks
        commands: list[Command] = []
        if fault is not None and (attempt is not fault.newest or ranks.changes != fault.changes):
            fault.changes = ranks.changes
            commands = self._look(fault, attempt, now, runs=runs)
        if self._plan.faults and self._under_way is None and runs and attempt.is_whole and not ranks.count(*ENDED):
            commands += self._due(attempt, now)
        return commands

    def _look(self, fault: _Fault, attempt: AttemptState, now: float, *, runs: bool) -> list[Command]:
        cost, ranks = fault.cost, attempt.ranks
        if cost.detection_s is not None:
            if attempt is not fault.newest:
                cost.steps_lost, fault.newest = fault.newest.lost_steps, attempt
            if runs and attempt.is_whole and all(map(self._trains, ranks)):
                self._end(fault, now)
                cost.recovery_s = now - fault.at
                ends = fault.attempt.ranks.exits().values()
                if cost.steps_lost is None and self._stepping and all(each.unsaved is not None for each in ends):
                    cost.steps_lost = 0
        elif attempt is not fault.newest:  # something else was quicker
            self._end(fault, now)
        elif fault.rank is not None and ranks.count(RankState.DONE):
            row = ranks.get(fault.rank)
            if row is not None and row.state is RankState.DONE:  # it had ended before
                self._under_way = None
            elif cost.action == "stop" and runs:  # the others wait for it no longer, so that it would not be noticed
                self._end(fault, now)
                return [Send(fault.host, KillWorker(rank=fault.rank, attempt=attempt.number, signum=signal.SIGCONT))]
        return []

    def _trains(self, row: Rank) -> bool:
        return row.has_stepped or row.number not in self._stepping

    def _due(self, attempt: AttemptState, now: float) -> list[Command]:
        """Make a fault, if one is due."""
        plan = self._plan
        commands: list[Command] = []
        if self._timers.at((Timer.CHAOS, 0)) == NEVER:
            commands.append(Notice(f"--chaos: the faults begin, with seed {plan.seed}"))
            for number, fault in enumerate(plan.faults):
                self._timers.set((Timer.CHAOS, number), now + fault.every_s)
        for number, fault in enumerate(plan.faults):
            if self._timers.over((Timer.CHAOS, number), now):
                # More time each time, as long as no process makes a step: it may take longer to start than the time
                # between two faults, and would never come to one.
                patience = 1 if self._stepping else 2 ** min(len(self.costs), 10)
                self._timers.set((Timer.CHAOS, number), now + fault.every_s * patience)
                return [*commands, *self._make(fault, attempt, now)]
        return commands

    def _make(self, fault: Fault, attempt: AttemptState, now: float) -> list[Command]:
        if fault.target == "host":
            host = self._random.choice(attempt.members)
            rank, what, order = None, f"host {host}", Send(host, LoseHost())
        else:
            rows = [row for worker in attempt.placement.workers if (row := attempt.ranks.get(worker.rank)) is not None]
            if fault.action == "stop" and len(rows) == 1:  # a run stopped as a whole is not blamed
                return [Notice("--chaos: no worker is stopped this time: that takes two")]
            row = self._random.choice(rows)
            host, rank, what = row.host, row.number, f"rank {row.number} on {row.host}"
            signum = signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP
            order = Send(host, KillWorker(rank=rank, attempt=attempt.number, signum=signum))
        self.costs.append(FaultCost(fault.action, what, now - self._began))
        self._under_way = _Fault(self.costs[-1], host, rank, now, attempt, attempt)
        return [Notice(f"--chaos: {fault.action} {what}"), order]

    def _end(self, fault: _Fault, now: float) -> None:
        """Let the time to the next faults go on."""
        self._under_way = None
        for number in range(len(self._plan.faults)):
            name = (Timer.CHAOS, number)
            self._timers.set(name, self._timers.at(name) + now - fault.at)
