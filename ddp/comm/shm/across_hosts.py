"""The algorithms over several hosts: within a host over memory, between hosts over gloo.

An all-reduce adds up within each host first, so that each of its L ranks has a part of the sum; exchanges the parts
with the ranks of the same number on the other hosts; and gathers them within the host. The network carries 2(h - 1)/h
of the bytes for h hosts, and every rank carries its share. Values are combined as (rank 0 + rank 1 + ... of the first
host) + (those of the second) + ..., for all sizes and timings, bitwise equal on all ranks. Therefore hosts exchange
parts and combine them here, which moves as much as gloo's ring, whose order depends on the size.
(Hierarchical all-reduce as in Horovod and NCCL; its parts: Thakur, Rabenseifner and Gropp 2005.)

A large tensor is sent in chunks: while some are on the wire, the next is added up within the host, and a received one
is gathered there. All in place: a host gets combined values of a part only after it has sent its own.

With unequal numbers of ranks per host, the number of sending ranks on each is that of the host with the fewest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import wraps
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from ddp.comm.combine import combine
from ddp.comm.shm.collectives import Steps
from ddp.comm.shm.rounds import Lost
from ddp.monitoring.stall_text import ranks_text
from ddp.torch_internals import end_groups

_SMALL_BYTES = 1 << 15  # smaller tensors are exchanged whole between hosts: one message instead of two
_CHUNK_BYTES = 4 << 20  # of a whole tensor
_AHEAD = 2  # chunks: receives are posted this early, and received chunks gathered this late
_SLOTS = 2 * _AHEAD  # chunks in flight at once


def _in_one_step(function: Callable[..., None]) -> Callable[..., Steps]:
    """Turn a blocking function into steps for an engine."""

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
        self._peers: Any = None  # _Peers, of a rank that carries
        if self._place < self._carriers:
            named = PrefixStore(f"peers/{self._place}", store)
            self._peers = _Peers(named, self._host, [ranks[self._place] for ranks in hosts], timeout)
        slot_bytes = -(-_CHUNK_BYTES // self._carriers // 64) * 64  # aligned for every dtype
        with torch.inference_mode(False):  # else it could not be used outside
            self._came = torch.empty(_SLOTS, slot_bytes, dtype=torch.uint8, device="cpu")

    def close(self) -> None:
        """Close the connections: ranks on other hosts that wait for this one fail."""
        self.local.shutdown()
        groups = [self.flat, *([] if self._peers is None else [self._peers.close()])]
        self.flat = self._peers = None
        end_groups(groups)

    def limit(self, timeout: timedelta) -> None:
        """Set the timeout of later operations."""
        for group in (self.local, self.flat):
            if hasattr(group, "set_timeout"):  # not in old torchs
                group.set_timeout(timeout)
        if self._peers is not None:
            self._peers.timeout = timeout

    def fail(self, text: str) -> None:
        """Close the connections after an error, and report it to the ranks of this host."""
        self.local.fail(text)
        self.close()

    def error(self, what: str, error: Exception) -> Lost:
        """Return an error with the ranks of this group."""
        said = str(error)
        if isinstance(error, Lost):
            ranks = ranks_text(self._hosts[self._host])
            said = f"among {ranks}, which share a host and are numbered from 0 there: {said}"
        return Lost(f"{what} failed on rank {self.rank}: {said}", rank=self.rank, what=what)

    def _position(self, rank: int) -> tuple[int, int]:
        """Return the host of a rank, and its number there."""
        return next((host, ranks.index(rank)) for host, ranks in enumerate(self._hosts) if rank in ranks)

    @_in_one_step
    def barrier(self) -> None:
        self.flat.barrier().wait()

    @_in_one_step
    def all_reduce(self, flat: torch.Tensor, reduction: str) -> None:
        self._all_reduce(flat, reduction)

    def _all_reduce(self, flat: torch.Tensor, reduction: str) -> None:
        share = self._carriers * len(self._hosts)
        whole = flat.numel() // share * share if flat.nbytes > _SMALL_BYTES else 0
        rest = self._reduce_at_once(flat[whole:], reduction)
        if whole < flat.numel():
            next(rest)
        most = _CHUNK_BYTES // flat.itemsize // share * share
        chunks = [
            self._reduce_chunk(chunk, self._came[index % _SLOTS], 1 + 2 * index, reduction)
            for index, chunk in enumerate(torch.split(flat[:whole], most) if whole else ())
        ]
        for step in range(-_AHEAD, len(chunks) + _AHEAD):
            for index in (step, step - 1, step - _AHEAD, step + _AHEAD):
                if 0 <= index < len(chunks):
                    next(chunks[index], None)
        if whole < flat.numel():
            next(rest, None)

    def _reduce_at_once(self, flat: torch.Tensor, reduction: str) -> Steps:
        """Add up within the host and send; combine the received sums."""
        name = "SUM" if reduction == "AVG" else reduction
        peers = self._peers if self._is_even or self._place == 0 else None
        every = flat.new_empty(len(self._hosts), flat.numel())
        if peers:
            peers.receive(list(every), 0)
        self._run_local("all_reduce", flat, name)
        if peers:
            peers.send([flat] * len(every), 0)
        yield
        if peers:
            peers.wait(0)
            every[self._host] = flat
            combine(name, list(every), flat)
            self._divide(flat, reduction)
        if not self._is_even:
            self._run_local("broadcast", flat, 0)

    def _reduce_chunk(self, flat: torch.Tensor, memory: torch.Tensor, tag: int, reduction: str) -> Steps:
        """Post receives into `memory`; add up within the host and send; combine the received sums; gather them.

        Each host combines a piece of the part, and sends that to the others. Of two hosts each combines the whole part:
        that is one message instead of two, with the same number of bytes.
        """
        name = "SUM" if reduction == "AVG" else reduction
        parts = [*flat.view(self._carriers, -1)]
        peers, host, hosts = self._peers, self._host, len(self._hosts)
        if peers:
            part = parts[self._place]
            came = memory[: part.nbytes].view(flat.dtype)
            mine, theirs = ([each] * 2 if hosts == 2 else [*each.view(hosts, -1)] for each in (part, came))
            peers.receive(theirs, tag)
            if hosts > 2:
                peers.receive(mine, tag + 1)
        yield
        self._reduce_in_host(parts, name)
        if peers:
            peers.send(mine, tag)
        yield
        if peers:
            peers.wait(tag)
            out = mine[host] if hosts == 2 else theirs[host]
            combine(name, [*theirs[:host], mine[host], *theirs[host + 1 :]], out)
            self._divide(out, reduction)
            if hosts > 2:
                mine[host].copy_(out)
                peers.send([out] * hosts, tag + 1)
        yield
        if peers and hosts > 2:
            peers.wait(tag + 1)
        self._gather_in_host(parts)

    def _reduce_in_host(self, parts: Sequence[torch.Tensor], name: str) -> None:
        if self._is_even:
            self._run_local("reduce_scatter", parts[self._place], parts, name)  # reads a span before it writes it
            return
        for carrier, part in enumerate(parts):
            self._run_local("reduce", part, name, carrier)

    def _gather_in_host(self, parts: Sequence[torch.Tensor]) -> None:
        if self._is_even:
            self._run_local("all_gather", parts, parts[self._place])
            return
        for carrier, part in enumerate(parts):
            self._run_local("broadcast", part, carrier)

    def _divide(self, total: torch.Tensor, reduction: str) -> None:
        if reduction == "AVG":
            total.div_(self.size)

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
        self.local.run_now("reduce_scatter", mine.view(-1), [*by_place.view(self._places, -1)], name)
        every = torch.empty_like(mine)
        every[self._host] = mine[self._host]
        self._peers.exchange(list(mine), list(every))
        combine(name, list(every), out)
        self._divide(out, reduction)

    @_in_one_step
    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """Send once to each other host over the network."""
        host, place = self._position(root)
        if place >= self._carriers and host == self._host:
            self._run_local("broadcast", flat, place)
        carrier = place if place < self._carriers else 0
        if self._place == carrier:
            options = dist.BroadcastOptions()
            options.rootRank = host
            self._peers.group.broadcast([_bytes_of(flat)], options).wait()
        if host != self._host or place < self._carriers:
            self._run_local("broadcast", flat, carrier)

    @_in_one_step
    def all_gather(self, outs: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
        if not self._is_even:
            self.flat.allgather([list(map(_bytes_of, outs))], [_bytes_of(flat)]).wait()
            return
        came = flat.new_empty(len(self._hosts), flat.numel())  # of this number on each host
        came[self._host] = flat
        self._peers.exchange([flat] * len(came), list(came))
        every = flat.new_empty(self._places, *came.shape)
        self.local.run_now("all_gather", [*every.view(self._places, -1)], came.view(-1))
        for host, ranks in enumerate(self._hosts):
            for place, rank in enumerate(ranks):
                outs[rank].copy_(every[place, host])

    @_in_one_step
    def gather(self, outs: Sequence[torch.Tensor], flat: torch.Tensor, root: int) -> None:
        options = dist.GatherOptions()
        options.rootRank = root
        self.flat.gather([list(map(_bytes_of, outs))] if outs else [], [_bytes_of(flat)], options).wait()

    @_in_one_step
    def scatter(self, out: torch.Tensor, pieces: Sequence[torch.Tensor], root: int) -> None:
        options = dist.ScatterOptions()
        options.rootRank = root
        self.flat.scatter([_bytes_of(out)], [list(map(_bytes_of, pieces))] if pieces else [], options).wait()

    @_in_one_step
    def all_to_all(self, outs: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor]) -> None:
        sent = torch.cat([_bytes_of(piece) for piece in pieces])
        came = sent.new_empty(sum(out.nbytes for out in outs))
        sizes = [[each.nbytes for each in tensors] for tensors in (outs, pieces)]
        self.flat.alltoall_base(came, sent, *sizes).wait()
        for out, part in zip(outs, torch.split(came, sizes[0]), strict=True):
            _bytes_of(out).copy_(part)

    def _run_local(self, name: str, *args: Any) -> None:
        """Run a collective within the host, unless this is its only rank."""
        if self._places > 1:
            self.local.run_now(name, *args)


_AT_ONCE = timedelta(milliseconds=1)


class _Peers:
    """Messages over gloo between `ranks`, one on each host; this process is the one on `host`.

    Rows are contiguous tensors, one per host. A tag is free again after `wait`. Post receives before sends: a request
    waits behind the data that this rank has sent before it, and a rank without a request sends nothing. gloo's own
    collectives send first, so that a slow link is used in one direction at a time.
    """

    def __init__(self, store: Any, host: int, ranks: Sequence[int], timeout: timedelta) -> None:
        self.group: Any = dist.ProcessGroupGloo(store, host, len(ranks), timeout)
        self.timeout = timeout
        self._ranks = ranks
        self._others = [(host + step) % len(ranks) for step in range(1, len(ranks))]
        self._works: dict[int, list[tuple[int, Any]]] = defaultdict(list)  # by tag, with the host

    def receive(self, rows: Sequence[torch.Tensor], tag: int) -> None:
        """Ask each other host for its row."""
        self._works[tag] += [(host, self.group.recv([_bytes_of(rows[host])], host, tag)) for host in self._others]

    def send(self, rows: Sequence[torch.Tensor], tag: int) -> None:
        """Send each other host its row, once it requests it."""
        self._works[tag] += [(host, self.group.send([_bytes_of(rows[host])], host, tag)) for host in self._others]

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

    def close(self) -> Any:
        """Give up the connections, and return their group: ranks that wait for this one fail once it is dropped."""
        for works in self._works.values():
            works.clear()
        group, self.group = self.group, None
        return group


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as (n,) uint8, so that gloo can move any dtype."""
    return tensor.view(-1).view(torch.uint8)
