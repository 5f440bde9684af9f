"""Ranks that step by themselves, simulated in one process, in float64, with optimizers of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import ddp
from ddp.strategies.local_sgd.averaging import LocalSGD
from testbed.present import present
from testbed.training import batch, build, loss_of

ROWS = 3  # of a rank's batch


class Outer(NamedTuple):
    """One way to average."""

    every: int
    after: int = 0
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    nesterov: bool = True


class Simulated:
    """All ranks in one process: replicas, each with its optimizer, and the point from which they left."""

    def __init__(self, outer: Outer, world: int, make: Callable[..., torch.optim.Optimizer]) -> None:
        self.outer = outer
        self.replicas = [build("mlp") for _ in range(world)]
        self.optimizers = [make(replica.parameters()) for replica in self.replicas]
        self.anchor = [p.detach().clone() for p in self.replicas[0].parameters()]
        self.velocity = [torch.zeros_like(p) for p in self.anchor]
        self.steps = self.own_steps = 0

    def step(self, gradients: list[list[torch.Tensor]], skipping: frozenset[int] = frozenset()) -> None:
        """Step every replica with its gradients, or all with their mean while steps are ordinary."""
        if self.own_steps == self.outer.every:
            self.average()
        is_own = self.steps >= self.outer.after
        mean = [torch.stack(each).mean(0) for each in zip(*gradients, strict=True)]
        for rank, (replica, optimizer) in enumerate(zip(self.replicas, self.optimizers, strict=True)):
            for p, g in zip(replica.parameters(), gradients[rank] if is_own else mean, strict=True):
                p.grad = g.clone()
            if rank not in skipping:
                optimizer.step()
        self.steps += 1
        self.own_steps += is_own
        if not is_own:
            self.anchor = [p.detach().clone() for p in self.replicas[0].parameters()]

    @torch.no_grad()
    def average(self) -> None:
        momentum = self.outer.outer_momentum
        for position, anchor in enumerate(self.anchor):
            mine = [list(replica.parameters())[position] for replica in self.replicas]
            gradient = anchor - torch.stack(list(mine)).mean(0)
            self.velocity[position] = momentum * self.velocity[position] + gradient
            ahead = gradient + momentum * self.velocity[position]
            anchor -= self.outer.outer_lr * (ahead if self.outer.nesterov else self.velocity[position])
            for p in mine:
                p.copy_(anchor)
        self.own_steps = 0

    def gradients(self, step: int, parts: int = 1) -> list[list[torch.Tensor]]:
        """Each replica's gradients where it is now."""
        if self.own_steps == self.outer.every:
            self.average()
        found = []
        for rank, replica in enumerate(self.replicas):
            replica.zero_grad()
            for part in range(parts):
                (loss_of(replica, *data(step, rank, part)) / parts).backward()
            found.append([present(p.grad) for p in replica.parameters()])
        return found


def data(step: int, rank: int, part: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return batch(1000 * step + 10 * rank + part, ROWS)


def sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


OPTIMIZERS = {"sgd": sgd, "adamw": adamw}


def assert_is(module: nn.Module, expected: nn.Module, what: str) -> None:
    for (name, a), e in zip(module.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-13, msg=lambda m, n=name: f"{what} {n}: {m}")


def differs(tensor: torch.Tensor) -> bool:
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(every, tensor.contiguous())
    return not all(torch.equal(other, every[0]) for other in every)


def start(
    outer: Outer, make: Callable[..., torch.optim.Optimizer] = sgd, **wrapping: Any
) -> tuple[Any, torch.optim.Optimizer, LocalSGD, Callable[..., None]]:
    """Return a model, its optimizer, what averages it, and a function that makes a step with a batch."""
    model = ddp.DistributedDataParallel(build("mlp"), **wrapping)
    optimizer = make(model.parameters())

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()

    return model, optimizer, LocalSGD(model, optimizer, **outer._asdict()), train
