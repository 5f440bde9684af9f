"""The optimizer that `prepare` returns if the strategy makes the steps: a stand-in for the user's."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ddp.errors import ArgumentError
from ddp.strategies.sharding.optimizer_state import hyperparameters
from ddp.torch_internals import mark_as_stepped, state_dict_hooks


class StandInOptimizer(torch.optim.Optimizer):
    """Shares the `param_groups` of the user's optimizer, which refuses to step from now on.

    Schedulers of either object set the same rates. Hooks registered on this object run; those of the user's do not. Its
    own `state` is empty: `state_dict()` returns that of the user's optimizer, whole.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._is_ready = False
        # Not the user's groups and defaults: torch would fill missing keys of one from the other.
        super().__init__(
            [{"params": [parameter for group in optimizer.param_groups for parameter in group["params"]]}], {}
        )
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults
        self._users = optimizer
        self._refusal = optimizer.register_step_pre_hook(_refuse_step)
        self._is_ready = True

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # overloads
        """Make one step on the gradients of all replicas (see the class); return the result of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._make_step()
        mark_as_stepped(self._users)  # a scheduler made before prepare() looks for it
        return loss

    @abstractmethod
    def _make_step(self) -> None:
        """Implement `step`, with the gradients in place."""

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the whole state, in torch's format."""
        for before in state_dict_hooks(self, "state_dict_pre"):
            before(self)
        state = self._whole_state()
        for after in state_dict_hooks(self, "state_dict_post"):
            state = after(self, state) or state
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a whole state, perhaps saved by torch, under another strategy or in a world of another size.

        Raises ArgumentError if the parameters differ.
        """
        state = dict(state_dict)
        for before in state_dict_hooks(self, "load_state_dict_pre"):
            state = before(self, state) or state
        groups = state["param_groups"]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in self.param_groups]:
            raise ArgumentError("the state has other param groups than the optimizer")
        self._load_whole_state(state)
        for mine, saved in zip(self.param_groups, hyperparameters(groups), strict=True):
            mine.update(copy.deepcopy(saved))
        for after in state_dict_hooks(self, "load_state_dict_post"):
            after(self)

    @abstractmethod
    def _whole_state(self) -> dict[str, Any]:
        """Implement `state_dict`."""

    @abstractmethod
    def _load_whole_state(self, state: Mapping[str, Any]) -> None:
        """Implement `load_state_dict`, apart from the param groups, which fit."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ArgumentError: `prepare` has already partitioned the parameters."""
        if self._is_ready:
            raise ArgumentError("add_param_group() after prepare(): add all groups before prepare()")
        super().add_param_group(param_group)


def _refuse_step(*_: object) -> None:
    raise ArgumentError("this optimizer was passed to prepare(): call step() of the one that prepare() returned")
