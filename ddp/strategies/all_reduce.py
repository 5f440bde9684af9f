"""Every replica holds the whole model, and gradients are averaged over all of them while backward runs."""

from __future__ import annotations

import weakref
from inspect import signature
from typing import Any

import torch
from torch import nn

from ddp.data_parallel.wrapper import DistributedDataParallel
from ddp.strategies.strategy import Strategy, Weighting, join


class AllReduce(Strategy):
    """Wraps the model in `ddp.DistributedDataParallel`; the optimizer stays as it is."""

    name = "all_reduce"
    comes_back = True

    def __init__(self, *, communication: str = "auto", **options: Any) -> None:
        super().__init__(join(communication))
        self._options = options
        self._models: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()

    @property
    def weighting(self) -> Weighting:
        """With the gradients, unless hooks or compression carry over residuals, which have other weights."""
        return "by_exchange" if any(model.has_comm_hook for model in self._models) else "in_backward"

    @classmethod
    def passes_on(cls) -> set[str]:
        return {*signature(DistributedDataParallel.__init__).parameters} - {"module"}

    def _prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        wrapper = DistributedDataParallel(model, **self._options)
        self._models.add(wrapper)
        return wrapper, optimizer
