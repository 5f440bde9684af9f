"""Gradients travel as products of two thin matrices: torch's PowerSGD hook, made safe for what training loops do.

The method is that of Vogels et al. 2019, PowerSGD: Practical Low-Rank Gradient Compression
for Distributed Optimization, arXiv:1905.13727; the hook is torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ddp.compression.compressor import Bucket, Compressor, LoadedBuckets, completed, mean_over_ranks
from ddp.errors import ArgumentError, CheckpointError, UnsupportedError
from ddp.monitoring.stall_report import waiting_for_peers

__all__ = ["PowerSGD", "PowerSGDCompressor"]

# Torch's default of 0 divides by zero where a gradient is zero, for instance of a parameter that was not used.
_EPSILON = 1e-8


@dataclass(frozen=True)
class PowerSGD:
    """Torch's PowerSGD: matrices as products of two of rank `rank`, after `start_step` steps of plain averages.

    The first steps are the ones that approximation harms most; torch advises a tenth of all steps. A gradient that
    does not shrink by `min_compression_rate` is sent as it is. Needs numpy.

    Rank 2 is the one to avoid: for up to two columns torch's hook orthogonalises by one pass of Gram-Schmidt, which
    loses a second column that is nearly a multiple of the first. Where gradients were of rank one (a batch of one row),
    averages came out up to twice as large, to be taken back by later steps; ranks 1 and 3 do not have this.
    """

    rank: int = 1
    start_step: int = 1000
    min_compression_rate: float = 2.0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ArgumentError(f"PowerSGD(rank={self.rank}): at least 1")
        if self.start_step < 2:
            raise ArgumentError(f"PowerSGD(start_step={self.start_step}): at least 2, buckets change after the first")

    def compressor(self, group: dist.ProcessGroup) -> PowerSGDCompressor:
        return PowerSGDCompressor(group, self)


class PowerSGDCompressor(Compressor):
    """Averages buckets, from step `start_step` on by matrices of rank `rank`.

    What it adds to torch's hook: it forgets what it remembers of a bucket that is not finite (a GradScaler's skipped
    step) or that has other gradients than last time; it takes gradients of any shape and layout; a world of one
    compresses nothing.

    On the CPU a bucket is finished before backward goes on: torch's hook starts collectives from the threads that
    end others, in no order that ranks share, which with several buckets on their way stalls or mixes them up.
    """

    def __init__(self, group: dist.ProcessGroup, settings: PowerSGD) -> None:
        super().__init__(group, "powersgd")
        try:
            from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

            self._state: Any = powersgd.PowerSGDState(
                group,
                matrix_approximation_rank=settings.rank,
                start_powerSGD_iter=settings.start_step,
                min_compression_rate=settings.min_compression_rate,
                orthogonalization_epsilon=_EPSILON,
            )
        except ImportError as error:
            raise UnsupportedError(
                f"compression by PowerSGD needs numpy, which torch's hook draws random numbers with: {error}"
            ) from error
        self._hook = powersgd.powerSGD_hook
        self._rank = settings.rank
        self._shapes: dict[int, list[torch.Size]] = {}
        self._loaded = LoadedBuckets()

    def reduce(self, bucket: Bucket) -> torch.futures.Future[torch.Tensor]:
        assert self._group is not None
        index, buffer = bucket.index(), bucket.buffer()
        held = self._loaded.fetch(bucket)
        if self._size == 1:
            if held is not None:
                buffer.add_(held["error"].to(buffer))
            self._state.maybe_increase_iter(bucket)
            return completed(buffer)
        matrices = _matrices_of(bucket)
        shapes = [matrix.shape for matrix in matrices.gradients()]
        if self._shapes.get(index) != shapes:
            self._forget(index)
            self._shapes[index] = shapes
        if held is not None:
            self._take(index, held, buffer)
        is_plain = self._state.iter < self._state.start_powerSGD_iter
        with waiting_for_peers(f"PowerSGD of bucket {index}", self._group):
            started: torch.futures.Future[torch.Tensor] = self._hook(self._state, matrices)
            if is_plain:
                return started
            if buffer.device.type == "cpu":
                return completed(self._checked(index, started.wait()))
        return started.then(lambda done: self._checked(index, done.value()))

    def state_dict(self) -> dict[str, Any]:
        assert self._group is not None
        state = self._state
        buckets = []
        for index in sorted(state.error_dict):
            error = state.error_dict[index]
            mean_over_ranks(self._group, error)  # which is all that the sum over ranks sees of it
            held = {"index": index, "numel": error.numel(), "error": error.clone()}
            if index in state.q_memory_dict:
                held |= {"q": state.q_memory_dict[index].clone(), "p_numel": state.p_memory_dict[index].numel()}
            buckets.append(held)
        _, keys, position, *_ = state.rng.get_state(legacy=True)
        return {
            "method": self._name,
            "rank": self._rank,
            "step": state.iter,
            "random": {"keys": [int(key) for key in keys], "position": int(position)},
            "buckets": self._loaded.with_rest(buckets),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._need_own(state)
        if state.get("rank") != self._rank:
            raise CheckpointError(f"the state is that of PowerSGD of rank {state.get('rank')}, this has {self._rank}")
        loaded = LoadedBuckets(state)
        try:
            step = int(state["step"])
            keys, position = state["random"]["keys"], int(state["random"]["position"])
            self._state.rng.set_state(("MT19937", keys, position))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"not the state of a compressor ({type(error).__name__}: {error})") from error
        self._state.iter = step
        for index in list(self._shapes):
            self._forget(index)
        self._loaded = loaded

    def close(self) -> None:
        super().close()
        self._state.process_group = None

    def _checked(self, index: int, buffer: torch.Tensor) -> torch.Tensor:
        """Forget a bucket that is not finite: its errors would never be. All ranks have the same buffer, so all do."""
        if not bool(buffer.isfinite().all()):
            self._forget(index)
        return buffer

    def _forget(self, index: int) -> None:
        for memory in (self._state.error_dict, self._state.p_memory_dict, self._state.q_memory_dict):
            memory.pop(index, None)

    def _take(self, index: int, held: Mapping[str, Any], buffer: torch.Tensor) -> None:
        self._state.error_dict[index] = held["error"].to(buffer).clone()
        if "q" in held:
            self._state.q_memory_dict[index] = held["q"].to(buffer).clone()
            self._state.p_memory_dict[index] = buffer.new_zeros(held["p_numel"])


def _matrices_of(bucket: Bucket) -> Any:
    """A bucket as torch's hook reads it, its gradients as contiguous views of one or more dimensions.

    The hook takes the first dimension for the rows and cannot take scalars, empty or channels_last gradients.
    """
    gradients = [_contiguous(gradient) for gradient in bucket.gradients() if gradient.numel()]
    return SimpleNamespace(
        index=bucket.index, buffer=bucket.buffer, is_last=bucket.is_last, gradients=lambda: gradients
    )


def _contiguous(gradient: torch.Tensor) -> torch.Tensor:
    """The memory of a dense gradient as a contiguous view: its dimensions in the order of their strides."""
    real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    order = sorted(range(real.dim()), key=lambda dim: (real.stride(dim), real.size(dim)), reverse=True)
    return real.permute(order) if real.dim() else real.view(1)
