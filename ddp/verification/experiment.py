"""Runs copies of a user's model, alone and in a wrapper, and compares the gradients. Called by `verify`.

Every rank must make the same calls with the same batch. Rank 0 makes all decisions.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ddp import rng
from ddp.comm.objects import gather_values
from ddp.data_parallel.wrapper import DistributedDataParallel
from ddp.errors import ArgumentError
from ddp.monitoring.stall_report import waiting_for_peers
from ddp.torch_internals import tree_leaves, tree_map_only

T = TypeVar("T")
LossFunction = Callable[[nn.Module, Any], torch.Tensor]
_SEED = 20200713
_FLOOR = 0.01  # of the tolerance: this part of the model's largest gradient counts as zero in every parameter


@dataclass(frozen=True)
class Difference:
    """A parameter whose gradients differ: |distributed - alone| / |alone|, and the factor from alone that fits best."""

    name: str
    relative_error: float
    ratio: float


@dataclass(frozen=True)
class Comparison:
    """The results of one run alone and one distributed. `unused_*` are parameters without a gradient."""

    loss_alone: float
    loss_distributed: float
    loss_is_equal: bool
    differences: tuple[Difference, ...]
    largest_error: float
    unused_alone: tuple[str, ...]
    unused_distributed: tuple[str, ...]


@dataclass(frozen=True)
class RunResult:
    """The loss and the gradients by parameter in float64 on the CPU; None if there is none."""

    loss: float
    gradients: Mapping[str, torch.Tensor | None]


class Experiment:
    """Runs of copies of `model` on `batch`, alone and on the ranks of `group`; both stay unchanged.

    `batch` is the same whole batch on every rank, `rows` its length; `tolerance` is relative. All gradients are
    compared in float64, whatever the model computes in.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        batch: Any,
        *,
        rows: int,
        group: dist.ProcessGroup | None,
        tolerance: float,
        dtype: torch.dtype,
    ) -> None:
        self.model = model
        self.tolerance = tolerance
        self.world_size = 1 if group is None else group.size()
        self._loss_fn, self._batch, self._rows, self._dtype = loss_fn, batch, rows, dtype
        self._group = group
        self._rank = 0 if group is None else group.rank()

    def alone(self) -> RunResult:
        """Run the whole batch in this process."""
        return self._run(copy.deepcopy(self.model), self._selected(None), _SEED)

    def on_shard(self) -> RunResult:
        """Run this rank's shard, without a wrapper."""
        return self._run(copy.deepcopy(self.model), self._selected(self._shard()), _SEED + 1 + self._rank)

    def distributed(self) -> RunResult:
        """Run this rank's shard in a wrapper. Every rank must call it; blocks."""
        model = DistributedDataParallel(copy.deepcopy(self.model), process_group=self._group)
        mine = self._run(model, self._selected(self._shard()), _SEED + 1 + self._rank)
        losses = gather(mine.loss, self._group)
        return RunResult(sum(losses) / len(losses), mine.gradients)

    def compare(self) -> Comparison:
        """Return rank 0's comparison of both. Every rank must call it; blocks."""
        received = gather(asdict(self.difference(self.alone(), self.distributed())), self._group)[0]
        return Comparison(**{**received, "differences": tuple(Difference(**each) for each in received["differences"])})

    def _shard(self) -> torch.Tensor:
        return torch.arange(self._rows, device="cpu").chunk(self.world_size)[self._rank]

    def _selected(self, rows: torch.Tensor | None) -> Any:
        """Copy these rows of the batch: a loss may change its batch in place."""

        def select(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() == 0 or rows is None:
                return tensor.clone()
            return tensor[rows.to(tensor.device)]

        return tree_map_only(torch.Tensor, select, self._batch)

    def _run(self, model: nn.Module, batch: Any, seed: int) -> RunResult:
        with _undisturbed(self._devices(), self._dtype), torch.enable_grad():
            _seed_all(seed, self._devices())
            loss = self._loss_fn(model, batch)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
                raise ArgumentError(
                    f"loss_fn must return a tensor of one element with a gradient, not {_described(loss)}"
                )
            loss.backward()
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        gradients = {
            name: None if p.grad is None else _comparable(p.grad)
            for name, p in inner.named_parameters()
            if p.requires_grad
        }
        return RunResult(float(loss.detach()), gradients)

    def _devices(self) -> list[int]:
        tensors = [*self.model.parameters(), *self.model.buffers(), *tree_leaves(self._batch)]
        devices = {t.device for t in tensors if isinstance(t, torch.Tensor)}
        return sorted({device.index for device in devices if device.type == "cuda" and device.index is not None})

    def difference(self, alone: RunResult, other: RunResult) -> Comparison:
        """Compare the gradients of two runs. A missing gradient counts as zeros."""
        pairs = {}
        for name, a in alone.gradients.items():
            d = other.gradients[name]
            if a is not None or d is not None:
                shape = (a if d is None else d).shape  # type: ignore[union-attr]  # one of them is not None
                pairs[name] = tuple(
                    torch.zeros(shape, dtype=torch.float64, device="cpu") if t is None else t for t in (a, d)
                )
        largest = max((_peak(t) for pair in pairs.values() for t in pair), default=0.0)
        differences, worst = [], 0.0
        for name, (a, d) in pairs.items():
            gap, scale = _peak(d - a), max(_peak(a), _peak(d))
            if not gap <= self.tolerance * (scale + _FLOOR * largest):  # also true for NaN
                differences.append(
                    Difference(name, _quotient((d - a).norm(), a.norm()), _quotient((d * a).sum(), (a * a).sum()))
                )
            worst = max(worst, gap / max(scale, _FLOOR * largest, sys.float_info.min))
        scale = max(abs(alone.loss), abs(other.loss))
        return Comparison(
            loss_alone=alone.loss,
            loss_distributed=other.loss,
            loss_is_equal=abs(alone.loss - other.loss) <= self.tolerance * scale,
            differences=tuple(differences),
            largest_error=worst,
            unused_alone=tuple(name for name, g in alone.gradients.items() if g is None),
            unused_distributed=tuple(name for name, g in other.gradients.items() if g is None),
        )


def gather(mine: T, group: dist.ProcessGroup | None) -> list[T]:
    """Return the values of all ranks; without a group, only this one's. Every rank must call it; blocks."""
    if group is None:
        return [mine]
    with waiting_for_peers("exchange of ddp.verify", group):
        return gather_values(mine, group=group)


def _described(loss: object) -> str:
    if not isinstance(loss, torch.Tensor):
        return f"a {type(loss).__name__}"
    return f"one of shape {tuple(loss.shape)}" + ("" if loss.requires_grad else " without gradient")


@contextmanager
def _undisturbed(devices: Sequence[int], dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype to `dtype`; restore it and every random number generator at the end."""
    states, default = rng.capture(), torch.get_default_dtype()
    with torch.random.fork_rng(devices=devices):
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(default)
            rng.restore(states)


def _seed_all(seed: int, devices: Sequence[int]) -> None:
    rng.seed_on_host(seed)
    torch.default_generator.manual_seed(seed)
    for index in devices:
        torch.cuda.default_generators[index].manual_seed(seed)


def _comparable(grad: torch.Tensor) -> torch.Tensor:
    """Return the elements as (n,) float64 on the CPU; of complex numbers both parts."""
    dense = grad.detach().to_dense() if grad.layout is not torch.strided else grad.detach()
    if dense.is_complex():
        dense = torch.view_as_real(dense.resolve_conj())
    return dense.to("cpu", torch.float64).reshape(-1)


def _peak(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _quotient(above: torch.Tensor, below: torch.Tensor) -> float:
    if float(below) == 0:
        return math.inf if float(above) else math.nan
    return float(above / below)
