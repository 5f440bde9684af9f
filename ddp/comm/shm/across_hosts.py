"""The algorithms over several hosts: within a host over memory, between hosts over gloo.

An all-reduce adds up within each host first, so that each of its L ranks has a part of the sum; exchanges the parts
with the ranks of the same number on the other hosts; and gathers them within the host. The network carries 2(h - 1)/h
of the bytes for h hosts, and every rank carries its share. Values are combined as (rank 0 + rank 1 + ... of the first
host) + (those of the second) + ..., whatever the sizes and the timing, with the same bits on all ranks. That is why
hosts exchange parts and combine them here, which moves as much as gloo's ring, whose order depends on the size.
(Hierarchical all-reduce as in Horovod and NCCL; its parts: Thakur, Rabenseifner and Gropp 2005.)

With unequal numbers of ranks per host, as many ranks of each carry as the host with the fewest has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public, but not marked as exported

from ddp.comm.shm.collectives import Steps
from ddp.comm.shm.combine import combine
from ddp.comm.shm.rounds import Lost

__all__ = ["AcrossHosts"]

_SMALL_BYTES = 1 << 15  # up to here all of a tensor travels between hosts at once: one message instead of two
_OPS: dict[str, Any] = {
    name: getattr(dist.ReduceOp, name) for name in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}


def _in_one_step(function: Callable[..., None]) -> Callable[..., Steps]:
    """What an engine runs, of a function that blocks."""

    @wraps(function)
    def steps(*args: Any) -> Steps:
        function(*args)
        yield from ()

    return steps


class AcrossHosts:
    """The connections of one rank of a group, and the algorithms on them, under the names of `collectives`.

    `hosts` are the ranks that share memory, the same on all; `local` is the group of those of this rank, which it owns.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        hosts: Sequence[Sequence[int]],
        make_local: Callable[[Any, int, int, timedelta], Any],
    ) -> None:
        self.rank, self.size = rank, size
        self._hosts = hosts
        self._host = next(index for index, ranks in enumerate(hosts) if rank in ranks)
        mine = hosts[self._host]
        self._place, self._places = mine.index(rank), len(mine)
        self._carriers = min(map(len, hosts))
        self._is_even = all(len(ranks) == self._carriers for ranks in hosts)
        self.local = make_local(PrefixStore(f"host/{self._host}", store), self._place, self._places, timeout)
        self.flat: Any = dist.ProcessGroupGloo(PrefixStore("all", store), rank, size, timeout)
        self._peers: Any = None  # the ranks of the same number, one on each host
        if self._place < self._carriers:
            named = PrefixStore(f"peers/{self._place}", store)
            self._peers = dist.ProcessGroupGloo(named, self._host, len(hosts), timeout)

    def close(self) -> None:
        """Close the connections: whoever waits for this rank on another host fails."""
        self.local.shutdown()
        self.flat = self._peers = None

    def fail(self, text: str) -> None:
        """Close them after an error, which the ranks of this host are told."""
        self.local.fail(text)
        self.close()

    def error(self, what: str, error: Exception) -> Lost:
        """What went wrong, with the ranks of this group."""
        said = str(error)
        if isinstance(error, Lost):
            ranks = ", ".join(map(str, self._hosts[self._host]))
            said = f"among ranks {ranks}, which share a host and are numbered from 0 there: {said}"
        return Lost(f"{what} failed on rank {self.rank}: {said}", rank=self.rank, what=what)

    def _position(self, rank: int) -> tuple[int, int]:
        """The host of a rank, and its number there."""
        return next((host, ranks.index(rank)) for host, ranks in enumerate(self._hosts) if rank in ranks)

    @_in_one_step
    def barrier(self) -> None:
        self.flat.barrier().wait()

    @_in_one_step
    def all_reduce(self, flat: torch.Tensor, reduction: str) -> None:
        self._all_reduce(flat, reduction)

    def _all_reduce(self, flat: torch.Tensor, reduction: str) -> None:
        name = "SUM" if reduction == "AVG" else reduction
        share = self._carriers * len(self._hosts)
        whole = flat.numel() // share * share if flat.nbytes > _SMALL_BYTES else 0
        if whole:
            self._reduce_in_parts(flat[:whole], name)
        if whole < flat.numel():
            self._reduce_at_once(flat[whole:], name)
        if reduction == "AVG":
            flat.div_(self.size)

    def _reduce_at_once(self, flat: torch.Tensor, name: str) -> None:
        self._run_local("allreduce", [flat], _OPS[name])
        if self._peers is not None and (self._is_even or self._place == 0):
            every = [torch.empty_like(flat) for _ in self._hosts]
            self._peers.allgather([list(map(_bytes, every))], [_bytes(flat)]).wait()
            combine(name, every, flat)
        if not self._is_even:
            self._run_local("broadcast", [flat], 0)

    def _reduce_in_parts(self, flat: torch.Tensor, name: str) -> None:
        parts = flat.view(self._carriers, -1)
        if self._is_even:
            part = torch.empty_like(parts[self._place])
            self._run_local("_reduce_scatter_base", part, flat, _OPS[name])
            self._exchange(part, name)
            self._run_local("_allgather_base", flat, part)
            return
        for carrier in range(self._carriers):
            options = dist.ReduceOptions()
            options.rootRank, options.reduceOp = carrier, _OPS[name]
            self._run_local("reduce", [parts[carrier]], options)
        if self._peers is not None:
            self._exchange(parts[self._place], name)
        for carrier in range(self._carriers):
            self._run_local("broadcast", [parts[carrier]], carrier)

    def _exchange(self, part: torch.Tensor, name: str) -> None:
        """Combine `part` over the hosts: each combines a piece of it and gives that to the others."""
        pieces = part.view(len(self._hosts), -1)
        came = torch.empty_like(pieces)
        self._peers.alltoall_base(_bytes(came), _bytes(pieces), [], []).wait()
        mine = pieces[self._host]
        combine(name, list(came), mine)
        gathered = [_bytes(piece) for piece in came]
        self._peers.allgather([gathered], [_bytes(mine)]).wait()
        pieces.copy_(came)

    @_in_one_step
    def reduce(self, flat: torch.Tensor, reduction: str, root: int) -> None:
        total = flat if self.rank == root else flat.clone()
        self._all_reduce(total, reduction)

    @_in_one_step
    def reduce_scatter(self, out: torch.Tensor, pieces: Sequence[torch.Tensor], reduction: str) -> None:
        if not self._is_even:
            flat = torch.cat(list(pieces))
            self._all_reduce(flat, reduction)
            out.copy_(flat.view(self.size, -1)[self.rank])
            return
        name = "SUM" if reduction == "AVG" else reduction
        # First the pieces of the ranks of number 0 on each host, then those of number 1, ...
        by_place = torch.cat([pieces[ranks[place]] for place in range(self._places) for ranks in self._hosts])
        mine = by_place.new_empty(len(self._hosts), out.numel())
        self._run_local("_reduce_scatter_base", mine, by_place, _OPS[name])
        came = torch.empty_like(mine)
        self._peers.alltoall_base(_bytes(came), _bytes(mine), [], []).wait()
        combine(name, list(came), out)
        if reduction == "AVG":
            out.div_(self.size)

    @_in_one_step
    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """Once to each other host over the network."""
        host, place = self._position(root)
        if place >= self._carriers and host == self._host:
            self._run_local("broadcast", [flat], place)
        carrier = place if place < self._carriers else 0
        if self._place == carrier:
            options = dist.BroadcastOptions()
            options.rootRank = host
            self._peers.broadcast([_bytes(flat)], options).wait()
        if host != self._host or place < self._carriers:
            self._run_local("broadcast", [flat], carrier)

    @_in_one_step
    def all_gather(self, outs: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
        if not self._is_even:
            self.flat.allgather([list(map(_bytes, outs))], [_bytes(flat)]).wait()
            return
        came = flat.new_empty(len(self._hosts), flat.numel())  # of this number on each host
        self._peers.allgather([list(map(_bytes, came))], [_bytes(flat)]).wait()
        every = flat.new_empty(self._places, *came.shape)
        self._run_local("_allgather_base", every, came)
        for host, ranks in enumerate(self._hosts):
            for place, rank in enumerate(ranks):
                outs[rank].copy_(every[place, host])

    @_in_one_step
    def gather(self, outs: Sequence[torch.Tensor], flat: torch.Tensor, root: int) -> None:
        options = dist.GatherOptions()
        options.rootRank = root
        self.flat.gather([list(map(_bytes, outs))] if outs else [], [_bytes(flat)], options).wait()

    @_in_one_step
    def scatter(self, out: torch.Tensor, pieces: Sequence[torch.Tensor], root: int) -> None:
        options = dist.ScatterOptions()
        options.rootRank = root
        self.flat.scatter([_bytes(out)], [list(map(_bytes, pieces))] if pieces else [], options).wait()

    @_in_one_step
    def all_to_all(self, outs: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor]) -> None:
        sent = torch.cat([_bytes(piece) for piece in pieces])
        came = sent.new_empty(sum(out.nbytes for out in outs))
        sizes = [[each.nbytes for each in tensors] for tensors in (outs, pieces)]
        self.flat.alltoall_base(came, sent, *sizes).wait()
        for out, part in zip(outs, torch.split(came, sizes[0]), strict=True):
            _bytes(out).copy_(part)

    def _run_local(self, name: str, *args: Any) -> None:
        if self._places > 1 or name.endswith("_base"):
            getattr(self.local, name)(*args).wait()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as (n,) uint8: gloo moves any dtype so."""
    return tensor.view(-1).view(torch.uint8)
