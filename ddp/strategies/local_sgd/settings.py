"""The arguments of LocalSGD, and its requirements on the model and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddp.errors import ArgumentError, UnsupportedError


@dataclass(frozen=True)
class Settings:
    """The numeric arguments. Raises ArgumentError for values out of range."""

    every: int
    after: int
    outer_lr: float
    outer_momentum: float
    nesterov: bool

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("after", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ArgumentError(f"{name}={value!r}; it must be an int, {least} or more")
        if not self.outer_lr > 0:
            raise ArgumentError(f"outer_lr={self.outer_lr!r}; it must be more than 0 (1: plain averaging)")
        if not 0 <= self.outer_momentum < 1:
            raise ArgumentError(f"outer_momentum={self.outer_momentum!r}; it must be from 0 to less than 1")

    @property
    def has_outer(self) -> bool:
        """Whether there is an outer optimizer, not plain averaging."""
        return self.outer_lr != 1 or self.outer_momentum != 0

    @property
    def is_ordinary(self) -> bool:
        """Whether averaging gradients is equivalent."""
        return self.every == 1 and not self.has_outer


def check_wrapped(model: Any, optimizer: Any) -> None:
    """Raise ArgumentError or UnsupportedError unless ranks can step `optimizer` on a wrapped `model` by themselves."""
    if not all(hasattr(model, name) for name in ("module", "process_group", "require_backward_grad_sync")):
        raise ArgumentError(f"model is a {type(model).__name__}: wrap it in ddp.DistributedDataParallel first")
    names = {kind.__name__ for kind in type(optimizer).__mro__}
    if "ZeroRedundancyOptimizer" in names:
        raise UnsupportedError("ZeroRedundancyOptimizer steps for other ranks too, so none can step by itself")
    if "StandInOptimizer" in names:
        raise UnsupportedError(
            "the optimizer that prepare() of central_storage or parameter_server returned steps for all ranks, so none "
            "can step by itself: make LocalSGD with the model and optimizer that were never given to prepare()"
        )
    if "LBFGS" in names:
        raise UnsupportedError("LBFGS evaluates the model several times in a step, and must not find it averaged then")
    if not hasattr(optimizer, "register_step_post_hook"):
        raise ArgumentError(f"optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(parameter) in stepped for parameter in model.parameters()):
        raise ArgumentError("the optimizer steps none of the model's parameters: make it from model.parameters()")
