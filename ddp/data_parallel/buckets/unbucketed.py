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
from ddp.comm.sums.tree_sum import start_tree_sum
from ddp.data_parallel.buckets.bucket_plan import Member
from ddp.errors import BackwardError
from ddp.monitoring.stall_report import finish

_NONE, _SPARSE, _DENSE = range(3)


def average_sparse(
    channel: Channel, member: Member, factor: float, micro_batches: Sequence[torch.Tensor] | None = None
) -> None:
    """Average the gradient of `member` over the ranks; `.grad` is sparse unless some rank's is dense.

    Every rank must call it; blocks. A rank's `.grad` may be None, sparse with any number of rows, or dense. The result
    is `factor` times the sum over the ranks divided by their number, and bitwise equal on all: each adds the rows in
    the order of the ranks. With this rank's `micro_batches`, it is the sum of these of all ranks, in their order.
    """
    with channel.report.waiting(f"exchange of the rows of {member.name!r}"):
        if micro_batches is None:
            grad = member.parameter.grad
            _average(channel, member.parameter, [] if grad is None else [grad.detach()], factor / channel.group.size())
            return
        if any(each.layout is not torch.sparse_coo for each in micro_batches):
            raise BackwardError(
                f"the gradient of {member.name!r} is sparse in some micro-batches of a step and dense in others",
                parameter=member.name,
            )
        _average(channel, member.parameter, micro_batches, factor)


def _average(channel: Channel, parameter: torch.nn.Parameter, gradients: Sequence[torch.Tensor], scale: float) -> None:
    group = channel.group
    mine = [_with_rows(each) for each in gradients]
    kinds, counts = _gathered_sizes(channel.control, mine)
    if _DENSE in kinds:
        total = torch.zeros_like(parameter)
        for each in mine:
            total += each
        _add_up(group, total := total.contiguous())
        parameter.grad = total.mul_(scale)
        return
    parameter.grad = _summed_rows(group, parameter, mine, counts).mul_(scale)


def _with_rows(grad: torch.Tensor) -> torch.Tensor:
    """Return a sparse gradient coalesced, or dense if it is not one of whole rows."""
    if grad.layout is not torch.sparse_coo:
        return grad
    return grad.coalesce() if grad.sparse_dim() == 1 else grad.to_dense()


def _gathered_sizes(control: dist.ProcessGroup, mine: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Return each rank's kind of gradient and number of rows; exchanged in host memory, where they are read."""
    kind, count = _NONE, 0
    if mine:
        is_sparse = all(each.is_sparse for each in mine)
        kind, count = (_SPARSE, sum(len(each.values()) for each in mine)) if is_sparse else (_DENSE, 0)
    own = torch.tensor([kind, count], device="cpu")
    every = [torch.empty_like(own) for _ in range(control.size())]
    finish(control.allgather([every], [own]), device=own.device)
    rows = [other.tolist() for other in every]
    return [row[0] for row in rows], [row[1] for row in rows]


def _summed_rows(
    group: dist.ProcessGroup, parameter: torch.Tensor, mine: Sequence[torch.Tensor], counts: list[int]
) -> torch.Tensor:
    """Return the sum of all ranks' sparse gradients, coalesced. The gather pads every rank's rows to the longest."""
    longest, own = max(counts), counts[group.rank()]
    indices = torch.zeros(longest, dtype=torch.int64, device=parameter.device)  # (rows,)
    values = torch.zeros(longest, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
    if own:
        indices[:own] = torch.cat([each.indices()[0] for each in mine])
        values[:own] = torch.cat([each.values() for each in mine])
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


def _add_up(group: dist.ProcessGroup, dense: torch.Tensor) -> None:
    """Replace a contiguous tensor by its sum over the ranks; in host memory always by the tree, since it is rare."""
    flat = dense.view(-1)
    finish(start_tree_sum(group, flat) if flat.is_cpu else group.allreduce([flat]), device=flat.device)


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
        _add_up(group, flat)
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
