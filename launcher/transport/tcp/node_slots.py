"""Which node has which place of a run whose nodes are started by hand. Owned by the door's thread; does no I/O."""

from __future__ import annotations

import shlex
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher import __version__
from launcher.protocol import PROTOCOL
from launcher.transport.tcp.greeting import Greeting, differences, printable
from launcher.transport.tcp.joined_node import Connection, JoinedStream

__all__ = ["Seat", "Seats", "Want"]


class Want:
    """Somebody who waits for a stream to a place: it is granted or refused by the door's thread, or withdrawn."""

    def __init__(self) -> None:
        self._settled = threading.Event()
        self._lock = threading.Lock()
        self._withdrawn = False
        self.stream: JoinedStream | None = None
        self.refusal: str | None = None

    def wait(self, limit_s: float) -> bool:
        """Wait until it is settled; False if it was not in time, and is withdrawn."""
        if self._settled.wait(limit_s):
            return True
        with self._lock:
            self._withdrawn = not self._settled.is_set()
        return not self._withdrawn

    @property
    def open(self) -> bool:
        return not self._withdrawn and not self._settled.is_set()

    def grant(self, stream: JoinedStream) -> bool:
        return self._settle(stream, None)

    def refuse(self, reason: str) -> None:
        self._settle(None, reason)

    def _settle(self, stream: JoinedStream | None, refusal: str | None) -> bool:
        with self._lock:
            if self._withdrawn:
                return False
            self.stream, self.refusal = stream, refusal
            self._settled.set()
            return True


@dataclass(eq=False)
class Seat:
    """One place: who has it, who had it last, who waits for it, and who else claims it."""

    rank: int
    name: str
    connection: Connection | None = None
    last: Greeting | None = None
    want: Want | None = None
    challenger: Connection | None = None
    challenged_at: float = 0.0


class Seats:
    """The places of a run in the order of node ranks; the first is node 0's own."""

    def __init__(self, places: Sequence[str], expected: Mapping[str, str]) -> None:
        self.all = [Seat(rank, name) for rank, name in enumerate(places)]
        self._expected = dict(expected)

    def named(self, place: str) -> Seat:
        return next(seat for seat in self.all if seat.name == place)

    def of(self, connection: Connection) -> Seat | None:
        return next((seat for seat in self.all if seat.connection is connection), None)

    def find(self, greeting: Greeting) -> Seat | str:
        """Return the place that a node is to have, or why it can have none. It may be another's still."""
        if (problem := self._mismatch(greeting)) is not None:
            return problem
        rank = greeting.node_rank
        if rank is None:
            return self._any(greeting)
        if rank == 0:
            return f"node rank 0 is {self.all[0].name}, where the run was started; give each node its own --node-rank"
        if not 0 < rank < len(self.all):
            return f"the run has {len(self.all)} nodes, so there is no node rank {rank}; see --node-rank and --nnodes"
        return self.all[rank]

    def taken(self, seat: Seat) -> str:
        """Say why a place cannot be had by another node."""
        assert seat.last is not None
        return f"node rank {seat.rank} is already taken by {seat.last.who}; give each node its own --node-rank"

    def _any(self, greeting: Greeting) -> Seat | str:
        """Return its own place to a node that comes again; else a free one, rather one that nobody ever had."""
        for seat in self.all[1:]:
            if seat.last is not None and seat.last.id == greeting.id:
                return seat
        free = [seat for seat in self.all[1:] if seat.connection is None]
        if free:
            return min(free, key=lambda seat: seat.last is not None)
        return f"all {len(self.all)} nodes of the run are there already; see --nnodes on node 0"

    def _mismatch(self, greeting: Greeting) -> str | None:
        node = printable(greeting.hostname)
        if greeting.version != __version__ or greeting.protocol != PROTOCOL:
            fix = f"{shlex.quote(sys.executable)} -m pip install dtrain=={__version__}"
            version = printable(greeting.version)
            return f"{node} has dtrain {version}, node 0 has {__version__}; install the same on both: {fix}"
        if lines := differences(self._expected, greeting):
            return "\n  ".join([f"{node} was started with another command than node 0:", *lines])
        return None
