"""When a forward pass of DistributedDataParallel starts with another rank's buffers, and how they are copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ddp.comm.broadcast import BufferSync
from ddp.comm.combine import Subtrees
from ddp.data.micro_batch import MicroBatch
from ddp.monitoring.stall_report import StallReport
from ddp.torch_internals import foreach_copy

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
        self._micro_batch: MicroBatch | None = None  # of the last forward pass
        self._buffers: list[torch.Tensor] = []  # in a step of micro-batches, ...
        self._first: list[torch.Tensor] = []  # ... their values at its beginning, ...
        self._kept: list[torch.Tensor] | None = None  # ... and after micro-batch 0
        self._sums = Subtrees()  # of floating-point buffers after each micro-batch, if they are averaged

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

    def enter(self, micro_batch: MicroBatch, named: _NamedBuffers) -> None:
        """Start the forward passes of a micro-batch with the buffers that its step began with."""
        before, self._micro_batch = self._micro_batch, micro_batch
        if micro_batch is before:
            return
        if micro_batch.is_first:
            self._buffers = [buffer.detach() for _, buffer in named()]
            self._first = [buffer.clone() for buffer in self._buffers]
            self._kept, self._sums = None, Subtrees()
            return
        if before is not None and before.index == 0:
            self._kept = [buffer.clone() for buffer in self._buffers]
        self._add(before)
        if self._buffers:
            foreach_copy(self._buffers, self._first)

    def leave_step(self) -> None:
        """Put the buffers after micro-batch 0 back where they were, after this rank's last backward pass."""
        self._add(self._micro_batch)
        if self._kept:
            foreach_copy(self._buffers, self._kept)
        self._buffers, self._first, self._kept, self._micro_batch = [], [], None, None

    def _add(self, micro_batch: MicroBatch | None) -> None:
        if self._sync is not None and micro_batch is not None and micro_batch.averages_buffers:
            values = self._sync.values().div_(micro_batch.divisor)
            self._sums.add(micro_batch.index, [values], micro_batch.shares)

    def end_step(self, micro_batch: MicroBatch) -> None:
        """Copy the buffers of rank 0, which has micro-batch 0, to every rank; perhaps average those of all.

        Every rank must call it; blocks.
        """
        if self._sync is not None:
            self._sync.run(0)
            if micro_batch.averages_buffers:
                rows = self._sums.take(micro_batch.shares, micro_batch.rank)
                self._sync.add_up([row for (row,) in rows], micro_batch.shares)
            self._are_of = self._report.step + 1

    def wait(self) -> None:
        """Wait for the futures of the hook."""
        if self.hook is not None:
            self.hook.wait()
