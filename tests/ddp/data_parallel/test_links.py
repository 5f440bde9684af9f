"""What is foretold of ways to send, against measurement on emulated links of two hosts.

The links are so slow that their bytes take the time, and what computes only pauses: a busy machine changes little.
Where it does, the comparison is made again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.namespaces import PARTS, find_part
from testbed.network import why_not
from testbed.nursery import Nursery
from testbed.require import require
from testbed.slow_network import SlowNetwork, enter
from torch import nn

import ddp

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
        return super().forward(Pause.apply(x))  # type: ignore[no-untyped-call]


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


def _train(networks: Sequence[int], names: Sequence[str], rounds: int) -> Any:
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


RATE = "25mbit"


TOLERANCE = 0.15


TRIES = 3


@pytest.fixture
def slow_network() -> Iterator[SlowNetwork]:
    """Two networks that send 25 Mbit/s each."""
    for part, package in PARTS.items():
        require(find_part(part), part, f"apt-get install {package}")
    if reason := why_not():
        pytest.skip(f"emulated links cannot be made here: {reason}")
    with SlowNetwork(2, RATE) as network:
        yield network


def assert_foretold(compare: Callable[[], Mapping[str, tuple[float, float]]]) -> None:
    """`compare` gives pairs of what was foretold and what was measured, by what they are of."""
    for attempt in range(1, TRIES + 1):
        found = compare()
        wrong = {what: pair for what, pair in found.items() if abs(pair[0] / pair[1] - 1) > TOLERANCE}
        if not wrong:
            return
        assert attempt < TRIES, f"foretold and measured: {wrong}, all: {found}"


@pytest.mark.slow
def test_explain_foretells_the_steps_of_other_ways(nursery: Nursery, slow_network: SlowNetwork) -> None:
    names = ("now", "one bucket", "bf16", "int8", "powersgd", "LocalSGD, every=8")

    def compare() -> Mapping[str, tuple[float, float]]:
        report, measured = nursery.run(2, _train, networks=slow_network.pids, names=names, rounds=3)[0]
        foretold = {way["title"]: way["step_s"] for way in [*report["other_plans"], *report["other_ways"]]}
        foretold["now"] = report["step_s"]
        return {name: (foretold[name], measured[name]) for name in names}

    assert_foretold(compare)
