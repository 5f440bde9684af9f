"""Checks whether a model trains distributed as it does alone, before hours are spent on it.

    print(ddp.verify(model, lambda model, batch: criterion(model(batch["x"]), batch["y"]), batch))

`verify` checks its arguments, makes the ranks agree and writes the report.
"""

from __future__ import annotations

import copy
import hashlib
import textwrap
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp.comm.fingerprint import fingerprints
from ddp.comm.objects import member_group
from ddp.data_parallel.wrapper import DistributedDataParallel
from ddp.errors import ArgumentError
from ddp.monitoring.interrupts import is_interrupt
from ddp.torch_internals import apply_to_tensors, tree_flatten, tree_map_only, unwrapped
from ddp.verification.experiment import Comparison, Difference, Experiment, LossFunction, gather

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}
_SHOWN = 6
_COLUMNS = 118


@dataclass(frozen=True)
class Verification:
    """The result of `verify`, the same on every rank; print it for a report.

    `differences` are the parameters whose gradients differ, in the order of the model; `compared` is the number that
    was compared, and `largest_error` the largest relative error among all. `drifted` names a parameter of a wrapped
    model whose weights differed between ranks. `unused` are parameters that got no gradient, neither alone nor
    distributed. Losses are those of the whole batch alone and the mean over the ranks; `dtype` is that of the runs.
    """

    ok: bool
    world_size: int
    loss_alone: float
    loss_distributed: float
    compared: int
    differences: tuple[Difference, ...]
    largest_error: float
    drifted: str
    unused: tuple[str, ...]
    dtype: torch.dtype
    tolerance: float

    def __str__(self) -> str:
        if self.world_size == 1:
            return (
                f"ddp.verify: nothing to compare, the world has one rank (loss {self.loss_alone:.6g}); "
                "start the script with several, e.g. dtrain run --nproc-per-node 2"
            )
        lines = [
            f"ddp.verify: {self.world_size} ranks with a shard each, against one process with the whole batch "
            f"({self.dtype}, tolerance {self.tolerance:g})",
            f"  loss        {self.loss_alone:.6g} alone, {self.loss_distributed:.6g} distributed",
        ]
        if self.differences:
            first = self.differences[0].name
            lines.append(
                f"  gradients   {len(self.differences)} of {self.compared} parameters differ, {first!r} is the first:"
            )
            lines += self._table()
        else:
            lines.append(
                f"  gradients   {self.compared} parameters agree, relative error at most {self.largest_error:.1e}"
            )
        if self.unused:
            lines.append(f"  unused      {len(self.unused)} parameters have no gradient, {self.unused[0]!r} first")
        if self.drifted:
            lines.append(textwrap.fill(self.drifted, _COLUMNS, initial_indent="  ", subsequent_indent="  "))
        lines.append(f"  {'the same' if self.ok else 'NOT THE SAME'}")
        return "\n".join(lines)

    def _table(self) -> list[str]:
        worst = sorted(self.differences, key=lambda each: -each.relative_error)
        width = max(len(each.name) for each in worst[:_SHOWN])
        rows = [
            f"    {each.name:<{width}}  relative error {each.relative_error:.1e}, distributed / alone {each.ratio:.6g}"
            for each in worst[:_SHOWN]
        ]
        more = len(worst) - _SHOWN
        return [*rows, f"    and {more} more"] if more > 0 else rows


def verify(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    *,
    double: bool = True,
    tolerance: float | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Verification:
    """Compare the gradients of `model` on `batch`, computed alone and by all ranks together.

    `loss_fn(model, batch)` returns the loss as a tensor of one element. `batch` is a tensor, or dicts, lists and tuples
    of tensors, whose first dimension is the batch; numbers, None and tensors without dimensions go to every rank as
    they are. Every rank must call it with the same whole batch, of a length that the number of ranks divides; it blocks
    until all have. Alone, a copy of the model sees the whole batch; distributed, each rank's copy, wrapped in
    ddp.DistributedDataParallel, sees an equal part of it, in order.

    A wrapped model is taken out of its wrapper. The model, its gradients, buffers and mode, the batch and the random
    number generators stay as they are. With `double`, copies are in float64, to exclude rounding; a model that cannot
    run in float64 is compared in its own dtype. `tolerance` is the relative error up to which gradients are equal
    (default 1e-9 in float64, 1e-3 in float32, 5e-2 in 16 bits).

    Dropout and batch norm always differ: pass a model in eval mode, or without them, to compare the rest. It takes a
    few runs, and memory for three more copies of the model and its gradients.

    Raises ArgumentError on every rank if the batches differ or cannot be divided, or if `loss_fn` fails or does not
    return such a loss; LayoutMismatchError if the ranks' models are different.
    """
    is_wrapped = isinstance(model, DistributedDataParallel | nn.parallel.DistributedDataParallel)
    if process_group is None and is_wrapped:
        process_group = model.process_group  # type: ignore[assignment]  # an attribute, not a submodule
    group = _group(process_group)
    inner = _trainable(model)
    rows = _require_same_batch(batch, group)
    drifted = _drifted(inner, group) if is_wrapped and group is not None else ""
    base = _equal_copy(inner, group)
    experiment = _experiment(base, loss_fn, batch, rows, group, double=double, tolerance=tolerance)
    if group is None:
        return _verification(experiment, experiment.difference(result := experiment.alone(), result), "")
    return _verification(experiment, experiment.compare(), drifted)


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the group to compare in, or None for a world of one."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    group = member_group(group, "ddp.verify")
    return group if group.size() > 1 else None


def _trainable(model: nn.Module) -> nn.Module:
    model = unwrapped(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ArgumentError("no parameter of the model requires a gradient, so there is nothing to compare")
    return model


def _require_same_batch(batch: Any, group: dist.ProcessGroup | None) -> int:
    """Return the number of samples in the batch that all ranks hold. Raises ArgumentError on every rank."""
    world = 1 if group is None else group.size()
    problem, rows, digest = "", 0, ""
    try:
        rows = _rows(batch)
        if rows % world:
            problem = (
                f"the batch has {rows} samples, which {world} ranks cannot share equally: pass "
                f"{rows - rows % world or world}, or another multiple of {world}"
            )
        digest = _digest(batch)
    except ArgumentError as error:
        problem = str(error)
    gathered = gather((problem, digest), group)
    for rank, (found, _) in enumerate(gathered):
        if found:
            raise ArgumentError(found if world == 1 else f"rank {rank}: {found}")
    for rank, (_, other) in enumerate(gathered):
        if other != gathered[0][1]:
            raise ArgumentError(
                f"rank {rank} has another batch than rank 0: pass the same whole batch on every rank, verify() splits "
                "it itself (does it come from a sampler that gives each rank its part, or from another shuffle?)"
            )
    return rows


def _rows(batch: Any) -> int:
    lengths: dict[int, None] = {}
    for leaf in tree_flatten(batch)[0]:
        if isinstance(leaf, torch.Tensor):
            if leaf.dim():
                lengths[len(leaf)] = None
        elif leaf is not None and not isinstance(leaf, int | float | complex):
            raise ArgumentError(
                f"batch holds a {type(leaf).__module__}.{type(leaf).__qualname__}: it must be tensors in dicts, lists "
                "and tuples (for other classes, pass dict(...) or vars(...))"
            )
    if len(lengths) != 1:
        found = f"first dimensions {', '.join(map(str, lengths))}" if lengths else "no tensor with a first dimension"
        raise ArgumentError(f"batch has {found}: every tensor in it must have one row for each sample")
    (rows,) = lengths
    if not rows:
        raise ArgumentError("batch has no samples")
    return rows


def _digest(batch: Any) -> str:
    leaves, structure = tree_flatten(batch)
    digest = hashlib.sha256(str(structure).encode())
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode() + _bytes(leaf))
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    flat = plain.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def _drifted(model: nn.Module, group: dist.ProcessGroup) -> str:
    """Return which parameter differs between replicas that should be equal. Every rank must call it; blocks."""
    every = gather(fingerprints(dict(model.named_parameters())), group)
    for rank, other in enumerate(every):
        for name, here in every[0].items():
            if here != other.get(name, here):
                return (
                    f"the replicas of the wrapped model have drifted: {name!r} on rank {rank} is not that of rank 0; "
                    "something changed it on some ranks only (the runs here all start from rank 0's)"
                )
    return ""


def _equal_copy(model: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    """Copy the model, with the parameters and buffers of rank 0. Every rank must call it; blocks."""
    problem, copied = "", None
    try:
        copied = copy.deepcopy(model)
    except Exception as error:  # a __deepcopy__ may raise anything; the other ranks must not wait
        if is_interrupt(error):
            raise
        problem = f"the model cannot be copied (copy.deepcopy): {type(error).__name__}: {error}"
    _raise_together(problem, group)
    assert copied is not None
    if group is not None:
        DistributedDataParallel(copied, process_group=group)  # compares the layouts and copies rank 0's values
    return copied


def _experiment(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    rows: int,
    group: dist.ProcessGroup | None,
    *,
    double: bool,
    tolerance: float | None,
) -> Experiment:
    """Return an experiment that is known to run: in float64 if requested and possible on every rank."""

    def prepared(in_double: bool) -> Experiment:
        dtypes = {torch.float64} if in_double else {p.dtype for p in model.parameters() if p.requires_grad}
        return Experiment(
            _doubled(copy.deepcopy(model)) if in_double else model,
            loss_fn,
            tree_map_only(torch.Tensor, _double, batch) if in_double else batch,
            rows=rows,
            group=group,
            tolerance=max(_TOLERANCES.get(d, _TOLERANCES[torch.float32]) for d in dtypes)
            if tolerance is None
            else tolerance,
            dtype=torch.float64 if in_double else torch.get_default_dtype(),
        )

    if double:
        experiment = prepared(True)
        if not any(gather(_problem(experiment), group)):
            return experiment
    experiment = prepared(False)
    _raise_together(_problem(experiment), group)
    return experiment


def _problem(experiment: Experiment) -> str:
    """Return why the loss cannot be computed on this rank, alone or on its shard; empty if it can."""
    try:
        result = experiment.alone()
        experiment.on_shard()
    except Exception as error:  # the user's code may raise anything; the other ranks must not wait
        if is_interrupt(error):
            raise
        return f"loss_fn(model, batch) failed: {type(error).__name__}: {error}"
    if all(gradient is None for gradient in result.gradients.values()):
        return "no parameter got a gradient: loss_fn must use the model that it is called with, a copy of yours"
    return ""


def _double(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _doubled(model: nn.Module) -> nn.Module:
    apply_to_tensors(model, _double)
    return model


def _raise_together(problem: str, group: dist.ProcessGroup | None) -> None:
    """Raise ArgumentError on every rank if one has a problem. Every rank must call it; blocks."""
    for rank, found in enumerate(gather(problem, group)):
        if found:
            raise ArgumentError(found if group is None else f"rank {rank}: {found}")


def _verification(experiment: Experiment, found: Comparison, drifted: str) -> Verification:
    trained = [(name, p) for name, p in experiment.model.named_parameters() if p.requires_grad]
    unused = tuple(name for name in found.unused_alone if name in set(found.unused_distributed))
    dtype = next((p.dtype for _, p in trained if p.is_floating_point()), trained[0][1].dtype)
    return Verification(
        ok=found.loss_is_equal and not found.differences and not drifted,
        world_size=experiment.world_size,
        loss_alone=found.loss_alone,
        loss_distributed=found.loss_distributed,
        compared=len(trained) - len(unused),
        differences=found.differences,
        largest_error=found.largest_error,
        drifted=drifted,
        unused=unused,
        dtype=dtype,
        tolerance=experiment.tolerance,
    )
