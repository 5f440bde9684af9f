"""What a rank does that has no more inputs while others go on: `join()` of the wrapper, and torch's `Join`.

In each iteration, the ranks that still have inputs announce it (Join itself does), agree on whether gradients will be
reduced and on whose buffers count, and go on. Those that have joined take part in all of it with nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch.distributed.algorithms.join import JoinHook

from ddp.data_parallel.forward_policy import ForwardPolicy

__all__ = ["JoinedRankHook"]


class JoinedRankHook(JoinHook):
    """Keeps up the collectives of one wrapper on a rank that has joined, then gives all the last joiner's values."""

    def __init__(
        self,
        policy: ForwardPolicy,
        sync_buffers: Callable[[int], AbstractContextManager[None]],
        equalise: Callable[[int], None],
    ) -> None:
        self._policy = policy
        self._sync_buffers = sync_buffers
        self._equalise = equalise

    def main_hook(self) -> None:
        """Take part in one iteration of the others."""
        syncs, root = self._policy.share_iteration(syncs=False, has_buffers=False)
        with self._sync_buffers(root):
            pass
        if syncs:
            self._policy.reduce_as_joined()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give every rank the parameters and buffers of one that joined last."""
        _, root = self._policy.share_iteration(syncs=False, has_buffers=is_last_joiner)
        self._policy.divides_by_active = False
        self._equalise(root)
        self._policy.replicas_equalised()
        if not is_last_joiner:
            self._policy.reducer.drop_gradients()  # of passes in which this rank only took part
