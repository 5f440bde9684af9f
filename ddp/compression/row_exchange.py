"""Averages bytes over a group in two steps: an all-to-all of the parts, then an all-gather of their averages.

The gradient compressors (half, int8) define the bytes; this module only moves them, so it works for any dtype on any
backend. With n ranks, a bucket is n rows; rank r owns row r:

1. every rank sends its row r to rank r (all-to-all), and r combines its n received rows into one;
2. every rank sends its combined row to all (all-gather).

Over gloo both are messages, and all receives are posted before any send: gloo's own collectives send first, and the
request for the peer's row then waits behind the data, so that a slow link is used in one direction at a time.

That is a reduce-scatter and an all-gather, as in a ring all-reduce, and each rank sends the same number of bytes:
2 (n-1)/n of the bucket.

On the CPU both steps overlap with backward. The second cannot use the group itself: ranks would start it at different
points among the first steps of later buckets, and collectives must start in the same order on every rank. It therefore
has its own connections, one thread that starts second steps in the order of the first ones, and one that ends them.
With NCCL the stream order does all this. With gloo on a device, a bucket is finished before the next one starts.
"""

from __future__ import annotations

import atexit
import itertools
import queue
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from ddp.comm.objects import gather_values
from ddp.comm.shm.backend import NAME as SHM
from ddp.comm.shm.backend import connect
from ddp.compression.compressor import completed
from ddp.errors import CollectiveError, UnsupportedError
from ddp.monitoring.interrupts import has_started, is_interrupt
from ddp.monitoring.stall_report import StallReport, report_of, waiting_for_peers
from ddp.torch_internals import allgather_flat, backend_of, default_store, is_in_stream_order, timeout_of

_CPU = torch.device("cpu")
_TORCHS_TIMEOUT = timedelta(minutes=30)

# How long the interpreter waits at exit for the threads, which may still have a bucket, after an error for example. A
# thread that returns from a collective later takes the interpreter's lock when it no longer exists, and aborts the
# process; one that still waits for a missing rank does no harm.
_SETTLE_S = 1.0

_FIRST_TAG, _TAGS = (1 << 30) + (1 << 20), 1 << 20  # away from those of `ddp.comm.sums.small_sum`, and from users' own

_open: weakref.WeakKeyDictionary[dist.ProcessGroup, RowExchange] = weakref.WeakKeyDictionary()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@dataclass(eq=False)
class RowMemory:
    """Memory for one bucket in flight, uint8 of shape (n, row bytes).

    `send` is filled by the caller; `busy` is its last use.
    """

    send: torch.Tensor
    received: torch.Tensor
    busy: torch.futures.Future[torch.Tensor] | None = None


@dataclass(frozen=True)
class BucketRows:
    """One bucket to average. Both functions may run in another thread, without autograd.

    `average` combines the n received rows, in rank order, into this rank's row (row bytes,), which may use their
    memory. `deliver` computes the result from all ranks' rows, of shape (n, row bytes).
    """

    label: str
    memory: RowMemory
    average: Callable[[torch.Tensor], torch.Tensor]
    deliver: Callable[[torch.Tensor], torch.Tensor]


def open_exchange(group: dist.ProcessGroup, *, is_on_host: bool = True) -> RowExchange:
    """Return the exchange of `group`, which its users share. Every rank of `group` must call it; may block.

    Buckets in host memory need `is_on_host`, which connects the ranks once more.
    """
    exchange = _open.setdefault(group, RowExchange(group))
    if is_on_host:
        exchange.connect(group)
    exchange.users += 1
    return exchange


class RowExchange:
    """The second step's connections for one group, kept as long as the group, and threads while there are `users`.

    Does not own the group, which its callers pass.
    """

    users = 0
    _pipeline: _Pipeline | None = None

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._may_connect = group.size() > 1

    def connect(self, group: dist.ProcessGroup) -> None:
        """Connect the ranks once more, for buckets in host memory, unless they are. All ranks must call it; blocks."""
        if not self._may_connect:
            return
        with waiting_for_peers("connection for compressed gradients", group):
            name, *_ = gather_values(uuid.uuid4().hex, group=group)
        second = _connect_again(group, name)
        self._may_connect = False
        if second is not None:
            self._pipeline = _Pipeline(second, report_of(group))
            weakref.finalize(self, self._pipeline.end).atexit = False

    def leave(self) -> None:
        """Release it for one user; after the last one the threads end."""
        self.users -= 1
        if self.users == 0 and self._pipeline is not None:
            self._pipeline.end()

    def start(self, group: dist.ProcessGroup, rows: BucketRows) -> torch.futures.Future[torch.Tensor]:
        """Start averaging without blocking. The future has the result of `rows.deliver`, or a CollectiveError.

        Every rank must start buckets of the same sizes in the same order. Nothing can be started after a failure:
        ranks may have stopped at different buckets, and the next would meet another one's bytes.
        """
        if rows.memory.send.device.type != "cpu" or self._pipeline is None:
            rows.memory.busy = _start_in_order(group, rows)
        else:
            rows.memory.busy = self._pipeline.start(group, rows)
        return rows.memory.busy


class _Messages:
    """Messages between all ranks of a gloo group: its own `rows` to the others, and theirs into `into`, by rank."""

    # group: ProcessGroup or ProcessGroupGloo, whose send() and recv() the stubs do not have
    def __init__(self, group: Any, into: torch.Tensor, rows: Sequence[torch.Tensor], tag: int) -> None:
        rank, size = group.rank(), group.size()
        others = [(rank + step) % size for step in range(1, size)]
        self._works = [group.recv([into[other]], other, tag) for other in others]
        self._works += [group.send([rows[other]], other, tag) for other in others]
        into[rank].copy_(rows[rank])

    def wait(self) -> None:
        """Block until all are sent and received. Raises RuntimeError if a rank is gone or too late."""
        for work in self._works:
            work.wait()


@dataclass(eq=False)
class _Pending:
    """A bucket in flight, and the messages that it waits for. `tag` is unique to this bucket, on every rank."""

    rows: BucketRows
    tag: int
    work: _Messages
    future: torch.futures.Future[torch.Tensor]


_Queue = queue.SimpleQueue[_Pending | None]


class _Pipeline:
    """Buckets between their steps, first in, first out: the caller starts the first step, threads do the rest."""

    def __init__(self, second: Any, report: StallReport) -> None:
        self._second = second
        self._report = report
        self._sent: _Queue = queue.SimpleQueue()
        self._started = itertools.count()  # buckets
        self._lock = threading.Lock()  # two models may run backward in two threads
        self._threads: list[threading.Thread] = []
        self._is_ending = False
        self._failure: CollectiveError | None = None

    def start(self, group: dist.ProcessGroup, rows: BucketRows) -> torch.futures.Future[torch.Tensor]:
        with self._lock:
            if self._failure is not None:
                raise self._failed(rows, RuntimeError("it was not started"))
            what = f"compressed average of {rows.label}"
            try:
                self._start_threads()
                self._report.at(what)
                tag = _FIRST_TAG + next(self._started) % _TAGS
                work = _Messages(group, rows.memory.received, list(rows.memory.send), tag)
                pending = _Pending(rows, tag, work, torch.futures.Future())
                self._sent.put(pending)
            except BaseException as error:
                if isinstance(error, RuntimeError) and not is_interrupt(error):
                    raise self._failed(rows, error) from error
                rank = self._report.rank
                self._failure = CollectiveError(f"rank {rank} was interrupted in the {what}", rank=rank, what=what)
                raise
            return pending.future

    def end(self) -> None:
        """End the threads once they have finished the started buckets; the next `start` makes new ones."""
        self._is_ending = True
        self._sent.put(None)

    def _start_threads(self) -> None:
        if not self._threads or self._is_ending:
            for thread in filter(has_started, self._threads):
                thread.join()  # buckets started before must come first
            averaged: _Queue = queue.SimpleQueue()
            self._sent = queue.SimpleQueue()
            self._threads = [
                threading.Thread(
                    target=self._average, args=(self._sent, averaged), name="ddp-compression-average", daemon=True
                ),
                threading.Thread(target=self._deliver, args=(averaged,), name="ddp-compression-deliver", daemon=True),
            ]
            self._is_ending = False
        for thread in self._threads:
            if not has_started(thread):
                _threads.add(thread)
                thread.start()

    @torch.no_grad()
    def _average(self, sent: _Queue, averaged: _Queue) -> None:
        """Start the second step of every bucket, in the order of the first ones."""
        while (pending := sent.get()) is not None:
            try:
                if self._failure is not None:
                    raise RuntimeError(str(self._failure))
                pending.work.wait()
                mine = pending.rows.average(pending.rows.memory.received)
                gathered = pending.rows.memory.send  # has been sent, so its memory is free
                pending.work = _Messages(self._second, gathered, [mine] * len(gathered), pending.tag)
            except Exception as error:  # whatever it is, this bucket's second step did not start, as it did elsewhere
                self._give_up(pending, error)
            else:
                averaged.put(pending)
            del pending  # else its tensors would be kept until the next bucket
        averaged.put(None)

    @torch.no_grad()
    def _deliver(self, averaged: _Queue) -> None:
        while (pending := averaged.get()) is not None:
            try:
                pending.work.wait()
                result = pending.rows.deliver(pending.rows.memory.send)
            except Exception as error:
                self._give_up(pending, error)
            else:
                pending.future.set_result(result)
            del pending

    def _give_up(self, pending: _Pending, error: Exception) -> None:
        failure = self._failed(pending.rows, error)
        failure.__cause__ = error
        pending.future.set_exception(failure)  # type: ignore[arg-type]  # torch's annotation is that of set_result

    def _failed(self, rows: BucketRows, error: Exception) -> CollectiveError:
        """Return the error of the first failure, also for all buckets after it: querying the ranks takes seconds."""
        what = f"compressed average of {rows.label}"
        if self._failure is None:
            self._failure = self._report.error(what, str(error))
        ranks = self._failure.failed_ranks or ()
        return CollectiveError(str(self._failure), rank=self._report.rank, what=what, failed_ranks=ranks)


def _start_in_order(group: dist.ProcessGroup, rows: BucketRows) -> torch.futures.Future[torch.Tensor]:
    """Enqueue all steps on the device: streams keep their order, so one group suffices. With gloo, wait for each."""
    send, received = rows.memory.send, rows.memory.received
    work = group.alltoall_base(received, send, [], [])
    what = f"compressed average of {rows.label}"
    report = report_of(group)

    def finish() -> torch.Tensor:
        with torch.no_grad():
            mine = rows.average(received)
            report.wait(allgather_flat(group, send.view(-1), mine), what, device=send.device)
            return rows.deliver(send)

    if not is_in_stream_order(group, send.device):
        with waiting_for_peers(what, group):
            report.wait(work, what, device=send.device)
            return completed(finish())
    # NCCL's future is complete when its work is enqueued: this runs now, on a stream that waits for the work.
    return work.get_future().then(lambda _: finish())


def _connect_again(group: dist.ProcessGroup, name: str) -> Any:
    """Connect the ranks of `group` again, if it moves host memory, by gloo or shm; None otherwise.

    `dist.new_group(use_local_synchronization=True)` would do, but it derives the name for the rendezvous from the
    number of groups of this process, and hangs if that differs between ranks.
    """
    if "cpu:" not in dist.get_backend_config(group):
        return None
    backend = backend_of(group, _CPU).name()
    if backend not in ("gloo", SHM):
        raise UnsupportedError(
            f"compression needs gloo or shm for tensors in host memory, but the group has "
            f"{dist.get_backend_config(group)}"
        )
    store = PrefixStore(f"ddp/exchange/{name}", default_store())
    timeout = timeout_of(group, _CPU) or _TORCHS_TIMEOUT
    if backend == "gloo":
        made: Any = dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout)
        made.barrier().wait()  # a rank that ends at once breaks the connection of one that still connects
        return made
    return connect(store, group.rank(), group.size(), timeout)


def _settle() -> None:
    for exchange in list(_open.values()):
        if exchange._pipeline is not None:
            exchange._pipeline.end()
    end = time.monotonic() + _SETTLE_S
    for thread in filter(has_started, list(_threads)):
        thread.join(max(0.0, end - time.monotonic()))


atexit.register(_settle)
