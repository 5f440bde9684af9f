"""The table of ranks: where each rank of an attempt is, and what has become of it. Pure; one table for each attempt.

A rank has one state, which only `Ranks.put` and `Ranks.move` change. All who decide over ranks read the table.

    STARTING -> RUNNING -> DONE, STOPPED, FAILED
                RUNNING -> FAILING, HUNG -> as RUNNING
    FAILED -> WAITING -> RESTARTING -> RUNNING;  FAILED -> LEFT_OUT
    all of these -> LOST -> STARTING on another host, or GONE
    JOINING -> READY -> RUNNING, or LEAVING -> GONE

A rank is a number in its attempt. Its worker keeps it when RANK changes for that worker. The number of a rank that is
GONE may be given to another worker.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from launcher.job.failures.failure import Failure
from launcher.placement.placement import WorkerPlace
from launcher.protocol.reports import Exited


class RankState(Enum):
    __hash__ = object.__hash__  # that of Enum is Python code, and states are looked up at every event

    STARTING = auto()  # the first process on this host is ordered
    RUNNING = auto()
    FAILING = auto()  # it has failed, and its process goes on
    HUNG = auto()  # it is killed for that, and its process goes on
    DONE = auto()  # its process ended with 0, by itself
    STOPPED = auto()  # its process ended since it was stopped
    FAILED = auto()  # its process ended otherwise
    WAITING = auto()  # it has failed, and another process is ordered at its Timer.RESTART
    RESTARTING = auto()  # that process is ordered
    LEFT_OUT = auto()  # it has failed, and the others go on without it
    LOST = auto()  # with its host; no other host has taken it over yet
    JOINING = auto()  # its process is ordered on a host that has come; the others do not know it yet
    READY = auto()  # that process runs, and waits for the others
    LEAVING = auto()  # on a host that was to join; its process may still run
    GONE = auto()  # no longer of the attempt


ENDED = (RankState.DONE, RankState.STOPPED, RankState.FAILED, RankState.WAITING, RankState.LEFT_OUT)
_AWAITED = (RankState.STARTING, RankState.WAITING, RankState.RESTARTING)
_PROCESS = (RankState.RUNNING, RankState.FAILING, RankState.HUNG)
_WELL = (RankState.DONE, RankState.LEFT_OUT)
JOINS = (RankState.JOINING, RankState.READY)
_APART = (RankState.LOST, *JOINS, RankState.LEAVING, RankState.GONE)  # no other meets it now
MAKE_UP = tuple(state for state in RankState if state not in _APART)  # the attempt
_UNFINISHED = (RankState.LOST, *(state for state in RankState if state not in (*_WELL, *_APART)))


@dataclass(eq=False)
class Rank:
    """A row of the table: a rank, by its number in the attempt.

    `failure` belongs to the state: that of a process which is FAILING or HUNG; of a rank that is LOST, the loss of its
    host; of one that is yet to run, the failure since which the others wait to meet it, if they do.
    """

    worker: WorkerPlace
    state: RankState
    failure: Failure | None = None
    restarts: int = 0  # processes that were ordered in the place of another
    exited: Exited | None = None  # the end of its newest process that has ended, and when that was
    ended_at: float = 0.0
    has_stepped: bool = False  # its newest process, in training; known with --chaos only

    @property
    def number(self) -> int:
        return self.worker.rank

    @property
    def host(self) -> str:
        return self.worker.host

    @property
    def is_live(self) -> bool:
        return self.state in _PROCESS

    @property
    def is_awaited(self) -> bool:
        return self.failure is not None and self.state in _AWAITED


class Ranks:
    """`changes` counts the changes of states, `taken_in` the workers."""

    def __init__(self, workers: Iterable[WorkerPlace]) -> None:
        self.changes = self.taken_in = 0
        self._rows: dict[int, Rank] = {}
        self._by_state: dict[RankState, dict[int, Rank]] = {state: {} for state in RankState}
        self._by_host: dict[str, list[Rank]] = {}
        self._awaited: dict[int, Rank] = {}
        for worker in workers:
            self.put(worker, RankState.STARTING, is_first=True)

    def __iter__(self) -> Iterator[Rank]:
        """Go through the ranks that make up the attempt now."""
        return (row for row in self._rows.values() if row.state not in _APART)

    def get(self, number: int, host: str | None = None) -> Rank | None:
        """Return a rank that makes up the attempt now, if it is there and on this host."""
        row = self._rows.get(number)
        if row is None or row.state in _APART or host not in (None, row.host):
            return None
        return row

    def of(self, *states: RankState) -> list[Rank]:
        """Return the ranks in these states; of each state, in the order in which they came to it."""
        return [row for state in states for row in self._by_state[state].values()]

    @property
    def places(self) -> list[WorkerPlace]:
        """Where each rank is, or was last: with those that are lost or gone, and those that are to join."""
        return [row.worker for _, row in sorted(self._rows.items())]

    def count(self, *states: RankState) -> int:
        number = 0
        for state in states:  # a generator takes twice as long, and this is asked six times an event
            number += len(self._by_state[state])
        return number

    def on(self, host: str) -> list[Rank]:
        """Return the ranks of a host that make up the attempt now."""
        return [row for row in self._by_host.get(host, ()) if row.state not in _APART]

    def by_host(self, *states: RankState) -> dict[str, list[Rank]]:
        """Return the ranks in these states by host, in the order in which they came to it."""
        if not self.count(*states):
            return {}
        found = {host: [row for row in rows if row.state in states] for host, rows in self._by_host.items()}
        return {host: rows for host, rows in found.items() if rows}

    @property
    def awaited(self) -> Collection[Rank]:
        """The ranks that the others wait to meet, without those of lost hosts."""
        return self._awaited.values()

    @property
    def lost_hosts(self) -> dict[str, Failure]:
        """The lost hosts whose ranks no other has taken over yet."""
        return {row.host: row.failure for row in self.of(RankState.LOST) if row.failure is not None}

    @property
    def finished(self) -> bool:
        """Whether each rank that the run waits for has ended with 0 by itself, or is left out."""
        return not any(row.worker.needed for state in _UNFINISHED for row in self._by_state[state].values())

    def can_do_without(self, row: Rank) -> bool:
        """Return whether another one that the run waits for is alive, comes back, or has finished successfully."""
        states = (*_UNFINISHED, RankState.DONE)
        return any(other.worker.needed and other is not row for other in self.of(*states))

    def unfinished_on(self, host: str) -> bool:
        return any(row.state not in _WELL for row in self.on(host))

    def restarts_of(self, number: int | None) -> int:
        """Return how many processes were ordered in the place of another."""
        row = None if number is None else self._rows.get(number)
        return 0 if row is None else row.restarts

    def exits(self) -> dict[int, Exited]:
        """Return the newest end of a process of each rank."""
        return {number: row.exited for number, row in self._rows.items() if row.exited is not None}

    def put(
        self, worker: WorkerPlace, state: RankState, failure: Failure | None = None, *, is_first: bool = False
    ) -> Rank:
        """Take in a worker whose process is ordered; its number may have been that of another before.

        `is_first`: the attempt begins with it.
        """
        row = Rank(worker, state)
        if (before := self._rows.pop(worker.rank, None)) is not None:
            self.move(before, RankState.GONE)
            del self._by_state[RankState.GONE][worker.rank]
            row.restarts, row.exited = before.restarts, before.exited
        row.restarts += not is_first
        self._rows[worker.rank] = row
        self.taken_in += 1
        self._by_host.setdefault(worker.host, []).append(row)
        self.move(row, state, failure)
        return row

    def compose(self, workers: Sequence[WorkerPlace], failure: Failure | None) -> list[Rank]:
        """Make up the attempt of these workers; return the rows of those that are to start, awaited since `failure`."""
        for row in self.of(RankState.LOST):
            self.move(row, RankState.GONE)
        starts = []
        for worker in workers:
            known = self._rows.get(worker.rank)
            if known is None or known.host != worker.host or known.state in (RankState.GONE, RankState.LEAVING):
                starts.append(self.put(worker, RankState.STARTING, failure))
            else:
                known.worker = worker
                if known.state is RankState.READY:
                    self.move(known, RankState.RUNNING)
        return starts

    def move(
        self,
        row: Rank,
        state: RankState,
        failure: Failure | None = None,
        *,
        exited: Exited | None = None,
        at: float = 0.0,
    ) -> None:
        """Change the state of a rank, with what belongs to it; `at` is when its process has `exited`."""
        self.changes += 1
        if state is RankState.GONE and row.state is not RankState.GONE:
            self._by_host[row.host].remove(row)
            if not self._by_host[row.host]:
                del self._by_host[row.host]
        self._by_state[row.state].pop(row.number, None)
        self._by_state[state][row.number] = row
        row.state, row.failure = state, failure
        row.restarts += state is RankState.RESTARTING
        row.has_stepped &= state is not RankState.RESTARTING
        if exited is not None:
            row.exited, row.ended_at = exited, at
        if row.is_awaited:
            self._awaited[row.number] = row
        else:
            self._awaited.pop(row.number, None)

    def stepped(self, row: Rank) -> None:
        row.has_stepped = True
        self.changes += 1
