"""Which samples of a data set this rank sees, in which order. Asks the process group for rank and size, no more."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sized

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from ddp.errors import ArgumentError, NotInitializedError

__all__ = ["DistributedSampler"]


class DistributedSampler(Sampler[int]):
    """Give each rank its own, equally long share of a data set.

    A drop-in for `torch.utils.data.DistributedSampler`: the same signature, and for the same seed and epoch
    the same indices in the same order. Rank `r` of `n` takes every n-th index of one permutation that all
    ranks share, from `r` on. When `len(dataset)` is not a multiple of `n`, indices from the start of the
    permutation are seen twice (`drop_last=False`), or its last few are not seen at all (`drop_last=True`).

    Call `set_epoch(epoch)` on every rank before each epoch, otherwise every epoch has the same order.
    Without a process group the world is this process alone, and every index comes once; if the environment
    announces a larger world, that is a NotInitializedError, because every rank would train on everything.

    To go on in the middle of an epoch, tell it after each step how many samples this rank has trained on
    (a DataLoader draws indices ahead, so the sampler cannot know) and keep `state_dict()`:

        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)
            for x, y in loader:
                ...
                sampler.advance(len(x))

    The state counts the samples of all ranks, so it fits a world of any size: the ranks of a resumed run
    share what remains of the epoch, each sample once. Then `len(sampler)` is this rank's share of the rest,
    until the next epoch. Padding and dropping, as above, are done for the rest: when it is not a multiple of
    the new number of ranks, fewer than that many indices come twice or not at all.
    """

    num_samples: int
    total_size: int
    _advanced: bool

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if num_replicas is None or rank is None:
            group_rank, group_size = _rank_and_size()
            num_replicas = group_size if num_replicas is None else num_replicas
            rank = group_rank if rank is None else rank
        if not 0 <= rank < num_replicas:
            raise ArgumentError(
                f"rank is {rank}, but with num_replicas={num_replicas} it must be 0 to {num_replicas - 1}"
            )
        self.dataset = dataset
        self.num_replicas = num_replicas
        self.rank = rank
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self._length = len(dataset)
        self._begin_at(0)

    def __iter__(self) -> Iterator[int]:
        if self._advanced:
            self._begin_at(0)  # the epoch once more, as in torch
        n = len(self.dataset)
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.epoch)
            order = torch.randperm(n, generator=generator)
        else:
            order = torch.arange(n)
        # Position k of the padded permutation holds index k mod n; without padding, positions end before n.
        positions = self._start + torch.arange(self.num_samples) * self.num_replicas + self.rank
        if self._start + self.total_size > n > 0:
            positions %= n
        self._drawn = 0
        for index in order[positions].tolist():
            self._drawn += 1
            yield index

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation of `epoch` and begin at its start. Every rank must call it with the same number.

        Right after `load_state_dict` the loaded epoch goes on where it was; any other begins at its start.
        """
        if epoch != self.epoch or self._advanced:
            self.epoch = epoch
            self._begin_at(0)

    def advance(self, samples: int) -> None:
        """Count `samples` more that this rank has trained on in this epoch, as every other rank has.

        Call it on every rank after each step, with the length of the rank's own batch. Raises ArgumentError if
        more would be trained on than were handed out.
        """
        if not 0 <= self._trained + samples <= self._drawn or samples < 0:
            raise ArgumentError(
                f"advance({samples}) makes {self._trained + samples} samples of this pass, but it has handed out "
                f"{self._drawn} to rank {self.rank}: pass the length of this rank's own batch, once after each step, "
                "and call set_epoch() only before a pass"
            )
        self._trained += samples
        self._advanced = True

    def state_dict(self) -> dict[str, int | bool]:
        """Return the place in the epoch in numbers that do not depend on the world size. Any rank may call it.

        Raises ArgumentError if samples were handed out in this epoch and `advance` was never called.
        """
        if self._drawn and not self._advanced:
            raise ArgumentError(
                f"{self._drawn} samples of epoch {self.epoch} were handed out, but nobody said how many were trained "
                "on: call sampler.advance(len(batch)) after each step, or set_epoch() with the next epoch before "
                "saving at the end of one"
            )
        position = self._start + self._trained * self.num_replicas
        return {
            "epoch": self.epoch,
            "position": position,
            "length": self._length,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def load_state_dict(self, state: Mapping[str, int | bool]) -> None:
        """Go on where `state` was taken, whatever the world size was. Every rank must call it with the same state.

        Raises ArgumentError if the permutation is another one: the length of the data set, `shuffle` or `seed`.
        """
        for name, mine in (("length", self._length), ("shuffle", self.shuffle), ("seed", self.seed)):
            if state[name] != mine:
                raise ArgumentError(
                    f"the sampler was saved with {name} {state[name]} and now has {mine}: "
                    f"sample {state['position']} of epoch {state['epoch']} is another one here"
                )
        self.epoch = int(state["epoch"])
        self._begin_at(int(state["position"]))

    def _begin_at(self, position: int) -> None:
        """Let the next pass hand out what follows the first `position` samples of the shared permutation."""
        self._start = position
        self._drawn = self._trained = 0  # of this rank, in this pass
        self._advanced = False
        full, rest = divmod(max(0, self._length - position), self.num_replicas)
        self.num_samples = full if self.drop_last or not rest else full + 1
        self.total_size = self.num_samples * self.num_replicas


def _rank_and_size() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    announced = os.environ.get("WORLD_SIZE", "1")
    if announced != "1":
        raise NotInitializedError(
            f"WORLD_SIZE={announced}, but there is no process group yet, so this rank does not know its share: "
            "call ddp.init() before DistributedSampler(), or pass num_replicas and rank"
        )
    return 0, 1
