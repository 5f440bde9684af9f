"""The cost of a group's all-reduce, measured by timing a few when a model is wrapped.

An all-reduce of b bytes takes latency + b * seconds per byte (Hockney 1994, "The communication challenge for MPP").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from ddp.comm.channel import Channel
from ddp.comm.sums.small_sum import reduce_options
from ddp.data_parallel.planning.step_timer import clock_of
from ddp.monitoring.stall_report import finish

_SMALL_BYTES = 4 << 10
_FIRST_BYTES = 32 << 10
_MOST_BYTES = 4 << 20
_GROWTH = 4
_BUDGET_S = 0.09
_SMALL_TIMES = 3


@dataclass(frozen=True)
class LinkCost:
    """Cost of an all-reduce over a group of `ranks`.

    An all-reduce of b bytes takes `latency_s` + b * `seconds_per_byte`, where b is the size of the reduced tensor, not
    of the data that a rank sends. `contention`: the delay of computation, in seconds per second of a concurrent
    collective; about 0 if the link is slow or a device communicates by itself, up to 1 and more if both need the same
    cores.
    """

    ranks: int
    latency_s: float
    seconds_per_byte: float
    contention: float = 0.0

    def collective_s(self, nbytes: float) -> float:
        """Return the duration of an all-reduce of `nbytes` in seconds, if all ranks start it at the same time."""
        return self.latency_s + nbytes * self.seconds_per_byte

    def corrected(self, collectives: int, nbytes: int, seconds: float) -> LinkCost:
        """Return a copy whose bandwidth lets `collectives` of `nbytes` in total take `seconds`, one after another."""
        left_s = seconds - collectives * self.latency_s
        return replace(self, seconds_per_byte=left_s / nbytes) if left_s > 0 and nbytes else self

    @property
    def ring_bytes_per_s(self) -> float:
        """Bytes that each rank sends per second if the all-reduce is a ring: 2 (n-1)/n of the tensor."""
        if not self.seconds_per_byte:
            return float("inf")
        return 2 * (self.ranks - 1) / self.ranks / self.seconds_per_byte


def measure_link(channel: Channel, device: torch.device) -> LinkCost:
    """Time all-reduces of three sizes on `device`; return the cost that the slowest rank measured, on all ranks.

    Every rank must call it; blocks, about 0.1 s at most on links of 10 MB/s or more. Sizes grow until another would
    take too long. Only then are they timed, largest first: a shaped link transfers the first bytes faster than later
    ones.
    """
    clock = clock_of(device)
    with channel.report.waiting("measurement of the link"):
        flat = torch.zeros(_MOST_BYTES // 4, dtype=torch.float32, device=device)

        def timed(nbytes: int) -> float:
            start = clock.now()
            finish(channel.group.allreduce([flat[: nbytes // 4]]), device=flat.device)
            return clock.seconds(start, clock.now())

        timed(_SMALL_BYTES)  # the first use makes connections
        nbytes, spent_s = _FIRST_BYTES, 0.0
        while nbytes < _MOST_BYTES:
            (took_s,) = agree(channel, [timed(nbytes)])
            spent_s += took_s
            if spent_s + 2.5 * _GROWTH * took_s > _BUDGET_S:  # growth, then the timing of this size and smaller ones
                break
            nbytes *= _GROWTH
        sizes = [nbytes, nbytes // _GROWTH, _SMALL_BYTES]
        large_s, middle_s, *small_s = (timed(size) for size in [*sizes, *[_SMALL_BYTES] * (_SMALL_TIMES - 1)])
        seconds = agree(channel, [large_s, middle_s, min(small_s)])
    return fit(channel.group.size(), list(zip(sizes, seconds, strict=True)))


def agree(channel: Channel, values: list[float]) -> list[float]:
    """Return the largest of all ranks' values, place by place. Every rank must call it; blocks."""
    largest = torch.tensor(values, dtype=torch.float64, device="cpu")
    finish(channel.control.allreduce([largest], reduce_options(dist.ReduceOp.MAX)), device=largest.device)
    return [float(value) for value in largest.tolist()]


def fit(ranks: int, samples: Sequence[tuple[int, float]]) -> LinkCost:
    """Fit the cost of an all-reduce to `samples` of (bytes, seconds), by least squares of the relative errors.

    Neither part of the cost is negative. Raises ValueError without samples of two sizes.
    """
    if len({nbytes for nbytes, _ in samples}) < 2:
        raise ValueError(f"at least two sizes of samples are needed to fit a latency and a bandwidth, not {samples}")
    rows = [(1 / seconds, nbytes / seconds) for nbytes, seconds in samples]  # latency * a + per_byte * b = 1
    aa, ab, bb = (sum(a * a for a, _ in rows), sum(a * b for a, b in rows), sum(b * b for _, b in rows))
    a1, b1 = sum(a for a, _ in rows), sum(b for _, b in rows)
    determinant = aa * bb - ab * ab
    latency_s, seconds_per_byte = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
    if latency_s < 0:
        latency_s, seconds_per_byte = 0.0, b1 / bb
    elif seconds_per_byte < 0:
        latency_s, seconds_per_byte = a1 / aa, 0.0
    return LinkCost(ranks, latency_s, seconds_per_byte)
