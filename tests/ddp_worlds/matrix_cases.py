"""Each way to average with each kind of model: what the ranks of a test world do.

The oracle is one process that computes the shares of all replicas in turn, in the model's dtype and without rounding on
the way. What a way rounds is compared with how far the training has moved the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from ddp_worlds.parameter_server_cases import in_roles
from torch import Tensor, nn
from torch.nn import functional as F

import ddp
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
