"""Notices that the job's time is nearly up, on all ranks in the same call of Checkpoint.due."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ddp.comm.objects import control_group, device_of
from ddp.comm.small_sum import reduce_options
from ddp.monitoring.stall_report import finish, waiting_for_peers
from ddp.monitoring.time_warning import time_warning
from ddp.world import before_leaving


class Warned:
    """Hears warnings from its construction on (`ddp.monitoring.time_warning`)."""

    def __init__(self) -> None:
        self._acted = 0  # on how many
        self._statuses = 0  # known at the call before
        self._most: tuple[dist.Work, torch.Tensor] | None = None  # (1,) that any rank has heard, on its way
        time_warning.listen()
        before_leaving(self, Warned._begin_anew)

    def _begin_anew(self) -> None:
        """With the next group: a rank that is new there does not know what the others have shared."""
        self._most, self._acted, self._statuses = None, 0, time_warning.statuses
        time_warning.shared = 0

    @property
    def has_acted(self) -> bool:
        """Whether `together` has returned True, which is so on all ranks or on none."""
        return self._acted > 0

    def together(self) -> bool:
        """Return True once for each warning, on all ranks in the same call: the one after the first rank has heard it.

        Every rank must call it equally often. It communicates nothing where a backward pass was averaged over all ranks
        since the call before: the status of that has said it. Else it starts an all-reduce of one number in host
        memory, which waits for no device, and waits for that of the call before, which is over by then unless a rank is
        a whole step behind.
        """
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            time_warning.shared = time_warning.heard
        else:
            time_warning.settle()
            if time_warning.statuses == self._statuses:
                self._exchange()
            self._statuses = time_warning.statuses
        is_warned = time_warning.shared > self._acted
        self._acted = time_warning.shared
        return is_warned

    def _exchange(self) -> None:
        # Counts, not flags: the ranks hear one warning in different steps, and it is still one.
        if self._most is not None:
            work, heard = self._most
            with waiting_for_peers("agreement on a warning that the time is nearly up"):
                finish(work, device=heard.device)
            time_warning.shared = max(time_warning.shared, int(heard))
        heard = torch.tensor([time_warning.heard], dtype=torch.int32, device="cpu")
        world = dist.group.WORLD
        assert world is not None
        control = control_group(world, device_of(world))
        self._most = control.allreduce([heard], reduce_options(dist.ReduceOp.MAX)), heard
