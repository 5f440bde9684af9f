"""Parameters that were frozen when the buckets were planned and are trained now: reduced in the same step.

Called by the reducer after the step status, when any rank has such parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ddp.comm.objects import gather_values
from ddp.data_parallel.status_errors import unfrozen_differ

__all__ = ["average_unfrozen"]

_Named = tuple[str, torch.nn.Parameter]


def average_unfrozen(group: dist.ProcessGroup, mine: Sequence[_Named], factor: float) -> Sequence[_Named]:
    """Average the gradients of the parameters that this rank has unfrozen, and return them. Blocks.

    Every rank must call it. Raises BackwardError on all if not every rank unfroze the same ones. Where no rank has a
    gradient, `.grad` stays as it is.
    """
    told = gather_values([name for name, _ in mine], group=group)
    if any(names != told[0] for names in told):
        raise unfrozen_differ(told)
    for _, parameter in mine:
        grad = parameter.grad
        has_grad = torch.tensor([float(grad is not None)], device=parameter.device)
        group.allreduce([has_grad]).wait()
        if not has_grad.item():
            continue
        total = torch.zeros_like(parameter) if grad is None else grad.detach().to_dense().clone()
        flat = torch.view_as_real(total) if total.is_complex() else total
        flat = flat.contiguous().div_(group.size())
        group.allreduce([flat]).wait()
        flat.mul_(factor)
        average = torch.view_as_complex(flat) if total.is_complex() else flat
        if grad is None or grad.layout is not torch.strided:
            parameter.grad = average
        else:
            grad.detach().copy_(average)
    return mine
