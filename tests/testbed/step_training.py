"""Trainings with `ddp.StepLoader`, whose bits are those of any number of ranks, and the lines of a ledger."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ddp

SAMPLES = 71  # the last step of an epoch has a micro-batch of 4 and one of 3


class Data(torch.utils.data.Dataset[Any]):
    """Pictures with noise of all random numbers, or texts."""

    def __init__(self, kind: str) -> None:
        self._are_texts = kind in ("transformer", "sparse")

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        if self._are_texts:
            return torch.randint(0, 20, (6,), generator=generator), index % 3
        noise = 0.1 * torch.randn(1, 8, 8) + random.random() + float(np.random.rand())
        return torch.randn(1, 8, 8, generator=generator) + noise, index % 3


class Transformer(nn.Module):
    """Has tied weights, a layer that is never used, and one that some micro-batches use, with a gradient of -0.0."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.tied = nn.Linear(16, 20, bias=False)
        self.tied.weight = self.embedding.weight
        self.out = nn.Linear(20, 3)
        self.sometimes, self.never = nn.Linear(16, 16), nn.Linear(4, 4)
        self.zero = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.layer(self.embedding(x))
        if int(x.sum()) % 2:
            zero = self.zero.clone()
            if zero.requires_grad:
                zero.register_hook(lambda grad: grad.abs() * -0.0)
            hidden = hidden + self.sometimes(hidden) + zero
        return self.out(self.tied(hidden).mean(1))


class Twice(nn.Module):
    """Has a layer in two reentrant checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(64, 64), nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = x.flatten(1).requires_grad_()
        for _ in range(2):
            hidden = checkpoint(self.layer, hidden, use_reentrant=True)
        return self.out(hidden)


class Shared(nn.Module):
    """Has two parameters whose gradients are views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.out = nn.Parameter(torch.ones(64)), nn.Parameter(torch.ones(64)), nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.out(x.flatten(1) * (self.one.view(-1) + self.other.view(-1)))


def net_of(kind: str) -> Any:
    torch.manual_seed(1)
    nets: dict[str, Any] = {
        "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.ReLU(), nn.Dropout(0.3), nn.Linear(40, 3)),
        "cnn": lambda: nn.Sequential(
            nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(216, 3)
        ),
        "bf16": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 3)).bfloat16(),
        "transformer": Transformer,
        "twice": Twice,
        "shared": Shared,
        "sparse": lambda: nn.Sequential(nn.EmbeddingBag(20, 16, sparse=True), nn.Linear(16, 3)),
    }
    return nets[kind]()


class Training:
    """A model and what trains it."""

    def __init__(self, kind: str, micro_batch_size: int = 4, *, weighs: bool = False, **loading: Any) -> None:
        self._weighs = weighs
        self.net = net_of(kind)
        self.loader = ddp.StepLoader(
            Data(kind), seed=3, global_batch_size=32, micro_batch_size=micro_batch_size, **loading
        )
        self.model = ddp.DistributedDataParallel(self.net)
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(self.net.parameters(), lr=0.05)
            if kind == "sparse"
            else torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        )
        self._digest = hashlib.sha256()

    def run(self, steps: int) -> str:
        """Train; return a digest of parameters, buffers, the optimizer's state, losses and random numbers."""
        dtype = next(self.net.parameters()).dtype
        for step in self.loader.epochs(1000):
            losses = []
            for x, y in step:
                output = self.model(x.to(dtype) if x.is_floating_point() else x)
                loss = nn.functional.cross_entropy(output.float(), y)
                if self._weighs:
                    self.model.backward(loss, weight=max(0.0, float(torch.rand(1)) - 0.3))
                else:
                    loss.backward()
                losses.append(loss.item())
            self._add(*(each.grad for each in self.net.parameters() if each.grad is not None))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self._add(repr(step.mean(losses)), torch.rand(2), repr(random.random()))
            steps -= 1
            if not steps:
                break
        state = self.optimizer.state_dict()["state"]
        self._add(*self.net.state_dict().values(), *(value for each in state.values() for value in each.values()))
        return self._digest.hexdigest()

    def _add(self, *values: Any) -> None:
        for value in values:
            value = value.to_dense() if isinstance(value, torch.Tensor) else value
            data = value.reshape(-1).view(torch.uint8).numpy().tobytes() if isinstance(value, torch.Tensor) else value
            self._digest.update(data if isinstance(data, bytes) else repr(data).encode())

    @property
    def parts(self) -> dict[str, Any]:
        """What a checkpoint saves."""
        return {"model": self.model, "optimizer": self.optimizer, "sampler": self.loader}


def lines_of(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a ledger."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]
