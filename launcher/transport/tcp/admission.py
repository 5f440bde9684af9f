"""Admission of nodes: assigns the slots of the run, and reports rejected peers on node 0's terminal.

Owned by listener.py; does no I/O except these messages. Anyone on the network can connect any number of times, so
nothing here grows with connections.
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
    """An authenticated node cannot join."""


@dataclass(eq=False)
class Slot:
    """A node of the run: its connection now, its last greeting, its waiter, and whether another node claims it."""

    rank: int
    name: str
    connection: NodeConnection | None = None
    last: Greeting | None = None
    waiter: object | None = None
    challenged: bool = False
    introduced: bool = False  # its machine was reported

    def taken(self) -> Refused:
        """Return the refusal for another node that claims the slot."""
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
        """Return the slot that this same process of a node had last."""
        return next((slot for slot in self.all if slot.last is not None and slot.last.id == greeting.id), None)

    def find(self, greeting: Greeting) -> Slot:
        """Return the slot for a node. Another node may still have it. Raises Refused."""
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
        """Return a rejoining node's own slot; otherwise a free one, preferably one never used."""
        if (own := self.last_of(greeting)) is not None:
            return own
        if free := [slot for slot in self.all[1:] if slot.connection is None]:
            return min(free, key=lambda slot: slot.last is not None)
        raise Refused(f"all {len(self.all)} nodes of the run have joined already; see --nnodes on node 0")

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
    """Counts rejected peers, and reports each different one once, up to SHOWN_OF_A_KIND."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._shown: defaultdict[str, set[str]] = defaultdict(set)

    def reject(self, kind: str, text: str = "") -> None:
        """Count a peer of a `kind`, and print the text, if there is one. Any thread may call it."""
        with self._lock:
            self._counts[kind] += 1
            shown = self._shown[kind]
            if not text or text in shown or len(shown) >= SHOWN_OF_A_KIND:
                return
            shown.add(text)
        self._notify(text)

    def summarize(self) -> None:
        """Print one line about peers that were not reported individually, if there were any."""
        with self._lock:
            unshown = {kind: count - len(self._shown[kind]) for kind, count in self._counts.items()}
        if parts := [f"{count} {kind}" for kind, count in unshown.items() if count > 0]:
            self._notify(f"other connections to the control port were rejected: {', '.join(parts)}")
