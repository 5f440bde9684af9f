"""Sums of small host vectors over many ranks: 1 + log2(n) consecutive messages, in gloo's ring 2(n-1).

Messages between ranks (`ddp.comm.objects`, the step status of a backward pass) are small and block, so the number of
consecutive messages matters, not the bytes. The method is recursive doubling (Thakur, Rabenseifner and Gropp 2005,
"Optimization of Collective Communication Operations in MPICH"): ranks above the largest power of two send their vector
to a partner first, and get the sum from it at the end.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from ddp.monitoring.interrupts import has_started
from ddp.monitoring.stall_report import HostWork, ThreadedWork, finish
from ddp.torch_internals import is_gloo_on_host

# Measured by scripts/bench/small_sum.py: below, gloo's own all-reduce is as fast, and needs no thread.
_LEAST_RANKS = 8
_MOST_BYTES = 1 << 20  # above, a ring moves less
_FIRST_TAG, _TAGS = 1 << 30, 1 << 20  # away from the tags of users' own messages

_calls: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()


def pays(group: dist.ProcessGroup, nbytes: int) -> bool:
    """Return whether a sum of `nbytes` of host memory should be made here: the same on every rank."""
    return group.size() >= _LEAST_RANKS and nbytes <= _MOST_BYTES and is_gloo_on_host(group)


def add_up(group: dist.ProcessGroup, flat: torch.Tensor) -> None:
    """Replace `flat` (n,), in host memory, by its sum over the ranks, bitwise equal on each. Blocks.

    Every rank must call it. Does not interfere with other collectives of the group. Raises RuntimeError if a rank is
    gone.
    """
    finish(HostWork(_start(group, flat)))


def _next_tag(group: dist.ProcessGroup) -> int:
    """Return a tag for the messages of one sum: all ranks start their sums of a group in the same order."""
    return _FIRST_TAG + next(_calls.setdefault(group, itertools.count())) % _TAGS


def _start(group: dist.ProcessGroup, flat: torch.Tensor) -> Exchange:
    return Exchange(group, partial(_add_up, group, flat, _next_tag(group)))


def _add_up(group: dist.ProcessGroup, flat: torch.Tensor, tag: int) -> None:
    rank, size = group.rank(), group.size()
    inner = 1 << (size.bit_length() - 1)  # the largest power of two
    other = torch.empty_like(flat)
    if rank >= inner:
        group.send([flat], rank - inner, tag).wait()
        group.recv([flat], rank - inner, tag).wait()
        return
    if rank + inner < size:
        group.recv([other], rank + inner, tag).wait()
        flat += other
    for step in range(inner.bit_length() - 1):
        partner = rank ^ (1 << step)
        sent = group.send([flat], partner, tag)
        group.recv([other], partner, tag).wait()
        sent.wait()
        flat += other  # the partner adds the same two, and addition commutes
    if rank + inner < size:
        group.send([flat], rank + inner, tag).wait()


def reduce_options(op: Any) -> dist.AllreduceOptions:
    """Return options for a group's own `allreduce`; `op` is one of `dist.ReduceOp`."""
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options


class SmallAdder:
    """Starts sums over `group` of small vectors in host memory, without blocking: a `Sender`, like `Adder`.

    A thread makes their exchanges, so that they overlap with backward.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.divisor = group.size()
        self._group = group
        self._options = reduce_options(dist.ReduceOp.SUM)

    def start(self, flat: torch.Tensor) -> HostWork:
        """Start replacing `flat` by its sum. Every rank must start the sums of a group in the same order."""
        is_small = pays(self._group, flat.nbytes)
        return HostWork(_start(self._group, flat) if is_small else self._group.allreduce([flat], self._options))


class Exchange(ThreadedWork):
    """Blocking messages in a thread of a group, after those of the exchanges started before.

    `exchange` makes them. It keeps the group alive until it ends, and nothing else may.
    """

    def __init__(self, group: dist.ProcessGroup, exchange: Callable[[], None]) -> None:
        super().__init__(exchange)
        _queue_of(group).put(self)


_Queue = SimpleQueue[Exchange | None]  # None: the group has gone
_served: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[_Queue, threading.Thread]] = weakref.WeakKeyDictionary()


def _queue_of(group: dist.ProcessGroup) -> _Queue:
    """Return the queue of the thread that makes the exchanges of a group; it ends with the group."""
    if group not in _served:
        new: _Queue = SimpleQueue()
        weakref.finalize(group, new.put, None).atexit = False
        # A daemon: at the end of the process it may still wait for a missing rank.
        _served[group] = new, threading.Thread(target=_make_exchanges, args=(new,), name="ddp-exchanges", daemon=True)
    queue, thread = _served[group]
    if not has_started(thread):
        thread.start()
    return queue


def _make_exchanges(queue: _Queue) -> None:
    while (each := queue.get()) is not None:
        each.run()
        del each  # not kept while waiting for the next
