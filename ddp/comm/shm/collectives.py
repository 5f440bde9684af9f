"""The algorithms: generators that end every round with a `yield`, and are resumed when all ranks have posted.

Memory is passed as addresses of contiguous tensors, which the caller of the generator keeps alive. Copies are plain
memmoves in one thread, without the interpreter's lock. Data larger than a slot is sent in chunks.

Two ranks each combine the contents of both slots: one copy and one sum per byte. From three on, each rank combines its
slice of a chunk and the others copy that: n - 1 sums become (n - 1)/n, and a copy is added. In both cases all ranks get
the bits of one tree (`ddp.comm.combine`). Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective
Communication Operations in MPICH", have the same two methods over messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from ddp.comm.combine import Shares, combine
from ddp.comm.shm.memory import SLOT_BYTES
from ddp.comm.shm.rounds import Rounds, header
from ddp.comm.shm.waiting import memmove

Steps = Iterator[None]

# Measured: smaller ones need more rounds, in which each rank waits for a core; larger ones do not fit the caches.
_CHUNK = SLOT_BYTES // 2  # the other half of a slot has results
_SMALL = 1 << 14  # up to this size every rank combines everything by itself, in one round, for any number of ranks
_RESULT = _CHUNK  # where in a slot
_LINE = 64


def _spans(nbytes: int, chunk: int) -> list[tuple[int, int]]:
    """Return (start, length) of each chunk; an empty tensor has one, of no bytes."""
    return [(start, min(chunk, nbytes - start)) for start in range(0, nbytes, chunk)] or [(0, 0)]


def barrier(rounds: Rounds) -> Steps:
    rounds.begin(header("barrier", torch.uint8, 0))
    rounds.post()
    yield
    rounds.check()


def all_reduce(rounds: Rounds, flat: torch.Tensor, reduction: str) -> Steps:
    """Replace `flat` (n,), contiguous, by the ranks' combined values."""
    nbytes = flat.nbytes
    if rounds.size == 1:
        return barrier(rounds)
    if rounds.size <= 2 or nbytes <= _SMALL:
        return _all_reduce_each(rounds, flat, reduction)
    words = header("all_reduce", flat.dtype, flat.numel(), reduction)
    return _combine_sliced(rounds, words, flat, [flat], Shares.of(rounds.size, rounds.size), reduction)


def _all_reduce_each(rounds: Rounds, flat: torch.Tensor, reduction: str) -> Steps:
    words = header("all_reduce", flat.dtype, flat.numel(), reduction)
    address, itemsize = flat.data_ptr(), flat.itemsize
    own = rounds.own
    spans = _spans(flat.nbytes, _CHUNK)
    for start, length in spans:
        parity = rounds.begin(words)
        memmove(own.slots[parity], address + start, length)
        rounds.post()
        yield
        rounds.check()
        if not length:
            continue
        first, count = start // itemsize, length // itemsize
        out = flat if len(spans) == 1 else flat[first : first + count]
        parts = rounds.parts(flat.dtype, 0, count)
        if rounds.size == 2:  # its own values are read in place: one stream of memory less
            parts = [out, parts[1]] if rounds.rank == 0 else [parts[0], out]
        combine(reduction, parts, out)


def sum_rows(rounds: Rounds, out: torch.Tensor, rows: Sequence[torch.Tensor], shares: Shares) -> Steps:
    """Write the sum of all leaves to `out`; `rows` are the sums of this rank's subtrees, and may include `out`."""
    return _combine_sliced(rounds, header("sum_rows", out.dtype, out.numel(), "SUM", shares.leaves), out, rows, shares)


def _combine_sliced(
    rounds: Rounds,
    words: tuple[int, int],
    out: torch.Tensor,
    rows: Sequence[torch.Tensor],
    shares: Shares,
    reduction: str = "SUM",
) -> Steps:
    """Send in each round a chunk of this rank's rows, and its slice of the results of the previous chunk."""
    most = max(map(len, shares.starts))
    chunk = _CHUNK // most // _LINE * _LINE
    own, rank, itemsize, dtype = rounds.own, rounds.rank, out.itemsize, out.dtype
    results = _RESULT // itemsize
    starts = [start for each in shares.starts for start in each]
    spans = _spans(out.nbytes, chunk)
    for index in range(len(spans) + 1):
        parity = rounds.begin(words)
        if index < len(spans):
            start, length = spans[index]
            begin, end = _slices(length, rounds.size)[rank]  # no other rank reads this rank's slice
            for at, row in enumerate(rows):
                address, slot = row.data_ptr() + start, own.slots[parity] + at * chunk
                memmove(slot, address, begin)
                memmove(slot + end, address + end, length - end)
        rounds.post()
        yield
        rounds.check()
        if index:
            _take_results(rounds, out.data_ptr(), *spans[index - 1])
        if index < len(spans):
            start, length = spans[index]
            begin, end = (each // itemsize for each in _slices(length, rounds.size)[rank])
            if begin < end:
                every = [rounds.parts(dtype, at * chunk // itemsize + begin, end - begin) for at in range(most)]
                parts = [every[at][peer] for peer, each in enumerate(shares.starts) for at in range(len(each))]
                first = sum(map(len, shares.starts[:rank]))
                parts[first : first + len(rows)] = [row[start // itemsize :][begin:end] for row in rows]
                total = own.slot(1 - parity, dtype)[results : results + end - begin]  # the slot of the next round
                combine(reduction, parts, total, starts=starts, leaves=shares.leaves)


def _take_results(rounds: Rounds, address: int, start: int, length: int) -> None:
    """Copy the ranks' slices of a chunk's results, which arrived in this round."""
    for peer, (begin, end) in zip(rounds.peers, _slices(length, rounds.size), strict=True):
        memmove(address + start + begin, peer.slots[rounds.parity] + _RESULT, end - begin)


def _slices(nbytes: int, size: int) -> list[tuple[int, int]]:
    """Return each rank's share of a chunk, in bytes: whole cache lines."""
    each = -(-nbytes // (size * _LINE)) * _LINE
    return [(min(rank * each, nbytes), min((rank + 1) * each, nbytes)) for rank in range(size)]


def reduce(rounds: Rounds, flat: torch.Tensor, reduction: str, root: int) -> Steps:
    """Replace `flat` on the root alone."""
    words = header("reduce", flat.dtype, flat.numel(), reduction, root)
    for start, length in _spans(flat.nbytes, _CHUNK):
        parity = rounds.begin(words)
        memmove(rounds.own.slots[parity], flat.data_ptr() + start, length)
        rounds.post()
        yield
        rounds.check()
        if rounds.rank == root and length:
            first, count = start // flat.itemsize, length // flat.itemsize
            parts = rounds.parts(flat.dtype, 0, count)
            combine(reduction, parts, flat[first : first + count])


def reduce_scatter(rounds: Rounds, out: torch.Tensor, pieces: Sequence[torch.Tensor], reduction: str) -> Steps:
    """Combine piece r of all ranks into `out` of rank r; all are flat and of equal size."""
    words = header("reduce_scatter", out.dtype, out.numel(), reduction)
    room = _share(rounds.size)
    for start, length in _spans(out.nbytes, room):
        parity = rounds.begin(words)
        for index, piece in enumerate(pieces):
            memmove(rounds.own.slots[parity] + index * room, piece.data_ptr() + start, length)
        rounds.post()
        yield
        rounds.check()
        if length:
            first, count = start // out.itemsize, length // out.itemsize
            at = rounds.rank * room // out.itemsize
            parts = rounds.parts(out.dtype, at, count)
            combine(reduction, parts, out[first : first + count])


def _share(size: int) -> int:
    """Return the part of a chunk for each of `size` pieces."""
    return max(_CHUNK // size // 4096 * 4096, 4096 if size <= SLOT_BYTES // 4096 else _LINE)


def broadcast(rounds: Rounds, flat: torch.Tensor, root: int) -> Steps:
    words = header("broadcast", flat.dtype, flat.numel(), root=root)
    address = flat.data_ptr()
    for start, length in _spans(flat.nbytes, _CHUNK):
        parity = rounds.begin(words)
        if rounds.rank == root:
            memmove(rounds.own.slots[parity], address + start, length)
        rounds.post()
        yield
        rounds.check()
        if rounds.rank != root:
            memmove(address + start, rounds.peers[root].slots[parity], length)


def all_gather(rounds: Rounds, outs: Sequence[torch.Tensor], flat: torch.Tensor) -> Steps:
    """Write `flat` of rank r to `outs[r]` on all ranks; flat tensors of equal size."""
    return _gather(rounds, outs, flat, header("all_gather", flat.dtype, flat.numel()))


def gather(rounds: Rounds, outs: Sequence[torch.Tensor], flat: torch.Tensor, root: int) -> Steps:
    """Like `all_gather`, on the root alone: the others pass no `outs`."""
    return _gather(rounds, outs, flat, header("gather", flat.dtype, flat.numel(), root=root))


def _gather(rounds: Rounds, outs: Sequence[torch.Tensor], flat: torch.Tensor, words: tuple[int, int]) -> Steps:
    address = flat.data_ptr()
    to = [out.data_ptr() for out in outs]
    for start, length in _spans(flat.nbytes, _CHUNK):
        parity = rounds.begin(words)
        memmove(rounds.own.slots[parity], address + start, length)
        rounds.post()
        yield
        rounds.check()
        for peer, out in zip(rounds.peers, to, strict=False):  # none on ranks that only send
            memmove(out + start, peer.slots[parity], length)


def scatter(rounds: Rounds, out: torch.Tensor, pieces: Sequence[torch.Tensor], root: int) -> Steps:
    """Write piece r of the root to `out` of rank r."""
    words = header("scatter", out.dtype, out.numel(), root=root)
    room = _share(rounds.size)
    for start, length in _spans(out.nbytes, room):
        parity = rounds.begin(words)
        for index, piece in enumerate(pieces):  # only on the root
            memmove(rounds.own.slots[parity] + index * room, piece.data_ptr() + start, length)
        rounds.post()
        yield
        rounds.check()
        memmove(out.data_ptr() + start, rounds.peers[root].slots[parity] + rounds.rank * room, length)


def all_to_all(rounds: Rounds, outs: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor]) -> Steps:
    """Write piece r of rank s to `outs[s]` of rank r; sizes may differ by pair, if both of a pair agree."""
    dtype = pieces[0].dtype
    words = header("all_to_all", dtype, 0)
    size, rank = rounds.size, rounds.rank
    parity = rounds.begin(words)
    counts = [*(piece.nbytes for piece in pieces), *(out.nbytes for out in outs)]
    sizes = torch.tensor(counts, dtype=torch.int64, device="cpu")
    memmove(rounds.own.slots[parity], sizes.data_ptr(), sizes.nbytes)
    rounds.post()
    yield
    rounds.check()
    table = [part.tolist() for part in rounds.parts(torch.int64, 0, 2 * size)]
    wrong = [
        f"rank {source} sends {table[source][to] // dtype.itemsize} elements to rank {to}, which expects "
        f"{table[to][size + source] // dtype.itemsize}"
        for source in range(size)
        for to in range(size)
        if table[source][to] != table[to][size + source]
    ]
    if wrong:
        raise rounds.error("; ".join(wrong[:4]))
    room = _share(size)
    for start in range(0, max(max(sent[:size]) for sent in table), room):
        parity = rounds.begin(words)
        for index, piece in enumerate(pieces):
            if start < piece.nbytes:
                at = rounds.own.slots[parity] + index * room
                memmove(at, piece.data_ptr() + start, min(room, piece.nbytes - start))
        rounds.post()
        yield
        rounds.check()
        for peer, out in zip(rounds.peers, outs, strict=True):
            if start < out.nbytes:
                at = peer.slots[parity] + rank * room
                memmove(out.data_ptr() + start, at, min(room, out.nbytes - start))


class Algorithms:
    """The algorithms above, over the rounds of one group."""

    def __init__(self, rounds: Rounds) -> None:
        for algorithm in (
            barrier,
            all_reduce,
            sum_rows,
            reduce,
            reduce_scatter,
            broadcast,
            all_gather,
            gather,
            scatter,
            all_to_all,
        ):
            setattr(self, algorithm.__name__, partial(algorithm, rounds))
