"""Times a few all-reduces of a group, when a model is wrapped, for the cost of its collectives."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ddp.comm.channel import Channel
from ddp.comm.small_sum import reduce_options
from ddp.data_parallel.planning.clock import clock_of
from ddp.data_parallel.planning.link_cost import LinkCost, fit
from ddp.monitoring.stall_report import finish

__all__ = ["agree", "measure_link"]

_SMALL_BYTES = 4 << 10
_FIRST_BYTES = 32 << 10
_MOST_BYTES = 4 << 20
_GROWTH = 4
_BUDGET_S = 0.09
_SMALL_TIMES = 3


def measure_link(channel: Channel, device: torch.device) -> LinkCost:
    """Time all-reduces of three sizes on `device`; return their cost on all ranks: as the slowest rank saw it.

    Every rank must call it; blocks, some 0.1 s at most where a link carries 10 MB a second or more. Sizes grow until
    another would take too long. Only then are they timed, largest first: a shaped link lets the first bytes through
    faster than it carries more.
    """
    clock = clock_of(device)
    with channel.report.waiting("measurement of the link"):
        flat = torch.zeros(_MOST_BYTES // 4, dtype=torch.float32, device=device)

        def timed(nbytes: int) -> float:
            start = clock.now()
            finish(channel.group.allreduce([flat[: nbytes // 4]]), device=flat.device)
            return clock.seconds(start, clock.now())

        timed(_SMALL_BYTES)  # connections are made when they are needed first
        nbytes, spent_s = _FIRST_BYTES, 0.0
        while nbytes < _MOST_BYTES:
            (took_s,) = agree(channel, [timed(nbytes)])
            spent_s += took_s
            if spent_s + 2.5 * _GROWTH * took_s > _BUDGET_S:  # once to grow, once to time it and the smaller ones
                break
            nbytes *= _GROWTH
        sizes = [nbytes, nbytes // _GROWTH, _SMALL_BYTES]
        large_s, middle_s, *small_s = (timed(size) for size in [*sizes, *[_SMALL_BYTES] * (_SMALL_TIMES - 1)])
        seconds = agree(channel, [large_s, middle_s, min(small_s)])
    return fit(channel.group.size(), list(zip(sizes, seconds, strict=True)))


def agree(channel: Channel, values: list[float]) -> list[float]:
    """Return the largest of all ranks' values, place by place. Every rank must call it; blocks."""
    told = torch.tensor(values, dtype=torch.float64, device="cpu")
    finish(channel.control.allreduce([told], reduce_options(dist.ReduceOp.MAX)), device=told.device)
    return [float(value) for value in told.tolist()]
