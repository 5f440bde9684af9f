"""Times of an all-reduce in worlds that are not here: pure functions of a layout, its links and the bytes.

A message costs its link's latency and its bytes by the link's rate (Hockney 1994, "The communication challenge for
MPP: Intel Paragon and Meiko CS-2", Parallel Computing 20(3)). The ranks of a host are neighbours, and those that send
into the network at the same time share the rate of their host. Adding up is not counted by itself: rates are measured
on whole all-reduces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = [
    "ALGORITHMS",
    "Layout",
    "Link",
    "all_reduce_s",
    "exchange_s",
    "hierarchical_s",
    "recursive_doubling_s",
    "ring_s",
    "tree_s",
]


@dataclass(frozen=True)
class Link:
    """`latency_s` is that of one message; `bytes_per_s` passes in each direction at the same time."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Layout:
    """`hosts` with `ranks_per_host` each: `local` joins ranks of a host, `network` is what each host has for others."""

    hosts: int
    ranks_per_host: int
    local: Link
    network: Link

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def slowest_bytes_per_s(self) -> float:
        """The rate of the slowest link that a chain through all ranks passes."""
        rates = [self.local.bytes_per_s] * (self.ranks_per_host > 1) + [self.network.bytes_per_s] * (self.hosts > 1)
        return min(rates, default=float("inf"))


def ring_s(layout: Layout, nbytes: float) -> float:
    """A ring over all ranks: 2(n-1) messages of a part of 1/n follow each other, 2(h-1) of them between hosts.

    Patarasu and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel
    Distrib. Comput. 69(2); which messages pass the network is counted as in NCCL's own tuning model.
    """
    n, h = layout.ranks, layout.hosts
    latency_s = 2 * (n - h) * layout.local.latency_s + 2 * (h - 1) * layout.network.latency_s
    return latency_s + 2 * (n - 1) / n * nbytes / layout.slowest_bytes_per_s


def tree_s(layout: Layout, nbytes: float) -> float:
    """Two binary trees over the hosts, a chain within each; each carries half of the bytes, in a pipeline.

    Sanders, Speck and Träff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel
    Computing 35(12); latencies are counted as in NCCL's own tuning model.
    """
    if layout.ranks == 1:
        return 0.0
    hops_s = (layout.ranks_per_host - 1) * layout.local.latency_s + _log2(layout.hosts) * layout.network.latency_s
    return 2 * hops_s + 2 * nbytes / layout.slowest_bytes_per_s


def recursive_doubling_s(layout: Layout, nbytes: float) -> float:
    """All bytes in each of log2(n) rounds, and two more messages where n is no power of two: `ddp.comm.small_sum`.

    Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in MPICH".
    """
    n, g = layout.ranks, layout.ranks_per_host
    inner = 1 << (n.bit_length() - 1)  # the largest power of two
    distances = [1 << step for step in range(inner.bit_length() - 1)]
    if n > inner:
        distances += [inner, inner]
    total_s = 0.0
    for distance in distances:
        if distance < g:
            total_s += layout.local.latency_s + nbytes / layout.local.bytes_per_s
        else:  # all ranks of the host send
            total_s += layout.network.latency_s + g * nbytes / layout.network.bytes_per_s
    return total_s


def hierarchical_s(layout: Layout, nbytes: float) -> float:
    """Reduce-scatter within each host, a ring over the hosts for each local rank's part, all-gather within each host.

    Cho, Finkler, Kung and Hunter 2019, "BlueConnect: Decomposing All-Reduce for Deep Learning on Heterogeneous Network
    Hierarchy", SysML. Of the bytes, 2(h-1)/h pass a host's network.
    """
    g, h = layout.ranks_per_host, layout.hosts
    within_s = 2 * (g - 1) * layout.local.latency_s + 2 * (g - 1) / g * nbytes / layout.local.bytes_per_s
    between_s = 2 * (h - 1) * layout.network.latency_s + 2 * (h - 1) / h * nbytes / layout.network.bytes_per_s
    return within_s + between_s


def exchange_s(layout: Layout, nbytes: float) -> float:
    """Each rank sends all others their parts of 1/n, then the average of its own: what compressors do, without latency.

    Of the bytes, the g ranks of a host send 2 g (n-g)/n into the network, and each of them 2 (g-1)/n to its neighbours.
    """
    n, g = layout.ranks, layout.ranks_per_host
    local_s = 2 * (g - 1) / n * nbytes / layout.local.bytes_per_s
    return max(local_s, 2 * g * (n - g) / n * nbytes / layout.network.bytes_per_s)


def _quicker_of_ring_and_tree_s(layout: Layout, nbytes: float) -> float:
    return min(ring_s(layout, nbytes), tree_s(layout, nbytes))


# What each backend of torch.distributed does with a bucket; others are taken for a ring.
ALGORITHMS: dict[str, tuple[str, Callable[[Layout, float], float]]] = {
    "gloo": ("ring", ring_s),
    "nccl": ("ring or tree", _quicker_of_ring_and_tree_s),
    "shm": ("hierarchical", hierarchical_s),
}


def all_reduce_s(backend: str, layout: Layout, nbytes: float) -> float:
    """The time of an all-reduce of `nbytes` by the algorithm that `backend` uses, in seconds."""
    _, seconds = ALGORITHMS.get(backend, ALGORITHMS["gloo"])
    return seconds(layout, nbytes)


def _log2(count: int) -> int:
    """The logarithm, rounded up: the depth of a tree of so many."""
    return (count - 1).bit_length()
