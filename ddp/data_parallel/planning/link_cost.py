"""What a collective of one group costs, and what compressing for it costs: fitted to measurements, by pure arithmetic.

A collective of b bytes takes latency + b * seconds per byte (Hockney 1994, "The communication challenge for MPP").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = ["CompressionCost", "LinkCost", "exchange_ratio", "fit"]


@dataclass(frozen=True)
class LinkCost:
    """What an all-reduce over a group of `ranks` costs.

    One of b bytes takes `latency_s` + b * `seconds_per_byte`, where b is the size of the tensor that is reduced, not
    what a rank sends for it. `contention`: the seconds by which computing is delayed for each second that a collective
    is on its way beside it; about 0 where the link is slow or a device communicates by itself, up to 1 and more where
    both need the same cores.
    """

    ranks: int
    latency_s: float
    seconds_per_byte: float
    contention: float = 0.0

    def collective_s(self, nbytes: float) -> float:
        """Seconds from the start of an all-reduce of `nbytes` to its end, if every rank starts it at once."""
        return self.latency_s + nbytes * self.seconds_per_byte

    def corrected(self, collectives: int, nbytes: int, seconds: float) -> LinkCost:
        """The same with a bandwidth by which `collectives` of `nbytes` in all take `seconds`, one after another."""
        left_s = seconds - collectives * self.latency_s
        return replace(self, seconds_per_byte=left_s / nbytes) if left_s > 0 and nbytes else self

    @property
    def ring_bytes_per_s(self) -> float:
        """Bytes that each rank sends in a second if the all-reduce is a ring: 2 (n-1)/n of the tensor."""
        if not self.seconds_per_byte:
            return float("inf")
        return 2 * (self.ranks - 1) / self.ranks / self.seconds_per_byte


@dataclass(frozen=True)
class CompressionCost:
    """What it costs to send a bucket compressed, in seconds for each byte of it before it is compressed.

    `wire_ratio`: the time of its bytes on the wire by that of an all-reduce of the bucket as it is.
    `before_s_per_byte` is spent before the bucket leaves, `after_s_per_byte` between its collectives and after them.
    `collectives` follow each other for one bucket.
    """

    name: str
    wire_ratio: float
    before_s_per_byte: float
    after_s_per_byte: float
    collectives: int = 2


def exchange_ratio(backend: str, ranks: int, hosts: Sequence[int] | None) -> float:
    """How much longer bytes take that all ranks send each other, as compressors do, than the same in an all-reduce.

    `hosts`: the ranks on each host; None if that is not known, and then it is what the worst layout gives. What limits
    is a host's network: its g of n ranks send 2 g (n-g)/n of a bucket to others, of which a ring carries 2 (n-1)/n, and
    the algorithm of shm 2 (h-1)/h for h hosts.
    """
    if hosts is None:
        worst = max(range(1, ranks), key=lambda g: g * (ranks - g), default=1)
        hosts = [worst, ranks - worst]
    if len(hosts) == 1 or ranks < 2:
        return 1.0
    sent = max(g * (ranks - g) for g in hosts) / ranks
    carried = (len(hosts) - 1) / len(hosts) if backend == "shm" else (ranks - 1) / ranks
    return max(1.0, sent / carried)


def fit(ranks: int, samples: Sequence[tuple[int, float]], *, contention: float = 0.0) -> LinkCost:
    """Fit the cost of an all-reduce to `samples` of (bytes, seconds), by least squares of the relative errors.

    Neither part of the cost is negative. ValueError without samples of two sizes.
    """
    if len({nbytes for nbytes, _ in samples}) < 2:
        raise ValueError(f"samples of two sizes at least are needed to fit a latency and a bandwidth, not {samples}")
    rows = [(1 / seconds, nbytes / seconds) for nbytes, seconds in samples]  # latency * a + per_byte * b = 1
    aa, ab, bb = (sum(a * a for a, _ in rows), sum(a * b for a, b in rows), sum(b * b for _, b in rows))
    a1, b1 = sum(a for a, _ in rows), sum(b for _, b in rows)
    determinant = aa * bb - ab * ab
    latency_s, seconds_per_byte = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
    if latency_s < 0:
        latency_s, seconds_per_byte = 0.0, b1 / bb
    elif seconds_per_byte < 0:
        latency_s, seconds_per_byte = a1 / aa, 0.0
    return LinkCost(ranks, latency_s, seconds_per_byte, contention)
