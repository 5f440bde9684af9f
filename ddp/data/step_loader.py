"""Steps of micro-batches, which are the same for any number of ranks: the loader whose training has the same bits.

The number of micro-batches of a step, their samples, their random numbers and the order in which gradients are added
depend on the loader's arguments alone; the ranks only share them out. The idea is EasyScale's (Li et al. 2023,
"EasyScale: Elastic Training with Consistent Accuracy and Improved Utilization on GPUs", SC'23).
"""

from __future__ import annotations

import copy
import hashlib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ddp import rng
from ddp.comm.combine import Shares
from ddp.comm.objects import gather_values
from ddp.data import replay
from ddp.data.ledger import KINDS, Kind, record
from ddp.data.micro_batch import MicroBatch, current
from ddp.data.permutation import Position, choose
from ddp.data.sampler import rank_and_size
from ddp.errors import ArgumentError, UnsupportedError
from ddp.monitoring.interrupts import is_interrupt
from ddp.monitoring.progress import set_recorded_step
from ddp.world import communicating

__all__ = ["Step", "StepLoader"]

_OURS = ("batch_size", "shuffle", "sampler", "batch_sampler", "persistent_workers")
_SPARE, _AFTER = -1, -2  # in place of a micro-batch's number


class StepLoader:
    """Yield the steps of a training, and in each step this rank's micro-batches.

        loader = ddp.StepLoader(dataset, global_batch_size=32, micro_batch_size=4, seed=0)
        for step in loader.epochs(3):           # each is one step of the optimizer
            for x, y in step:                   # this rank's micro-batches: 8 on one rank, 3 3 2 on three
                criterion(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    With models in `ddp.DistributedDataParallel`, in host memory, parameters, the optimizer's state, buffers and random
    numbers have the same bits on any number of ranks, after each step: the gradients of micro-batches are added by
    one tree (`ddp.comm.combine`), each micro-batch has random numbers of its own (torch's, numpy's, Python's),
    and so has each sample while it is loaded. The loss of a micro-batch must be a mean over its samples. Each begins
    with the step's first buffers. A step leaves those after micro-batch 0 or, with `buffers="average"`, the average
    over its micro-batches (in float64; whole numbers stay those after micro-batch 0).

    A step has `global_batch_size` samples, the last one of an epoch perhaps fewer, unless `drop_last`. Its
    micro-batches differ by one sample at most and have `micro_batch_size` at most; each counts by its samples. Ranks
    beyond the number of micro-batches have none. A rank keeps up to 1 + log2 of its number of micro-batches gradients.
    In `ddp.Trainer.fit`, leave `micro_batch_size` out to have `accumulate` micro-batches.

    `seed` chooses the order of samples, with `shuffle`, and all random numbers. All other arguments of torch's
    DataLoader are passed on, but those that say what is in a batch, and `persistent_workers`.

    The bits are those of one build of torch and one kind of processor: with `strict`, ranks that differ raise
    ArgumentError, and so does a state of another kind. The number of threads of an operator is that of rank 0 at the
    first start, on every rank and after a restart.

    Under `dtrain run`, or after `ddp.ledger`, each step has a line in the run's ledger, for `dtrain replay` and `dtrain
    diff`, and hashes of gradients and parameters are compared between the ranks: DriftError if they differ. By default
    they are those of as many parameters a step as 2 % of its time allows, all of them in turn; `ledger="full"` hashes
    all in each step, and "off" none.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sequence[Any],
        *,
        global_batch_size: int,
        micro_batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        strict: bool = True,
        ledger: Kind = "sampled",
        buffers: Literal["first", "average"] = "first",
        **loading: Any,
    ) -> None:
        """Raises ArgumentError for a data set without a length, and for sizes that are not possible."""
        for name in _OURS:
            if name in loading:
                raise ArgumentError(f"StepLoader({name}=...): it decides that by itself; leave {name} out")
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ArgumentError(f"StepLoader({type(dataset).__name__}): it takes a data set with a length")
        if not 1 <= (1 if micro_batch_size is None else micro_batch_size) <= global_batch_size:
            raise ArgumentError(
                f"micro_batch_size={micro_batch_size} and global_batch_size={global_batch_size}: a micro-batch has 1 "
                "sample or more, and a step one micro-batch or more"
            )
        if ledger not in KINDS:
            raise ArgumentError(f"ledger={ledger!r}; it must be one of {', '.join(map(repr, KINDS))}")
        if buffers not in ("first", "average"):
            raise ArgumentError(f'buffers={buffers!r}; it must be "first" (those after micro-batch 0) or "average"')
        self.dataset: Any = dataset
        self.buffers = buffers
        self.global_batch_size, self._micro_batch_size = global_batch_size, micro_batch_size
        self.shuffle, self.seed, self.drop_last, self.strict = shuffle, seed, drop_last, strict
        self.ledger = ledger
        self.epoch = 0
        self._position = 0  # samples of the epoch in the steps so far
        self._length = len(self.dataset)
        self._threads = 0  # of an operator; 0 until the first start
        self._loading = loading
        self._has_warned = False

    @property
    def micro_batch_size(self) -> int:
        """The largest number of samples in a micro-batch. Raises ArgumentError if it was not given."""
        if self._micro_batch_size is None:
            raise ArgumentError(
                "StepLoader() without micro_batch_size: give it, or, for Trainer.fit, Trainer(accumulate=) the number "
                "of micro-batches of a step"
            )
        return self._micro_batch_size

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of a whole step."""
        return -(-self.global_batch_size // self.micro_batch_size)

    def accumulate(self, count: int) -> None:
        """Divide steps into `count` micro-batches if no micro_batch_size was given.

        Raises ArgumentError if `micro_batch_size` makes it another number.
        """
        if self._micro_batch_size is None:
            self._micro_batch_size = -(-self.global_batch_size // count)
        if self.micro_batches != count:
            raise ArgumentError(
                f"accumulate={count}, but the loader's steps of {self.global_batch_size} samples have "
                f"{self.micro_batches} micro-batches of {self.micro_batch_size}: leave one of the two out, or choose "
                "an accumulate that divides the samples"
            )

    @property
    def steps(self) -> int:
        """The number of steps so far, over all epochs: within a step, its number in the ledger."""
        return self.epoch * len(self) - (-self._position // self.global_batch_size)

    def __len__(self) -> int:
        """Return the number of steps of an epoch."""
        full, over = divmod(self._length, self.global_batch_size)
        return full + (over > 0 and not self.drop_last)

    def epochs(self, count: int) -> Iterator[Step]:
        """Yield the remaining steps of `count` epochs. Every rank must call it; the first step blocks until all do.

        It continues where `load_state_dict` says, or the last call ended. Raises ArgumentError if the ranks' torch or
        processors differ.
        """
        rank, ranks = place = rank_and_size("StepLoader.epochs()")
        self._agree()
        if rank == 0 and ranks > self.micro_batches and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{ranks} ranks, but only {self.micro_batches} micro-batches in a step of ddp.StepLoader: ranks from "
                f"{self.micro_batches} on have none. Use fewer ranks or a smaller micro_batch_size",
                stacklevel=2,
            )
        replay.begin()
        kind: Kind = "full" if replay.plan() is not None and self.ledger != "off" else self.ledger
        record.begin(self, rank, {"machine": {**_machine(), "threads": self._threads}, "loader": self._facts()}, kind)
        try:
            yield from self._steps(count, place)
        finally:
            record.flush()

    def _steps(self, count: int, place: tuple[int, int]) -> Iterator[Step]:
        while self.epoch < count:
            epoch, generator = self.epoch, torch.Generator().manual_seed(self.seed)
            batches = _Batches(
                DataLoader(
                    _Seeded(self.dataset, self.seed, epoch),
                    batch_sampler=_Own(self, self._position, place),
                    **{"generator": generator, **self._loading},
                )
            )
            while size := self._size(self._position):
                step = Step(self, batches, self._position, size, place)
                self._position += size
                try:
                    yield step
                finally:  # also if the loop ends with it
                    record.end(step)
                replay.end_step(step.recorded)
                if step.recorded is not None:
                    set_recorded_step(step.recorded + 1)  # what fails from here on does so after the step
                if self.epoch != epoch:
                    raise ArgumentError("a StepLoader's state was loaded between two steps: call epochs() again")
            self.epoch, self._position = epoch + 1, 0

    def evaluation(self) -> Iterator[Any]:
        """Yield this rank's micro-batches of all steps of epoch 0, without gradients; the place stays as it is.

        Every rank must call it; the first micro-batch blocks until all do.
        """
        whole = copy.copy(self)
        whole.epoch = whole._position = 0
        whole.ledger = "off"
        whole._has_warned = True  # a rank without micro-batches costs an evaluation nothing
        for step in whole.epochs(1):
            yield from step.without_gradients()

    def set_epoch(self, epoch: int) -> None:
        """Move to the beginning of `epoch`, unless the loader is in it."""
        if epoch != self.epoch:
            self.epoch, self._position = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data: the steps yielded so far count as done. The same for any number of ranks."""
        sizes = {"global_batch_size": self.global_batch_size, "micro_batch_size": self.micro_batch_size}
        return {**self._where().state_dict(), **sizes, **_machine(), "threads": self._threads}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state`, on any number of ranks, with the random numbers that follow its last step.

        Raises ArgumentError if its steps are others.
        """
        epoch, position = self._where().going_on(state, "loader")
        for name in ("global_batch_size", "micro_batch_size"):
            if state[name] != getattr(self, name):
                raise ArgumentError(f"the loader was saved with {name}={state[name]} and now has {getattr(self, name)}")
        self._check_machine(state, "the loader was saved with")
        self.epoch, self._position, self._threads = epoch, position, int(state["threads"])
        if not position:  # its last step was that of the epoch before
            epoch, position = epoch - 1, len(self) * self.global_batch_size
        if epoch >= 0:
            _seed(self.seed, epoch, (position - 1) // self.global_batch_size * self.global_batch_size, _AFTER)

    def _agree(self) -> None:
        """Use the threads of the first start everywhere. Every rank must call it; blocks."""
        mine: dict[str, Any] = {**_machine(), "threads": self._threads or _first_threads()}
        first: dict[str, Any] = gather_values(mine)[0] if dist.is_available() and dist.is_initialized() else mine
        self._check_machine(first, "rank 0 has")
        self._threads = int(first["threads"])
        torch.set_num_threads(self._threads)

    def _facts(self) -> dict[str, Any]:
        sizes = {"global_batch_size": self.global_batch_size, "micro_batches": self.micro_batches}
        order = {"seed": self.seed, "shuffle": self.shuffle}
        return {"samples": self._length, "steps": len(self), **sizes, **order}

    def _check_machine(self, other: Mapping[str, Any], who: str) -> None:
        for name, value in _machine().items():
            if self.strict and other[name] != value:
                raise ArgumentError(
                    f"{who} {name} {other[name]}, and this rank {value}: the last bits may differ. Use equal ones, or "
                    "StepLoader(strict=False)"
                )

    def _where(self) -> Position:
        return Position(self.epoch, self._position, self._length, self.shuffle, self.seed)

    def _size(self, position: int) -> int:
        """Return the number of samples of the step at `position`; 0 at the end."""
        size = min(self.global_batch_size, self._length - position)
        return 0 if size < self.global_batch_size and self.drop_last else size

    def _bounds(self, size: int) -> Sequence[int]:
        """Return where the micro-batches of a step of `size` samples begin, and its end."""
        count = -(-size // self.micro_batch_size)
        each, over = divmod(size, count)
        return [index * each + min(index, over) for index in range(count + 1)]


class Step:
    """One step of the optimizer: iterate over this rank's micro-batches once, with one backward pass for each."""

    def __init__(self, loader: StepLoader, batches: _Batches, position: int, size: int, place: tuple[int, int]) -> None:
        self.epoch, self.samples = loader.epoch, size
        self.number = position // loader.global_batch_size  # in the epoch
        self.recorded: int | None = None  # its number in the ledger, once it is iterated and has a line there
        self._total = loader.steps + 1  # its number over all epochs
        self._loader = loader
        self._batches = batches
        self._bounds = loader._bounds(size)
        self._rank, ranks = place
        self._shares = Shares.of(len(self._bounds) - 1, ranks)
        self._numbers = batches.numbers(len(self.micro_batches))
        self._seeds = loader.seed, self.epoch, position

    @property
    def micro_batches(self) -> range:
        """The numbers of this rank's micro-batches, of those of the step."""
        first = self._shares.firsts[self._rank]
        return range(first, first + self._shares.counts[self._rank])

    @property
    def sizes(self) -> list[int]:
        """The numbers of samples of this rank's micro-batches."""
        return [self._samples(index) for index in self.micro_batches]

    def without_gradients(self) -> Iterator[Any]:
        """Yield this rank's micro-batches, and set the random numbers of each; models add nothing up."""
        for index, number in zip(self.micro_batches, self._numbers, strict=True):
            batch = self._batches.load(number)
            _seed(*self._seeds, index)
            yield batch
        _seed(*self._seeds, _AFTER)

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's micro-batches, and set the random numbers of each. A rank without any takes part, too."""
        current.step, current.is_used = self, False
        if record.begin_step(self._loader, self, self._total, self._shares.counts, self._rank):
            self.recorded = self._total
        try:
            for index, number in zip(self.micro_batches, self._numbers, strict=True):
                batch = self._batches.load(number)
                current.micro_batch = self._micro_batch(index, self.samples / self._samples(index))
                _seed(*self._seeds, index)
                replay.reach(self.recorded, index)
                yield batch
            current.micro_batch = None
            if not self.micro_batches:
                self._take_part()
            elif not current.is_used:
                raise ArgumentError(
                    "no model took part in a step of ddp.StepLoader: wrap it in ddp.DistributedDataParallel, which "
                    "adds up its micro-batches"
                )
            _seed(*self._seeds, _AFTER)
        finally:
            if current.step is self:  # else a later step has begun: a failed one ends when its traceback goes
                current.step = current.micro_batch = None

    def mean(self, losses: Sequence[float | torch.Tensor]) -> float:
        """Return the mean over the step's samples, from the `losses` of this rank's micro-batches, in their order.

        It has the same bits on every rank, and for any number of ranks. Every rank must call it; blocks.
        """
        if len(losses) != len(self.micro_batches):
            raise ArgumentError(
                f"mean() of {len(losses)} losses, but this rank has {len(self.micro_batches)} micro-batches"
            )
        mine = [float(loss) * size for size, loss in zip(self.sizes, losses, strict=True)]
        every = gather_values(mine) if dist.is_available() and dist.is_initialized() else [mine]
        mean = math.fsum(value for values in every for value in values) / self.samples
        record.add_loss(self.recorded, mean)
        return mean

    def _samples(self, index: int) -> int:
        return self._bounds[index + 1] - self._bounds[index]

    def _take_part(self) -> None:
        """Take part in the sums of a step without a micro-batch of this rank."""
        models = [each for each in communicating() if hasattr(each, "take_part")]
        if len(models) > 1:
            raise UnsupportedError(
                f"a step of {len(self._bounds) - 1} micro-batches for {len(self._shares.counts)} ranks and "
                f"{len(models)} models: give each rank a micro-batch, by a smaller micro_batch_size or drop_last=True"
            )
        for model in models:
            model.take_part(self._micro_batch(_SPARE, 1.0))

    def _micro_batch(self, index: int, divisor: float) -> MicroBatch:
        count = self._shares.leaves
        sum_divisor = 1.0 if self.samples % count else float(count)
        averages = self._loader.buffers == "average"
        return MicroBatch(index, divisor, sum_divisor, self._shares, self._rank, averages, self.recorded)


class _Batches:
    """This rank's micro-batches of the rest of an epoch, which are loaded in their order and numbered from 0."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._iterator = iter(loader)
        self._next = 0
        self._given = 0

    def numbers(self, count: int) -> range:
        """Return the numbers of the next `count`, for a step."""
        self._given += count
        return range(self._given - count, self._given)

    def load(self, number: int) -> Any:
        """Load a micro-batch, and before it those of earlier steps that were left early.

        An error in one of these is dropped, since nobody asks for it. Raises ArgumentError for one that is behind.
        """
        if number < self._next:
            raise ArgumentError(
                "a step of ddp.StepLoader was iterated again, or after a later one: each is iterated once, in their "
                "order"
            )
        while self._next < number:
            self._next += 1
            try:
                next(self._iterator)
            except Exception as error:
                if is_interrupt(error):
                    raise
        self._next += 1
        return next(self._iterator)


class _Own:
    """The samples of this rank's micro-batches in the rest of an epoch, for a DataLoader: (index, place) pairs."""

    def __init__(self, loader: StepLoader, position: int, place: tuple[int, int]) -> None:
        self._loader, self._position, self._place = loader, position, place

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        own, (rank, ranks) = self._loader, self._place
        position = self._position
        order = choose(own._length, seed=own.seed, epoch=own.epoch) if own.shuffle else None
        while size := own._size(position):
            bounds = own._bounds(size)
            shares = Shares.of(len(bounds) - 1, ranks)
            for index in range(shares.firsts[rank], shares.firsts[rank] + shares.counts[rank]):
                places = torch.arange(position + bounds[index], position + bounds[index + 1], device="cpu")
                samples = places if order is None else order(places)
                yield [*zip(samples.tolist(), places.tolist(), strict=True)]
            position += size


class _Seeded(Dataset[Any]):
    """A data set whose samples have random numbers of their own, by their place in the epoch."""

    def __init__(self, dataset: Any, seed: int, epoch: int) -> None:
        self._dataset, self._seed, self._epoch = dataset, seed, epoch

    def __getitem__(self, key: tuple[int, int]) -> Any:
        index, place = key
        _seed(self._seed, self._epoch, "sample", place)
        return self._dataset[index]


def _seed(*what: object) -> None:
    """Seed the random numbers of torch, Python and, if it is loaded, numpy."""
    digest = hashlib.blake2b(repr(what).encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little")
    if torch.cuda.is_initialized() or _has_other_devices():
        torch.manual_seed(seed)
    else:  # that would format the stack for each kind of device that is not in use
        torch.default_generator.manual_seed(seed)
    rng.seed_on_host(seed)


@cache
def _has_other_devices() -> bool:
    return torch.backends.mps.is_available() or torch.xpu.is_available()


def _first_threads() -> int:
    found = replay.plan()
    return torch.get_num_threads() if found is None or found.threads is None else found.threads


def _machine() -> dict[str, str]:
    """Return what the last bits of an operator depend on, besides its inputs and threads."""
    return {"torch": str(torch.__version__), "processor": torch.backends.cpu.get_cpu_capability()}
