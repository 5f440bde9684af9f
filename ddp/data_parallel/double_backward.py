"""Keeps `backward(create_graph=True)` differentiable: `.grad` has the average as its value and this rank's graph.

Where every rank goes on to compute the same function f of the averaged gradients g, the average of the ranks'
gradients of f is then exact: the derivative of f(mean of g_r) is the mean over the ranks r of f'(g) dg_r.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ddp.data_parallel.buckets.bucket_plan import Member

__all__ = ["GraphKeeper"]


class _Revalued(torch.autograd.Function):
    """`value`, to the bit, with the derivative of `source`."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class GraphKeeper:
    """The gradients of one backward pass with their graphs, while their values are reduced."""

    def __init__(self) -> None:
        self._kept: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

    def set_aside(self, members: Iterable[Member]) -> None:
        """Put plain copies in the place of gradients that have a graph."""
        for member in members:
            grad = member.parameter.grad
            if grad is not None and grad.requires_grad:
                self._kept.append((member.parameter, grad))
                member.parameter.grad = grad.detach().clone()

    def restore(self, on_grad: Callable[[torch.Tensor], None]) -> None:
        """Give the averages their graphs back; `on_grad` is called when a backward pass goes through one of them."""
        with torch.enable_grad():
            for parameter, grad in self._kept:
                if parameter.grad is not None:
                    parameter.grad = _Revalued.apply(grad, parameter.grad)  # type: ignore[no-untyped-call]  # torch has no types here
                    parameter.grad.register_hook(on_grad)
