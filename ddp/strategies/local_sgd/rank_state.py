"""Compares the states of local SGD's ranks and averages their replicas. Called by `averaging`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ddp.comm.broadcast import broadcast_tensors
from ddp.errors import DriftError, LayoutMismatchError
from ddp.monitoring.stall_report import finish, waiting_for_peers

_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class RankState:
    """A rank's state as sent before averaging, with a fingerprint of each tensor by its name."""

    is_waiting: bool
    step: int
    own_steps: int
    settings: Mapping[str, Any]
    values: Mapping[str, int]
    starts: Mapping[str, int]
    momenta: Mapping[str, int]


def compare(states: Sequence[RankState]) -> None:
    """Raise an error if averaging cannot make the ranks equal."""
    may_differ = any(state.is_waiting for state in states)  # in their steps: some ranks ran out of data
    first = states[0]
    for rank, state in enumerate(states):
        for what, theirs, expected in (
            ("settings", state.settings, first.settings),
            ("steps of its own", state.own_steps, state.own_steps if may_differ else first.own_steps),
            ("tensors", list(state.values), list(first.values)),
        ):
            if theirs != expected:
                raise LayoutMismatchError(
                    f"LocalSGD has other {what} on rank {rank} than on rank 0: {theirs} instead of {expected}; make it "
                    "with the same arguments on every rank, and call sync() on all after the same step",
                    rank=rank,
                    entry=what,
                )
        for what, theirs, expected in (
            ("starting point of the last steps", state.starts, first.starts),
            ("outer momentum", state.momenta, first.momenta),
        ):
            for name in (*expected, *theirs):
                if theirs.get(name) != expected.get(name):
                    raise DriftError(
                        f"the {what} of {name!r} is another on rank {rank} than on rank 0, so averaging would leave "
                        f"the replicas different at step {state.step}: change weights on every rank alike, and load "
                        "the same state into the model and into LocalSGD on all",
                        parameter=name,
                        step=state.step,
                        ranks=(rank,),
                    )


def average(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor]) -> None:
    """Write the average over the ranks into each tensor, in its own dtype, and rank 0's values into integers.

    Tensors are written only once all results are here, so if a rank is lost meanwhile, all of them stay unchanged.
    """
    floating = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    with waiting_for_peers("broadcast of rank 0's integers", group):
        broadcast_tensors(group, [t for t in tensors if not (t.is_floating_point() or t.is_complex())])
    come = []
    for chunk in cut_into_chunks(floating):
        # Divided before the sum, which would overflow in float16.
        flat = torch.cat([tensor.reshape(-1) for tensor in chunk]).div_(group.size())
        with waiting_for_peers("averaging of the replicas", group):
            real = torch.view_as_real(flat) if flat.is_complex() else flat
            finish(dist.all_reduce(real, group=group, async_op=True), device=flat.device)
        come.append((chunk, flat))
    for chunk, flat in come:
        for tensor, mean in zip(chunk, torch.split(flat, [t.numel() for t in chunk]), strict=True):
            tensor.copy_(mean.view(tensor.shape))


def cut_into_chunks(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors by dtype and device, up to about 64 MB each, in the same order on every rank.

    Kinds come in the order of their first tensors, because device indices may differ between the ranks.
    """
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    chunks: list[list[torch.Tensor]] = []
    for alike in by_kind.values():
        chunks.append([])
        size = 0
        for tensor in alike:
            size += tensor.nbytes
            if chunks[-1] and size > _CHUNK_BYTES:
                chunks.append([])
                size = tensor.nbytes
            chunks[-1].append(tensor)
    return chunks
