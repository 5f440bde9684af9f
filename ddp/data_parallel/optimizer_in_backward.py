"""Optimizers that step in backward (`torch.distributed.optim._apply_optimizer_in_backward`): after the reduction.

torch lets them step as soon as a gradient is there, which would be before it is averaged.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ddp.torch_internals import in_backward_optimizers

__all__ = ["OptimizersInBackward"]


class OptimizersInBackward:
    """The parameters that have such optimizers."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)

    @classmethod
    def of(cls, named: Sequence[tuple[str, nn.Parameter]]) -> OptimizersInBackward:
        """Find them among `named`, and take over from torch's own hooks."""
        owners = [parameter for _, parameter in named if in_backward_optimizers(parameter)]
        if owners:
            from torch.distributed.optim import apply_optimizer_in_backward as theirs

            for parameter in owners:
                handles = theirs.param_to_optim_hook_handle_map
                for handle in handles.get(parameter, []):  # type: ignore[no-untyped-call]  # torch has no types here
                    handle.remove()
        return cls(owners)

    def step(self) -> None:
        """Step with the averaged gradients and set them to None."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                for optimizer in in_backward_optimizers(parameter):
                    optimizer.step()
                parameter.grad = None
