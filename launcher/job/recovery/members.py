"""Change the hosts of an attempt that goes on: lost ones leave it, others take their places or join. Pure.

Only for resilient workers (restarts.py), and not with other roles or variables for other ecosystems: those cannot
change in a process that runs. Each change is a generation, with a number of its own.

A lost host. Its workers may live until it is fenced (fleet.py). The others learn at once that there will be another
generation ("later"), and wait. Once it is fenced, hosts that are ready take the places of lost ones, and their workers
are started. With too few of those an elastic run goes on with fewer; any other one waits. If the host of the store was
lost, another one opens a store first, and the workers learn where. Then all learn what they are now.

A host that has come to an elastic run. Its workers are started beside the others, which know nothing of them. Once they
are ready to meet, all are ordered to meet "at_commit". Until then the failure of one of them ends them alone.

A worker keeps its rank in the attempt, by which it is named in orders, output and reports, when RANK changes for it.
Workers of a host that has come get ranks that no other has.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count

from launcher.errors import PlacementError
from launcher.hosts.folding import some
from launcher.job.attempt import AttemptState
from launcher.job.events import Command, Notice, Send
from launcher.job.failures.failure import PROGRESS_S, FailedAttempt, Failure, what_happened
from launcher.job.fleet import HostPhase, HostState
from launcher.job.gathering import Readiness, misfits
from launcher.job.orders import composed_workers, open_store
from launcher.job.ranks import ENDED, JOINS, MAKE_UP, RankState
from launcher.job.recovery.restarts import judge, restarts_used
from launcher.job.run import Run
from launcher.job.timers import NEVER, Timer
from launcher.placement.placement import Placement, place_job
from launcher.protocol.commands import EndAttempt, NextGeneration
from launcher.protocol.message import RESILIENT
from launcher.protocol.reports import StoreOpened


def choose_members(previous: Sequence[str], ready: Sequence[str], most: int) -> tuple[str, ...]:
    """Return the hosts of the next attempt or generation, of those that are ready, in the order of their node ranks.

    Who took part before stays, in the same order. A newcomer takes the place of a host that is missing, so that the
    others keep theirs; more newcomers follow behind.

    >>> choose_members(["a", "b", "c"], ["b", "c", "d"], 3)
    ('d', 'b', 'c')
    """
    stays = set(ready) & set(previous)
    newcomers = [name for name in ready if name not in stays][: max(0, most - len(stays))]
    waiting = iter(newcomers)
    places = (name if name in stays else next(waiting, None) for name in previous)
    members = [name for name in places if name is not None]
    return (*members, *waiting)[:most]


# ---- a lost host ----


def lose_host(run: Run, failure: Failure, now: float) -> list[Command] | None:
    """Go on without a lost host, for now; None: the attempt ends."""
    attempt, timers, name, state = run.current, run.timers, failure.host, run.fleet.states[failure.host]
    if not _can_lose(run, name):
        return None
    steps, free = attempt.steps_on(name), failure.injected or run.spec.elastic
    made = FailedAttempt(failure, failure.ran_s, steps, free=free, lost_host=name)
    decision = judge(run.spec, [*run.past, made])
    if decision.again_after_s is None:
        attempt.last_failures, attempt.no_restart_reason = [failure], decision.reason
        return None
    run.past.append(made)
    number = "" if free else f" (restart {restarts_used(run.past)} of {run.spec.max_restarts})"
    is_first = not attempt.ranks.count(RankState.LOST)
    attempt.lose(name, failure)
    run.hangs.forget(name)
    _forget_store(attempt)
    ran_s = now - max(attempt.began, state.ready_at or attempt.began)
    in_vain = steps == 0 and ran_s < PROGRESS_S and not failure.injected
    excluded = run.gathering.count_loss(name, failed=in_vain)
    again_at = now + decision.again_after_s
    limit = max(again_at, now if state.fenced_at in (None, NEVER) else state.fenced_at) + run.spec.start_timeout_s
    timers.set(Timer.PAUSE, again_at if is_first else max(again_at, timers.at(Timer.PAUSE)))
    timers.set(Timer.COMPOSE, limit if is_first else max(limit, timers.at(Timer.COMPOSE)))
    commands: list[Command] = [Notice(_goes_on_without(failure, number)), *excluded]
    for joining in attempt.ranks.by_host(*JOINS):  # it may take the place of the lost one instead
        commands += leave(run, joining, f"{name} is lost", failed=False)
    if is_first:
        later = NextGeneration(attempt.number, attempt.begin_generation(now), "later")
        commands += [Send(host, later) for host in run.fleet.workers_of(attempt.members)]
    return commands


def _goes_on_without(failure: Failure, restart: str) -> str:
    """Say that an attempt goes on though a host is lost; `restart` counts it."""
    return (
        f"{what_happened(failure)}; the others keep their state and wait until its workers are certainly gone{restart}"
    )


def _can_lose(run: Run, name: str) -> bool:
    """Return whether the others can go on: all of them are resilient, one has the state, none has ended for good."""
    attempt, ranks = run.current, run.current.ranks
    others = [host for host in attempt.members if host != name and ranks.on(host)]
    if not _can_change(run) or not all(map(attempt.is_resilient, others)):
        return False
    if any(
        row.state is not RankState.WAITING and (row.state, row.host) != (RankState.STOPPED, name)
        for row in ranks.of(*ENDED)
    ):
        return False
    return any(
        row.host != name and (row.is_live or (row.state is RankState.RESTARTING and not row.is_awaited))
        for row in ranks
    )


def _can_change(run: Run) -> bool:
    return not (run.spec.env_for or run.spec.roles.first or run.spec.roles.others)


def decide(run: Run, now: float) -> Readiness:
    """Decide whether the attempt can go on with others in the places of the lost hosts."""
    attempt, fleet, lost = run.current, run.fleet, run.current.ranks.lost_hosts
    too_late = run.timers.over(Timer.COMPOSE, now)
    if too_late and not lost.keys().isdisjoint(fleet.never_fenced()):
        return Readiness.IMPOSSIBLE
    if lost.keys() & fleet.busy or not run.timers.over(Timer.PAUSE, now):
        return Readiness.WAIT
    least = run.spec.min_hosts
    if fleet.count(HostPhase.READY) < least or len(_choose(run)) < least:
        return Readiness.TOO_FEW if too_late or run.gathering.possible < least else Readiness.WAIT
    name, link = attempt.store_asked
    if name and (fleet.states[name].link != link or fleet.states[name].phase is not HostPhase.READY):
        _forget_store(attempt)  # another one can
    elif name and attempt.store is None:
        return Readiness.IMPOSSIBLE if too_late else Readiness.WAIT
    return Readiness.BEGIN


def _forget_store(attempt: AttemptState) -> None:
    attempt.store_asked = ("", 0)


def _is_free(run: Run, state: HostState) -> bool:
    return state.name not in run.fleet.busy and run.fleet.wanted(state) and not misfits(run.spec, [state])


def _choose(run: Run) -> tuple[str, ...]:
    """Return the hosts of the next generation, of those that are ready."""
    attempt = run.current
    usable = [
        state.name
        for state in run.fleet.ready()
        if attempt.ranks.on(state.name) or state.name == attempt.store_asked[0] or _is_free(run, state)
    ]
    return choose_members(attempt.members, usable, run.spec.max_hosts)


def go_on(run: Run, now: float) -> list[Command] | None:
    """Begin the next generation, or open its store first; None: that cannot be."""
    attempt, ranks, members = run.current, run.current.ranks, _choose(run)
    if attempt.store is None or not ranks.on(attempt.store_host):
        if not attempt.store_asked[0]:
            return _ask_for_store(run, sorted(members, key=lambda name: not ranks.on(name)), now)
        attempt.store_host = attempt.store_asked[0]
    commands = _compose(run, members, now, when="now", failure=next(iter(ranks.lost_hosts.values())))
    if commands is None:
        return None
    _forget_store(attempt)
    run.timers.cancel(Timer.COMPOSE)
    run.timers.set(Timer.PHASE, now + run.spec.start_timeout_s)
    attempt.made_progress(now)
    return commands


def _ask_for_store(run: Run, hosts: Sequence[str], now: float) -> list[Command]:
    attempt, timers = run.current, run.timers
    states = [run.fleet.states[name] for name in hosts]
    if attempt.store is not None:  # the first that is asked has its time
        timers.set(Timer.COMPOSE, max(now + run.spec.start_timeout_s, timers.at(Timer.COMPOSE)))
    attempt.store, attempt.store_asked = None, (hosts[0], states[0].link)
    attempt.stores_unanswered[attempt.store_asked] += 1
    _occupy(run, hosts[0])
    return [Send(hosts[0], open_store(run.spec, states, attempt.number))]


def store_opened(run: Run, host: str, store: StoreOpened) -> None:
    """Take the store that was asked for."""
    attempt, asked = run.current, (host, run.fleet.states[host].link)
    attempt.stores_unanswered[asked] -= 1
    if asked == attempt.store_asked and not attempt.stores_unanswered[asked]:  # else that of an earlier order, closed
        attempt.store = store


def _compose(
    run: Run, members: tuple[str, ...], now: float, *, when: str, failure: Failure | None = None
) -> list[Command] | None:
    """Make these hosts the attempt's, start the workers that do not run, and tell the others who they are now."""
    attempt, previous = run.current, run.current.members
    placement = _place(run, members)
    if placement is None:
        return None
    assert attempt.store is not None
    unknown = [name for name in members if not attempt.ranks.on(name)]
    starts = attempt.compose(members, placement, failure)
    fresh = list(dict.fromkeys(row.host for row in starts))
    number = attempt.begin_generation(now)
    changes, orders = composed_workers(
        run.spec, placement, attempt.store, {row.number: attempt.number + row.restarts for row in starts},
        run_key=run.run_key, generation=number, restart_policy=RESILIENT,
    )  # fmt: skip
    for name in fresh:
        _occupy(run, name)
        attempt.forget_heartbeat(name)
    news = [
        Send(name, NextGeneration(attempt.number, number, when, changes[name])) for name in members if name in changes
    ]
    return [Notice(_composed(number, members, previous, unknown, placement.world_size)), *news, *orders]


def _composed(number: int, members: Sequence[str], previous: Sequence[str], fresh: Sequence[str], size: int) -> str:
    """Say who goes on with an attempt, as which of its generations; `fresh` have been started for that."""
    gone = [name for name in previous if name not in members]
    without = f", without {some(gone)}" if gone else ""
    come = f", with {some(fresh)}" if fresh else ""
    workers = f"{size} worker{'' if size == 1 else 's'} on {len(members)} host{'' if len(members) == 1 else 's'}"
    return f"generation {number} goes on with {workers}{without}{come}"


def _place(run: Run, members: Sequence[str]) -> Placement | None:
    attempt, fleet = run.current, run.fleet
    leaving = {name: rows for name, rows in attempt.ranks.by_host(RankState.LEAVING).items() if name in fleet.busy}
    known = {**leaving, **attempt.ranks.by_host(*MAKE_UP, *JOINS)}
    numbers = {name: [row.number for row in rows] for name, rows in known.items()}
    try:
        return numbered(
            place_job(run.spec, [fleet.states[name].offer() for name in members]), numbers, attempt.placement
        )
    except PlacementError:
        return None


def _occupy(run: Run, name: str) -> None:
    run.fleet.occupy(run.fleet.states[name])
    for row in run.current.ranks.by_host(RankState.LEAVING).get(name, ()):
        run.current.ranks.move(row, RankState.GONE)


# ---- a host that has come ----


def suits(run: Run) -> bool:
    """Return whether hosts can join the workers of the attempt without a restart, now or before long."""
    attempt = run.current
    return run.spec.elastic and _can_change(run) and all(map(attempt.is_resilient, attempt.members))


def join(run: Run, now: float) -> list[Command]:
    """Start the workers of hosts that have come; have all meet, once those are ready."""
    attempt, ranks, spec = run.current, run.current.ranks, run.spec
    joining, room = ranks.by_host(*JOINS), spec.max_hosts - len(attempt.members)
    has_come = room > 0 and run.fleet.count(HostPhase.READY) > len(attempt.members)
    if not (joining or has_come) or not attempt.is_whole or run.timers.at(Timer.GENERATION) < NEVER:
        return []
    if ranks.count(*ENDED) or not suits(run):
        return []
    commands: list[Command] = []
    ready = [
        name
        for name, rows in joining.items()
        if all(row.state is RankState.READY for row in rows) and attempt.is_resilient(name)
    ]
    if ready:
        joined = _compose(run, (*attempt.members, *ready), now, when="at_commit")
        if joined is None:
            return [c for name in ready for c in leave(run, name, "its workers do not fit")]
        commands = joined
    elif joining and run.timers.over(Timer.JOIN, now):
        limit = f"within {spec.start_timeout_s:g} s (--start-timeout-s)"
        return [c for name in joining for c in leave(run, name, f"it was not ready {limit}")]
    come = [state.name for state in run.fleet.ready() if _is_free(run, state)]
    for name in come[: max(0, room - len(joining))]:
        commands += _start(run, name, now)
    return commands


def _start(run: Run, name: str, now: float) -> list[Command]:
    """Start the workers of a host that has come, under a number at which no other meets them."""
    attempt = run.current
    placement = _place(run, (*attempt.members, *attempt.ranks.by_host(*JOINS), name))
    if placement is None or attempt.store is None:
        return []
    attempt.generation += 1
    _occupy(run, name)
    mine = [worker for worker in placement.workers if worker.host == name]
    rows = [attempt.ranks.put(worker, RankState.JOINING) for worker in mine]
    attempt.made_progress(now)
    _, starts = composed_workers(
        run.spec, placement, attempt.store, {row.number: attempt.number + row.restarts for row in rows},
        run_key=run.run_key, generation=attempt.generation, restart_policy=0,
    )  # fmt: skip
    attempt.forget_heartbeat(name)
    run.timers.set(Timer.JOIN, now + run.spec.start_timeout_s)
    return [Notice(f"{name} has come; its workers start, and join the others at a commit"), *starts]


def newcomer_started(run: Run, name: str, rank: int) -> None:
    """Take the start of a worker of a host that is to join."""
    for row in run.current.ranks.by_host(RankState.JOINING).get(name, ()):
        if row.number == rank:
            run.current.ranks.move(row, RankState.READY)
    run.current.forget_heartbeat(name)  # it may have been sent before


def leave(run: Run, name: str, why: str, *, failed: bool = True) -> list[Command]:
    """Do without a host that was to join; what runs there is ended. `failed`: through that host."""
    attempt = run.current
    for row in attempt.ranks.by_host(*JOINS)[name]:
        attempt.ranks.move(row, RankState.LEAVING)
    end = [Send(host, EndAttempt(attempt.number, signal.SIGTERM)) for host in run.fleet.workers_of([name])]
    excluded = run.gathering.count_loss(name, failed=True) if failed else []
    return [Notice(f"{name} does not join: {why}", is_error=True), *end, *excluded]


def give_up(run: Run) -> None:
    """Wait no longer for other hosts, since the attempt ends."""
    _forget_store(run.current)
    run.current.stores_unanswered.clear()
    run.timers.cancel(Timer.COMPOSE, Timer.JOIN)
    for row in run.current.ranks.of(*JOINS, RankState.LEAVING):
        run.current.ranks.move(row, RankState.GONE)


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
