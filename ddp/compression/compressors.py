"""Less to send: compressors of gradients, by name, as communication hooks.

    model = ddp.DistributedDataParallel(model, compression="bf16")

or with torch's class, whose hooks have the same form:

    state, hook = ddp.make_compression("int8")
    model.register_comm_hook(state, hook)

A compressor gets a bucket of this rank's gradients and returns a future of their averages. On every rank the averages
have the same bits, so replicas stay equal. Which one pays depends on the network: measure (scripts/bench).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from ddp.comm.objects import gather_values
from ddp.compression.half import HalfCompressor
from ddp.compression.int8 import Int8Compressor
from ddp.compression.powersgd import PowerSGDCompressor
from ddp.compression.state import Bucket
from ddp.errors import ArgumentError, LayoutMismatchError, NotInitializedError

__all__ = ["CompressionHook", "Compressor", "Half", "Int8", "PowerSGD", "compress_hook", "make_compression"]


class Compressor(Protocol):
    """The state of the hook: what averages buckets, and what a checkpoint must hold of it."""

    def reduce(self, bucket: Bucket) -> torch.futures.Future[torch.Tensor]:
        """Start averaging the bucket; its buffer has the sums of this rank, the future will have the averages."""

    def state_dict(self) -> dict[str, Any]:
        """Return numbers, strings, tensors, lists and dicts. Every rank must call it, between two steps; blocks."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict()` returned on any rank. Raises CheckpointError if it cannot be meant."""

    def close(self) -> None:
        """Let go of the process group, before it is destroyed. The compressor cannot be used after that."""


class CompressionHook(NamedTuple):
    """What `register_comm_hook(state, hook)` takes."""

    state: Compressor
    hook: Callable[[Compressor, Any], torch.futures.Future[torch.Tensor]]


@dataclass(frozen=True)
class Half:
    """16 bits for each value, summed in float32. `dtype`: torch.bfloat16, or torch.float16 with a GradScaler."""

    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.dtype not in (torch.bfloat16, torch.float16):
            raise ArgumentError(f"Half(dtype={self.dtype}): torch.bfloat16 or torch.float16")

    def compressor(self, group: dist.ProcessGroup) -> Compressor:
        return HalfCompressor(group, self.dtype, name="bf16" if self.dtype is torch.bfloat16 else "fp16")


@dataclass(frozen=True)
class Int8:
    """A byte for each value and a scale for each `block` of them; `error_feedback` adds to a step what the last lost.

    A smaller block is more exact: one of 512 takes 0.8 % more bytes for its scale.
    """

    block: int = 512
    error_feedback: bool = True

    def __post_init__(self) -> None:
        if self.block < 16 or self.block % 4:
            raise ArgumentError(f"Int8(block={self.block}): a multiple of 4, at least 16")

    def compressor(self, group: dist.ProcessGroup) -> Compressor:
        return Int8Compressor(group, block=self.block, error_feedback=self.error_feedback)


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

    def compressor(self, group: dist.ProcessGroup) -> Compressor:
        return PowerSGDCompressor(
            group,
            rank=self.rank,
            start_step=self.start_step,
            min_compression_rate=self.min_compression_rate,
        )


_NAMED: dict[str, Half | Int8 | PowerSGD] = {
    "fp16": Half(torch.float16),
    "bf16": Half(torch.bfloat16),
    "int8": Int8(),
    "powersgd": PowerSGD(),
}


# Torch's register_comm_hook reads these annotations, and refuses strings: no `from __future__ import annotations` here.
def compress_hook(
    state: Compressor,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # not in torch's stubs
) -> torch.futures.Future[torch.Tensor]:
    """The communication hook of every compressor."""
    return state.reduce(bucket)


def make_compression(
    compression: str | Half | Int8 | PowerSGD, group: dist.ProcessGroup | None = None
) -> CompressionHook:
    """Return the state and the hook for `compression`: "fp16", "bf16", "int8", "powersgd" or one with its settings.

    Every rank of `group` (default: all) must call it with the same argument; blocks until all do. Raises
    ArgumentError for an unknown one and LayoutMismatchError if ranks ask for different ones.
    """
    if isinstance(compression, str):
        if compression not in _NAMED:
            raise ArgumentError(f"compression={compression!r}; there are {', '.join(map(repr, _NAMED))}")
        compression = _NAMED[compression]
    if not isinstance(compression, Half | Int8 | PowerSGD):
        raise ArgumentError(
            f"compression={compression!r}; it is one of {', '.join(map(repr, _NAMED))}, Half(...), Int8(...) or "
            "PowerSGD(...); a hook of your own goes to register_comm_hook()"
        )
    if not dist.is_initialized():
        raise NotInitializedError("there is no process group yet: call ddp.init() before make_compression()")
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise ArgumentError(f"this rank ({dist.get_rank()}) is not a member of the group: make it on its members only")
    _need_same(group, repr(compression))
    return CompressionHook(compression.compressor(group), compress_hook)


def _need_same(group: dist.ProcessGroup, mine: str) -> None:
    every = gather_values(mine, group=group)
    for rank, other in enumerate(every):
        if other != every[0]:
            raise LayoutMismatchError(
                f"compression: rank {rank} of the group has {other}, rank 0 has {every[0]}; it must be the same",
                rank=rank,
                entry="compression",
            )
