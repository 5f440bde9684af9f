# mypy: disable-error-code="no-any-return"
"""Models and optimizers with sparse gradients, normalization and unused parts, and the comparison of their states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from testbed.training import Conv, Mlp, Odd

F64 = torch.float64
Make = Callable[[Any], torch.optim.Optimizer]
MAKERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.5),
    "sparse sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sparse adam": lambda p: torch.optim.SparseAdam(p, lr=0.01),
}


class Norm(nn.Module):
    """Batch normalization, and a branch that odd ranks use only in odd steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 33, bias=False)  # whose gradient would be noise, of which Adam makes steps
        self.norm = nn.BatchNorm1d(33)
        self.sometimes = nn.Linear(33, 33)
        self.last = nn.Linear(33, 3)
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x)).tanh()
        if self.step % 2 == 0 and dist.get_rank() != 1:
            hidden = hidden + self.sometimes(hidden)
        return self.last(hidden)


class Words(nn.Module):
    """Embeddings with sparse gradients, of which each rank uses other rows, sometimes none."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(41, 5, sparse=True)
        self.others = nn.Embedding(300, 3, sparse=True)
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = (x[:, 0] * 10).abs().long() % 41
        total = self.words(at).sum(1, keepdim=True)
        if dist.get_rank() == self.step % 2:
            total = total + self.others(at * 7).sum(1, keepdim=True)
        return total * x[:, :3]


MODELS: dict[str, type[nn.Module]] = {"mlp": Mlp, "odd": Odd, "norm": Norm, "words": Words, "conv": Conv}


def build(name: str, dtype: torch.dtype = F64) -> nn.Module:
    torch.manual_seed(7 + dist.get_rank())  # rank 0's values count
    return MODELS[name]().to(dtype)


def batch(step: int, dtype: torch.dtype = F64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return (
        torch.randn(4, 6, generator=generator, dtype=dtype),
        torch.randn(4, 3, generator=generator, dtype=dtype),
    )
