"""The optimizer that `prepare` returns where the strategy makes the steps: it stands for the user's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from ddp.errors import ArgumentError
from ddp.torch_internals import mark_as_stepped

__all__ = ["StandInOptimizer"]


class StandInOptimizer(torch.optim.Optimizer):
    """Shares the `param_groups` of the user's optimizer, which refuses to step from now on.

    Schedulers of either object set the same rates. Hooks registered on this object run; those of the user's do not.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._is_ready = False
        # Not the user's groups and defaults: they would be filled up with each other.
        super().__init__(
            [{"params": [parameter for group in optimizer.param_groups for parameter in group["params"]]}], {}
        )
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults
        self._users = optimizer
        self._refusal = optimizer.register_step_pre_hook(_refuse_step)
        self._is_ready = True

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # overloads
        """Make one step on the gradients of all replicas, as the class says; return what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._make_step()
        mark_as_stepped(self._users)  # a scheduler made before prepare() looks for it
        return loss

    @abstractmethod
    def _make_step(self) -> None:
        """Do what `step` promises, with the gradients in place."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: `prepare` has dealt out the parameters. Raises ArgumentError."""
        if self._is_ready:
            raise ArgumentError("add_param_group() after prepare(): give the optimizer all of its groups before")
        super().add_param_group(param_group)


def _refuse_step(*_: object) -> None:
    raise ArgumentError("this optimizer was given to prepare(): call step() of the one that prepare() returned")
