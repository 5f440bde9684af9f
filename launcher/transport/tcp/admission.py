"""Who gets in: which node has which slot of the run, and what node 0's terminal shows of those that get none.

Owned by listener.py; does no I/O but for what is shown. Anybody on the network can connect as often as they like, so
nothing here grows with that.
"""

from __future__ import annotations

import shlex
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from launcher import __version__
from launcher.machine.packages import install_command
from launcher.protocol.message import PROTOCOL
from launcher.transport.tcp.greeting import Greeting, differences, printable
from launcher.transport.tcp.joined_node import NodeConnection

SHOWN_OF_A_KIND = 8


class Refused(Exception):
    """A node that has proved itself cannot join."""


@dataclass(eq=False)
class Slot:
    """One node of the run: who it is now, who it was last, who waits for it, and whether another claims it."""

    rank: int
    name: str
    connection: NodeConnection | None = None
    last: Greeting | None = None
    waiter: object | None = None
    challenged: bool = False
    introduced: bool = False  # it was said which machine has taken it

    def taken(self) -> Refused:
        """Return why it cannot be had by another node."""
        assert self.last is not None
        return Refused(f"node rank {self.rank} is already taken by {self.last.who}; give each node its own --node-rank")


class NodeSlots:
    """The nodes of a run in the order of node ranks; the first is node 0's own. Under the listener's lock."""

    def __init__(self, nodes: Sequence[str], expected: Mapping[str, str]) -> None:
        self.all = [Slot(rank, name) for rank, name in enumerate(nodes)]
        self._expected = expected

    def named(self, node: str) -> Slot:
        return next(slot for slot in self.all if slot.name == node)

    def last_of(self, greeting: Greeting) -> Slot | None:
        """Return the slot that this very start of a node had last."""
        return next((slot for slot in self.all if slot.last is not None and slot.last.id == greeting.id), None)

    def find(self, greeting: Greeting) -> Slot:
        """Return the slot that a node is to have. It may be another's still. Raises Refused."""
        self._compare(greeting)
        rank, count = greeting.node_rank, len(self.all)
        if rank is None:
            return self._any(greeting)
        if rank == 0:
            first = self.all[0].name
            raise Refused(f"node rank 0 is {first}, where the run was started; give each node its own --node-rank")
        if not 0 < rank < count:
            raise Refused(f"the run has {count} nodes, so there is no node rank {rank}; see --node-rank and --nnodes")
        return self.all[rank]

    def vacate(self, connection: NodeConnection) -> Slot | None:
        """Free the slot that a connection has, and return it."""
        for slot in self.all:
            if slot.connection is connection:
                slot.connection = None
                return slot
        return None

    def _any(self, greeting: Greeting) -> Slot:
        """Return its own slot to a node that comes again; else a free one, rather one that nobody ever had."""
        if (own := self.last_of(greeting)) is not None:
            return own
        if free := [slot for slot in self.all[1:] if slot.connection is None]:
            return min(free, key=lambda slot: slot.last is not None)
        raise Refused(f"all {len(self.all)} nodes of the run are there already; see --nnodes on node 0")

    def _compare(self, greeting: Greeting) -> None:
        node = printable(greeting.hostname)
        if greeting.version != __version__ or greeting.protocol != PROTOCOL:
            fix = install_command(shlex.quote(sys.executable))
            advice = ": ".join(filter(None, ["install the same on both", fix]))
            version = printable(greeting.version)
            raise Refused(f"{node} has dtrain {version}, node 0 has {__version__}; {advice}")
        if lines := differences(self._expected, greeting):
            raise Refused("\n  ".join([f"{node} was started with another command than node 0:", *lines]))


class RejectedPeers:
    """Counts those that were rejected, and shows each different one once, as far as there are not too many."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._shown: defaultdict[str, set[str]] = defaultdict(set)

    def reject(self, kind: str, text: str = "") -> None:
        """Note one of a `kind`, and show the text, if there is one. Any thread may call it."""
        with self._lock:
            self._counts[kind] += 1
            shown = self._shown[kind]
            if not text or text in shown or len(shown) >= SHOWN_OF_A_KIND:
                return
            shown.add(text)
        self._notify(text)

    def summarize(self) -> None:
        """Show one line about those that were not shown one by one, if there were any."""
        with self._lock:
            unshown = {kind: count - len(self._shown[kind]) for kind, count in self._counts.items()}
        if parts := [f"{count} {kind}" for kind, count in unshown.items() if count > 0]:
            self._notify(f"other connections to the control port were turned away: {', '.join(parts)}")
