"""Steps over emulated links, and what `model.explain` says of them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.training import assert_same_bits
from testbed.present import present
from testbed.slow_network import enter
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import ddp
from ddp.errors import DdpError, UnsupportedError

LAYERS, WIDTH = 3, 256
PAUSE_S = 0.06


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
        every_way: dict[str, dict[str, Any]] = {
            "now": {"bucket_cap_mb": "auto"},
            "one bucket": {"bucket_cap_mb": 1000},
            "powersgd": {"compression": ddp.compression.PowerSGD(start_step=2)},
            "bf16": {"compression": "bf16"},
            "int8": {"compression": "int8"},
        }
        options = every_way.get(name, {})
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


def train(networks: Sequence[int], names: Sequence[str], rounds: int) -> Any:
    """What `explain` says of the first way, and the least time of a step in each, measured in turns.

    The least, since a busy machine only adds.
    """
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
        said = model.explain().as_dict()
    for variant in variants[1:]:
        variant.run(1 if variant.steps > 1 else 3)
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, variant in zip(names, variants, strict=True):
            times[name].append(variant.run())
    return said, {name: min(taken) for name, taken in times.items()}


def says_what_it_lacks() -> None:
    """Each of these is an error at once, on the rank that asks, and the others train on."""
    rank = dist.get_rank()

    def refused(model: ddp.DistributedDataParallel, kind: type[Exception], match: str) -> None:
        if rank == 0:
            with pytest.raises(kind, match=match):
                model.explain()

    def trained(steps: int, model: ddp.DistributedDataParallel) -> ddp.DistributedDataParallel:
        for _ in range(steps):
            model(torch.randn(3, 8)).sum().backward()
        return model

    model = ddp.DistributedDataParallel(nn.Linear(8, 8))
    for _ in range(8):
        refused(model, DdpError, "after more steps")
        trained(1, model)
    trained(2, model)
    refused(trained(10, ddp.DistributedDataParallel(nn.Linear(8, 8), measure=False)), UnsupportedError, "measure=True")
    refused(trained(10, ddp.DistributedDataParallel(nn.Linear(8, 8), bucket_cap_mb=1)), UnsupportedError, "bucket_cap")
    hooked = ddp.DistributedDataParallel(nn.Linear(8, 8))
    hooked.register_comm_hook(None, allreduce_hook)
    refused(trained(10, hooked), UnsupportedError, "hook of your own")


def explains_to_one_rank() -> Any:
    """Rank 0 alone asks, and what it gets; neither its random numbers nor the others' steps notice."""
    torch.manual_seed(0)
    models = {
        method: ddp.DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 4)), compression=given)
        for method, given in {
            "none": None,
            "bf16": "bf16",
            "int8": "int8",
            "powersgd": ddp.compression.PowerSGD(start_step=2),
        }.items()
    }
    found = {}
    for method, model in models.items():
        for step in range(12):
            model.zero_grad()
            model(torch.randn(4, 64)).sum().backward()
            if step == 10 and dist.get_rank() == 0:
                before = torch.get_rng_state()
                report = model.explain()
                found[method] = str(report), report.as_dict()
                assert torch.equal(torch.get_rng_state(), before)
        assert_same_bits([present(parameter.grad) for parameter in model.parameters()])
    return found


def asks_alone() -> None:
    model = ddp.DistributedDataParallel(nn.Linear(8, 8))
    with pytest.raises(UnsupportedError, match="world of one"):
        model.explain()
