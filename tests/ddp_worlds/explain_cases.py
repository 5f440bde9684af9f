"""All-reduces and steps over emulated links, and what the models say of them."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from testbed.slow_network import enter
from torch import nn

import ddp

LAYERS, WIDTH = 3, 256
PAUSE_S = 0.06


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


class Pause(torch.autograd.Function):
    """Takes time in backward, but no core."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(PAUSE_S)
        return grad


class Layer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(Pause.apply(x))


def network() -> nn.Module:
    """0.8 MB of gradients, ready one layer after the other while backward pauses: what is slow here is no core."""
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(WIDTH, WIDTH) for _ in range(LAYERS)))


class Variant:
    """A fresh replica that trains in one of the ways that `explain` foretells; "now" is the one that is measured."""

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        options: dict[str, Any] = {
            "now": {"bucket_cap_mb": "auto"},
            "one bucket": {"bucket_cap_mb": 1000},
            "powersgd": {"compression": ddp.compression.PowerSGD(start_step=2)},
            "bf16": {"compression": "bf16"},
            "int8": {"compression": "int8"},
        }.get(name, {})
        self.model = ddp.DistributedDataParallel(network(), process_group=group, measure=name == "now", **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.batch = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
        self.steps = 1
        if name.startswith("LocalSGD"):
            self.steps = 8
            self.local = ddp.LocalSGD(self.model, self.optimizer, every=8)

    def run(self, times: int = 1) -> float:
        """Seconds of a step; with LocalSGD, on the average of a round."""
        dist.barrier()
        began = time.perf_counter()
        for _ in range(times * self.steps):
            self.optimizer.zero_grad()
            self.model(self.batch).square().mean().backward()
            self.optimizer.step()
        return (time.perf_counter() - began) / (times * self.steps)


def train(networks: Sequence[int], names: Sequence[str], rounds: int, scaled: Sequence[Mapping[str, Any]]) -> Any:
    """What `explain` says of the first way, and the median times of a step in each, measured in turns."""
    rank = dist.get_rank()
    enter(networks, rank)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(dist.get_world_size()), "LOCAL_RANK": "0"}
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    torch.set_num_threads(1)
    group = dist.new_group()
    variants = [Variant(name, group) for name in names]
    variants[0].run(14)
    model, said = variants[0].model, None
    if rank == 0:  # only one asks: it takes part in nothing
        said = model.explain().as_dict(), [model.explain(**each).as_dict() for each in scaled]
    for variant in variants[1:]:
        variant.run(1 if variant.steps > 1 else 3)
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, variant in zip(names, variants, strict=True):
            times[name].append(variant.run())
    return said, {name: statistics.median(taken) for name, taken in times.items()}
