"""When a forward pass of DistributedDataParallel starts with another rank's buffers, and how they are copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ddp.comm.broadcast import BufferSync
from ddp.monitoring.stall_report import StallReport

_NamedBuffers = Callable[[], Sequence[tuple[str, torch.Tensor]]]


class BufferHook:
    """Runs a user's function that synchronises buffers, instead of the broadcast from rank 0.

    It is registered by `_register_buffer_comm_hook`, as in torch's class. `call(state, buffers by name)` runs before or
    after forward. Its futures are waited for at the end of backward, or before it runs again.
    """

    def __init__(self, state: object, call: Callable[..., Any], location: object) -> None:
        self._state = state
        self._call = call
        # torch's enum is private, so compare the name; the default is after forward.
        self.is_before = getattr(location, "name", None) == "PRE_FORWARD"
        self._futures: list[torch.futures.Future[Any]] = []

    def run(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        self.wait()
        with torch.no_grad():
            returned = self._call(self._state, dict(named))
        if returned is not None:
            self._futures += returned if isinstance(returned, list | tuple) else [returned]

    def wait(self) -> None:
        """Wait for the hook's futures."""
        while self._futures:
            self._futures.pop().wait()


class ForwardBuffers:
    """Shares buffers before the first forward pass after each reduction.

    Reductions are counted, because their number is the same on every rank; that of forward passes may not be. Without
    `sync`, every rank keeps its own buffers; `hook` replaces it.
    """

    def __init__(self, report: StallReport, sync: BufferSync | None, hook: BufferHook | None) -> None:
        self.hook = hook
        self._report = report
        self._sync = sync
        self._are_of = -1  # number of reductions when buffers were last made equal

    @property
    def are_stale(self) -> bool:
        """Whether the next forward pass starts with new buffers."""
        return self._sync is not None and self._report.step != self._are_of

    def share(self, root: int, named: _NamedBuffers) -> AbstractContextManager[None]:
        """Copy the buffers of `root` to every rank before a forward pass, or return a context that runs the hook.

        `named` returns the present buffers with their names.
        """
        self._are_of = self._report.step
        if self.hook is not None:
            return self._hooked(self.hook, named)
        if self._sync is not None:
            self._sync.run(root)
        return nullcontext()

    @contextmanager
    def _hooked(self, hook: BufferHook, named: _NamedBuffers) -> Iterator[None]:
        """Run the hook before or after forward; after it also if forward raises, as the other ranks run it."""
        if hook.is_before:
            hook.run(named())
        try:
            yield
        except Exception:
            if not hook.is_before:
                hook.run(named())
            raise
        if not hook.is_before:
            hook.run(named())

    def wait(self) -> None:
        """Wait for the futures of the hook."""
        if self.hook is not None:
            self.hook.wait()
