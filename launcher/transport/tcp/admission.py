"""Who gets in: which node has which slot of the run, and what node 0's terminal shows of those that get none.

Owned by listener.py, under its lock; does no I/O. Anybody on the network can connect as often as they like, so nothing
here grows with that.
"""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher import __version__
from launcher.protocol import PROTOCOL
from launcher.transport.tcp.greeting import Greeting, differences, printable
from launcher.transport.tcp.joined_node import NodeConnection

__all__ = ["NodeSlots", "RejectedPeers", "Slot"]

SAY_AT_MOST = 8  # different things of one kind


@dataclass(eq=False)
class Slot:
    """One node of the run: who it is now, who it was last, who waits for it, and whether another claims it."""

    rank: int
    name: str
    connection: NodeConnection | None = None
    last: Greeting | None = None
    waiter: object | None = None
    challenged: bool = False


class NodeSlots:
    """The nodes of a run in the order of node ranks; the first is node 0's own."""

    def __init__(self, nodes: Sequence[str], expected: Mapping[str, str]) -> None:
        self.all = [Slot(rank, name) for rank, name in enumerate(nodes)]
        self._expected = dict(expected)

    def named(self, node: str) -> Slot:
        return next(slot for slot in self.all if slot.name == node)

    def last_of(self, greeting: Greeting) -> Slot | None:
        """Return the slot that this very start of a node had last."""
        return next((slot for slot in self.all if slot.last is not None and slot.last.id == greeting.id), None)

    def find(self, greeting: Greeting) -> Slot | str:
        """Return the slot that a node is to have, or why it can have none. It may be another's still."""
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

    def taken(self, slot: Slot) -> str:
        """Say why a slot cannot be had by another node."""
        assert slot.last is not None
        return f"node rank {slot.rank} is already taken by {slot.last.who}; give each node its own --node-rank"

    def _any(self, greeting: Greeting) -> Slot | str:
        """Return its own slot to a node that comes again; else a free one, rather one that nobody ever had."""
        if (own := self.last_of(greeting)) is not None:
            return own
        free = [slot for slot in self.all[1:] if slot.connection is None]
        if free:
            return min(free, key=lambda slot: slot.last is not None)
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


class RejectedPeers:
    """Counts those that were rejected; `reject` says what is to be shown at once, if anything is."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._said: dict[str, set[str]] = {}

    def reject(self, kind: str, text: str) -> str | None:
        """Note one of a `kind`, e.g. an error's class name; return `text` if it is to be shown, None if it was."""
        self._counts[kind] += 1
        said = self._said.setdefault(kind, set())
        if text in said or len(said) >= SAY_AT_MOST:
            return None
        said.add(text)
        return text

    def count(self, kind: str) -> None:
        """Note one of which there is nothing to show."""
        self._counts[kind] += 1

    def summary(self) -> str | None:
        """Return one line about those that were not shown one by one, None if there were none."""
        unshown = {kind: count - len(self._said.get(kind, ())) for kind, count in self._counts.items()}
        parts = [f"{count} {printable(kind)}" for kind, count in unshown.items() if count > 0]
        if not parts:
            return None
        return f"other connections to the control port were turned away: {', '.join(parts)}"
