"""Collective calls: compared between the ranks, started, and awaited through a handle. Used by `collectives`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp.comm.call_check import Call, CallCheck, host_side, no_rank, title
from ddp.comm.objects import member_group
from ddp.comm.sums.small_sum import reduce_options
from ddp.compression import Half
from ddp.monitoring.stall_report import report_of
from ddp.torch_internals import allgather_flat

Average, Sum, Min, Max, Product = "average", "sum", "min", "max", "product"
_REDUCTIONS = {
    Average: dist.ReduceOp.SUM,
    Sum: dist.ReduceOp.SUM,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}
_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def is_initialized() -> bool:
    """Return whether there is a process group: after `ddp.init()`, until `shutdown()`."""
    return dist.is_available() and dist.is_initialized()


def own_group(group: dist.ProcessGroup | None, what: str) -> dist.ProcessGroup:
    """Return the group for `what`; default: all. Raises NotInitializedError, or ArgumentError if not a member."""
    return member_group(group, f"ddp.horovod.{what}")


def form_of(tensor: Tensor, *, rows: str | None = None) -> str:
    shape = [str(length) for length in tensor.shape]
    if rows is not None and shape:
        shape[0] = rows
    where = "" if tensor.device.type == "cpu" else f", on {tensor.device.type}"
    return f"{str(tensor.dtype).removeprefix('torch.')}, shape ({', '.join(shape)}){where}"


class Handle:
    """A call in progress, described by `what`. Waiting again returns the same result.

    `works` are collectives, each with the device whose memory it moves.
    """

    def __init__(
        self, check: CallCheck, works: Sequence[tuple[dist.Work, torch.device]], finish: Callable[[], Any]
    ) -> None:
        self.what = check.what
        self._check = check
        self._works = list(works)
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def wait(self) -> Any:
        """Block until the ranks have compared their calls; return the result. Raises as the synchronous call does.

        A result in host memory is complete. On a device the current stream waits for it, and the host only for gloo.
        """
        if self._finish is not None:
            self._check.settle()
            for work, device in self._works:
                self._check.report.wait(work, self.what, device=device)
            with torch.no_grad():
                self._result = self._finish()
            self._finish = None
            self._works.clear()
        return self._result

    def is_completed(self) -> bool:
        """Return whether the result is complete, on a device too. Does not block."""
        return self._finish is None or (self._check.is_completed() and all(w.is_completed() for w, _ in self._works))

    def then(self, change: Callable[[Any], Any]) -> Handle:
        """Apply `change` to the result that `wait` returns."""
        before = self._finish
        assert before is not None
        self._finish = lambda: change(before())
        return self


def reduction_problem(tensors: Sequence[Tensor], op: str, compression: object) -> str:
    """Return why these cannot be reduced; empty if they can."""
    if op not in _REDUCTIONS:
        return f"op={op!r}; there are {', '.join(map(repr, _REDUCTIONS))}"
    if compression is not None and not isinstance(compression, Half) and compression not in _HALVES:
        return f'compression={compression!r} is for DistributedOptimizer; a single call takes "fp16" or "bf16"'
    for tensor in tensors:
        dtype = tensor.dtype
        if tensor.layout is not torch.strided:
            return f"a {tensor.layout} tensor: use to_dense(), or allgather its indices and values"
        if op == Average and not (dtype.is_floating_point or dtype.is_complex):
            return f"the average of {dtype} would be rounded: use op='sum', or convert it with .float() first"
        if (dtype is torch.bool and op == Sum) or (dtype.is_complex and op in (Min, Max, Product)):
            return f"op={op!r} of {dtype} is not defined"
        if compression is not None and not dtype.is_floating_point:
            return f"compression of {dtype}: only floating-point numbers can be sent in 16 bits"
    return ""


def _sent_dtype(dtype: torch.dtype, compression: str | Half | None) -> torch.dtype:
    """Return the dtype in which `dtype` is sent. Gloo supports neither bool nor int16."""
    if compression is not None and dtype.itemsize > 2:
        return compression.dtype if isinstance(compression, Half) else _HALVES[compression]
    return {torch.bool: torch.uint8, torch.int16: torch.int32}.get(dtype, dtype)


def start_allreduce(
    tensors: list[Tensor],
    name: str | None,
    op: str,
    compression: str | Half | None,
    group: dist.ProcessGroup | None,
    *,
    is_async: bool = False,
) -> Handle:
    """Start an all-reduce; unless `is_async`, only after the ranks have compared their calls."""
    problem = reduction_problem(tensors, op, compression) or _name_problem(name)
    forms = (
        "; ".join(map(form_of, tensors)) if len(tensors) < 9 else f"{len(tensors)} tensors {[*map(form_of, tensors)]}"
    )
    facts = f"{op}, {forms}" + ("" if compression is None else f", as {compression}")
    call = Call("allreduce" if len(tensors) == 1 else "grouped_allreduce", name, facts, problem=problem)
    link = own_group(group, call.kind)
    compression = compression if link.size() > 1 else None
    check = CallCheck(call, link, is_async=is_async)
    bundles: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        bundles.setdefault((tensor.device, _sent_dtype(tensor.dtype, compression)), []).append(index)
    flats, works = [], []
    for (_, dtype), indices in bundles.items():
        flat = torch.cat([tensors[index].detach().reshape(-1).to(dtype) for index in indices])
        if op == Average and dtype.itemsize == 2:
            flat.div_(link.size())  # before the sum, which would overflow in float16
        flats.append((flat, indices))
        if link.size() > 1 and flat.numel():
            sent = torch.view_as_real(flat) if flat.is_complex() else flat
            works.append((link.allreduce([sent], reduce_options(_REDUCTIONS[op])), flat.device))
    count = link.size()

    def finish() -> list[Tensor]:  # again after an interrupt, so it changes no `flat`
        results: list[Tensor] = list(tensors)
        for flat, indices in flats:
            reduced = flat / count if op == Average and flat.dtype.itemsize > 2 else flat
            parts = torch.split(reduced, [tensors[index].numel() for index in indices])
            for index, part in zip(indices, parts, strict=True):
                results[index] = part.to(tensors[index].dtype).reshape(tensors[index].shape)
        return results

    return Handle(check, works, finish)


def _name_problem(name: object) -> str:
    if name is None or isinstance(name, str):
        return ""
    return f"name={name!r} is not a string (Horovod's average=True and False are op='average' and 'sum' here)"


def _bytes_of(tensor: Tensor) -> Tensor:
    """Copy the elements as bytes (n,), so that any dtype can be sent by any backend."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def start_broadcast(
    tensor: Tensor, root: int, name: str | None, group: dist.ProcessGroup | None, *, is_async: bool = False
) -> Handle:
    link = own_group(group, "broadcast")
    problem = no_rank(root, link) or _name_problem(name)
    call = Call("broadcast", name, f"from rank {root}, {form_of(tensor)}", problem=problem)
    check = CallCheck(call, link, is_async=is_async)
    data = _bytes_of(tensor)
    works = []
    if link.size() > 1 and data.numel():
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        works.append((link.broadcast([data], options), data.device))
    return Handle(check, works, lambda: data.view(tensor.dtype).reshape(tensor.shape))


def start_allgather(tensor: Tensor, name: str | None, group: dist.ProcessGroup | None) -> tuple[Handle, list[int]]:
    """Start an all-gather after the ranks have compared their calls; return the handle and the rows of each rank."""
    link = own_group(group, "allgather")
    call = Call("allgather", name, form_of(tensor, rows="any"), number=tensor.shape[0], problem=_name_problem(name))
    check = CallCheck(call, link)
    counts = check.settle()
    row_bytes = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
    longest = max(counts) * row_bytes
    data = _bytes_of(tensor)
    every, works = data, []
    if link.size() > 1:
        padded = torch.cat([data, data.new_zeros(longest - len(data))])
        every = data.new_empty(link.size() * longest)
        if longest:
            works.append((allgather_flat(link, every, padded), data.device))

    def finish() -> Tensor:
        parts = [every.narrow(0, at * longest, count * row_bytes) for at, count in enumerate(counts)]
        return torch.cat(parts).view(tensor.dtype).reshape(sum(counts), *tensor.shape[1:])

    return Handle(check, works, finish), counts


def exchange_rows(
    tensor: Tensor, sends: Sequence[int], name: str | None, link: dist.ProcessGroup
) -> tuple[Tensor, list[int]]:
    """Send `sends[r]` rows to each rank r; return the received rows and their number from each rank.

    Blocks until the numbers of rows are here; if the rows are on a device, the current stream waits for them.
    """
    if link.size() == 1:
        return tensor.detach().clone(), list(sends)
    report = report_of(link)
    mine = torch.tensor(sends, device="cpu")  # int64
    counts = torch.empty_like(mine)
    report.wait(host_side(link).alltoall_base(counts, mine, [], []), title("exchange of row counts", name))
    receives: list[int] = counts.tolist()
    row_bytes = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
    data = _bytes_of(tensor)
    came = data.new_empty(sum(receives) * row_bytes)
    if row_bytes:
        sizes = [[count * row_bytes for count in counted] for counted in (receives, sends)]
        work = link.alltoall_base(came, data, *sizes)
        report.wait(work, title("exchange of rows", name), device=data.device)
    return came.view(tensor.dtype).reshape(sum(receives), *tensor.shape[1:]), receives
