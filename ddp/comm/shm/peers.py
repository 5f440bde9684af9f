"""Messages between the ranks with the same number on all hosts, over gloo.

Post receives before sends: a request waits behind the data that this rank has sent before it, and a rank without a
request sends nothing. gloo's own collectives send first, so that a slow link is used in one direction at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from ddp.comm.shm.rounds import ranks_text

_AT_ONCE = timedelta(milliseconds=1)


class Peers:
    """`ranks`, one on each host; this process is the one on `host`. Rows are contiguous tensors, one per host.

    A tag is free again after `wait`.
    """

    def __init__(self, store: Any, host: int, ranks: Sequence[int], timeout: timedelta) -> None:
        self.group: Any = dist.ProcessGroupGloo(store, host, len(ranks), timeout)
        self.timeout = timeout
        self._ranks = ranks
        self._others = [(host + step) % len(ranks) for step in range(1, len(ranks))]
        self._works: dict[int, list[tuple[int, Any]]] = defaultdict(list)  # by tag, with the host

    def receive(self, rows: Sequence[torch.Tensor], tag: int) -> None:
        """Ask each other host for its row."""
        self._works[tag] += [(host, self.group.recv([bytes_of(rows[host])], host, tag)) for host in self._others]

    def send(self, rows: Sequence[torch.Tensor], tag: int) -> None:
        """Send each other host its row, once it requests it."""
        self._works[tag] += [(host, self.group.send([bytes_of(rows[host])], host, tag)) for host in self._others]

    def wait(self, tag: int) -> None:
        """Block until all transfers of this tag are done. Raises RuntimeError if a rank is gone or too late."""
        works, began = self._works[tag], monotonic()
        while works:
            host = works[0][0]
            try:
                works.pop(0)[1].wait(self.timeout)  # a frame of a traceback that has a work keeps connections open
            except RuntimeError as error:
                if monotonic() - began < self.timeout.total_seconds():
                    raise RuntimeError(f"rank {self._ranks[host]} on another host: {error}") from error
                late = {host, *self._unfinished(works)}  # the first one awaited need not be the one that stalls
                ranks = [self._ranks[each] for each in sorted(late)]
                which = f"rank {ranks[0]} on another host" if len(ranks) == 1 else f"{ranks_text(ranks)} on other hosts"
                raise RuntimeError(f"{which}: {error}") from error
        del self._works[tag]

    def _unfinished(self, works: list[tuple[int, Any]]) -> Iterator[int]:
        """Yield the hosts with unfinished messages, and remove these."""
        while works:
            host = works[0][0]
            try:
                works.pop(0)[1].wait(_AT_ONCE)
            except RuntimeError:
                yield host

    def exchange(self, rows: Sequence[torch.Tensor], came: Sequence[torch.Tensor]) -> None:
        """Send each other host its row of `rows`, and receive one from each."""
        self.receive(came, 0)
        self.send(rows, 0)
        self.wait(0)

    def close(self) -> None:
        """Close the connections: ranks that wait for this one fail."""
        for works in self._works.values():
            works.clear()
        self.group = None


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as (n,) uint8, so that gloo can move any dtype."""
    return tensor.view(-1).view(torch.uint8)
