"""Batches for one replica: each global batch of the data set is split over the replicas, to the last sample.

Made by `strategy.loader`. Depends on the number of replicas, not on how they communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data import default_collate as _default_collate

from ddp.data.permutation import Position, choose
from ddp.errors import ArgumentError, UnsupportedError

__all__ = ["ReplicaLoader"]

_OURS = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")
_STRIDE = 1_000_003  # between the seeds of two epochs


class ReplicaLoader:
    """Iterate over this replica's share of each global batch.

    Global batch number g is samples g*B to (g+1)*B of the epoch's order, which all replicas share; replica r of n takes
    every n-th of them from r on. If n does not divide a batch, the first replicas have one sample more, and if the
    last batch has fewer samples than replicas, the batch of the others is empty (tensors of length 0): every replica
    makes the same number of steps, and each sample is seen once. `strategy.mean` divides by the size of the whole
    batch; a plain `loss.mean()` of an empty batch is NaN: scripts that use it need `drop_last=True`.

    Each pass is the next epoch, with another order if `shuffle`; `set_epoch` chooses one. `len()` is the number of
    batches of a whole epoch. `state_dict()` returns the progress in samples, valid for any number of replicas and
    batch size: the last batch yielded counts as trained on. All arguments of torch's DataLoader are passed on, except
    those that determine the contents of a batch.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        global_batch_size: int,
        replica: int,
        replicas: int,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        on_batch: Callable[[int], None] | None = None,
        **loading: Any,
    ) -> None:
        for name in _OURS:
            if name in loading:
                raise ArgumentError(f"loader({name}=...): the strategy decides that; see global_batch_size and shuffle")
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ArgumentError(
                f"loader({type(dataset).__name__}): a data set without a length cannot be shared out by samples; give "
                "each replica a stream of its own (strategy.replica of strategy.replicas) in a plain DataLoader"
            )
        if global_batch_size < replicas:
            raise ArgumentError(
                f"global_batch_size={global_batch_size} is less than one sample for each of the {replicas} replicas"
            )
        self.dataset: Any = dataset
        self.global_batch_size = global_batch_size
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0  # of the current pass, or the next one
        self._replica, self._replicas = replica, replicas
        self._length = len(self.dataset)
        self._begun = False  # whether the epoch's pass has started
        self._finished = -1  # the epoch that is complete in the loaded state, until a pass starts
        self._position = 0  # samples of the epoch that all replicas together have been given
        self._behind: Callable[[], int] | None = None
        self._skip = 0  # whole batches still to skip, over epochs
        self._on_batch = on_batch
        # A separate generator, so that starting a pass draws nothing from the one that dropout uses: a run that is
        # resumed within an epoch starts one more pass. It is seeded for each, so that a resumed run's workers have the
        # random numbers of the epoch, not of the first one (persistent workers are seeded when they start).
        self._generator = None if "generator" in loading else torch.Generator()
        loading.setdefault("generator", self._generator)
        self._collate: Callable[[list[Any]], Any] = loading.get("collate_fn") or _default_collate
        self._shares = _Shares(self)
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=self._shares, **loading)

    def __len__(self) -> int:
        return self._batches(0)

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest of the epoch; a pass that was interrupted is over, as with a DataLoader."""
        if self._begun:
            self._next_epoch()
        self._begun, self._finished = True, -1
        if self._behind is not None:
            self._skip, self._behind = self._behind(), None
        return self._pass(self.epoch)

    def _pass(self, epoch: int) -> Iterator[Any]:
        if self._skip >= (left := self._batches(self._position)) > 0:  # others have made this epoch already
            self._skip -= left
            self._position = self._length
            self._next_epoch()
            return
        self._position += self._skip * self.global_batch_size
        self._skip = 0
        if self._generator is not None:
            seed = (self.seed + epoch * _STRIDE) * self._replicas + self._replica
            self._generator.manual_seed(seed % (1 << 63))
        loader = iter(self._loader)
        while self.epoch == epoch and (size := self._size(self._position)):
            batch = next(loader) if self._share(size) else self._empty()
            self._position += size
            if self._on_batch is not None:
                self._on_batch(size)
            yield self._handed_out(batch, size)
        if self.epoch == epoch:
            self._next_epoch()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass; right after `load_state_dict`, the loaded epoch continues where it was.

        If the loaded epoch was complete, its pass is empty.
        """
        if epoch == self._finished:
            self.epoch, self._position, self._begun = epoch, self._length, False
        elif epoch != self.epoch or self._begun:
            self.epoch = epoch
            self._position, self._begun = 0, False

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the remaining epochs, up to `count`, for a loop around the loader's own.

        Starts where training is: after `load_state_dict`, or if this replica joined a training in progress.
        """
        self.catch_up()
        while (epoch := self.epoch) < count:
            yield epoch
            if self.epoch == epoch:  # the pass was interrupted
                self._next_epoch()

    def catch_up(self, *, accumulate: int = 1, steps: int | None = None) -> int:
        """Skip to the others' position, if this replica joined a training in progress; return the epoch.

        `accumulate`: the global batches of a step; `steps` of an epoch, if these are not all.
        """
        behind = 0 if self._behind is None else self._behind()
        self._behind = None
        whole, rest = divmod(behind, steps or len(self) or 1)
        self.epoch += whole
        self._position += rest * accumulate * self.global_batch_size
        return self.epoch

    @property
    def position(self) -> int:
        """Samples of the epoch that all replicas together have been given."""
        return self._position

    def begin_after(self, batches: Callable[[], int]) -> None:
        """Skip `batches()` global batches, or steps of `catch_up`, which others have made, from the first pass on.

        It is called when that pass starts. Whole epochs become empty passes, unless a loop over `epochs` skips them.
        """
        self._behind = batches

    def state_dict(self) -> dict[str, int | bool | str]:
        """Return the position in the data, which depends neither on the replicas nor on the batch size."""
        return self._where().state_dict()

    def load_state_dict(self, state: Mapping[str, int | bool | str]) -> None:
        """Continue from a saved `state`. Raises ArgumentError if the order of the samples differs."""
        self.epoch, self._position = self._where().going_on(state, "loader")
        self._begun, self._behind, self._finished = False, None, -1
        if not self._size(self._position):
            self._finished = self.epoch
            self._next_epoch()

    def deal_over(self, before: tuple[int, int], place: tuple[int, int]) -> None:
        """Split global batches of the same size over other replicas than before, from the next pass on.

        Both are (replica, replicas). A loader whose place was not `before` is unchanged: the script has chosen it.
        Raises UnsupportedError if there are more replicas than samples in a batch.
        """
        if (self._replica, self._replicas) != before:
            return
        replica, replicas = place
        if self.global_batch_size < replicas:
            raise UnsupportedError(
                f"global_batch_size={self.global_batch_size} is less than one sample for each of the {replicas} "
                "replicas that there are now. All start again"
            )
        self._replica, self._replicas = replica, replicas

    def stand_in(self) -> Any:
        """Return a batch with the data set's first sample, twice, for a model that cannot run on an empty batch."""
        return self._collate([self.dataset[0]] * 2)

    def _next_epoch(self) -> None:
        self.epoch += 1
        self._position, self._begun = 0, False

    def _where(self) -> Position:
        return Position(self.epoch, self._position, self._length, self.shuffle, self.seed)

    def _size(self, position: int) -> int:
        """Return the number of samples of the global batch at `position`; 0 at the end."""
        size = min(self.global_batch_size, self._length - position)
        return 0 if size < 0 or (self.drop_last and size < self.global_batch_size) else size

    def _share(self, size: int) -> range:
        """Return the samples of a global batch of `size` that this process loads."""
        return range(self._replica, size, self._replicas)

    def _handed_out(self, batch: Any, size: int) -> Any:
        """Return the batch for the training from this process's share of a global batch of `size`."""
        return batch

    def _batches(self, position: int) -> int:
        full, over = divmod(max(0, self._length - position), self.global_batch_size)
        return full + (over > 0 and not self.drop_last)

    def _empty(self) -> Any:
        """Return the batch of a replica without samples: like one of a single sample, without that sample."""
        return _emptied(self._collate([self.dataset[0]]))


class _Shares:
    """The indices of this replica in each remaining batch, for a DataLoader; without empty batches."""

    def __init__(self, loader: ReplicaLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        own = self._loader
        position = own._position
        order = choose(own._length, seed=own.seed, epoch=own.epoch) if own.shuffle else None
        while share := own._share(size := own._size(position)):
            places = torch.arange(position + share.start, position + share.stop, share.step, device="cpu")
            yield (places if order is None else order(places)).tolist()
            position += size

    def __len__(self) -> int:
        return self._loader._batches(self._loader._position)


def _emptied(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch[:0]
    if isinstance(batch, Mapping):
        return {key: _emptied(item) for key, item in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(_emptied, batch))
    if isinstance(batch, list | tuple):
        kept = [_emptied(item) for item in batch if not isinstance(item, str | bytes | int | float)]
        return type(batch)(kept)
    return batch
