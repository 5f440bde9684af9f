"""The state of an attempt: its hosts and ranks, the progress of its workers, its failures. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from launcher.job.failures.failure import Failure, FailureKind, looks_like_consequence
from launcher.job.ranks import Rank, Ranks, RankState
from launcher.job.timers import NEVER, Timer, Timers
from launcher.placement.placement import Placement
from launcher.protocol.reports import Evidence, Exited, PortsReserved, Started, StoreOpened
from launcher.protocol.two_way import START, Heartbeat

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
        self.placement = placement
        self.ranks = Ranks(placement.workers)
        self.fresh: set[str] = set()  # hosts that have come while it went on, with resilient workers
        self.generation = 0  # the newest; see recovery/restarts.py
        self.announced_at = -NEVER
        self.began = began
        self.stopped_at: float | None = None  # when the order to end its workers was given
        self.grown_for = ""  # the other host that the next one can use, if it ends for that
        self.forked = 0
        self.by_exec: dict[str, float] = {}  # why workers were not forked, and how much longer that takes
        self.failures: list[Failure] = []  # before it was stopped, in the order of their news
        self.secondary_failures: list[Failure] = []  # after that
        self.left_out: list[Failure] = []  # of processes that the others went on without
        self.last_failures: list[Failure] = []  # those after which there is no restart; why, if that is news
        self.no_restart_reason = ""
        self.first_root_at: float | None = None  # of the first failure that is no mere consequence
        self.evidence: tuple[Evidence, ...] = ()
        self.devices: dict[str, list[str]] = {}  # by host, what has gone wrong with its GPUs, by its newest answer
        self.saved = 0  # checkpoints
        self.store: StoreOpened | None = None
        self.store_host = members[0]
        self.store_asked = ("", 0)  # the host that opens another store, and its link
        self.stores_unanswered: Counter[tuple[str, int]] = Counter()  # such orders, by host and link
        self.ports: dict[str, PortsReserved] = {}
        self.ports_wanted: set[str] = set()  # hosts that have not reserved theirs yet
        self._timers = timers
        self._stall_s = NEVER if stall_s is None else stall_s
        self._start_s = start_s
        self._starts_until = began
        self._has_stepped = False
        self._progress_at = began
        self._heartbeats: dict[str, Heartbeat] = {}  # the newest of each host

    @property
    def world_size(self) -> int:
        return self.placement.world_size

    @property
    def all_started(self) -> bool:
        return self.ranks.count(RankState.STARTING) == 0

    @property
    def finished(self) -> bool:
        return self.ranks.finished

    @property
    def lacks_workers(self) -> bool:
        """Whether a worker or host has failed for which the others wait, or its place is taken."""
        return self.restarts_one or bool(self.ranks.awaited) or self.ranks.count(RankState.LOST) > 0

    @property
    def is_whole(self) -> bool:
        """Whether all its workers have started, and the others wait for none that has failed."""
        return self.all_started and not self.lacks_workers

    @property
    def restarts_one(self) -> bool:
        """Whether a process is about to be started again, for which the others may wait."""
        return self.ranks.count(RankState.WAITING, RankState.RESTARTING) > 0

    def runs_at(self, at: float) -> bool:
        """Return whether its workers had not been ordered to end by then."""
        return self.stopped_at is None or at < self.stopped_at

    def needs(self, host: str) -> bool:
        """Return whether the loss of a host matters: not all its workers have finished, or it holds the store."""
        return bool(self.ranks.on(host)) and (host == self.store_host or self.ranks.unfinished_on(host))

    def host_of(self, rank: int) -> str:
        row = self.ranks.get(rank)
        assert row is not None
        return row.host

    def is_resilient(self, host: str) -> bool:
        """Return whether the workers there can meet others in another generation, as far as it is known."""
        beat = self._heartbeats.get(host)
        return host in self.fresh or (beat is not None and beat.resilient)

    def steps_on(self, host: str) -> int:
        """Return how many training steps its workers said they made."""
        beat = self._heartbeats.get(host)
        return 0 if beat is None else beat.steps

    @property
    def steps(self) -> int:
        """Number of training steps of a rank, on the host that has made the most."""
        per_host = zip(self.members, self.placement.per_host, strict=True)
        made = ((self._heartbeats[host].steps, count) for host, count in per_host if host in self._heartbeats)
        return max((steps // count for steps, count in made if count), default=0)

    @property
    def lost_steps(self) -> int | None:
        """Number of steps that another attempt repeats: those since the newest checkpoint when the workers ended.

        As reported by the first rank that has saved one. None if no rank has counted steps, or if their saves are not
        known.
        """
        ends = [each for _, each in sorted(self.ranks.exits().items())]
        if not any(each.steps for each in ends) or any(each.unsaved is None for each in ends):
            return None
        saved = (each.unsaved for each in ends if each.saved)
        return next(saved, max(each.steps for each in ends))

    # ---- the hosts that make it up ----

    def lose(self, host: str, failure: Failure) -> None:
        """Go on without the workers of a lost host, for which the run still waits."""
        for row in self.ranks.on(host):
            self._timers.cancel((Timer.RESTART, row.number))
            self.ranks.move(row, RankState.LOST, failure)
        self.fresh.discard(host)
        self.forget_heartbeat(host)
        workers = tuple(worker for worker in self.placement.workers if worker.host != host)
        self.placement = replace(self.placement, workers=workers)

    def compose(self, members: tuple[str, ...], placement: Placement, failure: Failure | None) -> list[Rank]:
        """Go on with these hosts; return the ranks that are to start, which the others wait to meet since `failure`."""
        self.fresh |= {name for name in members if not self.ranks.on(name)}
        self.members, self.placement = members, placement
        return self.ranks.compose(placement.workers, failure)

    def forget_heartbeat(self, host: str) -> None:
        """Note that other workers run there now than those that it has reported on."""
        self._heartbeats.pop(host, None)

    def begin_generation(self, now: float) -> int:
        """Return the number of another generation, which is announced to the workers at once."""
        self._timers.cancel(Timer.GENERATION)
        self.generation += 1
        self.announced_at = now
        return self.generation

    # ---- what its workers say ----

    def take_start(self, row: Rank, started: Started, now: float) -> None:
        if row.state in (RankState.STARTING, RankState.RESTARTING):
            self.ranks.move(row, RankState.RUNNING)
        self._starts_until = now + self._start_s
        self._has_stepped = False
        self.forked += not started.by_exec
        self._note_exec(started)
        self.made_progress(now)

    def take_exit(self, row: Rank, exited: Exited, at: float, now: float) -> None:
        """Note the end of a worker; `at` is its time on the controller's clock."""
        state = RankState.DONE if exited.status == 0 else RankState.FAILED
        awaited = row.failure if row.is_awaited else None  # it has not started, and the others still wait to meet it
        self.ranks.move(row, RankState.STOPPED if exited.provoked else state, awaited, exited=exited, at=at)
        self._note_exec(exited)
        self.made_progress(now)

    def _note_exec(self, report: Started | Exited) -> None:
        if report.by_exec:
            self.by_exec[report.by_exec] = max(report.costs_s, self.by_exec.get(report.by_exec, 0.0))

    def leave_out(self, row: Rank, failure: Failure) -> None:
        """Go on without a worker that has failed."""
        self.left_out.append(failure)
        self.ranks.move(row, RankState.LEFT_OUT)

    def start_again(self, row: Rank, now: float) -> int:
        """Note that a worker that has ended is started again; return its TORCHELASTIC_RESTART_COUNT."""
        self.ranks.move(row, RankState.RESTARTING, row.failure)
        self.made_progress(now)
        return self.number + row.restarts

    def made_progress(self, now: float) -> None:
        self._progress_at = now
        at = now + self._stall_s
        self._timers.set(Timer.STALL, at if self._has_stepped else max(at, self._starts_until))

    def seems_hung(self, now: float) -> bool:
        """Return whether it is worth a look where the ranks stand before they are ended.

        It is if no rank has shown progress for HUNG_S, or one is silent for far longer than any ever was.
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

    # ---- what has failed ----

    def failure(
        self, kind: FailureKind, host: str, message: str, at: float, *,
        noticed: float | None = None, injected: bool = False,
    ) -> Failure:  # fmt: skip
        """Return what is no worker's failure; of another than a host, `host` may be empty.

        `at` is the earliest that it can have been, which orders it among others; `noticed` is what is known for
        certain, where that was later.
        """
        ran_s = max(0.0, (at if noticed is None else noticed) - self.began)
        killer = "--chaos" if injected else ""
        return Failure(kind, host, at, ran_s, self.number, message=message, injected=injected, killer=killer)

    def take_failure(self, failure: Failure) -> None:
        """Note what failed by itself before the attempt was stopped."""
        self.failures.append(failure)
        row = None if failure.rank is None else self.ranks.get(failure.rank)
        if row is not None and row.state is RankState.STOPPED:  # on its way to the end by itself
            self.ranks.move(row, RankState.FAILED)
        if not looks_like_consequence(failure):
            known = self.first_root_at
            self.first_root_at = failure.at if known is None else min(known, failure.at)

    def take_end(self, known: Failure, ended: Failure) -> None:
        """Note how the process of a worker ended that was known to have failed."""
        self.failures = [ended if failure is known else failure for failure in self.failures]
