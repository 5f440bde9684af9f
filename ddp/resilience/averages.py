"""Restore torch's AveragedModel after a failure: its buffers on a rank that died between its gradients and its commit.

The parameters of an average are the same on all ranks, so another rank sends them. Its buffers follow those of this
rank's model: after a step that the others have finished, they need one more update.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ddp.torch_internals import foreach_copy

__all__ = ["averaged_by", "catch_up"]


def averaged_by(average: AveragedModel, models: Sequence[nn.Module]) -> nn.Module | None:
    """Return the one of `models` that it averages; None if that is not known."""
    forms = _forms(average.module)
    found = [model for model in models if type(model) is type(average.module) and _forms(model) == forms]
    return found[0] if len(found) == 1 else None


def _forms(module: nn.Module) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in module.state_dict().items()}


@torch.no_grad()
def catch_up(average: AveragedModel, source: nn.Module, before: Sequence[torch.Tensor]) -> None:
    """Update the buffers as the other ranks did in the step that led to the present `average`.

    `before` are all of its buffers at the commit before that step. Without them, or after more than one update, it
    stays unchanged.
    """
    buffers = dict(average.named_buffers())
    if len(before) != len(buffers):
        return
    kept = dict(zip(buffers, before, strict=True))
    now = int(average.n_averaged)
    updates = now - int(kept["n_averaged"])
    if updates not in (0, 1):
        return
    parameters = [parameter.data for parameter in average.parameters()]
    theirs = [parameter.clone() for parameter in parameters]
    foreach_copy([buffer.data for buffer in buffers.values()], list(before))
    if updates:
        average.update_parameters(source)
    foreach_copy(parameters, theirs)
    average.n_averaged.fill_(now)
