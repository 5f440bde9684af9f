"""Collectives on tensors, in Horovod's words: a call says what it is first, so that ranks that differ get an error.

Scripts and `broadcast_state` call these; nothing that happens during backward does. Before its data travels, a call
tells the other ranks its kind, name, operation, dtype and shape as 16 bytes. Where they differ, every rank raises
ArgumentError with what each of them called, and the group stays usable. That is one more small collective a call,
as long as an all-reduce of a few numbers. A form that ends in `_async` pays for it in `synchronize()`.

Calls in one group must come in the same order on all ranks, asynchronous ones too. No call changes its argument unless
its name ends with `_`. Gradients flow through allreduce, grouped_allreduce, allgather, broadcast, reducescatter and
alltoall: what comes back is the derivative of the sum of all ranks' losses.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp import world
from ddp.comm.objects import device_of, gather_values
from ddp.compression.compressors import Half
from ddp.errors import ArgumentError, NotInitializedError, UnsupportedError
from ddp.monitoring.stall_report import report_of
from ddp.torch_internals import allgather_flat

__all__ = [
    "Average",
    "Call",
    "Compression",
    "Handle",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "check_same_call",
    "cross_rank",
    "cross_size",
    "grouped_allreduce",
    "grouped_allreduce_",
    "is_initialized",
    "local_rank",
    "local_size",
    "own_group",
    "poll",
    "rank",
    "reducescatter",
    "shutdown",
    "size",
    "synchronize",
]

Average, Sum, Min, Max, Product = "average", "sum", "min", "max", "product"
_REDUCTIONS = {
    Average: dist.ReduceOp.SUM,
    Sum: dist.ReduceOp.SUM,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}
_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Compression:
    """Horovod's names for what `compression=` takes, and those of this package."""

    none = None
    fp16 = "fp16"
    bf16 = "bf16"
    int8 = "int8"
    powersgd = "powersgd"


# Who and where


def is_initialized() -> bool:
    """Whether there is a process group: after `ddp.init()`, until `ddp.shutdown()`."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Return this process's rank in the world. Like the five below: NotInitializedError before `ddp.init()`."""
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
    """Return this host's index. Where the launcher does not tell, hosts are taken to hold equal numbers of ranks."""
    here = _here("cross_rank")
    return here.rank // here.local_world_size if here.node_rank is None else here.node_rank


def cross_size() -> int:
    """Return the number of hosts. Where the launcher does not tell, they are taken to hold equal numbers of ranks."""
    here = _here("cross_size")
    told = os.environ.get("GROUP_WORLD_SIZE") or os.environ.get("SLURM_STEP_NUM_NODES") or ""
    if told.isdecimal() and os.environ.get("WORLD_SIZE", str(here.world_size)) == str(here.world_size):
        return int(told)
    return -(-here.world_size // here.local_world_size)


def shutdown() -> None:
    """Close the process group, as the end of the process does. Every rank should call it; without a group, nothing."""
    if is_initialized():
        world.leave()


def _here(what: str) -> world.World:
    if not is_initialized():
        raise NotInitializedError(f"there is no process group yet: call ddp.init() before ddp.{what}()")
    return world.init()


# Reductions


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
    differ, CollectiveError if a rank does not come.
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
        results: list[Tensor] = _allreduce(list(given), name, op, compression, group).wait()
        return results

    def back(*grads: Tensor) -> list[Tensor]:
        if op not in (Average, Sum):
            raise UnsupportedError(f"{_named('allreduce', name)} with op={op!r} has no gradient: detach its argument")
        return grouped_allreduce(grads, _gradient_of(name), op=op, compression=compression, group=group)

    if not any(map(_needs_gradient, tensors)):
        return run(*tensors)
    return list(_Differentiable.apply(run, back, *tensors))  # type: ignore[no-untyped-call]  # torch has no types here


def allreduce_(
    tensor: Tensor, name: str | None = None, *, op: str = Average, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Like `allreduce`, into `tensor` itself, which is returned. No gradient goes through."""
    return grouped_allreduce_([tensor], name, op=op, group=group)[0]


def grouped_allreduce_(
    tensors: Sequence[Tensor], name: str | None = None, *, op: str = Average, group: dist.ProcessGroup | None = None
) -> list[Tensor]:
    """Like `grouped_allreduce`, into the tensors themselves."""
    return _into(list(tensors), _allreduce(list(tensors), name, op, None, group).wait())


def allreduce_async(
    tensor: Tensor, name: str | None = None, *, op: str = Average, group: dist.ProcessGroup | None = None
) -> Handle:
    """Start an `allreduce` and return a handle for `synchronize` and `poll`. Do not change `tensor` meanwhile."""
    return _allreduce([tensor], name, op, None, group, is_async=True).then(lambda results: results[0])


def allreduce_async_(
    tensor: Tensor, name: str | None = None, *, op: str = Average, group: dist.ProcessGroup | None = None
) -> Handle:
    """Like `allreduce_async`; `synchronize` puts the result into `tensor`."""
    handle = _allreduce([tensor], name, op, None, group, is_async=True)
    return handle.then(lambda results: _into([tensor], results)[0])


def reducescatter(
    tensor: Tensor, name: str | None = None, *, op: str = Average, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return this rank's share of the rows (dimension 0) of `allreduce(tensor)`; the first ranks get one more each.

    Every rank must call it with the same name, operation, dtype and shape; blocks. Each adds in the order of the ranks.
    """
    link = own_group(group, "reducescatter")
    count = link.size()
    rows = tensor.shape[0] if tensor.dim() else 0
    splits = [len(range(index, rows, count)) for index in range(count)]

    def run(given: Tensor) -> Tensor:
        problem = _reduction_problem([given], op, None) or ("" if given.dim() else "a tensor without dimensions")
        check_same_call(Call("reducescatter", name, f"{op}, {_form(given)}", problem=problem), group)
        shares, _ = _exchange_rows(given, splits, name, link)  # (ranks * own rows, ...)
        shares = shares.reshape(count, splits[link.rank()], *given.shape[1:])
        return _reduced_here(shares, op)

    def back(grad: Tensor) -> Tensor:
        if op not in (Average, Sum):
            raise UnsupportedError(f"{_named('reducescatter', name)} with op={op!r} has no gradient")
        whole = allgather(grad, _gradient_of(name), group=group)
        return whole / count if op == Average else whole

    return _differentiable(tensor, run, back)


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


# Copies


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, *, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return rank `root_rank`'s tensor. Every rank must call it with the same name, root, dtype and shape; blocks."""

    def back(grad: Tensor) -> Tensor:
        total = allreduce(grad, _gradient_of(name), op=Sum, group=group)
        return total if own_group(group, "broadcast").rank() == root_rank else torch.zeros_like(total)

    return _differentiable(tensor, lambda given: _broadcast(given, root_rank, name, group).wait(), back)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, *, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Like `broadcast`, into `tensor` itself, which is returned. No gradient goes through."""
    return _into([tensor], [_broadcast(tensor, root_rank, name, group).wait()])[0]


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, *, group: dist.ProcessGroup | None = None
) -> Handle:
    """Start a `broadcast` and return a handle for `synchronize` and `poll`."""
    return _broadcast(tensor, root_rank, name, group, is_async=True)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, *, group: dist.ProcessGroup | None = None
) -> Handle:
    """Like `broadcast_async`; `synchronize` puts the result into `tensor`."""
    handle = _broadcast(tensor, root_rank, name, group, is_async=True)
    return handle.then(lambda result: _into([tensor], [result])[0])


def allgather(tensor: Tensor, name: str | None = None, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the rows (dimension 0) of all ranks, in the order of the ranks; a number counts as one row.

    Every rank must call it with the same name, dtype and shape, but for the number of rows; blocks.
    """
    mine = tensor.reshape(1) if tensor.dim() == 0 else tensor
    counts: list[int] = []

    def run(given: Tensor) -> Tensor:
        handle, rows = _allgather(given, name, group)
        counts.extend(rows)
        result: Tensor = handle.wait()
        return result

    def back(grad: Tensor) -> Tensor:
        at = own_group(group, "allgather").rank()
        total = allreduce(grad, _gradient_of(name), op=Sum, group=group)
        return total.narrow(0, sum(counts[:at]), counts[at])

    return _differentiable(mine, run, back)


def allgather_async(tensor: Tensor, name: str | None = None, *, group: dist.ProcessGroup | None = None) -> Handle:
    """Start an `allgather` and return a handle. It waits for all ranks, to learn their numbers of rows."""
    return _allgather(tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach(), name, group)[0]


def alltoall(
    tensor: Tensor,
    splits: Sequence[int] | Tensor | None = None,
    name: str | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """Send `splits[r]` rows of `tensor` to each rank r; return the rows that came, in the order of the ranks.

    Without `splits`, each rank gets the same number of rows; with them, the result is a pair: the rows, and how many
    came from each rank. Every rank must call it with the same name, dtype and shape but for the rows; blocks.
    """
    link = own_group(group, "alltoall")
    rows = tensor.shape[0] if tensor.dim() else 0
    sends = [rows // link.size()] * link.size() if splits is None else [int(count) for count in splits]
    problem = "a tensor without dimensions" if not tensor.dim() else ""
    if len(sends) != link.size() or min(sends) < 0 or sum(sends) != rows:
        problem = f"splits {sends} of {rows} rows for {link.size()} ranks: one number a rank, {rows} in all"
    received: list[int] = []

    def run(given: Tensor) -> Tensor:
        check_same_call(Call("alltoall", name, _form(given, rows="any"), problem=problem), group)
        result, counts = _exchange_rows(given, sends, name, link)
        received.extend(counts)
        return result

    def back(grad: Tensor) -> Tensor:
        result: Tensor = alltoall(grad, received, _gradient_of(name), group=group)[0]
        return result

    result = _differentiable(tensor, run, back)
    return result if splits is None else (result, torch.tensor(received))


def barrier(name: str | None = None, *, group: dist.ProcessGroup | None = None) -> None:
    """Wait until every rank has called it, with the same name."""
    check_same_call(Call("barrier", name, ""), group)


# Handles


class Handle:
    """A call under way. It knows its result once it was waited for; waiting again returns the same."""

    def __init__(self, what: str, check: _CallCheck, works: Sequence[dist.Work], finish: Callable[[], Any]) -> None:
        self.what = what
        self._check = check
        self._works = list(works)
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def wait(self) -> Any:
        """Block until the result is there, and return it. Raises as the synchronous call does."""
        if self._finish is not None:
            self._check.settle()
            for work in self._works:
                self._check.report.wait(work, self.what)
            with torch.no_grad():
                self._result = self._finish()
            self._finish = None
            self._works.clear()
        return self._result

    def is_completed(self) -> bool:
        """Whether `wait` would return at once. Does not block."""
        return self._finish is None or (self._check.is_completed() and all(w.is_completed() for w in self._works))

    def then(self, change: Callable[[Any], Any]) -> Handle:
        """Let `wait` return what `change` makes of the result."""
        before = self._finish
        assert before is not None
        self._finish = lambda: change(before())
        return self


def synchronize(handle: Handle) -> Any:
    """Wait for what an `_async` call has started, and return its result."""
    return handle.wait()


def poll(handle: Handle) -> bool:
    """Whether `synchronize(handle)` would return at once."""
    return handle.is_completed()


# Agreement


@dataclass(frozen=True)
class Call:
    """What one rank calls: `facts` must agree between the ranks, `number` need not; a `problem` is all ranks' error."""

    kind: str
    name: str | None
    facts: str
    number: int = 0
    problem: str = ""

    def __str__(self) -> str:
        text = _named(self.kind, self.name) + (f" ({self.facts})" if self.facts else "")
        return f"{text}: {self.problem}" if self.problem else text


class _CallCheck:
    """The comparison of a call with those of the other ranks, under way. Holds `group` until it is settled."""

    def __init__(self, call: Call, group: dist.ProcessGroup) -> None:
        self.report = report_of(group)
        self._call = call
        self._group: dist.ProcessGroup | None = group
        self._numbers = [call.number]
        if group.size() > 1:
            self._device = device_of(group)
            digest = int.from_bytes(hashlib.blake2b(str(call).encode(), digest_size=8).digest(), "little", signed=True)
            self._mine = torch.tensor([digest, call.number], device=self._device)  # int64
            self._every = torch.empty(2 * group.size(), dtype=torch.int64, device=self._device)
            self._work: dist.Work = allgather_flat(group, self._every, self._mine)

    def is_completed(self) -> bool:
        return self._group is None or self._group.size() == 1 or self._work.is_completed()

    def settle(self) -> list[int]:
        """Wait for the others; return their numbers. Raises ArgumentError on every rank if the calls differ."""
        if self._group is None:
            return self._numbers
        group, self._group = self._group, None
        if group.size() > 1:
            self.report.wait(self._work, str(self._call))
            self.report.step += 1
            every = self._every.tolist()
            self._numbers = every[1::2]
            if len(set(every[::2])) > 1:
                raise _calls_differ(gather_values(str(self._call), device=self._device, group=group))
        if self._call.problem:
            raise ArgumentError(str(self._call))
        return self._numbers


def check_same_call(call: Call, group: dist.ProcessGroup | None) -> list[int]:
    """Wait until every rank has made the same call; return their numbers, by rank. See `_CallCheck.settle`."""
    return _CallCheck(call, own_group(group, call.kind)).settle()


def _calls_differ(told: Sequence[str]) -> ArgumentError:
    texts: dict[str, list[int]] = {}
    for rank_, text in enumerate(told):
        texts.setdefault(text, []).append(rank_)
    usual = max(texts, key=lambda text: (len(texts[text]), -texts[text][0]))
    lines = [
        f"rank {', '.join(map(str, ranks[:16]))}{', ...' if len(ranks) > 16 else ''} called {text}"
        for text, ranks in sorted(texts.items(), key=lambda item: (item[0] == usual, item[1]))
    ]
    return ArgumentError(
        f"the ranks do not make the same call: {'; '.join(lines)}. Call the same collective, by the same name, with "
        "the same dtype, shape and settings on every rank, in the same order"
    )


def own_group(group: dist.ProcessGroup | None, what: str) -> dist.ProcessGroup:
    """Return the group that `what` works on; default: all. Raises NotInitializedError, ArgumentError if not in it."""
    if not is_initialized():
        raise NotInitializedError(f"there is no process group yet: call ddp.init() before ddp.{what}()")
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise ArgumentError(
            f"ddp.{what}(): this rank ({dist.get_rank()}) is not in the group; only its members call it"
        )
    return group


def _named(kind: str, name: str | None) -> str:
    return kind if name is None else f"{kind} {name!r}"


def _gradient_of(name: str | None) -> str:
    return "gradient" if name is None else f"gradient of {name}"


def _form(tensor: Tensor, *, rows: str | None = None) -> str:
    shape = [str(length) for length in tensor.shape]
    if rows is not None and shape:
        shape[0] = rows
    where = "" if tensor.device.type == "cpu" else f", on {tensor.device.type}"
    return f"{str(tensor.dtype).removeprefix('torch.')}, shape ({', '.join(shape)}){where}"


# What happens


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


def _needs_gradient(tensor: Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


def _differentiable(tensor: Tensor, run: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    if not _needs_gradient(tensor):
        return run(tensor.detach())
    result: Tensor = _Differentiable.apply(run, back, tensor)  # type: ignore[no-untyped-call]  # torch has no types here
    return result


@torch.no_grad()
def _into(tensors: list[Tensor], results: Sequence[Tensor]) -> list[Tensor]:
    for tensor, result in zip(tensors, results, strict=True):
        if result is not tensor:
            tensor.copy_(result)
    return tensors


def _reduction_problem(tensors: Sequence[Tensor], op: str, compression: object) -> str:
    """Why these cannot be reduced, or nothing."""
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
    """What travels for `dtype`. Gloo knows neither bool nor int16."""
    if compression is not None and dtype.itemsize > 2:
        return compression.dtype if isinstance(compression, Half) else _HALVES[compression]
    return {torch.bool: torch.uint8, torch.int16: torch.int32}.get(dtype, dtype)


def _allreduce(
    tensors: list[Tensor],
    name: str | None,
    op: str,
    compression: str | Half | None,
    group: dist.ProcessGroup | None,
    *,
    is_async: bool = False,
) -> Handle:
    """Start it; unless `is_async`, only when the ranks have agreed."""
    problem = _reduction_problem(tensors, op, compression) or _name_problem(name)
    forms = (
        "; ".join(map(_form, tensors)) if len(tensors) < 9 else f"{len(tensors)} tensors {list(map(_form, tensors))}"
    )
    facts = f"{op}, {forms}" + ("" if compression is None else f", as {compression}")
    call = Call("allreduce" if len(tensors) == 1 else "grouped_allreduce", name, facts, problem=problem)
    link = own_group(group, call.kind)
    compression = compression if link.size() > 1 else None
    check = _CallCheck(call, link)
    if problem or not is_async:
        check.settle()
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
            options = dist.AllreduceOptions()
            options.reduceOp = _REDUCTIONS[op]  # type: ignore[assignment]  # torch's stubs have two types for it
            works.append(link.allreduce([torch.view_as_real(flat) if flat.is_complex() else flat], options))
    count = link.size()

    def finish() -> list[Tensor]:
        results: list[Tensor] = list(tensors)
        for flat, indices in flats:
            if op == Average and flat.dtype.itemsize > 2:
                flat.div_(count)
            parts = torch.split(flat, [tensors[index].numel() for index in indices])
            for index, part in zip(indices, parts, strict=True):
                results[index] = part.to(tensors[index].dtype).reshape(tensors[index].shape)
        return results

    return Handle(str(call), check, works, finish)


def _name_problem(name: object) -> str:
    if name is None or isinstance(name, str):
        return ""
    return f"name={name!r} is no text (Horovod's average=True and False are op='average' and 'sum' here)"


def _bytes_of(tensor: Tensor) -> Tensor:
    """A copy of the elements as bytes (n,): a copy has any dtype on any backend."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _broadcast(
    tensor: Tensor, root: int, name: str | None, group: dist.ProcessGroup | None, *, is_async: bool = False
) -> Handle:
    link = own_group(group, "broadcast")
    problem = "" if 0 <= root < link.size() else f"there is no rank {root} among {link.size()}"
    call = Call("broadcast", name, f"from rank {root}, {_form(tensor)}", problem=problem or _name_problem(name))
    check = _CallCheck(call, link)
    if call.problem or not is_async:
        check.settle()
    data = _bytes_of(tensor)
    works = []
    if link.size() > 1 and data.numel():
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        works.append(link.broadcast([data], options))
    return Handle(str(call), check, works, lambda: data.view(tensor.dtype).reshape(tensor.shape))


def _allgather(tensor: Tensor, name: str | None, group: dist.ProcessGroup | None) -> tuple[Handle, list[int]]:
    """Start it when the ranks have agreed; the handle, and the rows of each rank."""
    link = own_group(group, "allgather")
    call = Call("allgather", name, _form(tensor, rows="any"), number=tensor.shape[0], problem=_name_problem(name))
    check = _CallCheck(call, link)
    counts = check.settle()
    row_bytes = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
    longest = max(counts) * row_bytes
    data = _bytes_of(tensor)
    every, works = data, []
    if link.size() > 1:
        padded = torch.cat([data, data.new_zeros(longest - len(data))])
        every = data.new_empty(link.size() * longest)
        if longest:
            works.append(allgather_flat(link, every, padded))

    def finish() -> Tensor:
        parts = [every[at * longest :][: count * row_bytes] for at, count in enumerate(counts)]
        return torch.cat(parts).view(tensor.dtype).reshape(sum(counts), *tensor.shape[1:])

    return Handle(str(call), check, works, finish), counts


def _exchange_rows(
    tensor: Tensor, sends: Sequence[int], name: str | None, link: dist.ProcessGroup
) -> tuple[Tensor, list[int]]:
    """Send `sends[r]` rows to each rank r; return what came and how many rows from each. Blocks."""
    if link.size() == 1:
        return tensor.detach().clone(), list(sends)
    report = report_of(link)
    mine = torch.tensor(sends, device=device_of(link))  # int64
    counts = torch.empty_like(mine)
    report.wait(link.alltoall_base(counts, mine, [], []), _named("exchange of row counts", name))
    receives: list[int] = counts.tolist()
    row_bytes = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
    data = _bytes_of(tensor)
    came = data.new_empty(sum(receives) * row_bytes)
    if row_bytes:
        sizes = [[count * row_bytes for count in counted] for counted in (receives, sends)]
        report.wait(link.alltoall_base(came, data, *sizes), _named("exchange of rows", name))
    return came.view(tensor.dtype).reshape(sum(receives), *tensor.shape[1:]), receives
