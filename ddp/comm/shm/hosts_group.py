"""The process group of `shm` if not all of its ranks share memory: `across_hosts` has the algorithms.

Operations run one after the other, in the order of their calls, in a thread of the group; messages use gloo. An error
breaks the group: all queued and later operations fail with it, as do the other ranks, on this host through shared
memory and on others because their connections close.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from ddp.comm.combine import is_narrow
from ddp.comm.shm.across_hosts import AcrossHosts
from ddp.comm.shm.collectives import Steps
from ddp.comm.shm.engine import Operation
from ddp.comm.shm.group import ShmGroup, or_elsewhere
from ddp.comm.shm.process_end import end_with_process
from ddp.comm.shm.rounds import not_done, refused

_LEAVE_S = 5.0  # how long the end waits for a collective that hangs


class HostsGroup(ShmGroup):
    """Ranks of several hosts. All of them must make it; `hosts` are the ranks that share memory, the same on all."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        hosts: Sequence[Sequence[int]],
        others: Any = None,
    ) -> None:
        self._hosts = hosts
        super().__init__(store, rank, size, timeout, others)

    def _connect(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self._algorithms = AcrossHosts(store, rank, size, timeout, self._hosts, ShmGroup)
        self._engine = _Engine(self._algorithms)

    def __del__(self) -> None:
        if "_engine" in vars(self):
            self._engine.close()

    @property
    def _flat(self) -> Any:
        if self._algorithms.flat is None:
            raise self._engine.broken
        return self._algorithms.flat

    sum_rows: Any = None  # messages between all ranks take its place

    def adds_by_tree(self, dtype: torch.dtype) -> bool:
        """Return whether each host has one subtree; the sums of 16-bit numbers are rounded on each host."""
        places = len(self._hosts[0])
        blocks = [tuple(range(at, at + places)) for at in range(0, self.size(), places)]
        return not is_narrow(dtype) and places & (places - 1) == 0 and [*map(tuple, self._hosts)] == blocks

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Run a barrier. Its error names ranks that did not arrive."""
        self._flat.monitored_barrier(timeout or timedelta(seconds=self._timeout_s), wait_all_ranks)

    @or_elsewhere
    def send(self, tensors: Any, rank: int, tag: int = 0) -> dist.Work:
        work: dist.Work = self._flat.send(tensors, rank, tag)
        return work

    @or_elsewhere
    def recv(self, tensors: Any, rank: int, tag: int = 0) -> dist.Work:
        work: dist.Work = self._flat.recv(tensors, rank, tag)
        return work

    @or_elsewhere
    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        work: dist.Work = self._flat.recv_anysource(tensors, tag)
        return work


class _Engine:
    """Runs the operations of a group on this rank, as `engine.Engine` does for one host."""

    def __init__(self, algorithms: AcrossHosts) -> None:
        self.broken: Exception | None = None
        self._algorithms = algorithms
        self._queue: SimpleQueue[Operation | None] = SimpleQueue()
        # For the queue's end, and `done` and `calls`; reentrant, because a group may be garbage-collected inside.
        self._telling = threading.RLock()
        self._is_closed = False
        self._running: Operation | None = None
        self._last: Operation | None = None  # that was queued
        self._timeout_s = 0.0  # of the operation before
        self._thread = threading.Thread(target=self._serve, name="shm-hosts", daemon=True)
        self._thread.start()
        end_with_process(self)

    def run(self, operation: Operation, *, wait: bool) -> None:
        """Start an operation; with `wait`, return when it is done, and raise its error."""
        operation.event = threading.Event()
        with self._telling:  # so that it is queued before the queue's end
            if self.broken is not None:
                raise refused(operation.what, self._algorithms.rank, self.broken)
            self._last = operation
            self._queue.put(operation)
        if wait:
            self.wait(operation, None)

    def run_now(self, what: str, steps: Steps, results: Sequence[torch.Tensor], timeout_s: float) -> None:
        """Run an operation; block until it is done, and raise its error."""
        self.run(Operation(what, steps, results, timeout_s), wait=True)

    def wait(self, operation: Operation, timeout_s: float | None) -> None:
        """Block until an operation is done; raise its error.

        Raises CollectiveError after `timeout_s`; the operation then continues.
        """
        assert operation.event is not None
        if not operation.event.wait(timeout_s):
            raise not_done(operation.what, self._algorithms.rank, timeout_s)
        if operation.error is not None:
            raise operation.error

    def when_done(self, operation: Operation, call: Callable[[], None]) -> None:
        """Run `call` when the operation is done, at once if it already is."""
        with self._telling:
            if not operation.done:
                operation.calls.append(call)
                return
        call()

    def drain(self) -> None:
        """Wait until the started operations are done or have failed, at the latest by their timeouts."""
        last = self._last
        if last is not None and last.event is not None:
            last.event.wait(last.timeout_s + _LEAVE_S)

    def close(self) -> None:
        """End the thread, fail unfinished operations, and notify the other ranks. May be repeated."""
        with self._telling:
            if self._is_closed:
                return
            self._is_closed = True
            self.broken = self.broken or self._algorithms.error("it", RuntimeError("the group was destroyed"))
            self._queue.put(None)
        is_own = self._thread is threading.current_thread()  # which has dropped the group
        if not is_own:
            self._thread.join(_LEAVE_S)  # nothing runs, unless a caller has given up waiting for it
        if not is_own and self._thread.is_alive():
            self._algorithms.fail(str(self.broken))
            for operation in (self._running, self._last):  # those in between fail in order
                if operation is not None:
                    self._finish(operation, self.broken)
        self._algorithms.close()

    def leave_to_parent(self) -> None:
        """Give up the group in a forked child: it belongs to the parent."""
        self._is_closed, self._telling = True, threading.RLock()
        why = "this process was forked from the rank that made the group: make another one"
        self.broken = self._algorithms.error("it", RuntimeError(why))

    def _serve(self) -> None:
        while (operation := self._queue.get()) is not None:
            self._running = operation
            self._finish(operation, self.broken or self._do(operation))
            self._running = None
            del operation

    def _do(self, operation: Operation) -> Exception | None:
        """Run an operation; return its error, after reporting it to the other ranks."""
        try:
            if operation.timeout_s != self._timeout_s:
                self._limit(operation.timeout_s)
            with torch.inference_mode(operation.in_inference), torch.no_grad():
                for _ in operation.steps:  # type: ignore[union-attr]  # messages are not queued here
                    pass
        except Exception as error:
            self.broken = self.broken or self._algorithms.error(operation.what, error)
            self._algorithms.fail(str(self.broken))
            return self.broken
        return None

    def _limit(self, timeout_s: float) -> None:
        """Set the timeout of later operations."""
        self._timeout_s = timeout_s
        self._algorithms.limit(timedelta(seconds=timeout_s))

    def _finish(self, operation: Operation, error: BaseException | None) -> None:
        with self._telling:
            if operation.done:
                return
            operation.error, operation.done = error, True
            calls, operation.calls = operation.calls, []
        assert operation.event is not None
        operation.event.set()
        if calls:  # they may wait for another operation, which the group's thread does
            threading.Thread(target=_call_all, args=(calls,), name="shm-futures", daemon=True).start()


def _call_all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()
