"""What a step of the optimizer may need besides it: gradients that are averaged before, and rates of this step alone.

Called by `ddp.training.trainer`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from ddp.errors import UnsupportedError
from ddp.strategies.strategy import Strategy

__all__ = ["average_gradients", "needs_average", "scaled_rates"]


def needs_average(strategy: Strategy, precision: str, max_grad_norm: float | None) -> bool:
    """Whether gradients must be averaged before the step, where the strategy would do it in the step.

    Raises UnsupportedError where it cannot be done.
    """
    if not strategy.averages_in_step or (max_grad_norm is None and precision != "float16"):
        return False
    if not strategy.collective:
        what = "max_grad_norm" if max_grad_norm is not None else 'precision="float16"'
        raise UnsupportedError(
            f"{what} under strategy {strategy.name!r}: no replica has the averaged gradients; leave it out "
            '(or take precision="bfloat16"), or choose "all_reduce"'
        )
    return strategy.replicas > 1


def average_gradients(strategy: Strategy, module: nn.Module) -> None:
    parameters = [parameter for parameter in module.parameters() if parameter.grad is not None]
    averages = strategy.reduce("mean", [parameter.grad for parameter in parameters])
    for parameter, average in zip(parameters, averages, strict=True):
        parameter.grad = average


@contextlib.contextmanager
def scaled_rates(optimizer: torch.optim.Optimizer, factor: float) -> Iterator[None]:
    """Multiply the learning rates by `factor` within the block."""
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        if factor != 1:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
