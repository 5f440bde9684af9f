"""Uneven inputs: what a rank does that has no more batches while others go on (`join`, and torch's `Join`).

Per iteration, the ranks that still have inputs announce one (by Join itself), agree on whether gradients will be
reduced and on whose buffers count, and go on; those that have joined take part in all of it with nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

__all__ = ["JoinedRankHook", "share_iteration"]

_NOBODY = -1


def share_iteration(
    group: dist.ProcessGroup, device: torch.device, *, syncs: bool, candidate: int = _NOBODY
) -> tuple[bool, int]:
    """Whether any rank reduces gradients, and the highest candidate. Every rank must call it; blocks."""
    told = torch.tensor([int(syncs), candidate], device=device)
    dist.all_reduce(told, dist.ReduceOp.MAX, group=group)
    any_syncs, root = told.tolist()
    return bool(any_syncs), root


class JoinedRankHook(JoinHook):
    """Keeps up the collectives of one wrapper on a rank that has joined, then gives all the last joiner's values."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        reduce_as_joined: Callable[[], None],
        sync_buffers: Callable[[int], object],
        equalise: Callable[[int, bool], None],
    ) -> None:
        self._group, self._device = group, device
        self._reduce_as_joined = reduce_as_joined
        self._sync_buffers = sync_buffers
        self._equalise = equalise

    def main_hook(self) -> None:
        """Take part in one iteration of the others."""
        syncs, root = share_iteration(self._group, self._device, syncs=False)
        self._sync_buffers(root)
        if syncs:
            self._reduce_as_joined()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give every rank the parameters and buffers of one that joined last."""
        candidate = self._group.rank() if is_last_joiner else _NOBODY
        _, root = share_iteration(self._group, self._device, syncs=False, candidate=candidate)
        self._equalise(root, is_last_joiner)
