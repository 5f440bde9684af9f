"""Notices that the job's time is nearly up: SIGUSR1, which SLURM sends ahead of the end, seen by all ranks in one step.

Used by Checkpoint.due. The signal reaches the ranks at different moments, between different steps; what they do about
it they must do together.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

import torch
import torch.distributed as dist

from ddp.comm.objects import control_group, device_of
from ddp.comm.small_sum import reduce_options
from ddp.monitoring.stall_report import finish, waiting_for_peers
from ddp.world import before_leaving

__all__ = ["Warned"]


class Warned:
    """Listens for SIGUSR1 from its construction on, beside whatever handler there was before.

    Outside of the main thread, where Python has no signals, it hears nothing by itself, but takes part.
    """

    def __init__(self) -> None:
        self._heard = 0  # by this rank
        self._acted = 0  # on how many
        self._most: tuple[dist.Work, torch.Tensor] | None = None  # (1,) that any rank has heard, on its way
        self._before: object = None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGUSR1, self._hear)

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        self._heard += 1
        if callable(self._before):
            self._before(signum, frame)

    def _begin_anew(self) -> None:
        """With the next group: a rank that is new there does not know what the others have acted on."""
        self._most, self._acted = None, 0

    @property
    def has_acted(self) -> bool:
        """Whether `together` has returned True, which is so on all ranks or on none."""
        return self._acted > 0

    def together(self) -> bool:
        """Return True once for each warning, on all ranks in the same call: the one after the first rank has heard it.

        Every rank must call it equally often. It starts an all-reduce of one number in host memory, which waits for no
        device, and waits for that of the call before, which is over by then unless a rank is a whole step behind.
        """
        # Counts, not flags: the ranks hear one warning in different steps, and it is still one.
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            most = self._heard
        else:
            most = 0
            if self._most is not None:
                work, heard = self._most
                with waiting_for_peers("agreement on a warning that the time is nearly up"):
                    finish(work, device=heard.device)
                most = int(heard)
            heard = torch.tensor([self._heard], dtype=torch.int32, device="cpu")
            world = dist.group.WORLD
            assert world is not None
            control = control_group(world, device_of(world))
            before_leaving(self, Warned._begin_anew)
            self._most = control.allreduce([heard], reduce_options(dist.ReduceOp.MAX)), heard
        warned = most > self._acted
        self._acted = max(most, self._acted)
        return warned
