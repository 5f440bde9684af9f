"""One attempt as the job sees it: who takes part, how far its workers have come, what failed. Pure; owned by job.py."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from launcher.job.failure import Failure, FailureKind, looks_like_consequence
from launcher.job.timers import NEVER, Timer, Timers
from launcher.placement.placement import Placement
from launcher.protocol.reports import Evidence, Exited, PortsReserved, Started, StoreOpened
from launcher.protocol.two_way import START, Heartbeat

__all__ = ["AttemptState", "choose_members", "lost_steps"]

HUNG_S = 10.0  # without a sign of life; and then HUNG_FACTOR times the longest silence that has ended
HUNG_FACTOR = 5.0


class AttemptState:
    """`members` in the order of their node ranks; the first of them holds the store at first.

    Timer.STALL is set `stall_s` after each sign of progress; until the first step of training, no earlier than
    `start_s` after the start of the workers, which import and connect.
    """

    def __init__(
        self, number: int, members: tuple[str, ...], placement: Placement, timers: Timers, *,
        began: float, stall_s: float | None = None, start_s: float = 0.0,
    ) -> None:  # fmt: skip
        self.number = number
        self.members = members
        self._take_placement(placement)
        self.store_host = members[0]
        self.fresh: set[str] = set()  # hosts that have come while it went on, with resilient workers
        self.began = began
        self.stopped_at: float | None = None  # when the order to end its workers was given
        self.grown_for = ""  # the other host that the next one can use, if it ends for that
        self.started: set[int] = set()
        self.forked = 0
        self.by_exec: dict[str, float] = {}  # why workers were not forked, and how much longer that takes
        self.stopped: set[int] = set()  # ranks that ended because they were stopped
        self.failures: list[Failure] = []  # before it was stopped, in the order of their news
        self.secondary_failures: list[Failure] = []  # after that
        self.left_out: list[Failure] = []  # of processes that the others went on without
        self.evidence: tuple[Evidence, ...] = ()
        self.saved = 0  # checkpoints
        self.store: StoreOpened | None = None
        self.ports: dict[str, PortsReserved] = {}
        self.ports_wanted: set[str] = set()  # hosts that have not reserved theirs yet
        self.provoked_at: dict[str, float] = {}  # when the first of a host's workers ended because its agent made it
        self.ended: set[int] = set()
        self.finished_at: dict[int, float] = {}  # by rank, of those that ended with 0 by themselves
        self.failing: dict[int, Failure] = {}  # by rank, of workers whose process had not ended yet
        self._timers = timers
        self._stall_s = NEVER if stall_s is None else stall_s
        self._start_s = start_s
        self._starts_until = began
        self._has_stepped = False
        self._progress_at = began
        self.first_root_at: float | None = None  # of the first failure that is no mere consequence
        # Those that have not finished successfully, and are not left out.
        self._needed = {worker.rank for worker in placement.workers if worker.needed}
        self._unfinished = dict(zip(members, placement.per_host, strict=True))
        self._succeeded = False  # one of those that the run waits for
        self._restarts: dict[int, int] = {}  # of single ranks
        self._exits: dict[int, Exited] = {}  # the newest of each rank
        self._heartbeats: dict[str, Heartbeat] = {}  # the newest of each host

    @property
    def world_size(self) -> int:
        return self.placement.world_size

    @property
    def all_started(self) -> bool:
        return len(self.started) == self.world_size

    def host_of(self, rank: int) -> str:
        return self._workers[rank].host

    def role_of(self, rank: int) -> str:
        return self._workers[rank].role

    @property
    def ranks(self) -> Collection[int]:
        """Those of the present composition; a worker keeps its rank here when RANK changes for it."""
        return self._workers.keys()

    def is_resilient(self, host: str) -> bool:
        """Whether the workers there can meet others in another composition, as far as it is known."""
        beat = self._heartbeats.get(host)
        return host in self.fresh or (beat is not None and beat.resilient)

    def steps_on(self, host: str) -> int:
        """How many training steps its workers said they made."""
        beat = self._heartbeats.get(host)
        return 0 if beat is None else beat.steps

    def forget_heartbeat(self, host: str) -> None:
        """Note that other workers run there now than those of which it has spoken."""
        self._heartbeats.pop(host, None)

    def lose(self, host: str) -> None:
        """Go on without the workers of a lost host, for which the run still waits."""
        gone = {worker.rank for worker in self.placement.workers if worker.host == host}
        for ranks in (self.started, self.ended, self.stopped):
            ranks -= gone
        for rank in gone:
            self.failing.pop(rank, None)
        self._unfinished.pop(host, None)
        self._heartbeats.pop(host, None)
        self.provoked_at.pop(host, None)
        workers = tuple(worker for worker in self.placement.workers if worker.host != host)
        self._take_placement(replace(self.placement, workers=workers))

    def compose(self, members: tuple[str, ...], placement: Placement, fresh: Collection[str]) -> None:
        """Go on with these hosts; those that are `fresh` run no workers yet, or none that are known here."""
        stay = {worker.rank for worker in self.placement.workers}
        self._take_placement(placement)
        self.members = members
        self.fresh |= {*fresh}
        self._needed = {
            w.rank for w in placement.workers if w.needed and (w.rank in self._needed or w.rank not in stay)
        }
        for worker in placement.workers:
            if worker.host in fresh:
                self._unfinished[worker.host] = self._unfinished.get(worker.host, 0) + 1

    def _take_placement(self, placement: Placement) -> None:
        self.placement = placement
        self._workers = {worker.rank: worker for worker in placement.workers}

    @property
    def finished(self) -> bool:
        """Whether every worker that the run waits for has ended by itself and well, or is left out.

        One that was stopped has not finished successfully.
        """
        return not self._needed

    @property
    def steps(self) -> int:
        """How many training steps a rank has made, by those of the host that is the furthest."""
        per_host = zip(self.members, self.placement.per_host, strict=True)
        made = ((self._heartbeats[host].steps, count) for host, count in per_host if host in self._heartbeats)
        return max((steps // count for steps, count in made if count), default=0)

    @property
    def lost_steps(self) -> int | None:
        """How many steps of it another attempt makes again, as far as it is over; None where nobody counts them."""
        return lost_steps(self._exits)

    def restarts_of(self, rank: int) -> int:
        """How often a rank alone was started again."""
        return self._restarts.get(rank, 0)

    def needs(self, host: str) -> bool:
        """Whether the loss of a host is one: its workers have not finished successfully, or it holds the store."""
        return host in self._unfinished and (host == self.store_host or self._unfinished[host] > 0)

    def take_start(self, started: Started, now: float) -> None:
        self.started.add(started.rank)
        self._starts_until = now + self._start_s
        self._has_stepped = False
        if started.by_exec:
            self.by_exec[started.by_exec] = max(started.costs_s, self.by_exec.get(started.by_exec, 0.0))
        else:
            self.forked += 1
        self.made_progress(now)

    def take_exit(self, host: str, exited: Exited, at: float, now: float) -> None:
        """Note the end of a worker; `at` is its time on the controller's clock."""
        self._exits[exited.rank] = exited
        if exited.rank in self.ended:
            return
        self.started.add(exited.rank)
        self.ended.add(exited.rank)
        self.made_progress(now)
        if exited.provoked:
            self.stopped.add(exited.rank)
            self.provoked_at.setdefault(host, at)
        elif exited.status == 0:
            self.finished_at[exited.rank] = at
            self._succeeded |= exited.rank in self._needed
            self._needed.discard(exited.rank)
            self._unfinished[host] -= 1

    def can_go_on_without(self, rank: int) -> bool:
        """Whether another one that the run waits for is alive, comes back, or has finished successfully."""
        return self._succeeded or bool(self._needed - {rank})

    def leave_out(self, failure: Failure) -> None:
        """Go on without a worker that has failed."""
        assert failure.rank is not None
        self.left_out.append(failure)
        self._needed.discard(failure.rank)
        self._unfinished[failure.host] -= 1

    def start_again(self, rank: int, now: float) -> int:
        """Note that a worker that has ended is started again; return its TORCHELASTIC_RESTART_COUNT."""
        self.ended.discard(rank)
        self.finished_at.pop(rank, None)
        self.made_progress(now)
        self._restarts[rank] = self._restarts.get(rank, 0) + 1
        return self.number + self._restarts[rank]

    def is_successor(self, rank: int | None) -> bool:
        """Whether a worker takes the place of an earlier one, or its host that of another, in this attempt."""
        return rank in self._restarts

    def made_progress(self, now: float) -> None:
        self._progress_at = now
        at = now + self._stall_s
        self._timers.set(Timer.STALL, at if self._has_stepped else max(at, self._starts_until))

    def seems_hung(self, now: float) -> bool:
        """Whether it is worth a look where the ranks stand before they are ended.

        So it is where nobody has shown progress for HUNG_S, or somebody is silent for far longer than anybody ever was.
        """
        beats = self._heartbeats.values()
        longest_s = max((each for beat in beats for each in beat.longest_s[:START]), default=0.0)
        silent_s = max((beat.silent_s for beat in beats), default=0.0)
        is_silent = silent_s >= max(HUNG_S, HUNG_FACTOR * longest_s)
        return self.all_started and (is_silent or now - self._progress_at >= HUNG_S)

    def take_heartbeat(self, host: str, heartbeat: Heartbeat, now: float) -> bool:
        """Note how far a host's workers are; return whether they have saved more checkpoints than before."""
        before, self._heartbeats[host] = self._heartbeats.get(host), heartbeat
        self._has_stepped |= heartbeat.steps > (before.steps if before is not None else 0)
        if before is None or before.progress != heartbeat.progress:
            self.made_progress(now)
        return heartbeat.saved > (before.saved if before is not None else 0)

    def failure(
        self, kind: FailureKind, host: str, message: str, at: float, *, noticed: float | None = None
    ) -> Failure:
        """Return what is no worker's failure; of another than a host, `host` may be empty.

        `at` is the earliest that it can have been, which orders it among others; `noticed` is what is known for
        certain, where that was later.
        """
        ran_s = max(0.0, (at if noticed is None else noticed) - self.began)
        return Failure(kind=kind, host=host, attempt=self.number, message=message, at=at, ran_s=ran_s)

    def take_failure(self, failure: Failure) -> None:
        """Note what failed by itself before the attempt was stopped."""
        self.failures.append(failure)
        self.stopped.discard(-1 if failure.rank is None else failure.rank)
        if not looks_like_consequence(failure):
            known = self.first_root_at
            self.first_root_at = failure.at if known is None else min(known, failure.at)

    def take_end(self, known: Failure, ended: Failure) -> None:
        """Note how the process of a worker ended that was known to have failed."""
        self.failures = [ended if failure is known else failure for failure in self.failures]


def lost_steps(exits: Mapping[int, Exited]) -> int | None:
    """Return how many steps were made since the newest checkpoint, as the first rank knows it that saved one.

    `exits` are the ends of processes by rank. None where none of them has counted steps, or where what
    they save is not known.
    """
    ends = [each for _, each in sorted(exits.items())]
    if not any(each.steps for each in ends) or any(each.unsaved is None for each in ends):
        return None
    saved = (each.unsaved for each in ends if each.saved)
    return next(saved, max(each.steps for each in ends))


def choose_members(previous: Sequence[str], ready: Sequence[str], most: int) -> tuple[str, ...]:
    """Return the hosts of the next attempt, of those that are ready, in the order of their node ranks.

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
