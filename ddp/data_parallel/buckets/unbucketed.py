"""Gradients that are in no bucket: they are exchanged after the step status of a backward pass, one after the other.

Sparse gradients (of embeddings): every rank's rows are sent to every rank, which adds them up. Called by
`gradient_sums`. Gradients of parameters that were frozen when the buckets were planned and are trained now: called
by the reducer if any rank has such parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist

from ddp.comm.channel import Channel
from ddp.comm.combine import Subtrees, is_narrow
from ddp.comm.objects import gather_values
from ddp.comm.sums.tree_sum import start_tree_sum
from ddp.data.micro_batch import MicroBatch
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


def average_unfrozen(
    group: dist.ProcessGroup,
    mine: Sequence[_Named],
    factor: float,
    held: Mapping[str, Sequence[torch.Tensor | None]],
    micro_batch: MicroBatch | None,
) -> Sequence[_Named]:
    """Average the gradients of the parameters that this rank has unfrozen, and return them. Blocks.

    `held` are divided ones of earlier micro-batches, if `micro_batch` is the last of this rank. Every rank must call
    it. Raises BackwardError on all if not every rank unfroze the same ones before the step. Where no rank has a
    gradient, `.grad` stays as it is.
    """
    rank, counts = group.rank(), [1] * group.size()
    divisor: float = group.size()
    if micro_batch is not None:
        divisor, counts = micro_batch.divisor, [*micro_batch.shares.counts]
    leaves = {
        name: [*held.get(name, ()), *([divided(parameter.grad, divisor)] if counts[rank] else [])]
        for name, parameter in mine
    }
    known = {name: [each is not None for each in of_name] for name, of_name in leaves.items()}
    every: list[dict[str, list[bool]]] = gather_values(known, group=group)
    if any([*names] != [*every[0]] for names in every):
        raise _unfrozen_differ(every)
    for name, parameter in mine:
        if any(len(known[name]) != count for known, count in zip(every, counts, strict=True)):
            raise BackwardError(
                f"parameter {name!r} was unfrozen within a step of ddp.StepLoader: unfreeze it between two steps. The "
                "gradients of this step are dropped (None) on every rank",
                parameter=name,
            )
        if not any(any(known[name]) for known in every):
            continue
        total = _sum(group, parameter, leaves[name], micro_batch).mul_(factor)
        average = torch.view_as_complex(total) if parameter.is_complex() else total
        if parameter.grad is None or parameter.grad.layout is not torch.strided:
            parameter.grad = average
        else:
            parameter.grad.detach().copy_(average)
    return mine


def divided(grad: torch.Tensor | None, divisor: float) -> torch.Tensor | None:
    """Return a dense gradient, divided, real and imaginary parts apart, in memory of its own."""
    if grad is None:
        return None
    dense = grad.detach().to_dense()
    return (torch.view_as_real(dense) if dense.is_complex() else dense) / divisor


def _sum(
    group: dist.ProcessGroup,
    parameter: torch.Tensor,
    leaves: Sequence[torch.Tensor | None],
    micro_batch: MicroBatch | None,
) -> torch.Tensor:
    """Return the sum of the ranks' divided gradients, one or more of each, by the tree."""
    like = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter.detach()
    total = torch.zeros_like(like, memory_format=torch.contiguous_format)
    if micro_batch is None:
        (leaf,) = leaves
        _add_up(group, total if leaf is None else total.copy_(leaf))
        return total
    subtrees, shares = Subtrees(), micro_batch.shares
    for at, leaf in enumerate(leaves, shares.firsts[micro_batch.rank]):
        flat = torch.full_like(total, -0.0) if leaf is None else leaf.contiguous()
        subtrees.add(at, [flat.float().view(-1) if is_narrow(flat.dtype) else flat.view(-1)], shares)
    rows = [row for (row,) in subtrees.take(shares, micro_batch.rank)]
    finish(start_tree_sum(group, total.view(-1), rows, shares), device=total.device)
    return total


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
