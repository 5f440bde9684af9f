"""Collectives on tensors with Horovod's interface; the ranks compare their calls first and raise if they differ.

Called by scripts and `broadcast_state`, never during backward. Before sending data, a call sends the other ranks a
16-byte digest of its kind, name, operation, dtype and shape. If they differ, every rank raises ArgumentError with the
calls of all ranks, and the group stays usable. This costs one more small collective per call, in host memory, as long
as an all-reduce of a few numbers. Functions that end in `_async` pay for it in `synchronize()`.

If tensors are on a device, "blocks" below means the comparison alone: after it, the current stream waits for the
result, as for any other operation, and the host continues.

Calls in one group must come in the same order on all ranks, asynchronous ones too. No call changes its argument unless
its name ends with `_`. Gradients flow through allreduce, grouped_allreduce, allgather, broadcast, reducescatter and
alltoall; they are those of the sum of all ranks' losses.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp import world
from ddp.comm.call_check import Call, check_same_call, title
from ddp.compression import Half
from ddp.errors import UnsupportedError
from ddp.horovod.calls import (
    Average,
    Handle,
    Min,
    Product,
    Sum,
    exchange_rows,
    form_of,
    is_initialized,
    own_group,
    reduction_problem,
    start_allgather,
    start_allreduce,
    start_broadcast,
)


class Compression:
    """Values for `compression=`: Horovod's names, and those of this package."""

    none = None
    fp16 = "fp16"
    bf16 = "bf16"
    int8 = "int8"
    powersgd = "powersgd"


def rank() -> int:
    """Return this process's rank in the world. Like the next five, raises NotInitializedError before `ddp.init()`."""
    return _here("rank").rank


def size() -> int:
    """Return the number of processes in the world."""
    return _here("size").world_size


def local_rank() -> int:
    """Return this process's index on its host."""
    return _here("local_rank").local_rank


def local_size() -> int:
    """Return the number of processes on this host."""
    return _here("local_size").local_world_size


def cross_rank() -> int:
    """Return this host's index. If the launcher does not set it, assumes equal numbers of ranks on all hosts."""
    here = _here("cross_rank")
    return here.rank // here.local_world_size if here.node_rank is None else here.node_rank


def cross_size() -> int:
    """Return the number of hosts. If the launcher does not set it, assumes equal numbers of ranks on all hosts."""
    here = _here("cross_size")
    hosts = os.environ.get("GROUP_WORLD_SIZE") or os.environ.get("SLURM_STEP_NUM_NODES") or ""
    if hosts.isdecimal() and os.environ.get("WORLD_SIZE", str(here.world_size)) == str(here.world_size):
        return int(hosts)
    return -(-here.world_size // here.local_world_size)


def shutdown() -> None:
    """Close the process group, if there is one, as happens at process exit. Every rank should call it."""
    if is_initialized():
        world.leave()


def _here(what: str) -> world.World:
    own_group(None, what)
    return world.init()


def allreduce(
    tensor: Tensor,
    name: str | None = None,
    *,
    op: str = Average,
    compression: str | Half | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return the "average", "sum", "min", "max" or "product" of `tensor` over the ranks, with its shape and dtype.

    Every rank must call it with the same name, operation, dtype and shape; blocks. `compression`: "fp16" or "bf16" on
    the wire. An average needs floating-point or complex numbers. Raises ArgumentError on every rank if the calls
    differ, CollectiveError if a rank does not call it.
    """
    return grouped_allreduce([tensor], name, op=op, compression=compression, group=group)[0]


def grouped_allreduce(
    tensors: Sequence[Tensor],
    name: str | None = None,
    *,
    op: str = Average,
    compression: str | Half | None = None,
    group: dist.ProcessGroup | None = None,
) -> list[Tensor]:
    """Like `allreduce` of each tensor, with one collective for all that share a dtype and a device."""

    def run(*given: Tensor) -> list[Tensor]:
        results: list[Tensor] = start_allreduce(list(given), name, op, compression, group).wait()
        return results

    def back(*grads: Tensor) -> list[Tensor]:
        if op not in (Average, Sum):
            raise UnsupportedError(f"{title('allreduce', name)} with op={op!r} has no gradient: detach its argument")
        return grouped_allreduce(grads, _gradient_of(name), op=op, compression=compression, group=group)

    return list(_differentiable(run, back, *tensors))


def allreduce_(
    tensor: Tensor, name: str | None = None, *, op: str = Average, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Like `allreduce`, in place; returns `tensor`. Not differentiable."""
    return grouped_allreduce_([tensor], name, op=op, group=group)[0]


def grouped_allreduce_(
    tensors: Sequence[Tensor], name: str | None = None, *, op: str = Average, group: dist.ProcessGroup | None = None
) -> list[Tensor]:
    """Like `grouped_allreduce`, in place."""
    return _into(list(tensors), start_allreduce(list(tensors), name, op, None, group).wait())


def allreduce_async(
    tensor: Tensor, name: str | None = None, *, op: str = Average, group: dist.ProcessGroup | None = None
) -> Handle:
    """Start an `allreduce` and return a handle for `synchronize` and `poll`. Do not change `tensor` meanwhile."""
    return start_allreduce([tensor], name, op, None, group, is_async=True).then(lambda results: results[0])


def allreduce_async_(
    tensor: Tensor, name: str | None = None, *, op: str = Average, group: dist.ProcessGroup | None = None
) -> Handle:
    """Like `allreduce_async`; `synchronize` puts the result into `tensor`."""
    handle = start_allreduce([tensor], name, op, None, group, is_async=True)
    return handle.then(lambda results: _into([tensor], results)[0])


def reducescatter(
    tensor: Tensor, name: str | None = None, *, op: str = Average, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return this rank's share of the rows (dimension 0) of `allreduce(tensor)`; the first ranks get one more each.

    Every rank must call it with the same name, operation, dtype and shape; blocks. Each adds in rank order.
    """
    link = own_group(group, "reducescatter")
    count = link.size()
    rows = tensor.shape[0] if tensor.dim() else 0
    splits = [len(range(index, rows, count)) for index in range(count)]

    def run(given: Tensor) -> Tensor:
        problem = reduction_problem([given], op, None) or ("" if given.dim() else "a tensor without dimensions")
        check_same_call(Call("reducescatter", name, f"{op}, {form_of(given)}", problem=problem), group)
        shares, _ = exchange_rows(given, splits, name, link)  # (ranks * own rows, ...)
        shares = shares.reshape(count, splits[link.rank()], *given.shape[1:])
        return _reduced_here(shares, op)

    def back(grad: Tensor) -> Tensor:
        if op not in (Average, Sum):
            raise UnsupportedError(f"{title('reducescatter', name)} with op={op!r} has no gradient")
        whole = allgather(grad, _gradient_of(name), group=group)
        return whole / count if op == Average else whole

    result: Tensor = _differentiable(run, back, tensor)
    return result


def _reduced_here(shares: Tensor, op: str) -> Tensor:
    """Reduce dimension 0, (ranks, rows, ...)."""
    if op in (Average, Sum):
        total = shares[0].clone()
        for share in shares[1:]:
            total += share
        return total / len(shares) if op == Average else total
    if op == Product:
        return shares.prod(0, dtype=shares.dtype)
    return shares.amin(0) if op == Min else shares.amax(0)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, *, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return rank `root_rank`'s tensor. Every rank must call it with the same name, root, dtype and shape; blocks."""

    def back(grad: Tensor) -> Tensor:
        total = allreduce(grad, _gradient_of(name), op=Sum, group=group)
        return total if own_group(group, "broadcast").rank() == root_rank else torch.zeros_like(total)

    result: Tensor = _differentiable(lambda given: start_broadcast(given, root_rank, name, group).wait(), back, tensor)
    return result


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, *, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Like `broadcast`, in place; returns `tensor`. Not differentiable."""
    return _into([tensor], [start_broadcast(tensor, root_rank, name, group).wait()])[0]


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, *, group: dist.ProcessGroup | None = None
) -> Handle:
    """Start a `broadcast` and return a handle for `synchronize` and `poll`."""
    return start_broadcast(tensor, root_rank, name, group, is_async=True)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, *, group: dist.ProcessGroup | None = None
) -> Handle:
    """Like `broadcast_async`; `synchronize` puts the result into `tensor`."""
    handle = start_broadcast(tensor, root_rank, name, group, is_async=True)
    return handle.then(lambda result: _into([tensor], [result])[0])


def allgather(tensor: Tensor, name: str | None = None, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the rows (dimension 0) of all ranks, in rank order; a scalar tensor counts as one row.

    Every rank must call it with the same name, dtype and shape, except for the number of rows; blocks.
    """
    mine = tensor.reshape(1) if tensor.dim() == 0 else tensor
    counts: list[int] = []

    def run(given: Tensor) -> Tensor:
        handle, rows = start_allgather(given, name, group)
        counts.extend(rows)
        result: Tensor = handle.wait()
        return result

    def back(grad: Tensor) -> Tensor:
        at = own_group(group, "allgather").rank()
        total = allreduce(grad, _gradient_of(name), op=Sum, group=group)
        return total.narrow(0, sum(counts[:at]), counts[at])

    result: Tensor = _differentiable(run, back, mine)
    return result


def allgather_async(tensor: Tensor, name: str | None = None, *, group: dist.ProcessGroup | None = None) -> Handle:
    """Start an `allgather` and return a handle. Waits for all ranks' numbers of rows."""
    return start_allgather(tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach(), name, group)[0]


def alltoall(
    tensor: Tensor,
    splits: Sequence[int] | Tensor | None = None,
    name: str | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """Send `splits[r]` rows of `tensor` to each rank r; return the received rows, in rank order.

    Without `splits`, each rank gets the same number of rows; with them, the result is a pair: the rows, and the number
    from each rank. Every rank must call it with the same name, dtype and shape except for the rows; blocks.
    """
    link = own_group(group, "alltoall")
    rows = tensor.shape[0] if tensor.dim() else 0
    sends = [rows // link.size()] * link.size() if splits is None else [int(count) for count in splits]
    problem = "a tensor without dimensions" if not tensor.dim() else ""
    if len(sends) != link.size() or min(sends) < 0 or sum(sends) != rows:
        problem = f"splits {sends} of {rows} rows for {link.size()} ranks: one number a rank, {rows} in all"
    received: list[int] = []

    def run(given: Tensor) -> Tensor:
        check_same_call(Call("alltoall", name, form_of(given, rows="any"), problem=problem), group)
        result, counts = exchange_rows(given, sends, name, link)
        received.extend(counts)
        return result

    def back(grad: Tensor) -> Tensor:
        result: Tensor = alltoall(grad, received, _gradient_of(name), group=group)[0]
        return result

    result = _differentiable(run, back, tensor)
    return result if splits is None else (result, torch.tensor(received, device="cpu"))


def barrier(name: str | None = None, *, group: dist.ProcessGroup | None = None) -> None:
    """Block until every rank has called it, with the same name."""
    check_same_call(Call("barrier", name, ""), group)


def synchronize(handle: Handle) -> Any:
    """Wait for an `_async` call and return its result; on a device, the current stream waits."""
    return handle.wait()


def poll(handle: Handle) -> bool:
    """Return whether an `_async` call is complete, on a device too. Does not block."""
    return handle.is_completed()


def _gradient_of(name: str | None) -> str:
    return "gradient" if name is None else f"gradient of {name}"


class _Differentiable(torch.autograd.Function):
    """`run(*tensors)` forward, `back(*gradients)` backward."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], back: Callable[..., Any], *tensors: Tensor) -> Any:
        ctx.back = back
        result = run(*(tensor.detach() for tensor in tensors))
        return tuple(result) if isinstance(result, list) else result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        result = ctx.back(*grads)
        return (None, None, *(result if isinstance(result, list) else [result]))


def _differentiable(run: Callable[..., Any], back: Callable[..., Any], *tensors: Tensor) -> Any:
    """Return `run(*tensors)`, with `back(*gradients)` as its derivative if a tensor requires grad."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _Differentiable.apply(run, back, *tensors)  # type: ignore[no-untyped-call]  # torch has no types here
    return run(*(tensor.detach() for tensor in tensors))


@torch.no_grad()
def _into(tensors: list[Tensor], results: Sequence[Tensor]) -> list[Tensor]:
    for tensor, result in zip(tensors, results, strict=True):
        if result is not tensor:
            tensor.copy_(result)
    return tensors
