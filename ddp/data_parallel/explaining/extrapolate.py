"""A measured step in worlds and on links that are not here: pure functions of what was measured.

The model: every rank computes what was measured here (the batch of a rank stays), its buckets leave as in `simulate`,
each all-reduce takes what the backend's algorithm takes in that world, and a step ends once the slowest of all ranks is
there. Left out: other users of the network, switches with too little capacity for all hosts at once, data loading that
does not keep up, failures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ddp.data_parallel.explaining.all_reduce_models import (
    ALGORITHMS,
    Layout,
    Link,
    all_reduce_s,
    exchange_s,
    recursive_doubling_s,
    ring_s,
)
from ddp.data_parallel.planning.link_cost import CompressionCost, LinkCost
from ddp.data_parallel.planning.simulate import Bucket, simulate
from ddp.data_parallel.planning.step_record import StepRecord

__all__ = [
    "PUBLISHED",
    "Extrapolator",
    "Needed",
    "Published",
    "ScaledStep",
    "expected_maximum",
    "link_of",
    "rank_counts",
]

_FASTEST_BYTES_PER_S = 1e14  # no link of today is near it
_MANY_BYTES = 1e9  # where the latency of a collective is little
_TAIL = 0.1  # of a sample: what lies above it gives the slope of its tail


@dataclass(frozen=True)
class ScaledStep:
    """A step in a world of `ranks` on `hosts`, in seconds.

    `straggling_s` is what the slowest rank takes longer than the mean. `efficiency`: the step without communication by
    this one; `speed_up`: efficiency times ranks, how many times as many samples a second as one rank.
    """

    ranks: int
    hosts: int
    step_s: float
    compute_s: float
    delayed_s: float
    wire_s: float
    overlapped_s: float
    exposed_s: float
    straggling_s: float

    @property
    def efficiency(self) -> float:
        return self.compute_s / self.step_s

    @property
    def speed_up(self) -> float:
        return self.efficiency * self.ranks


@dataclass(frozen=True)
class Published:
    """A published speed-up of data-parallel training. `gbit` is what its hosts had, where that is known."""

    title: str
    ranks: int
    ranks_per_host: int
    speed_up: float
    source: str
    gbit: float | None = None

    @property
    def efficiency(self) -> float:
        return self.speed_up / self.ranks


# The first two are of asynchronous parameter servers, where nobody waits for the slowest; here they are goals.
PUBLISHED = (
    Published("50 GPUs, 40 times", 50, 1, 40.0, "Google 2016, talks on TensorFlow: asynchronous parameter servers"),
    Published("500 machines, 300 times", 500, 1, 300.0, "Google 2016, talks on TensorFlow: asynchronous"),
    Published(
        "512 GPUs, 90 %",
        512,
        4,
        0.9 * 512,
        "Sergeev and Del Balso 2018, Horovod, arXiv:1802.05799 (Inception V3)",
        25.0,
    ),
)


@dataclass(frozen=True)
class Needed:
    """What would have to be true for a published speed-up, each with all else as it is; None: it would not be enough.

    `gbit`: the rate of each host's network. `overlap`: the share of communication beside backward. `spread`: the spread
    of the ranks' times, by that measured here.
    """

    published: Published
    here: ScaledStep
    gbit: float | None
    overlap: float | None
    spread: float | None

    @property
    def is_reached(self) -> bool:
        return self.here.efficiency >= self.published.efficiency


def link_of(cost: LinkCost, backend: str, hosts: int) -> Link:
    """The link on which an all-reduce by the algorithm of `backend` costs what was measured.

    `cost.ranks` ranks, of at least 2, on `hosts`: it is the link within the only host, or that between several, where
    links within a host cost nothing.
    """

    def seconds(link: Link, nbytes: float) -> float:
        local = link if hosts == 1 else Link(0.0, math.inf)
        return all_reduce_s(backend, Layout(hosts, max(1, cost.ranks // hosts), local, link), nbytes)

    messages, passes = seconds(Link(1.0, math.inf), 0.0), seconds(Link(0.0, 1.0), 1.0)
    rate = passes / cost.seconds_per_byte if cost.seconds_per_byte else math.inf
    return Link(cost.latency_s / messages, rate)


def rank_counts(hosts: int, ranks_per_host: int) -> list[tuple[int, int]]:
    """Worlds up to `hosts` full hosts, each about twice the last, as pairs of hosts and ranks on each."""
    counts = [(1, ranks) for ranks in _doubled(ranks_per_host)]
    return counts + [(many, ranks_per_host) for many in _doubled(hosts) if many > 1]


def _doubled(most: int) -> Iterator[int]:
    count = 1
    while count < most:
        yield count
        count *= 2
    yield most


@dataclass(frozen=True)
class _ModelCost(LinkCost):
    """The cost of an all-reduce in a layout, by the algorithm of a backend."""

    backend: str = ""
    layout: Layout | None = None

    @staticmethod
    def of(layout: Layout, backend: str, contention: float) -> _ModelCost:
        latency_s = all_reduce_s(backend, layout, 0.0)
        many_s = all_reduce_s(backend, layout, _MANY_BYTES)
        return _ModelCost(layout.ranks, latency_s, (many_s - latency_s) / _MANY_BYTES, contention, backend, layout)

    def collective_s(self, nbytes: float) -> float:
        assert self.layout is not None
        return all_reduce_s(self.backend, self.layout, nbytes)


def _status_s(layout: Layout, nbytes: float) -> float:
    """The time of a step status that travels alone, in host memory, as `ddp.comm.small_sum` sends it to many ranks."""
    return min(recursive_doubling_s(layout, nbytes), ring_s(layout, nbytes))


@dataclass(frozen=True)
class Extrapolator:
    """Everything that was measured, and the links of the world that is asked for.

    `compute_times_s`: the step without communication in each of the measured steps of a rank, in seconds, whose spread
    the stragglers come from. `compression`: what it costs on a link, if buckets travel compressed, and `wire_ratio`
    is that of their bytes.
    """

    record: StepRecord
    buckets: Sequence[Bucket]
    backend: str
    contention: float
    compute_times_s: Sequence[float]
    local: Link
    network: Link
    compression: Callable[[LinkCost], CompressionCost] | None = None

    @property
    def algorithm(self) -> str:
        """What the backend's all-reduce is called."""
        return ALGORITHMS.get(self.backend, ALGORITHMS["gloo"])[0]

    def step(self, hosts: int, ranks_per_host: int) -> ScaledStep:
        """The step with so many ranks on each of `hosts`."""
        layout = Layout(hosts, ranks_per_host, self.local, self.network)
        ranks = layout.ranks
        if ranks == 1:
            alone_s = self.record.compute_s
            return ScaledStep(1, 1, alone_s, alone_s, 0.0, 0.0, 0.0, 0.0, 0.0)
        cost = _ModelCost.of(layout, self.backend, self.contention)
        status = [bucket for bucket in self.buckets if not bucket.indices]  # alone, and after all else
        status_s = sum(_status_s(layout, bucket.nbytes) for bucket in status)
        made = simulate(
            self.record,
            [bucket for bucket in self.buckets if bucket.indices],
            cost,
            compression=self._compression(layout, cost),
        )
        times = self.compute_times_s
        straggling_s = expected_maximum(times, ranks) - expected_maximum(times, 1) if times else 0.0
        return ScaledStep(
            ranks=ranks,
            hosts=hosts,
            step_s=made.total_s + status_s + straggling_s,
            compute_s=made.compute_s,
            delayed_s=made.delayed_s,
            wire_s=made.wire_s + status_s,
            overlapped_s=made.overlapped_s,
            exposed_s=made.exposed_s + status_s,
            straggling_s=straggling_s,
        )

    def _compression(self, layout: Layout, cost: LinkCost) -> CompressionCost | None:
        """What compression costs there: rows go from all ranks to all, in no ring."""
        if self.compression is None:
            return None
        found, all_reduce_s_per_byte = self.compression(cost), cost.seconds_per_byte
        if not all_reduce_s_per_byte:
            return found
        return replace(found, wire_ratio=found.wire_ratio * exchange_s(layout, 1.0) / all_reduce_s_per_byte)

    def steps(self, hosts: int, ranks_per_host: int) -> list[ScaledStep]:
        """The step in each of `rank_counts`."""
        return [self.step(*counts) for counts in rank_counts(hosts, ranks_per_host)]

    def needed(self, published: Published) -> Needed:
        """What would have to be true for a published speed-up, in the world in which it was published."""
        hosts, each = published.ranks // published.ranks_per_host, published.ranks_per_host
        here = self.step(hosts, each)
        slack_s = here.compute_s / published.efficiency - here.compute_s - here.delayed_s
        exposed_s, straggling_s = slack_s - here.straggling_s, slack_s - here.exposed_s
        return Needed(
            published,
            here,
            gbit=_least(lambda gbit: self._with_gbit(gbit).step(hosts, each).efficiency >= published.efficiency),
            overlap=None if exposed_s < 0 else max(0.0, 1 - exposed_s / here.wire_s) if here.wire_s else 0.0,
            spread=None if straggling_s < 0 else straggling_s / here.straggling_s if here.straggling_s else math.inf,
        )

    def _with_gbit(self, gbit: float) -> Extrapolator:
        return replace(self, network=replace(self.network, bytes_per_s=gbit * 1e9 / 8))


def _least(is_enough: Callable[[float], bool]) -> float | None:
    """The least rate in Gbit/s that is enough, to 1 %; None if none is. More must never be worse."""
    low, high = 1e-6, _FASTEST_BYTES_PER_S * 8 / 1e9
    if not is_enough(high):
        return None
    while high > low * 1.01:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def expected_maximum(sample: Sequence[float], draws: int) -> float:
    """The expected largest of `draws` independent draws from the distribution that `sample` is of.

    Up to as many draws as the sample has, it is that of draws from the sample itself (David and Nagaraja 2003, "Order
    Statistics", chapter 2). More draws would give no more than its largest. For them the tail is taken for exponential
    with the mean excess over the upper tenth (Pickands 1975, "Statistical Inference Using Extreme Order Statistics",
    Annals of Statistics 3(1), with shape 0), whose largest grows with the logarithm of their number. A tail that is
    heavier makes larger ones. Ranks that are slow in every step are not independent draws: the largest is then smaller.
    """
    ordered = sorted(sample)
    count = len(ordered)
    within = min(draws, count)
    expected = sum(
        value * ((at / count) ** within - ((at - 1) / count) ** within) for at, value in enumerate(ordered, 1)
    )
    if draws <= count:
        return expected
    first = max(0, math.ceil(count * (1 - _TAIL)) - 1)
    excesses = [value - ordered[first] for value in ordered[first + 1 :]]
    slope = sum(excesses) / len(excesses) if excesses else 0.0
    return expected + slope * math.log(draws / count)
