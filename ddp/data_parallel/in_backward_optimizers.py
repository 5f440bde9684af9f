"""Optimizers that step within backward: `torch.distributed.optim._apply_optimizer_in_backward`.

torch lets them step as soon as a gradient is there, which is before it is averaged. Here they step after that.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ddp.torch_internals import in_backward_optimizers

__all__ = ["InBackwardOptimizers"]


class InBackwardOptimizers:
    """Those of `parameters`, whose own hooks are removed."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._owners = [parameter for parameter in parameters if in_backward_optimizers(parameter)]
        if not self._owners:
            return
        from torch.distributed.optim import apply_optimizer_in_backward as theirs

        for parameter in self._owners:
            handles = theirs.param_to_optim_hook_handle_map
            for handle in handles.get(parameter, []):
                handle.remove()

    def step(self) -> None:
        """Step with the gradients that are there, and set them to None."""
        for parameter in self._owners:
            if parameter.grad is not None:
                for optimizer in in_backward_optimizers(parameter):
                    optimizer.step()
                parameter.grad = None
