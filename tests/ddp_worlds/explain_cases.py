"""All-reduces and steps over emulated links, and what the models say of them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from testbed.slow_network import enter


def all_reduce_times(networks: Sequence[int], sizes: Sequence[int], times: int) -> list[tuple[int, float]]:
    """The least time of an all-reduce of each size (bytes): a busy machine only adds."""
    enter(networks, dist.get_rank())
    group = dist.new_group()
    found = []
    for nbytes in sizes:
        tensor = torch.zeros(nbytes // 4)
        taken = []
        for _ in range(times):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(tensor, group=group)
            taken.append(time.perf_counter() - began)
        found.append((nbytes, min(taken)))
    return found
