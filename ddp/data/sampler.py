"""The samples of a data set for this rank, in order. Uses only rank and size of the process group."""

from __future__ import annotations

import itertools
import operator
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
import torch.utils.data

from ddp.data.permutation import Permutation, Position, choose
from ddp.errors import ArgumentError, NotInitializedError

Even = Literal["pad", "drop", "exact"]

_CHUNK = 32768  # indices computed at once; torch starts no threads for so few


class DistributedSampler(torch.utils.data.DistributedSampler[int]):
    """Give each rank its own share of a data set.

    A drop-in for `torch.utils.data.DistributedSampler` and a subclass of it: the same signature, and with the same
    defaults the same indices in the same order. Rank `r` of `n` takes every n-th index of one permutation that all
    ranks share, from `r` on. Call `set_epoch(epoch)` on every rank before each epoch, otherwise every epoch has the
    same order. Without a process group the world is this process alone, and every index comes once; if the
    environment announces a larger world, raises NotInitializedError, because every rank would train on everything.

    `even` decides what happens if `len(dataset)` is not a multiple of `n`:

    - "pad" (`drop_last=False`): indices from the start of the permutation are seen twice. Shares are equal.
    - "drop" (`drop_last=True`): the last few of the permutation are not seen at all. Shares are equal.
    - "exact": each sample is seen once, and the first ranks have one more than the others. `len()` is this rank's
      own, and may be 0. For evaluation: `ddp.gather_metrics` sums such shares. A training loop needs `join()`,
      because the ranks may take different numbers of steps.

    The order is torch's, number for number, for `seed=0` and up to 2**20 samples. Two things differ otherwise:

    - For another seed, (seed, epoch) is hashed. torch adds the two, so that its epoch 1 of seed 0 is epoch 0 of seed
      1, and runs over several seeds see the same orders, shifted. Any integer is a valid seed.
    - Above 2**20 samples, the order is computed as it is read (`Keyed`), for every seed: torch makes
      the whole list on every rank, ours takes the same few megabytes for any number of samples.

    To resume in the middle of an epoch, report after each step how many samples this rank has trained on
    (a DataLoader draws indices ahead, so the sampler cannot know) and save `state_dict()`:

        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)
            for x, y in loader:
                ...
                sampler.advance(len(x))

    The state counts the samples of all ranks, so it fits a world of any size: the ranks of a resumed run
    share the rest of the epoch, each sample once. Then `len(sampler)` is this rank's share of the rest,
    until the next epoch. `even` applies to the rest: if it is not a multiple of the new number of ranks,
    fewer than that many indices come twice or not at all, or once on some ranks only.
    """

    num_samples: int  # of this rank, in this pass
    total_size: int  # of all ranks, in this pass

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        even: Even | None = None,
    ) -> None:
        if num_replicas is None or rank is None:
            group_rank, group_size = rank_and_size("DistributedSampler(), or pass num_replicas and rank")
            num_replicas = group_size if num_replicas is None else num_replicas
            rank = group_rank if rank is None else rank
        if not 0 <= rank < num_replicas:
            raise ArgumentError(
                f"rank is {rank}, but with num_replicas={num_replicas} it must be 0 to {num_replicas - 1}"
            )
        self.even = _even(even, drop_last)
        self.dataset: Any = dataset  # torch's annotation is Dataset, but its class too uses the length alone
        self.num_replicas = num_replicas
        self.rank = rank
        self.shuffle = shuffle
        self.seed = _integer(seed, "seed")
        self.drop_last = self.even == "drop"
        self.epoch = 0
        self._before_rest: Callable[[], None] | None = None
        self._length = len(dataset)
        self.places = 0  # how often the start of the next pass was set
        self.advanced = 0  # how often `advance` was called
        self._begin_at(0)

    def __iter__(self) -> Iterator[int]:
        call, self._before_rest = self._before_rest, None
        if call is not None:
            call()
        if self._is_over:
            self._begin_at(0)  # the same epoch again, as in torch
        if len(self.dataset) != self._length:
            raise ArgumentError(
                f"the data set had {self._length} samples when the sampler was made and has {len(self.dataset)} now: "
                "make a sampler for it as it is, and a DataLoader with that"
            )
        order = choose(self._length, seed=self.seed, epoch=self.epoch) if self.shuffle else None
        self._pass = _Pass(order, self._length, self.start + self.rank, self.num_replicas, self.num_samples)
        # chain counts nothing and runs no Python code between two indices of a chunk.
        return itertools.chain.from_iterable(self._pass)

    def __len__(self) -> int:
        return self.num_samples

    @property
    def drawn(self) -> int:
        """Number of samples that this pass has yielded."""
        return self._pass.drawn

    @property
    def is_drawn_elsewhere(self) -> bool:
        """Whether another thread than the calling one draws the samples of this pass."""
        return self._pass.thread not in (0, threading.get_ident())

    def before_rest(self, call: Callable[[], None]) -> None:
        """Run `call` when the loaded pass resumes; not if it starts from the beginning, or another one starts."""
        self._before_rest = call if self.start else None

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation of `epoch` and start at its beginning. Every rank must call it with the same number.

        Right after `load_state_dict`, the loaded epoch continues where it was; any other starts at its beginning.
        """
        epoch = _integer(epoch, "epoch")
        if epoch != self.epoch or self._is_over:
            self.epoch = epoch
            self._begin_at(0)

    def advance(self, samples: int) -> None:
        """Count `samples` more that this rank has trained on in this epoch, as every other rank has.

        Call it on every rank after each step, with the length of the rank's own batch. With `even="exact"` a rank
        may have one less in the last step, or none, and may then omit the call. Raises ArgumentError if more would be
        trained on than were yielded.
        """
        drawn = self._pass.drawn
        if not 0 <= self.trained + samples <= drawn or samples < 0:
            raise ArgumentError(
                f"advance({samples}) makes {self.trained + samples} samples of this pass, but it has yielded "
                f"{drawn} to rank {self.rank}: pass the length of this rank's own batch, once after each step, "
                "and call set_epoch() only before a pass"
            )
        self.trained += samples
        self._advanced = True
        self.advanced += 1

    def state_dict(self) -> dict[str, int | bool | str]:
        """Return the position in the epoch, independent of the world size. Any rank may call it.

        It is the same on every rank after the same step. If the shares of `even="exact"` differ, a rank with the
        smaller one considers the epoch complete once it has trained on all of its share and was asked for more; if it
        is asked ahead (by a DataLoader with workers) while the other ranks still have a step to make for their one
        more sample, that is too early. Rank 0 has the larger share, and its state is always right: save that one, as
        `ddp.Checkpoint` does, which also refuses to save if the ranks do not agree.

        Raises ArgumentError if samples were yielded in this epoch and `advance` was never called.
        """
        if self._pass.drawn and not self._advanced:
            raise ArgumentError(
                f"{self._pass.drawn} samples of epoch {self.epoch} were yielded, but advance() was never called: "
                "call sampler.advance(len(batch)) after each step, or set_epoch() with the next epoch "
                "before saving at the end of one"
            )
        return self._where(self._position()).state_dict()

    def load_state_dict(self, state: Mapping[str, int | bool | str]) -> None:
        """Continue from a saved `state`, for any world size. Every rank must call it with the same state.

        Raises ArgumentError if the permutation differs: the length of the data set, `shuffle`, `seed` or the algorithm.
        """
        self.epoch, position = self._where(0).going_on(state, "sampler")
        self._begin_at(position)

    @property
    def _is_over(self) -> bool:
        """Whether training on this pass has ended, so that the next samples belong to another one."""
        return self.trained > 0 or (self._pass.is_exhausted and self.num_samples == 0)

    def _begin_at(self, position: int) -> None:
        """Start the next pass after the first `position` samples of the shared permutation."""
        self.places += 1
        self._before_rest = None
        self.start = position  # samples of the order that were done when this pass started
        self.trained = 0  # by this rank, in this pass, as reported to `advance`
        self._advanced = False
        self._pass = _Pass(None, 0, 0, 1, 0)
        rest = max(0, self._length - position)
        full, over = divmod(rest, self.num_replicas)
        has_one_more = {"pad": over > 0, "drop": False, "exact": self.rank < over}[self.even]
        self.num_samples = full + has_one_more
        self.total_size = rest if self.even == "exact" else self.num_samples * self.num_replicas

    def _position(self) -> int:
        """Return the number of samples that all ranks together have trained on, after the last step."""
        if self.even == "exact" and self.trained == self.num_samples and self._pass.is_exhausted:
            # The others' extra samples were in that step, or in one that had no batch for this rank.
            return self._length
        return min(self.start + self.trained * self.num_replicas, self._length)

    def _where(self, position: int) -> Position:
        return Position(self.epoch, position, self._length, self.shuffle, self.seed)


class _Pass(Iterator[Iterator[int]]):
    """The indices of one rank in one pass, as one iterator per chunk, and the number drawn so far.

    They are `count` of the `n` samples of the order, every `stride`-th from `place` on; the order starts again after n.
    """

    def __init__(self, order: Permutation | None, n: int, place: int, stride: int, count: int) -> None:
        self._order = order
        self._n = n
        self._place = place
        self._stride = stride
        self._count = count
        self._computed = 0
        self._chunk: Iterator[int] = iter(())
        self.is_exhausted = False  # whether more was requested than there is
        self.thread = 0  # the last one that requested indices

    def __next__(self) -> Iterator[int]:
        self.thread = threading.get_ident()
        size = min(_CHUNK, self._count - self._computed)
        if size == 0:
            self.is_exhausted = True
            raise StopIteration
        begin = self._place + self._computed * self._stride
        end = begin + size * self._stride
        positions = torch.arange(begin, end, self._stride, device="cpu")  # (size,)
        if end - self._stride >= self._n:
            positions %= self._n
        self._computed += size
        self._chunk = iter((positions if self._order is None else self._order(positions)).tolist())
        return self._chunk

    @property
    def drawn(self) -> int:
        """Number of indices drawn. A list iterator knows its remaining length, so no counter is needed."""
        return self._computed - operator.length_hint(self._chunk)


def rank_and_size(before: str, group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """Return this process's rank and size in the group, or those of a world of one if no larger one is announced.

    Otherwise raises NotInitializedError, which says that `ddp.init()` must come `before` a call.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(group), dist.get_world_size(group)
    announced = os.environ.get("WORLD_SIZE", "1")
    if announced != "1":
        raise NotInitializedError(
            f"WORLD_SIZE={announced}, but there is no process group yet, so this rank's share is unknown: "
            f"call ddp.init() before {before}"
        )
    return 0, 1


def _even(even: Even | None, drop_last: bool) -> Even:
    if even is None:
        return "drop" if drop_last else "pad"
    if even not in get_args(Even):
        raise ArgumentError(f"even is {even!r}; it must be one of {', '.join(map(repr, get_args(Even)))}")
    if drop_last and even != "drop":
        raise ArgumentError(f"drop_last=True and even={even!r} contradict each other: leave drop_last out")
    return even


def _integer(value: int, name: str) -> int:
    """Return the number as a plain int: a numpy integer or a tensor would be hashed differently, or not be saved."""
    try:
        return operator.index(value)
    except TypeError as error:
        raise ArgumentError(f"{name} is {value!r}; it must be an integer") from error
