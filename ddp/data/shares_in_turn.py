"""The indices of a rank that has the shares of several: a batch of each in turn, as those ranks would have had them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import torch

from ddp.data.permutation import Permutation

__all__ = ["SharesInTurn", "ends_batches_early"]


class SharesInTurn(Iterator[int]):
    """Of one pass. The shares begin at `places` of the order of `length` samples, and have every `stride`-th on.

    Each has `count` samples, in batches of `batch`, the last of which may have fewer. Such a one ends the iteration
    where it ends, and the next call goes on with the next one: torch's BatchSampler asks on after an end, so that no
    batch of a DataLoader has samples of two shares.
    """

    def __init__(
        self,
        order: Permutation | None,
        length: int,
        places: Sequence[int],
        stride: int,
        count: int,
        batch: int,
    ) -> None:
        self.drawn = 0
        self.thread = 0  # that has begun a batch last
        self._order, self._length, self._places, self._stride = order, length, places, stride
        self._count, self._batch = count, batch
        self._turn = self._done = 0  # which share is next, and how many samples of it are done
        self._ends = False  # the batch that was begun last is short
        self._indices: Iterator[int] = iter(())

    @property
    def is_exhausted(self) -> bool:
        return self._done == self._count

    def __next__(self) -> int:
        index = next(self._indices, None)
        if index is None:
            self._begin_batch()
            index = next(self._indices)
        self.drawn += 1
        return index

    def _begin_batch(self) -> None:
        """Compute the indices of the next batch. Raises StopIteration where there is none, or a short one has ended."""
        self.thread = threading.get_ident()
        size = min(self._batch, self._count - self._done)
        if self._ends or not size:
            self._ends = False
            raise StopIteration
        begin = self._places[self._turn] + self._done * self._stride
        positions = torch.arange(begin, begin + size * self._stride, self._stride, device="cpu") % self._length
        self._indices = iter((positions if self._order is None else self._order(positions)).tolist())
        self._turn = (self._turn + 1) % len(self._places)
        self._ends = size < self._batch
        if not self._turn:
            self._done += size


def ends_batches_early() -> bool:
    """Whether this torch's BatchSampler asks on where an iterator ended a batch; no documentation says that it does."""
    shares = SharesInTurn(None, 6, (0, 3), 1, 3, 2)
    return [*torch.utils.data.BatchSampler(shares, 2, drop_last=False)] == [[0, 1], [3, 4], [2], [5]]
