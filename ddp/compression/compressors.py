"""Compressors of gradients, by name, as communication hooks.

    model = ddp.DistributedDataParallel(model, compression="bf16")

or with torch's class, whose hooks have the same signature:

    state, hook = ddp.make_compression("int8")
    model.register_comm_hook(state, hook)

A compressor gets a bucket of this rank's gradients and returns a future of their averages. The averages are bitwise
equal on every rank, so replicas stay equal. Which one pays off depends on the network: measure (scripts/bench).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ddp.comm.objects import gather_values
from ddp.compression.compressor import Compressor
from ddp.compression.half import Half
from ddp.compression.int8 import Int8
from ddp.compression.powersgd import PowerSGD
from ddp.errors import ArgumentError, LayoutMismatchError, NotInitializedError
from ddp.monitoring.stall_report import waiting_for_peers


class CompressionHook(NamedTuple):
    """The arguments of `register_comm_hook(state, hook)`."""

    state: Compressor
    hook: Callable[[Compressor, Any], torch.futures.Future[torch.Tensor]]


_NAMED: dict[str, Half | Int8 | PowerSGD] = {
    "fp16": Half(torch.float16),
    "bf16": Half(torch.bfloat16),
    "int8": Int8(),
    "powersgd": PowerSGD(),
}


def named(method: str) -> Half | Int8 | PowerSGD:
    """Return the method with this name, with its default settings. Raises ArgumentError for an unknown one."""
    if method not in _NAMED:
        raise ArgumentError(f"compression={method!r}; there are {', '.join(map(repr, _NAMED))}")
    return _NAMED[method]


# Torch's register_comm_hook reads these annotations, and refuses strings: no `from __future__ import annotations` here.
def compress_hook(
    state: Compressor,
    bucket: dist.GradBucket,
) -> torch.futures.Future[torch.Tensor]:
    """Start averaging a bucket; the communication hook of every compressor."""
    return state.reduce(bucket)


def make_compression(
    compression: str | Half | Int8 | PowerSGD,
    group: dist.ProcessGroup | None = None,
    *,
    parameters: Mapping[str, torch.Tensor] | None = None,
) -> CompressionHook:
    """Return the state and the hook for `compression`: "fp16", "bf16", "int8", "powersgd" or one with its settings.

    `parameters` are the model's by name, `dict(model.named_parameters())`: with them, the state in a checkpoint fits
    the model with any plan of buckets. Without, it fits only if the first pass has the same buckets.

    Every rank of `group` (default: all) must call it with the same argument; blocks until all do. Raises
    ArgumentError for an unknown method and LayoutMismatchError if the ranks' methods differ.
    """
    if isinstance(compression, str):
        compression = named(compression)
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
    return CompressionHook(compression.compressor(group, parameters), compress_hook)


def _need_same(group: dist.ProcessGroup, mine: str) -> None:
    with waiting_for_peers("comparison of the compressions", group):
        every = gather_values(mine, group=group)
    for rank, other in enumerate(every):
        if other != every[0]:
            raise LayoutMismatchError(
                f"compression: rank {rank} of the group has {other}, rank 0 has {every[0]}; it must be the same",
                rank=rank,
                entry="compression",
            )
