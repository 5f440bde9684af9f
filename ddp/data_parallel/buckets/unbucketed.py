"""Gradients that are in no bucket: they are exchanged after the step status of a backward pass, one after the other.

Sparse gradients (of embeddings): every rank's rows are sent to every rank, which adds them up. Called by
`gradient_sums`. Gradients of parameters that were frozen when the buckets were planned and are trained now: called
by the reducer if any rank has such parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist

from ddp.comm.channel import Channel
from ddp.comm.objects import gather_values
from ddp.data_parallel.buckets.bucket_plan import Member
from ddp.errors import BackwardError
from ddp.monitoring.stall_report import finish

_NONE, _SPARSE, _DENSE = range(3)


def average_sparse(channel: Channel, member: Member, factor: float) -> None:
    """Average the gradient of `member` over the ranks; `.grad` is sparse unless some rank's is dense.

    Every rank must call it; blocks. A rank's `.grad` may be None, sparse with any number of rows, or dense. The result
    is `factor` times the sum over the ranks divided by their number, and bitwise equal on all: each adds the rows in
    the order of the ranks.
    """
    with channel.report.waiting(f"exchange of the rows of {member.name!r}"):
        _average(channel, member.parameter, factor)


def _average(channel: Channel, parameter: torch.nn.Parameter, factor: float) -> None:
    group = channel.group
    mine = None if parameter.grad is None else parameter.grad.detach()
    if mine is not None and mine.layout is torch.sparse_coo:
        mine = mine.coalesce() if mine.sparse_dim() == 1 else mine.to_dense()
    kinds, counts = _gathered_sizes(channel.control, mine)
    scale = factor / group.size()
    if _DENSE in kinds:
        total = torch.zeros_like(parameter) if mine is None else mine.to_dense() if mine.is_sparse else mine.clone()
        finish(group.allreduce([total]), device=total.device)
        parameter.grad = total.mul_(scale)
        return
    parameter.grad = _summed_rows(group, parameter, mine, counts).mul_(scale)


def _gathered_sizes(control: dist.ProcessGroup, mine: torch.Tensor | None) -> tuple[list[int], list[int]]:
    """Return each rank's kind of gradient and number of rows; exchanged in host memory, where they are read."""
    kind, count = _NONE, 0
    if mine is not None:
        kind, count = (_SPARSE, len(mine.values())) if mine.is_sparse else (_DENSE, 0)
    own = torch.tensor([kind, count], device="cpu")
    every = [torch.empty_like(own) for _ in range(control.size())]
    finish(control.allgather([every], [own]), device=own.device)
    rows = [other.tolist() for other in every]
    return [row[0] for row in rows], [row[1] for row in rows]


def _summed_rows(
    group: dist.ProcessGroup, parameter: torch.Tensor, mine: torch.Tensor | None, counts: list[int]
) -> torch.Tensor:
    """Return the sum of all ranks' sparse gradients, coalesced. The gather pads every rank's rows to the longest."""
    longest, own = max(counts), counts[group.rank()]
    indices = torch.zeros(longest, dtype=torch.int64, device=parameter.device)  # (rows,)
    values = torch.zeros(longest, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
    if mine is not None and own:
        indices[:own] = mine.indices()[0]
        values[:own] = mine.values()
    every_index = [torch.empty_like(indices) for _ in counts]
    every_value = [torch.empty_like(values) for _ in counts]
    if longest:
        finish(dist.all_gather(every_index, indices, group=group, async_op=True), device=indices.device)
        finish(dist.all_gather(every_value, values, group=group, async_op=True), device=values.device)
    rows = torch.cat([index[:count] for index, count in zip(every_index, counts, strict=True)])
    entries = torch.cat([value[:count] for value, count in zip(every_value, counts, strict=True)])
    return torch.sparse_coo_tensor(
        rows[None], entries, parameter.shape, device=entries.device, check_invariants=False
    ).coalesce()


_Named = tuple[str, torch.nn.Parameter]


def average_unfrozen(group: dist.ProcessGroup, mine: Sequence[_Named], factor: float) -> Sequence[_Named]:
    """Average the gradients of the parameters that this rank has unfrozen, and return them. Blocks.

    Every rank must call it. Raises BackwardError on all if not every rank unfroze the same ones. Where no rank has a
    gradient, `.grad` stays as it is.
    """
    every = gather_values({name: parameter.grad is not None for name, parameter in mine}, group=group)
    if any([*names] != [*every[0]] for names in every):
        raise _unfrozen_differ(every)
    for name, parameter in mine:
        if not any(has_grad[name] for has_grad in every):
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


def _unfrozen_differ(unfrozen: Sequence[Collection[str]]) -> BackwardError:
    """Return the error for ranks that unfroze different parameters."""
    every = {name for names in unfrozen for name in names}
    name = min(every, key=lambda name: (sum(name in names for names in unfrozen), name))
    lacking = [rank for rank, names in enumerate(unfrozen) if name not in names]
    having = [rank for rank, names in enumerate(unfrozen) if name in names]
    return BackwardError(
        f"parameter {name!r} was frozen when the module was wrapped and requires a gradient now on rank "
        f"{', '.join(map(str, having))}, but not on rank {', '.join(map(str, lacking))}: unfreeze it on every rank in "
        "the same step. The gradients of this step are dropped (None) on every rank",
        parameter=name,
    )
