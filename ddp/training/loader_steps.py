"""What each kind of loader is for a fit: its steps, their batches, and how often a number counts.

`ddp.training.trainer` asks for the kind once, in `steps_of`.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ddp.data.replica_loader import ReplicaLoader
from ddp.data.step_loader import Step, StepLoader
from ddp.errors import ArgumentError, UnsupportedError
from ddp.strategies.strategy import Strategy
from ddp.training.losses_and_metrics import PartOfStep, StepTotals, Totals, parts_of_steps

_BATCH_SIZE = 32  # as in Keras


class LoaderSteps(ABC):
    """The steps of a loader on this replica.

    `random_stream` is that of this replica's random numbers, by the seed of a fit. `totals` is the type of totals that
    goes with the loader.
    """

    loader: ReplicaLoader | StepLoader
    random_stream = 0
    totals: type[Totals] = Totals
    stand_in: Callable[[], Any] | None = None  # a batch in place of an empty one

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of steps of an epoch."""

    @property
    @abstractmethod
    def shares(self) -> int:
        """The number of parts of a step that have a mean loss each: replicas, or micro-batches."""

    @abstractmethod
    def rest_of_epoch(self, totals: Totals) -> Iterator[Iterator[PartOfStep]]:
        """Yield the remaining steps of the epoch, each as this replica's batches. Iterate over each to its end."""

    @abstractmethod
    def evaluation(self, totals: Totals) -> Iterator[Any]:
        """Yield this replica's batches of the whole data, to be added up in `totals`."""

    @abstractmethod
    def in_order(self) -> Iterator[PartOfStep]:
        """Yield this replica's batches in the order of the data set. Raises ArgumentError if that is not possible."""

    @abstractmethod
    def held_out(self, dataset: Any, global_batch_size: int | None) -> ReplicaLoader | StepLoader:
        """Return a loader of the same kind for an evaluation."""

    def catch_up(self, steps: int) -> tuple[int, int]:
        """Skip to the others' position, if this replica joined a training in progress; return epoch and step in it.

        `steps`: of an epoch.
        """
        return self.loader.epoch, 0


class ReplicaSteps(LoaderSteps):
    """Steps of `accumulate` global batches. A replica has its share of each."""

    loader: ReplicaLoader

    def __init__(self, loader: ReplicaLoader, strategy: Strategy, accumulate: int) -> None:
        self.loader, self._strategy, self._accumulate = loader, strategy, accumulate
        self.random_stream, self.stand_in = strategy.replica, loader.stand_in

    def __len__(self) -> int:
        return -(-len(self.loader) // self._accumulate)

    @property
    def shares(self) -> int:
        return self._strategy.replicas

    def rest_of_epoch(self, totals: Totals) -> Iterator[Iterator[PartOfStep]]:
        parts = parts_of_steps(self.loader, self._accumulate)
        for first in parts:
            yield self._step(first, parts)

    def _step(self, first: PartOfStep, parts: Iterator[PartOfStep]) -> Iterator[PartOfStep]:
        for part in itertools.chain([first], parts):
            self._strategy.set_batch_size(part.size)  # a callback may have read another loader since
            yield part
            if part.ends_step:
                return

    def evaluation(self, totals: Totals) -> Iterator[Any]:
        return iter(self.loader)

    def in_order(self) -> Iterator[PartOfStep]:
        if self.loader.shuffle or self.loader.drop_last:
            raise ArgumentError("predict() keeps the order of the data set: its loader must not shuffle or drop_last")
        return parts_of_steps(self.loader, 1)

    def held_out(self, dataset: Any, global_batch_size: int | None) -> ReplicaLoader:
        size = _BATCH_SIZE if global_batch_size is None else global_batch_size
        return self._strategy.loader(dataset, global_batch_size=size, seed=self.loader.seed)

    def catch_up(self, steps: int) -> tuple[int, int]:
        epoch = self.loader.catch_up(accumulate=self._accumulate, steps=steps)
        return epoch, self.loader.position // (self._accumulate * self.loader.global_batch_size)


class MicroBatchSteps(LoaderSteps):
    """Steps of a `ddp.StepLoader`: numbers are those of all replicas, with the same bits on any number of them."""

    loader: StepLoader
    totals = StepTotals

    def __init__(self, loader: StepLoader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def shares(self) -> int:
        return self.loader.micro_batches

    def rest_of_epoch(self, totals: Totals) -> Iterator[Iterator[PartOfStep]]:
        for step in self.loader.epochs(self.loader.epoch + 1):
            yield self._parts(step, totals)

    def _parts(self, step: Step, totals: Totals) -> Iterator[PartOfStep]:
        for batch, size in zip(self._counted(step, totals), step.sizes, strict=True):
            yield PartOfStep(batch, size, 1.0)

    def evaluation(self, totals: Totals) -> Iterator[Any]:
        return self._counted(self.loader.evaluation(), totals)

    def _counted(self, batches: Iterable[Any], totals: Totals) -> Iterator[Any]:
        """Yield micro-batches, each with totals of its own; then add up those of all replicas."""
        assert isinstance(totals, StepTotals)
        for batch in batches:
            totals.begin_micro_batch()
            yield batch
        totals.end_step()

    def in_order(self) -> Iterator[PartOfStep]:
        raise ArgumentError("predict() of a ddp.StepLoader: give the data set, or the loader of the strategy")

    def held_out(self, dataset: Any, global_batch_size: int | None) -> StepLoader:
        own = self.loader
        size = global_batch_size or own.global_batch_size
        micro = min(own.micro_batch_size, size)
        return StepLoader(dataset, global_batch_size=size, micro_batch_size=micro, shuffle=False, seed=own.seed)


def steps_of(
    data: Any,
    strategy: Strategy,
    accumulate: int,
    global_batch_size: int | None,
    *,
    seed: int = 0,
    shuffle: bool = False,
    like: LoaderSteps | None = None,
) -> LoaderSteps:
    """Return the steps of a loader, or of a new one for a data set, for an evaluation that of `like`.

    Raises ArgumentError for other data, and for a loader that does not fit.
    """
    if isinstance(data, StepLoader):
        if strategy.name != "all_reduce":
            raise UnsupportedError(
                f'a ddp.StepLoader under strategy {strategy.name!r}: it is for "all_reduce"; give the data set, or '
                "strategy.loader(dataset, ...)"
            )
        if accumulate > 1:
            data.accumulate(accumulate)
        return MicroBatchSteps(data)
    if isinstance(data, ReplicaLoader):
        return ReplicaSteps(data, strategy, accumulate)
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise ArgumentError(
            f"a {type(data).__name__} cannot be sharded: give the data set, or strategy.loader(dataset, ...)"
        )
    if isinstance(data, tuple) and all(hasattr(item, "shape") for item in data):  # else a data set of two samples
        raise ArgumentError("a tuple of tensors is not a data set: give torch.utils.data.TensorDataset(x, y)")
    if like is not None:
        return steps_of(like.held_out(data, global_batch_size), strategy, accumulate, None)
    size = _BATCH_SIZE if global_batch_size is None else global_batch_size
    return ReplicaSteps(strategy.loader(data, global_batch_size=size, shuffle=shuffle, seed=seed), strategy, accumulate)
