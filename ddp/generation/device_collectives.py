"""Ends a group's collectives on devices (NCCL) from another thread. Written from the documentation, not yet tested.

A collective there is queued: its call returns, and its kernel waits in a stream for ranks that may be gone. The host
waits when it reads a value or synchronizes, and gets no error. Once the communicators are aborted, the kernels end, the
host continues, and their output is undefined. Before this output changes anything that must not be lost, `settle`
therefore waits for the kernels and checks. This follows torch's documentation of `abort` and of
TORCH_NCCL_ASYNC_ERROR_HANDLING: unless that is 0, torch's watchdog ends the process as soon as the network reports a
lost rank. Under dtrain, `ddp.init` sets it (`leave_errors`), and `ddp.monitoring.device_watch` replaces the watchdog.
If a device cannot continue, its process ends, and is replaced.

Without that watchdog, `settle` limits the wait for a rank that lives but does not join: by the timeout of the group,
not counted while a debugger is open in a rank. It polls an event of the stream, since synchronizing has no timeout.
After that the collectives are ended, as when a rank is lost.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Collection, Iterator
from time import monotonic

import torch
import torch.distributed as dist

from ddp.errors import CollectiveError
from ddp.generation.announcements import can_replace
from ddp.monitoring.debuggers import debugged_until
from ddp.torch_internals import abort_on_devices, device_recorder, timeout_of

NCCL_BESIDE_GLOO = {"cpu", "gloo", "cuda", "nccl"}  # parts of the backend that `ddp.init` chooses with CUDA
HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_LIMIT_S = 60.0  # for operations that normally take a second
_TIMEOUT_S = 600.0  # of a group whose backend does not report one; NCCL's default
_POLL_S = 5e-5
_BUSY_S = 2e-3  # polled without a pause: an optimizer's step waits for it


def can_be_ended(words: Collection[str]) -> bool:
    """Return whether NCCL's collectives can be ended in a group whose backend has these parts, with gloo on the host.

    Must be called when the group is made: torch reads the variable then.
    """
    return {*words} == NCCL_BESIDE_GLOO and leaves_errors()


def leaves_errors() -> bool:
    """Return whether torch's watchdog does not end this process when a collective fails."""
    return os.environ.get(HANDLING) == "0"


def leave_errors(device: torch.device, backend: str | None) -> None:
    """Make torch's watchdog leave errors to this package, before a group is made on CUDA under dtrain.

    Does nothing if the user has set the variable (DTRAIN_DEFAULTS has the names that dtrain has set), or with a
    `backend` whose collectives cannot be ended.
    """
    is_default = HANDLING in os.environ.get("DTRAIN_DEFAULTS", "").split(",") and os.environ.get(HANDLING) == "1"
    is_beside_gloo = backend is None or set(backend.replace(",", ":").split(":")) == NCCL_BESIDE_GLOO
    if device.type == "cuda" and is_beside_gloo and is_default and can_replace() and device_recorder():
        os.environ[HANDLING] = "0"
        os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "0")  # else its thread sleeps before it ends


class DeviceCollectives:
    """The collectives of a process's default groups, which are numbered in the order of their creation."""

    def __init__(self) -> None:
        self.number = 0
        self._lock = threading.Lock()
        self._ending: set[int] = set()  # numbers of groups
        self._has_ended = False

    def begin(self) -> None:
        """Reset for a new group."""
        with self._lock:
            self.number += 1
            self._has_ended = False

    @property
    def has_ended(self) -> bool:
        """Whether the collectives of the current group were ended."""
        return self._has_ended or self.number in self._ending

    def end(self, number: int) -> None:
        """End a group's collectives, unless there is a newer group. Callable from any thread, repeatedly; blocks."""
        self._ending.add(number)  # before the first kernel ends: see `settle`
        with self._lock:
            if self._has_ended or number != self.number:
                return
            with _ending_after("its collectives on devices do not end"):
                abort_on_devices()
            self._has_ended = True

    def settle(self, devices: Collection[torch.device]) -> bool:
        """Wait for the current streams; raise CollectiveError if their collectives may have been ended early.

        Returns False without waiting while a CUDA graph is captured: nothing runs then. Collectives that are not
        complete after the timeout of the group are ended.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return False
        for device in devices:
            self._wait(device)
        if self.number in self._ending:
            rank = dist.get_rank()
            raise CollectiveError(
                f"the collectives of rank {rank} on its devices were ended, since another rank is lost",
                rank=rank,
                what="collective on a device",
            )
        return True

    def _wait(self, device: torch.device) -> None:
        """Wait until the current stream is done. After the timeout, end the collectives and raise CollectiveError."""
        event = torch.accelerator.current_stream(device).record_event()
        limit_s = _timeout_s(device)
        began = monotonic()
        deadline = began + limit_s
        while not event.query():
            time.sleep(_POLL_S if monotonic() > began + _BUSY_S else 0)
            if monotonic() < deadline:
                continue
            deadline = max(deadline, debugged_until() + limit_s)
            if monotonic() >= deadline and not event.query():  # this process may have been stopped since it last asked
                rank = dist.get_rank()
                self.end(self.number)
                raise CollectiveError(
                    f"rank {rank} has waited for a collective on {device} for longer than {limit_s:g} s, the timeout "
                    "of the group (init_process_group); some rank has not joined it",
                    rank=rank,
                    what="collective on a device",
                )

    def let_go(self, devices: Collection[torch.device]) -> None:
        """End all collectives, and this process if a device no longer works."""
        self.end(self.number)
        for device in devices:
            with _ending_after(f"{device} does not answer"):
                try:
                    found = torch.ones(2, device=device).sum().item()
                    torch.accelerator.synchronize(device)
                except RuntimeError as error:  # all of CUDA's are
                    _end_process(f"{device} no longer works: {error}")
                if found != 2.0:
                    _end_process(f"{device} adds 1 and 1 to {found}")

    def connect(self, devices: Collection[torch.device]) -> None:
        """Connect the new group on devices, as NCCL's first collective does. All ranks must call it; blocks."""
        for device in devices:
            dist.all_reduce(torch.zeros(1, device=device))
            torch.accelerator.synchronize(device)


def _timeout_s(device: torch.device) -> float:
    group = dist.group.WORLD
    timeout = None if group is None else timeout_of(group, device)
    return _TIMEOUT_S if timeout is None else timeout.total_seconds()


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
    """End this process, so that the launcher replaces it: code that waits for a device could not exit normally."""
    print(f"ddp: {why}; this process ends, to be replaced", file=sys.stderr, flush=True)
    os._exit(1)
