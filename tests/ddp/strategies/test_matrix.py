# mypy: disable-error-code="no-any-return"
"""Every way to average trains every kind of model: as exact as its numbers, with equal replicas, or it is refused.

Kinds of models: tied weights, unused parameters, BatchNorm, bfloat16 parameters, sparse gradients, and layers that are
frozen and unfrozen while it trains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.nursery import Nursery
from testbed.servers import in_roles
from torch import Tensor, nn
from torch.nn import functional as F

import ddp
from ddp.compression import PowerSGD
from ddp.strategies.parameter_server.strategy import ParameterServer
from ddp.strategies.strategy import Strategy

STEPS, ROWS, PLACES, CLASSES = 8, 13, 5, 4  # unequal shares
F64 = torch.float64


class Tied(nn.Module):
    """One table as embedding and as the last layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.middle = nn.Linear(8, 8)
        self.last = nn.Linear(8, 20)
        self.last.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.words(_words(x)).mean(1)).tanh())


class Unused(nn.Module):
    """A layer that is never used, and two of which a replica uses one in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.never = nn.Linear(PLACES, 16), nn.Linear(16, 16)
        self.ways = nn.ModuleList([nn.Linear(16, CLASSES), nn.Linear(16, CLASSES)])

    def forward(self, x: Tensor) -> Tensor:
        return self.ways[int(x[0, 0] > 0)](self.first(x).tanh())


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(PLACES, 16, bias=False), nn.BatchNorm1d(16)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).tanh())


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(50, 16, sparse=True), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.words(_words(x)).mean(1).tanh())


class Unfrozen(nn.Module):
    """The first layer is frozen until the third step, the last bias from the fifth on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(PLACES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES)
        )
        self.layers[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def _words(x: Tensor) -> Tensor:
    return (x.double() * 100).abs().long() % 20


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(PLACES, 32), nn.Tanh(), nn.Linear(32, CLASSES)).bfloat16()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied weights": lambda: Tied().double(),
    "unused parameters": lambda: Unused().double(),
    "BatchNorm": lambda: Norm().double(),
    "bfloat16": _mlp,
    "sparse gradients": lambda: Sparse().double(),
    "frozen and unfrozen": lambda: Unfrozen().double(),
}


@dataclass(frozen=True)
class Way:
    strategy: str
    tolerance: float  # as a part of how far the parameters have moved
    options: dict[str, Any] = field(default_factory=dict)
    bfloat16: float = 0.1  # tolerance where the parameters themselves are rounded


def made(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = MODELS[name]()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def thaw(model: nn.Module, step: int) -> None:
    if isinstance(model, Unfrozen):
        model.layers[0].requires_grad_(step >= 2)
        model.layers[4].bias.requires_grad_(step < 4)


def batches(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(8)
    for _ in range(STEPS):
        x = torch.randn(ROWS, PLACES, generator=generator, dtype=F64).to(dtype)
        yield x, torch.randint(CLASSES, (ROWS,), generator=generator)


def state(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().double().reshape(-1) for parameter in model.parameters()])


def trained(strategy: Strategy, name: str) -> tuple[nn.Module, Tensor]:
    """Train as a script does."""
    module, optimizer = made(name)
    model, optimizer = strategy.prepare(module, optimizer)
    for step, (x, y) in enumerate(batches(next(module.parameters()).dtype)):
        thaw(module, step)
        own = slice(strategy.replica, None, strategy.replicas)
        losses = F.cross_entropy(model(x[own]).float() if x.dtype != F64 else model(x[own]), y[own], reduction="none")
        strategy.mean(losses, global_batch_size=ROWS).backward()
        optimizer.step()
        optimizer.zero_grad()
    strategy.sync()
    return module, state(module)


def replicas_in_turn(name: str, replicas: int, *, every: int) -> tuple[nn.Module, Tensor]:
    """The same in this process: one model for all, averaged `every` 0 steps, or one for each replica."""
    models = [made(name) for _ in range(replicas if every else 1)]
    for step, (x, y) in enumerate(batches(next(models[0][0].parameters()).dtype)):
        for replica in reversed(range(replicas)):  # the buffers that remain are those of replica 0
            model, optimizer = models[replica if every else 0]
            thaw(model, step)
            before = [buffer.clone() for buffer in model.buffers()]
            own = slice(replica, None, replicas)
            out = model(x[own]).float() if x.dtype != F64 else model(x[own])
            (F.cross_entropy(out, y[own], reduction="sum") / ROWS * (replicas if every else 1)).backward()
            if every or replica == 0:
                optimizer.step()
                optimizer.zero_grad()
            else:
                for buffer, old in zip(model.buffers(), before, strict=True):
                    buffer.copy_(old)
        if every and (step + 1) % every == 0:
            _average([model for model, _ in models])
    return models[0][0], state(models[0][0])


@torch.no_grad()
def _average(models: Sequence[nn.Module]) -> None:
    for tensors in zip(*([*model.parameters(), *model.buffers()] for model in models), strict=True):
        mean = (
            torch.stack([each.double() for each in tensors]).mean(0) if tensors[0].is_floating_point() else tensors[0]
        )
        for each in tensors:
            each.copy_(mean)


def every_model(way: Way, models: Sequence[str]) -> None:
    """Compare each with the oracle, in parts of how far that has moved. A server comes after the workers."""
    for name in models:
        if way.strategy == "parameter_server":
            in_roles(dist.get_world_size() - 1, 1, partial(_check, way, name))
        else:
            _check(way, name)


def _check(way: Way, name: str) -> None:
    strategy = ddp.strategy(way.strategy, **way.options)
    module, ours = trained(strategy, name)
    assert torch.equal(strategy.reduce("max", ours), strategy.reduce("min", ours)), f"{name}: replicas differ"
    expected, theirs = replicas_in_turn(name, strategy.replicas, every=way.options.get("every", 0))
    distance = (theirs - state(made(name)[0])).norm()
    assert distance > 0.05, name
    difference = ((ours - theirs).norm() / distance).item()
    tolerance = way.bfloat16 if name == "bfloat16" else way.tolerance
    assert tolerance / (1e9 if tolerance < 1e-9 else 200) < difference < tolerance, (way, name, difference)
    if strategy.replica == 0:
        for (buffer, mine), its in zip(module.named_buffers(), expected.buffers(), strict=True):
            torch.testing.assert_close(mine, its, rtol=tolerance, atol=tolerance, msg=f"{way} {name}: {buffer}")
    if isinstance(strategy, ParameterServer):
        strategy.close()


SERVERS = {"timeout_s": 20.0}
NETWORK = {**SERVERS, "shared_memory": False}  # between hosts, where numbers are short
EXACT = 1e-11
WAYS = [
    Way("all_reduce", EXACT),
    Way("all_reduce", 0.002, {"compression": "fp16"}),
    Way("all_reduce", 0.01, {"compression": "bf16"}),
    Way("all_reduce", 0.03, {"compression": "int8"}),
    Way("all_reduce", 0.6, {"compression": PowerSGD(start_step=3, rank=1)}, bfloat16=0.6),
    Way("central_storage", EXACT),
    Way("local_sgd", EXACT, {"every": 2}, bfloat16=0.15),
    Way("parameter_server", EXACT, SERVERS),
    # Values come back short too, which shows in those that have hardly moved.
    Way("parameter_server", 0.05, {**NETWORK, "compression": "fp16"}),
    Way("parameter_server", 0.3, {**NETWORK, "compression": "bf16"}),
    Way("parameter_server", 0.3, {**NETWORK, "compression": "int8"}),
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.strategy}-{way.options.get('compression')}")
def test_each_kind_of_model_is_trained_as_in_one_process(nursery: Nursery, way: Way) -> None:
    world = 4 if way.strategy == "parameter_server" else 3
    nursery.run(world, every_model, deadline_s=250, way=way, models=list(MODELS))


@pytest.mark.parametrize(
    ("name", "compression", "message"),
    [
        ("central_storage", "int8", "strategy 'central_storage' has no option 'compression'"),
        ("local_sgd", "bf16", "strategy 'local_sgd' has no option 'compression'"),
        ("parameter_server", "powersgd", "compression='powersgd'; it must be one of"),
    ],
)
def test_compression_that_a_strategy_does_not_have_is_refused(name: str, compression: str, message: str) -> None:
    with pytest.raises(ddp.errors.ArgumentError, match=message):
        ddp.strategy(name, compression=compression)
