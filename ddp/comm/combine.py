"""Combines the parts of all ranks by a fixed binary tree: (rank 0 + rank 1) + (rank 2 + rank 3), and so on.

Each node has a power of two of leaves in its first half, and the rest in the second. The leaves are the ranks, or
micro-batches, several of a rank one after the other: a rank combines whole subtrees by itself (`Shares`).
The result of an element depends on the leaves' values of it alone, never on the limits of chunks and slices. Half
precision, bfloat16 and float8 are combined in float32 and rounded once (gloo rounds each partial sum); bool is
combined logically.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from ddp.errors import ArgumentError
from ddp.torch_internals import foreach_add

_STEPS: dict[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_BITWISE = ("BAND", "BOR", "BXOR")
# torch has no sums of these; their bits are those of the signed ones.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


@lru_cache(maxsize=256)
def reduction_of(name: str, dtype: torch.dtype) -> torch.dtype | None:
    """Check that values of `dtype` can be combined so; return the dtype to combine them in if it differs.

    Raises ArgumentError.
    """
    if name not in _STEPS:
        raise ArgumentError(f"the backend shm cannot combine by {name}: it has {', '.join(_STEPS)}; use gloo or NCCL")
    exact = not dtype.is_floating_point and not dtype.is_complex
    if (name in _BITWISE and not exact) or (name == "AVG" and exact) or (name in ("MIN", "MAX") and dtype.is_complex):
        raise ArgumentError(f"the backend shm cannot combine {dtype} by {name}: convert the tensor first")
    if name in ("MIN", "MAX") and dtype in _SIGNED:
        raise ArgumentError(f"the backend shm cannot combine {dtype} by {name}: convert the tensor first")
    return torch.float32 if is_narrow(dtype) else _SIGNED.get(dtype)


def is_narrow(dtype: torch.dtype) -> bool:
    """Return whether numbers of `dtype` are added in float32, and the sum is rounded once."""
    return dtype.is_floating_point and dtype.itemsize < 4


def combine(
    name: str,
    parts: Sequence[torch.Tensor],
    out: torch.Tensor,
    *,
    starts: Sequence[int] | None = None,
    leaves: int | None = None,
) -> None:
    """Write the combined values of `parts`, flat tensors, to `out`, which may only alias the first part.

    By default, parts are the leaves of the tree, one a rank. Otherwise each is the value of a subtree of a tree of
    `leaves`, from leaf `starts[i]` on, in order; the subtrees have all leaves. With two parts `out` may alias either.
    """
    step = _STEPS[name]
    wide = reduction_of(name, out.dtype)
    if wide is not None and not wide.is_floating_point:
        parts, out, wide = [part.view(wide) for part in parts], out.view(wide), None
    total = out if wide is None else torch.empty_like(out, dtype=wide)
    count = len(parts) if leaves is None else leaves
    _combine_node(step, parts, range(count) if starts is None else starts, 0, node_size(count), total)
    if name == "AVG":
        total.div_(len(parts))
    if wide is not None:
        out.copy_(total)


def node_size(leaves: int) -> int:
    """Return the size of a tree's root: the least power of two that is not below the number of leaves."""
    return 1 << (leaves - 1).bit_length()


def _combine_node(
    step: Callable[..., torch.Tensor],
    parts: Sequence[torch.Tensor],
    starts: Sequence[int],
    begin: int,
    size: int,
    out: torch.Tensor,
) -> None:
    """Combine the subtrees in the node of `size` leaves from `begin` on."""
    if len(parts) == 1:
        out.copy_(parts[0])
        return
    half = size // 2
    middle = bisect_left(starts, begin + half)
    if middle == len(parts):  # the second half has no leaves
        _combine_node(step, parts, starts, begin, half, out)
        return
    left, right = parts[0], parts[middle]
    if middle > 1:
        _combine_node(step, parts[:middle], starts[:middle], begin, half, out)
        left = out
    if len(parts) - middle > 1:
        right = torch.empty_like(out)
        _combine_node(step, parts[middle:], starts[middle:], begin + half, half, right)
    step(left.to(out.dtype), right.to(out.dtype), out=out)


@dataclass(frozen=True)
class Shares:
    """The leaves that each rank has: the first `counts[0]`, the next `counts[1]`, and so on.

    >>> Shares.of(8, 3).starts
    ((0, 2), (3, 4), (6,))
    """

    counts: tuple[int, ...]

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, leaves: int, ranks: int) -> Shares:
        """Return shares that differ by one leaf at most, larger ones first."""
        each, over = divmod(leaves, ranks)
        return cls(tuple(each + (rank < over) for rank in range(ranks)))

    @cached_property
    def leaves(self) -> int:
        return sum(self.counts)

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """The first leaf of each rank."""
        return tuple(sum(self.counts[:rank]) for rank in range(len(self.counts)))

    @cached_property
    def starts(self) -> tuple[tuple[int, ...], ...]:
        """By rank, where the largest subtrees begin that have only leaves of this rank."""
        found = []
        for first, count in zip(self.firsts, self.counts, strict=True):
            nodes: list[tuple[int, int]] = []
            for leaf in range(first, first + count):
                nodes.append((leaf, 1))
                while (node := self.merged(nodes)) is not None:
                    nodes[-2:] = [node]
            found.append(tuple(start for start, _ in nodes))
        return tuple(found)

    def merged(self, nodes: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
        """Return the node whose halves are the last two nodes, as (start, size); None if there is none."""
        if len(nodes) < 2:
            return None
        (start, size), (middle, other) = nodes[-2:]
        is_left = start % (2 * size) == 0 and start + size == middle
        return (start, 2 * size) if is_left and middle + other >= min(middle + size, self.leaves) else None

    @cached_property
    def is_of_ranks(self) -> bool:
        """Whether each rank has one subtree, and the sum of these is that of the tree whose leaves are the ranks."""
        if any(len(starts) != 1 for starts in self.starts):
            return False
        ranks = len(self.counts)
        return _shape([starts[0] for starts in self.starts], 0, node_size(self.leaves)) == _shape(
            range(ranks), 0, node_size(ranks)
        )


class Subtrees:
    """The sums of a rank's leaves so far, over whole subtrees, in order. Each leaf is added when it comes.

    The value of a leaf is a list of tensors, which a sum may be written to.
    """

    def __init__(self) -> None:
        self._nodes: list[tuple[int, int]] = []  # as (start, size)
        self._sums: list[Sequence[torch.Tensor]] = []

    def add(self, leaf: int, value: Sequence[torch.Tensor], shares: Shares, *, size: int = 1) -> None:
        """Add the value of a leaf or, with `size`, of a subtree of so many leaves, from `leaf` on."""
        self._nodes.append((leaf, size))
        while (node := shares.merged(self._nodes)) is not None:
            self._nodes[-2:] = [node]
            foreach_add(value, self._sums.pop())
        self._sums.append(value)

    def take(self, shares: Shares, rank: int) -> list[Sequence[torch.Tensor]]:
        """Return the sums that `rank` sends, and begin again. After a failure they may be any."""
        sums, count = self._sums, len(shares.starts[rank])
        self._sums, self._nodes = [], []
        sums += sums[-1:] * (count - len(sums))
        return sums[len(sums) - count :]


def _shape(starts: Sequence[int], begin: int, size: int) -> object:
    """Return how subtrees are combined, as pairs of pairs."""
    if len(starts) == 1:
        return None
    half = size // 2
    middle = bisect_left(starts, begin + half)
    if middle == len(starts):
        return _shape(starts, begin, half)
    return _shape(starts[:middle], begin, half), _shape(starts[middle:], begin + half, half)
