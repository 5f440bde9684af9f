"""Parameters that were frozen when the buckets were planned and are trained now: reduced in the same step.

Called by the reducer after the step status, when any rank has such parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist

from ddp.comm.objects import gather_values
from ddp.errors import BackwardError
from ddp.monitoring.stall_report import finish

__all__ = ["average_unfrozen"]

_Named = tuple[str, torch.nn.Parameter]


def average_unfrozen(group: dist.ProcessGroup, mine: Sequence[_Named], factor: float) -> Sequence[_Named]:
    """Average the gradients of the parameters that this rank has unfrozen, and return them. Blocks.

    Every rank must call it. Raises BackwardError on all if not every rank unfroze the same ones. Where no rank has a
    gradient, `.grad` stays as it is.
    """
    told = gather_values({name: parameter.grad is not None for name, parameter in mine}, group=group)
    if any([*names] != [*told[0]] for names in told):
        raise _unfrozen_differ(told)
    for name, parameter in mine:
        if not any(has_grad[name] for has_grad in told):
            continue
        grad = parameter.grad
        total = torch.zeros_like(parameter) if grad is None else grad.detach().to_dense().clone()
        flat = torch.view_as_real(total) if total.is_complex() else total
        flat = flat.contiguous().div_(group.size())
        finish(group.allreduce([flat]), device=flat.device)
        flat.mul_(factor)
        average = torch.view_as_complex(flat) if total.is_complex() else flat
        if grad is None or grad.layout is not torch.strided:
            parameter.grad = average
        else:
            grad.detach().copy_(average)
    return mine


def _unfrozen_differ(told: Sequence[Collection[str]]) -> BackwardError:
    """Not every rank unfroze the same parameters."""
    every = {name for names in told for name in names}
    name = min(every, key=lambda name: (sum(name in names for names in told), name))
    lacking = [rank for rank, names in enumerate(told) if name not in names]
    having = [rank for rank, names in enumerate(told) if name in names]
    return BackwardError(
        f"parameter {name!r} was frozen when the module was wrapped and requires a gradient now on rank "
        f"{', '.join(map(str, having))}, but not on rank {', '.join(map(str, lacking))}: unfreeze it on every rank in "
        "the same step. The gradients of this step are dropped (None) on every rank",
        parameter=name,
    )
