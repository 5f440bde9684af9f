"""The collectives of a group on devices (NCCL), which another thread can end. Written by documentation, not yet tried.

A collective there is queued: its call returns, and its kernel waits in a stream for ranks that may be gone. The host
waits where it reads a value or synchronizes, and hears of no error. Once the communicators are aborted, the kernels
end, the host comes back, and what they were to write has no meaning. So before that changes anything that must not be
lost, `settle` waits for it and asks. That is as torch has it in its documentation of `abort` and of
TORCH_NCCL_ASYNC_ERROR_HANDLING: unless that is 0, torch's watchdog ends the process as soon as the network tells it of
a lost rank. Where a device cannot go on, its process ends, and is replaced.

Without that watchdog nothing limits how long `settle` waits for a rank that lives and does not come: a stall report is
written to stderr, but only the launcher ends the wait (`dtrain run --hang`).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Collection, Iterator

import torch
import torch.distributed as dist

from ddp.errors import CollectiveError
from ddp.torch_internals import abort_on_devices

__all__ = ["HANDLING", "NCCL_BESIDE_GLOO", "DeviceCollectives", "can_be_ended", "leaves_errors"]

NCCL_BESIDE_GLOO = {"cpu", "gloo", "cuda", "nccl"}  # words of the backend that `ddp.init` takes where there is CUDA
HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_LIMIT_S = 60.0  # for what takes a second where all is well


def can_be_ended(words: Collection[str]) -> bool:
    """Whether NCCL's collectives can be ended in a group whose backend has these words, with gloo in host memory.

    To be asked when the group is made: torch reads the variable then.
    """
    return {*words} == NCCL_BESIDE_GLOO and leaves_errors()


def leaves_errors() -> bool:
    """Whether torch's watchdog does not end this process when a collective fails."""
    return os.environ.get(HANDLING) == "0"


class DeviceCollectives:
    """Of the default group of a process, one group after the other, which have numbers."""

    def __init__(self) -> None:
        self.number = 0
        self._lock = threading.Lock()
        self._ending: set[int] = set()  # numbers of groups
        self._has_ended = False

    def begin(self) -> None:
        """Begin with a new group."""
        with self._lock:
            self.number += 1
            self._has_ended = False

    def end(self, number: int) -> None:
        """Let those of a group end, unless there is another one. May be called from any thread, and again; blocks."""
        self._ending.add(number)  # before the first kernel ends: see `settle`
        with self._lock:
            if self._has_ended or number != self.number:
                return
            with _ending_after("its collectives on devices do not end"):
                abort_on_devices()
            self._has_ended = True

    def settle(self, devices: Collection[torch.device]) -> bool:
        """Wait for what is queued on the current streams; raise CollectiveError if it may have been ended before.

        Return False, without a wait, while a CUDA graph is captured: nothing is done then. Has no limit of time.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return False
        for device in devices:
            torch.accelerator.current_stream(device).synchronize()
        if self.number in self._ending:
            rank = dist.get_rank()
            raise CollectiveError(
                f"the collectives of rank {rank} on its devices were ended, since another rank is lost",
                rank=rank,
                what="collective on a device",
            )
        return True

    def let_go(self, devices: Collection[torch.device]) -> None:
        """End what there is, and end this process if a device does not compute any more."""
        self.end(self.number)
        for device in devices:
            with _ending_after(f"{device} does not answer"):
                try:
                    found = torch.ones(2, device=device).sum().item()
                    torch.accelerator.synchronize(device)
                except RuntimeError as error:  # all of CUDA's are
                    _end_process(f"{device} does not compute any more: {error}")
                if found != 2.0:
                    _end_process(f"{device} adds 1 and 1 to {found}")

    def connect(self, devices: Collection[torch.device]) -> None:
        """Connect the new group on devices, as NCCL does in the first collective there. All ranks call it; blocks."""
        for device in devices:
            dist.all_reduce(torch.zeros(1, device=device))
            torch.accelerator.synchronize(device)


@contextlib.contextmanager
def _ending_after(what: str) -> Iterator[None]:
    """End this process if the block takes too long."""
    timer = threading.Timer(_LIMIT_S, _end_process, [f"{what} within {_LIMIT_S:.0f} s"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end_process(why: str) -> None:
    """End this process, so that the launcher replaces it: nothing that waits for a device would let it end itself."""
    print(f"ddp: {why}; this process ends, to be replaced", file=sys.stderr, flush=True)
    os._exit(1)
