"""Which hosts make up an attempt that goes on: lost ones leave it, others take their places or join. Pure.

Only for resilient workers (generations.py), and not with other roles or variables for other ecosystems: those cannot
change in a process that runs. Each composition is a generation, with a number of its own.

A lost host. Its workers may live until it is fenced (fleet.py). The others are told at once that there will be another
generation ("later"), and wait. Once it is fenced, hosts that are ready take the places of lost ones, and their workers
are started. With too few of those an elastic run goes on with fewer; any other one waits. If the host of the store was
lost, another one opens a store first, and the workers are told where. Then all are told what they are now.

A host that has come to an elastic run. Its workers are started beside the others, which know nothing of them. Once they
are ready to meet, all are told to meet "at_commit". Until then the failure of one of them ends them alone.

A worker keeps its rank in the attempt, by which it is named in orders, output and reports, when RANK changes for it.
Workers of a host that has come get ranks that nobody has.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from itertools import count

from launcher.errors import PlacementError
from launcher.job.attempt import AttemptState, choose_members
from launcher.job.events import Command, Notice, Send
from launcher.job.failure import Failure
from launcher.job.fleet import Fleet
from launcher.job.gathering import Gathering, misfits
from launcher.job.host_state import HostPhase
from launcher.job.orders import composed_workers, open_store
from launcher.job.progress_messages import composed
from launcher.job.recovery.generations import Generations
from launcher.job.recovery.restarts import PROGRESS_S, Restarts
from launcher.job.timers import NEVER, Timer, Timers
from launcher.placement.job_spec import JobSpec
from launcher.placement.placement import Placement, place_job
from launcher.protocol.commands import EndAttempt, NextGeneration
from launcher.protocol.message import RESILIENT
from launcher.protocol.reports import StoreOpened

__all__ = ["Compositions", "Readiness", "numbered"]


class Readiness(Enum):
    WAIT = auto()
    COMPOSE = auto()
    TOO_FEW = auto()  # hosts, and there will not be more in time
    IMPOSSIBLE = auto()  # in this attempt


class Compositions:
    """`lost` are hosts whose ranks nobody has taken over yet, with their failures."""

    def __init__(
        self,
        spec: JobSpec,
        fleet: Fleet,
        timers: Timers,
        gathering: Gathering,
        generations: Generations,
        restarts: Restarts,
        run_key: str,
    ) -> None:
        self.lost: dict[str, Failure] = {}
        self._spec = spec
        self._fleet = fleet
        self._timers = timers
        self._gathering = gathering
        self._generations = generations
        self._restarts = restarts
        self._run_key = run_key
        self._ranks: dict[str, tuple[int, ...]] = {}  # of the hosts that run workers
        self._joining: dict[str, set[int]] = {}  # hosts that are to join, and their ranks that have not started yet
        self._leaving: dict[str, tuple[int, ...]] = {}  # hosts that were to join, and ranks that may still run there
        self._store_asked = ("", 0)  # the host that opens another store, and its link
        self._unanswered: Counter[tuple[str, int]] = Counter()  # such orders, by host and link

    def begin(self) -> None:
        """Begin anew, with an attempt."""
        self.lost, self._ranks, self._joining, self._leaving, self._store_asked = {}, {}, {}, {}, ("", 0)
        self._unanswered.clear()
        self._timers.cancel(Timer.COMPOSE, Timer.JOIN)

    def joins(self, host: str) -> bool:
        """Whether the workers of a host are about to join, and nobody knows them yet."""
        return host in self._joining

    # ---- a lost host ----

    def lose(self, attempt: AttemptState, failure: Failure, now: float) -> list[Command] | None:
        """Go on without a lost host, for now; None: the attempt ends."""
        name = failure.host
        self._learn_ranks(attempt)
        if not self._can_lose(attempt, name):
            return None
        ran_s = now - max(attempt.began, self._fleet.states[name].ready_at or attempt.began)
        decision = self._restarts.lost(attempt, failure, progress=attempt.steps_on(name))
        if decision is None:
            return None
        wait_s, notice = decision
        made_progress = attempt.steps_on(name) > 0 or ran_s >= PROGRESS_S
        self._generations.forget(self._ranks.pop(name))
        attempt.lose(name)
        attempt.fresh.discard(name)
        self._forget_store()
        is_first = not self.lost
        self.lost[name] = failure
        self._timers.set(Timer.PAUSE, now + wait_s if is_first else max(now + wait_s, self._timers.at(Timer.PAUSE)))
        commands: list[Command] = [
            notice,
            *self._gathering.count_loss(name, failed=not (made_progress or failure.injected)),
        ]
        fenced_at = self._fleet.states[name].fenced_at
        begin = max(now + wait_s, now if fenced_at in (None, NEVER) else fenced_at)
        limit = begin + self._spec.start_timeout_s
        self._timers.set(Timer.COMPOSE, limit if is_first else max(limit, self._timers.at(Timer.COMPOSE)))
        for joining in [*self._joining]:  # it may take the place of the lost one instead
            commands += self.leave(attempt, joining, f"{name} is lost", failed=False)
        if is_first:
            later = NextGeneration(attempt.number, self._generations.number_at_once(now), "later")
            commands += [Send(host, later) for host in self._fleet.workers_of(attempt.members)]
        return commands

    def _can_lose(self, attempt: AttemptState, name: str) -> bool:
        """Whether the others can go on: all of them are resilient, one has the state, none has ended for good."""
        if not self._can_change:
            return False
        others = [host for host in attempt.members if host in self._ranks and host != name]
        if not all(map(attempt.is_resilient, others)):
            return False
        gone = attempt.ended - {*self._restarts.waiting} - (attempt.stopped & {*self._ranks[name]})
        alive = (attempt.started - attempt.ended).difference(self._generations.missing, self._ranks[name])
        return not gone and bool(alive)

    @property
    def _can_change(self) -> bool:
        return not (self._spec.env_for or self._spec.roles.first or self._spec.roles.others)

    def _learn_ranks(self, attempt: AttemptState) -> None:
        if not self._ranks:
            self._ranks = _by_host(attempt.placement)

    def decide(self, attempt: AttemptState, now: float) -> Readiness:
        """Decide whether the attempt can go on with others in the places of the lost hosts."""
        too_late = self._timers.over(Timer.COMPOSE, now)
        if too_late and not self.lost.keys().isdisjoint(self._fleet.never_fenced()):
            return Readiness.IMPOSSIBLE
        if not self.lost or self.lost.keys() & self._fleet.busy or not self._timers.over(Timer.PAUSE, now):
            return Readiness.WAIT
        least = self._spec.min_hosts
        if self._fleet.count(HostPhase.READY) < least or len(self._choose(attempt)) < least:
            return Readiness.TOO_FEW if too_late or self._gathering.possible < least else Readiness.WAIT
        name, link = self._store_asked
        if name and (self._fleet.states[name].link != link or self._fleet.states[name].phase is not HostPhase.READY):
            self._forget_store()  # another one can
        elif name and attempt.store is None:
            return Readiness.IMPOSSIBLE if too_late else Readiness.WAIT
        return Readiness.COMPOSE

    def _forget_store(self) -> None:
        name, _ = self._store_asked
        if not self._ranks.get(name, (0,)):
            del self._ranks[name]
        self._store_asked = ("", 0)

    def _choose(self, attempt: AttemptState) -> tuple[str, ...]:
        """Return the hosts of the next composition, of those that are ready."""
        free = [
            state.name
            for state in self._fleet.ready()
            if (state.name in self._ranks and state.name not in self._joining)
            or (state.name not in self._fleet.busy and self._fleet.wanted(state) and not misfits(self._spec, [state]))
        ]  # fmt: skip
        return choose_members(attempt.members, free, self._spec.max_hosts)

    def go_on(self, attempt: AttemptState, now: float) -> list[Command] | None:
        """Begin the next composition, or open its store first; None: that cannot be."""
        members = self._choose(attempt)
        if attempt.store is None or attempt.store_host not in self._ranks:
            stay = [name for name in members if name in self._ranks]
            if not self._store_asked[0]:
                return self._ask_for_store(attempt, (*stay, *(name for name in members if name not in stay)), now)
            attempt.store_host = self._store_asked[0]
        failure = next(iter(self.lost.values()))
        commands = self._compose(attempt, members, now, when="now")
        if commands is None:
            return None
        fresh = [rank for name in attempt.members if name in attempt.fresh for rank in self._ranks[name]]
        self._generations.wait_for((rank for rank in fresh if rank not in attempt.started), failure)
        self.lost.clear()
        self._store_asked = ("", 0)
        self._restarts.replaced()
        self._timers.cancel(Timer.COMPOSE)
        self._timers.set(Timer.PHASE, now + self._spec.start_timeout_s)
        attempt.made_progress(now)
        return commands

    def _ask_for_store(self, attempt: AttemptState, hosts: Sequence[str], now: float) -> list[Command]:
        states = [self._fleet.states[name] for name in hosts]
        if attempt.store is not None:  # the first that is asked has its time
            self._timers.set(Timer.COMPOSE, max(now + self._spec.start_timeout_s, self._timers.at(Timer.COMPOSE)))
        attempt.store, self._store_asked = None, (hosts[0], states[0].link)
        self._unanswered[self._store_asked] += 1
        self._occupy(hosts[0])
        self._ranks.setdefault(hosts[0], ())
        return [Send(hosts[0], open_store(self._spec, states, attempt.number))]

    def opened(self, attempt: AttemptState, host: str, store: StoreOpened) -> None:
        """Take the store that was asked for."""
        asked = (host, self._fleet.states[host].link)
        self._unanswered[asked] -= 1
        if asked == self._store_asked and not self._unanswered[asked]:  # else that of an earlier order, closed since
            attempt.store = store

    def _compose(
        self, attempt: AttemptState, members: tuple[str, ...], now: float, *, when: str
    ) -> list[Command] | None:
        """Make these hosts the attempt's, start the workers that do not run, and tell the others who they are now."""
        previous = attempt.members
        ranks = {name: numbers for name, numbers in self._ranks.items() if numbers}
        placement = self._place(attempt, members, ranks)
        if placement is None:
            return None
        assert attempt.store is not None
        fresh = [name for name in members if name not in ranks]
        number = self._generations.number_at_once(now)
        unknown = [name for name in members if name not in ranks or name in self._joining]
        attempt.compose(members, placement, unknown)
        attempt.started |= {rank for name in unknown if name in ranks for rank in ranks[name]}
        counts = {w.rank: attempt.start_again(w.rank, now) for w in placement.workers if w.host in fresh}
        changes, starts = composed_workers(
            self._spec, placement, attempt.store, counts,
            run_key=self._run_key, generation=number, restart_policy=RESILIENT,
        )  # fmt: skip
        for name in fresh:
            self._occupy(name)
            attempt.forget_heartbeat(name)
        for name in members:
            self._joining.pop(name, None)
        self._ranks = {**{name: self._ranks[name] for name in self._joining}, **_by_host(placement)}
        news = [
            Send(name, NextGeneration(attempt.number, number, when, changes[name]))
            for name in members
            if name in changes
        ]
        shown = fresh if when == "now" else unknown
        return [Notice(composed(number, members, previous, shown, placement.world_size)), *news, *starts]

    def _place(
        self, attempt: AttemptState, members: Sequence[str], ranks: Mapping[str, Sequence[int]]
    ) -> Placement | None:
        offers = [self._fleet.states[name].offer() for name in members]
        leaving = {name: numbers for name, numbers in self._leaving.items() if name in self._fleet.busy}
        try:
            return numbered(place_job(self._spec, offers), {**leaving, **ranks}, attempt.placement)
        except PlacementError:
            return None

    def _occupy(self, name: str) -> None:
        self._fleet.occupy(self._fleet.states[name])
        self._leaving.pop(name, None)

    # ---- a host that has come ----

    def can_join(self, attempt: AttemptState) -> bool:
        """Whether hosts can join without a restart: all workers are resilient, and none is away."""
        busy = self.lost or self._restarts.under_way or self._generations.untold or self._generations.missing
        return not busy and attempt.all_started and not attempt.ended and self.suits(attempt)

    def suits(self, attempt: AttemptState) -> bool:
        """Whether hosts can join its workers without a restart, now or before long."""
        return self._spec.elastic and self._can_change and all(map(attempt.is_resilient, attempt.members))

    def join(self, attempt: AttemptState, now: float) -> list[Command]:
        """Start the workers of hosts that have come; have all meet, once those are ready."""
        members = len(attempt.members)
        has_come = members < self._spec.max_hosts and self._fleet.count(HostPhase.READY) > members
        if not (self._joining or has_come) or not self.can_join(attempt):
            return []
        self._learn_ranks(attempt)
        commands: list[Command] = []
        ready = [name for name, starting in self._joining.items() if not starting and attempt.is_resilient(name)]
        if ready:
            joined = self._compose(attempt, (*attempt.members, *ready), now, when="at_commit")
            if joined is None:
                return [c for name in ready for c in self.leave(attempt, name, "its workers do not fit")]
            commands = joined
        elif self._joining and self._timers.over(Timer.JOIN, now):
            limit = f"within {self._spec.start_timeout_s:g} s (--start-timeout-s)"
            return [c for name in [*self._joining] for c in self.leave(attempt, name, f"it was not ready {limit}")]
        room = max(0, self._spec.max_hosts - len(attempt.members) - len(self._joining))
        come = [
            state.name
            for state in self._fleet.ready()
            if state.name not in self._fleet.busy and self._fleet.wanted(state) and not misfits(self._spec, [state])
        ]
        for name in come[:room]:
            commands += self._start(attempt, name, now)
        return commands

    def _start(self, attempt: AttemptState, name: str, now: float) -> list[Command]:
        """Start the workers of a host that has come, under a number at which nobody meets them."""
        members = (*attempt.members, *self._joining, name)
        placement = self._place(attempt, members, self._ranks)
        if placement is None or attempt.store is None:
            return []
        self._generations.number += 1
        mine = [worker.rank for worker in placement.workers if worker.host == name]
        counts = {rank: attempt.start_again(rank, now) for rank in mine}
        _, starts = composed_workers(
            self._spec, placement, attempt.store, counts,
            run_key=self._run_key, generation=self._generations.number, restart_policy=0,
        )  # fmt: skip
        self._occupy(name)
        attempt.forget_heartbeat(name)
        self._ranks[name] = tuple(mine)
        self._joining[name] = {*mine}
        self._timers.set(Timer.JOIN, now + self._spec.start_timeout_s)
        return [Notice(f"{name} has come; its workers start, and join the others at a commit"), *starts]

    def started(self, attempt: AttemptState, name: str, rank: int) -> None:
        """Take the start of a worker of a host that is to join."""
        self._joining[name].discard(rank)
        attempt.forget_heartbeat(name)  # it may have been sent before

    def leave(self, attempt: AttemptState, name: str, why: str, *, failed: bool = True) -> list[Command]:
        """Do without a host that was to join; what runs there is ended. `failed`: through that host."""
        self._leaving[name] = self._ranks.pop(name)
        del self._joining[name]
        end = [Send(host, EndAttempt(attempt.number, signal.SIGTERM)) for host in self._fleet.workers_of([name])]
        excluded = self._gathering.count_loss(name, failed=True) if failed else []
        return [Notice(f"{name} does not join: {why}", is_error=True), *end, *excluded]


def _by_host(placement: Placement) -> dict[str, tuple[int, ...]]:
    ranks: dict[str, tuple[int, ...]] = {}
    for worker in placement.workers:
        ranks[worker.host] = (*ranks.get(worker.host, ()), worker.rank)
    return ranks


def numbered(placement: Placement, ranks: Mapping[str, Sequence[int]], before: Placement) -> Placement:
    """Give the workers of a placement their ranks in the attempt: those of hosts in `ranks` have them already.

    All others get the lowest that are free. Raises PlacementError where a worker that runs cannot be placed so: it has
    other GPUs than `before`, or its host another number of workers.
    """
    known = {worker.rank: worker for worker in before.workers}
    taken = {rank for numbers in ranks.values() for rank in numbers}
    free = (number for number in count() if number not in taken)
    left = {host: iter(numbers) for host, numbers in ranks.items()}
    workers = []
    for worker in placement.workers:
        rank = next(left[worker.host], None) if worker.host in left else next(free)
        if rank is None:
            raise PlacementError(f"{worker.host}: it has more workers now than those that run there")
        same = known.get(rank)
        if worker.host in left and same is not None and (same.gpus, same.visible) != (worker.gpus, worker.visible):
            raise PlacementError(f"{worker.host}: its workers would have other GPUs than those that run there")
        workers.append(replace(worker, rank=rank))
    placed = {worker.host for worker in workers}
    if rest := [host for host, numbers in left.items() if host in placed and next(numbers, None) is not None]:
        raise PlacementError(f"{rest[0]}: it has fewer workers now than those that run there")
    return replace(placement, workers=tuple(workers), ordinary=max(worker.rank for worker in workers) + 1)
