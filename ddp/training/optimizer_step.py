"""Preparation of an optimizer step: gradients averaged before it, and learning rates for this step only.

Called by `ddp.training.trainer`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from ddp.errors import UnsupportedError
from ddp.monitoring.stall_report import finish, waiting_for_peers
from ddp.strategies.local_sgd.rank_state import cut_into_chunks
from ddp.strategies.strategy import Strategy
from ddp.training.losses_and_metrics import wide


def needs_average(strategy: Strategy, precision: str, max_grad_norm: float | None) -> bool:
    """Return whether gradients must be averaged before the step although the strategy would do it in the step.

    Raises UnsupportedError if that is not possible.
    """
    if not strategy.averages_in_step or (max_grad_norm is None and precision != "float16"):
        return False
    if not strategy.collective:
        what = "max_grad_norm" if max_grad_norm is not None else 'precision="float16"'
        raise UnsupportedError(
            f"{what} under strategy {strategy.name!r}: no replica has the averaged gradients; leave it out "
            '(or use precision="bfloat16"), or choose "all_reduce"'
        )
    return strategy.replicas > 1


@torch.no_grad()
def average_gradients(strategy: Strategy, module: nn.Module) -> None:
    """Average the gradients over the replicas of a process group, in all-reduces of 64 MB or of one gradient.

    Half precision is summed in single. A replica without a gradient that another has contributes zeros and gets the
    average. Every replica must call it; blocks. Raises UnsupportedError on all if one has a sparse gradient.
    """
    parameters = list(module.parameters())
    kinds = [0 if each.grad is None else 1 if each.grad.layout is torch.strided else 2 for each in parameters]
    kinds = strategy.reduce("max", torch.tensor(kinds, dtype=torch.int8, device="cpu")).tolist()
    if 2 in kinds:
        raise UnsupportedError(
            f"a sparse gradient under strategy {strategy.name!r} with max_grad_norm or float16: gradients are averaged "
            'before the step then, and only dense ones can be; use sparse=False in the embedding, or "all_reduce"'
        )
    gradients = []
    for parameter, kind in zip(parameters, kinds, strict=True):
        if kind:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients.append(parameter.grad)
    for chunk in cut_into_chunks(gradients):
        flat = wide(torch.cat([gradient.reshape(-1) for gradient in chunk])).div_(strategy.replicas)
        with waiting_for_peers("the average of the gradients"):
            real = torch.view_as_real(flat) if flat.is_complex() else flat
            finish(dist.all_reduce(real, async_op=True), device=flat.device)
        for gradient, mean in zip(chunk, torch.split(flat, [each.numel() for each in chunk]), strict=True):
            gradient.copy_(mean.view(gradient.shape))


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
