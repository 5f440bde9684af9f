"""Each replica steps by itself; the replicas are averaged every so many steps."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ddp.data_parallel.wrapper import DistributedDataParallel
from ddp.strategies.local_sgd.averaging import LocalSGD
from ddp.strategies.strategy import Strategy, Weighting, join


class LocalSteps(Strategy):
    """`ddp.LocalSGD` over `ddp.DistributedDataParallel`; call `sync()` before evaluating or saving.

    Under `ddp.Trainer`, if the loss is a mean over labels, a local step uses the mean over the replica's own labels,
    and a step with averaged gradients the mean over all.
    """

    name = "local_sgd"

    def __init__(
        self,
        *,
        every: int = 8,
        after: int = 0,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        nesterov: bool = True,
        communication: str = "auto",
    ) -> None:
        super().__init__(join(communication))
        self._options: dict[str, Any] = {
            "every": every,
            "after": after,
            "outer_lr": outer_lr,
            "outer_momentum": outer_momentum,
            "nesterov": nesterov,
        }
        self._averages: list[LocalSGD] = []
        self._models: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()

    @property
    def weighting(self) -> Weighting:
        """A replica's own in local steps, which wait for no other rank; else over all. Fixed at each forward pass."""
        return "own" if any(model.steps_alone for model in self._models) else "by_exchange"

    def _prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        wrapper = DistributedDataParallel(model)
        self._averages.append(LocalSGD(wrapper, optimizer, **self._options))
        self._models.add(wrapper)
        return wrapper, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the count of steps and the outer momenta of each model. Raises DdpError after a local step."""
        return {"averages": [average.state_dict() for average in self._averages]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for average, its_state in zip(self._averages, state["averages"], strict=True):
            average.load_state_dict(its_state)

    def sync(self) -> None:
        """Average the replicas. Every replica must call it; blocks."""
        for average in self._averages:
            average.sync()
