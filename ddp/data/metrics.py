"""Gathers metrics that the ranks computed on their shares of the data; the result is the same on all ranks.

Called by evaluation loops. Shares may be unequal or empty. Never changes its arguments, and never unpickles received
data.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ddp.comm.objects import device_of, gather_values
from ddp.comm.reduction import exact_sum
from ddp.data.sampler import rank_and_size
from ddp.errors import ArgumentError
from ddp.monitoring.interrupts import is_interrupt
from ddp.monitoring.stall_report import finish, waiting_for_peers

Amount: TypeAlias = int | float | Tensor


def gather_metrics(
    metrics: Mapping[str, Amount | tuple[Amount, Amount]], *, group: dist.ProcessGroup | None = None
) -> dict[str, Amount]:
    """Sum metrics over all ranks; pairs of a sum and a count become means.

        sampler = ddp.DistributedSampler(test, shuffle=False, even="exact")
        loss, right, count = 0.0, 0, 0
        for x, y in DataLoader(test, 64, sampler=sampler):
            ...
            loss, right, count = loss + losses.sum(), right + (found == y).sum(), count + len(y)
        result = ddp.gather_metrics({"loss": (loss, count), "accuracy": (right, count), "images": count})

    A pair is (sum, count) and becomes the mean: the total sum over the total count, NaN if the counts add up to 0.
    Anything else is summed. An amount is a number, or a tensor of any shape and device, which is added elementwise
    (for example per class) and returned on the CPU. Integers (and bools) stay exact integers; anything else is added in
    float64, correctly rounded (`math.fsum`: Shewchuk 1997), so the result does not depend on the order of the ranks or
    on how a machine adds, and is bitwise equal on all of them.

    Every rank must call it, with the same names; blocks. A rank without data passes zeros; a plain 0, as a loop without
    batches leaves it, may replace a tensor. Without a process group the world is this process alone. Raises
    ArgumentError on every rank, with the rank and the name, if the names or shapes differ or a value is not an amount;
    CollectiveError if a rank is gone.
    """
    every = _agree_on("gather_metrics", lambda: _read_all(metrics), group)
    gathered = [{name: [_Amount(*each) for each in parts] for name, parts in theirs.items()} for theirs in every]
    _check_names([set(each) for each in gathered])
    result = {}
    for name in gathered[0]:
        _check_kind(name, [len(each[name]) for each in gathered])
        parts = [_total(name, part) for part in zip(*(each[name] for each in gathered), strict=True)]
        result[name] = _amount(parts[0] if len(parts) == 1 else _mean(name, *parts))
    return result


def gather_samples(rows: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Gather the ranks' results for their samples, in the order of the data set.

    `rows` (this rank's samples, ...) has one row for each sample that an unshuffled `DistributedSampler` yielded on
    this rank, in that order; the result (all samples, ...) is on the same device. With `even="exact"`, row i belongs to
    sample i. (With "pad", rows of the repeated samples follow; with `shuffle=True`, rows are in the order of the
    permutation.) A rank without samples may pass any empty tensor, such as `torch.empty(0)`.

    Every rank must call it and gets all rows; blocks. Not differentiable. Raises ArgumentError on every rank if the
    rows of the ranks do not fit together, CollectiveError if a rank is gone.
    """
    gathered = [_Rows(*each) for each in _agree_on("gather_samples", lambda: _describe_rows(rows), group)]
    _check_rows(gathered)
    shape, dtype = next((note for note in gathered if note.shape[0]), gathered[0])
    counts = [note.shape[0] for note in gathered]
    if len(gathered) == 1:
        return rows.detach().clone()
    row_bytes = math.prod(shape[1:]) * getattr(torch, dtype).itemsize
    padded = torch.zeros(max(counts) * row_bytes, dtype=torch.uint8, device=device_of(group))
    mine = torch.empty(rows.numel(), dtype=rows.dtype, device=rows.device).copy_(rows.detach().flatten())
    padded[: mine.nbytes] = mine.view(torch.uint8).to(padded.device)
    every = [torch.empty_like(padded) for _ in gathered]
    if len(padded):
        with waiting_for_peers("gather_samples", group):
            finish(dist.all_gather(every, padded, group=group, async_op=True), device=padded.device)
    whole = torch.empty(sum(counts), *shape[1:], dtype=getattr(torch, dtype), device=rows.device)
    for rank, (count, theirs) in enumerate(zip(counts, every, strict=True)):
        share = theirs[: count * row_bytes].view(whole.dtype).view(count, *shape[1:])
        whole[rank :: len(gathered)] = share.to(rows.device)
    return whole


@dataclass(frozen=True)
class _Amount:
    """One rank's amount: the numbers of a tensor in order, or a single number, whose shape is None."""

    shape: Sequence[int] | None
    values: Sequence[int] | Sequence[float]

    @property
    def is_zero(self) -> bool:
        return self.shape is None and self.values[0] == 0


class _Rows(NamedTuple):
    shape: tuple[int, ...]
    dtype: str


def _agree_on(what: str, read: Callable[[], Any], group: dist.ProcessGroup | None) -> list[Any]:
    """Read the arguments on every rank and return all ranks' results; raise on all ranks if reading fails on one."""
    rank, size = rank_and_size(f"{what}()", group)
    if rank < 0:
        raise ArgumentError(f"{what}: this process is not in the group; only its members may call it")
    mine, reason = None, ""
    problem: Exception | None = None
    try:
        mine = read()
    except Exception as error:  # reading a tensor may raise anything; the other ranks must not wait for this one
        if is_interrupt(error):
            raise
        problem = error
        reason = str(error) if isinstance(error, ArgumentError) else f"{type(error).__name__}: {error}"
    gathered = [(mine, reason)]
    if size > 1:
        with waiting_for_peers(what, group):
            gathered = gather_values((mine, reason), group=group)
    problems = [f"rank {each}: {reason}" for each, (_, reason) in enumerate(gathered) if reason]
    if problems:
        together = ArgumentError(f"{what}: {'; '.join(problems)}")
        if problem is None:
            ranks = range(size) if group is None else dist.get_process_group_ranks(group)
            together.failed_ranks = tuple(ranks[each] for each, (_, reason) in enumerate(gathered) if reason)
        raise together from problem
    return [theirs for theirs, _ in gathered]


def _read_all(metrics: Mapping[str, Amount | tuple[Amount, Amount]]) -> dict[str, list[tuple[Any, ...]]]:
    """Return one amount or two for each name, as the fields of `_Amount`."""
    if not isinstance(metrics, Mapping):
        raise ArgumentError(f"metrics is a {type(metrics).__name__}; it must be a dict of names and amounts")
    read = {}
    for name, given in metrics.items():
        if not isinstance(name, str):
            raise ArgumentError(f"the name {name!r} is not a string")
        amounts = given if isinstance(given, tuple) else (given,)
        if len(amounts) not in (1, 2) or (isinstance(given, tuple) and len(given) == 1):
            raise ArgumentError(f"{name!r} is a tuple of {len(amounts)}; it must be an amount or (sum, count)")
        read[name] = [_read(name, amount) for amount in amounts]
    return read


def _read(name: str, amount: object) -> tuple[Any, ...]:
    if isinstance(amount, Tensor) and not amount.is_complex():
        values = amount.detach().flatten().cpu()
        read = (values.double() if values.is_floating_point() else values).tolist()
        shape = tuple(amount.shape) if amount.dim() else None
        return shape, [int(value) if isinstance(value, bool) else value for value in read]
    if isinstance(amount, numbers.Integral):
        return None, [int(amount)]
    if isinstance(amount, numbers.Real):
        return None, [float(amount)]
    what = f"a tensor of {amount.dtype}" if isinstance(amount, Tensor) else f"{amount!r} ({type(amount).__name__})"
    raise ArgumentError(f"{name!r} holds {what}; an amount is a real number or a tensor of them")


def _describe_rows(rows: Tensor) -> tuple[tuple[int, ...], str]:
    """Return the fields of `_Rows`."""
    if not isinstance(rows, Tensor) or rows.dim() == 0 or rows.layout is not torch.strided:
        what = f"a {rows.layout} tensor of shape {tuple(rows.shape)}" if isinstance(rows, Tensor) else repr(rows)
        raise ArgumentError(f"rows is {what}; it must be a dense tensor (samples, ...)")
    return tuple(rows.shape), str(rows.dtype).removeprefix("torch.")


def _check_names(names: Sequence[set[str]]) -> None:
    for rank, theirs in enumerate(names):
        for name in sorted(names[0] ^ theirs):
            has, lacks = (0, rank) if name in names[0] else (rank, 0)
            raise ArgumentError(
                f"gather_metrics: rank {has} passes {name!r}, but rank {lacks} does not (it passes "
                f"{', '.join(map(repr, sorted(names[lacks]))) or 'nothing'}): pass the same names on every rank, with "
                "0 or (0, 0) on a rank without data"
            )


def _check_kind(name: str, lengths: Sequence[int]) -> None:
    kinds = {1: "one amount", 2: "(sum, count)"}
    for rank, length in enumerate(lengths):
        if length != lengths[0]:
            raise ArgumentError(
                f"gather_metrics: rank {rank} passes {name!r} as {kinds[length]}, but rank 0 as {kinds[lengths[0]]}"
            )


def _check_rows(gathered: Sequence[_Rows]) -> None:
    total = sum(note.shape[0] for note in gathered)
    first = next((rank for rank, note in enumerate(gathered) if note.shape[0]), 0)
    for rank, note in enumerate(gathered):
        if note.shape[0] != (share := len(range(rank, total, len(gathered)))):
            raise ArgumentError(
                f"gather_samples: rank {rank} has {note.shape[0]} rows, but {share} of {total} rows are its share (all "
                f"have {', '.join(str(each.shape[0]) for each in gathered)}): pass a row for each index that "
                'DistributedSampler(..., even="exact") yielded on this rank, and leave drop_last of the DataLoader out'
            )
        if note.shape[0] and (note.shape[1:], note.dtype) != (gathered[first].shape[1:], gathered[first].dtype):
            raise ArgumentError(
                f"gather_samples: rank {rank} has rows of shape {note.shape[1:]} and {note.dtype}, but rank {first} of "
                f"shape {gathered[first].shape[1:]} and {gathered[first].dtype}"
            )


def _total(name: str, amounts: Sequence[_Amount]) -> _Amount:
    """Return the sum over the ranks, elementwise."""
    first = next((rank for rank, each in enumerate(amounts) if each.shape is not None), 0)
    shape = amounts[first].shape
    for rank, each in enumerate(amounts):
        if each.shape != shape and not each.is_zero:
            one, other = ("a number" if s is None else f"of shape {tuple(s)}" for s in (each.shape, shape))
            raise ArgumentError(f"gather_metrics: rank {rank} passes {name!r} as {one}, but rank {first} {other}")
    return _Amount(
        shape,
        [exact_sum(values) for values in zip(*(each.values for each in amounts if each.shape == shape), strict=True)],
    )


def _mean(name: str, total: _Amount, count: _Amount) -> _Amount:
    if count.shape not in (None, total.shape):
        raise ArgumentError(
            f"gather_metrics: the count of {name!r} has shape {tuple(count.shape or ())}, but its sum "
            f"{'is a number' if total.shape is None else f'has shape {tuple(total.shape)}'}"
        )
    counts = count.values if count.shape is not None else [count.values[0]] * len(total.values)
    return _Amount(total.shape, [a / b if b else math.nan for a, b in zip(total.values, counts, strict=True)])


def _amount(total: _Amount) -> Amount:
    if total.shape is None:
        return total.values[0]
    dtype = torch.int64 if all(isinstance(value, int) for value in total.values) else torch.float64
    return torch.tensor(total.values, dtype=dtype, device="cpu").reshape(*total.shape)
