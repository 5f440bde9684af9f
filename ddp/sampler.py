"""Which samples of a data set this rank sees, in which order. Asks the process group for rank and size, no more."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sized

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
    """

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
        full, rest = divmod(len(dataset), num_replicas)
        self.num_samples = full if drop_last or not rest else full + 1
        self.total_size = self.num_samples * num_replicas

    def __iter__(self) -> Iterator[int]:
        n = len(self.dataset)
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.epoch)
            order = torch.randperm(n, generator=generator)
        else:
            order = torch.arange(n)
        # Position k of the padded permutation holds index k mod n; without padding, positions end before n.
        positions = torch.arange(self.num_samples) * self.num_replicas + self.rank
        if self.total_size > n > 0:
            positions %= n
        yield from order[positions].tolist()

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation of `epoch`. Every rank must call it with the same number."""
        self.epoch = epoch


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
