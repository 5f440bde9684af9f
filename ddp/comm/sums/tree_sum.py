"""Sums over a group by the tree of `ddp.comm.combine`: the same bits for any backend, sizes and hosts.

The leaves of the tree are the ranks, or micro-batches, several for a rank: it sends only whole subtrees.

Where the backend adds by that tree itself (`shm`), it makes the sum. Otherwise ranks exchange messages: each gets one
piece of the tensor from every rank, adds, and sends the sum to all. That moves the bytes of a ring, 2(n - 1)/n of the
tensor for n ranks, in two messages one after the other instead of 2(n - 1). It is a reduce-scatter by pairwise exchange
and an all-gather (Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in MPICH").
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from ddp.comm.combine import Shares, combine, is_narrow
from ddp.comm.sums.small_sum import Exchange, reduce_options
from ddp.monitoring.stall_report import Pending
from ddp.torch_internals import backend_of

_WHOLE_BYTES = 1 << 15  # up to this size every rank gets the whole tensors: one message after another less
# Away from the tags of `ddp.comm.sums.small_sum`, of `ddp.compression.row_exchange`, and of users' own messages.
_FIRST_TAG, _TAGS = (1 << 30) + (2 << 20), 1 << 20
_TAGS_OF_ONE = 64  # a rank has at most two subtrees of each size

_with_trees: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
_tags: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()


def start_tree_sum(
    group: dist.ProcessGroup,
    flat: torch.Tensor,
    rows: Sequence[torch.Tensor] | None = None,
    shares: Shares | None = None,
) -> Pending:
    """Start replacing `flat` (n,), contiguous and in host memory, by its sum over the ranks, without blocking.

    With `shares`, the sum is that of all leaves: `rows` are the sums of this rank's subtrees, each (n,), and `flat` may
    be one of them. 16-bit numbers are added in float32, and the sum is rounded once; their rows are in float32. Every
    rank must start the sums of a group in the same order. The wait raises RuntimeError if a rank is gone or too late.
    """
    if shares is not None and shares.is_of_ranks:
        assert rows is not None
        (row,) = rows
        return start_tree_sum(group, flat) if row is flat else _Copied(start_tree_sum(group, row), row, flat)
    if shares is None:
        if adds_by_tree(group, flat.dtype) or group.size() <= 2:
            return group.allreduce([flat], reduce_options(dist.ReduceOp.SUM))
        if is_narrow(flat.dtype):
            wide = flat.float()
            return _Copied(start_tree_sum(group, wide), wide, flat)
        rows, shares = (flat,), Shares.of(group.size(), group.size())
    elif is_narrow(flat.dtype):
        wide = torch.empty_like(flat, dtype=torch.float32)
        return _Copied(start_tree_sum(group, wide, rows, shares), wide, flat)
    assert rows is not None
    if (sum_rows := getattr(backend_of(group, torch.device("cpu")), "sum_rows", None)) is not None:
        work: Pending = sum_rows(flat, rows, shares)
        return work
    return Exchange(group, _Messages(group, flat, rows, shares).finish)


def prefer_trees(group: dist.ProcessGroup) -> None:
    """Let the gradients of all models over `group` in host memory be added by the tree, unless they rule it out."""
    _with_trees.add(group)


def prefers_trees(group: dist.ProcessGroup) -> bool:
    return group in _with_trees


def adds_by_tree(group: dist.ProcessGroup, dtype: torch.dtype) -> bool:
    """Return whether the backend for host memory adds numbers of `dtype` by the tree, rounding once."""
    adds = getattr(backend_of(group, torch.device("cpu")), "adds_by_tree", None)
    return adds is not None and bool(adds(dtype))


class _Copied:
    """A sum that is copied to another tensor at its end."""

    def __init__(self, work: Pending, total: torch.Tensor, to: torch.Tensor) -> None:
        self._work, self._total, self._to = work, total, to

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self, *timeout: timedelta) -> bool:
        self._work.wait(*timeout)
        self._to.copy_(self._total)
        return True


class _Messages:
    """The messages of one sum. The first ones are on their way at once, so that several sums are in transit.

    Each rank gets its piece of every row, adds, and sends the sum to the others.
    """

    def __init__(
        self, group: dist.ProcessGroup, flat: torch.Tensor, rows: Sequence[torch.Tensor], shares: Shares
    ) -> None:
        rank, size = group.rank(), group.size()
        self._group, self._flat, self._shares = group, flat, shares
        self._is_whole = flat.nbytes <= _WHOLE_BYTES
        self._others = [(rank + step) % size for step in range(1, size)]
        self._tag = _next_tag(group)
        sent = [self._pieces(row) for row in rows]
        own = self._pieces(flat)[rank]
        self._came = [
            [pieces[rank] for pieces in sent] if other == rank else [*own.new_empty(len(starts), own.numel())]
            for other, starts in enumerate(shares.starts)
        ]
        # Receives first: a request for data waits behind the data that this rank has sent before it.
        self._works = [
            group.recv([piece], other, self._tag + at)
            for other in self._others
            for at, piece in enumerate(self._came[other])
        ]
        self._works += [
            group.send([pieces[other]], other, self._tag + at)
            for other in self._others
            for at, pieces in enumerate(sent)
        ]

    def _pieces(self, row: torch.Tensor) -> Sequence[torch.Tensor]:
        size = self._group.size()
        return [row] * size if self._is_whole else torch.tensor_split(row, size)

    def finish(self) -> None:
        """Add what the others have sent; send them the sum, and receive theirs. Blocks."""
        _wait_all(self._works)
        pieces = self._pieces(self._flat)
        own = pieces[self._group.rank()]
        total = torch.empty_like(own)
        parts = [piece for came in self._came for piece in came]
        starts = [start for each in self._shares.starts for start in each]
        combine("SUM", parts, total, starts=starts, leaves=self._shares.leaves)
        own.copy_(total)
        if not self._is_whole:
            tag = self._tag + _TAGS_OF_ONE - 1
            works = [self._group.recv([pieces[other]], other, tag) for other in self._others]
            _wait_all(works + [self._group.send([own], other, tag) for other in self._others])


def _wait_all(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def _next_tag(group: dist.ProcessGroup) -> int:
    """Return the first of the tags for the messages of one sum."""
    return _FIRST_TAG + _TAGS_OF_ONE * next(_tags.setdefault(group, itertools.count())) % _TAGS
