"""The step of a small GPT with more ranks, extrapolated from a run of two ranks here by a model of the all-reduce.

    python scripts/bench/scaling.py [--hosts 64] [--gpus 8] [--gbit 100] [--algorithm ring] [--steps 30] [--json]

Two processes on this machine train over gloo. Compute, bytes and the spread of the steps are measured; the network is
what --gbit says, and everything in larger worlds is a model's answer. --json: one object for each number of ranks.

The model: every rank computes what was measured here (the batch of a rank stays), its buckets leave as
`ddp.data_parallel.planning.simulate` has it, and a step ends once the slowest of all ranks is there. A message costs
its link's latency and its bytes by the link's rate (Hockney 1994, "The communication challenge for MPP: Intel Paragon
and Meiko CS-2", Parallel Computing 20(3)). Left out: other users of the network, switches with too little capacity for
all hosts at once, data loading that does not keep up, failures.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp.data_parallel.planning.link_cost import LinkCost
    from ddp.data_parallel.planning.step_report import StepReport

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

SHAPE = {"layers": 4, "width": 256, "heads": 4, "block_size": 64}
SEQUENCES = 2  # of a rank's batch
BAR = 20  # characters of 100 %
TAIL = 0.1  # of a sample: what lies above it gives the slope of its tail


@dataclass(frozen=True)
class Link:
    """`latency_s` is that of one message; `bytes_per_s` passes in each direction at the same time."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Layout:
    """`hosts` with `gpus` ranks each: `local` joins ranks of a host, `network` is what each host has for others."""

    hosts: int
    gpus: int
    local: Link
    network: Link

    @property
    def slowest_bytes_per_s(self) -> float:
        """The rate of the slowest link that a chain through all ranks passes."""
        rates = [self.local.bytes_per_s] * (self.gpus > 1) + [self.network.bytes_per_s] * (self.hosts > 1)
        return min(rates, default=math.inf)


def ring_s(layout: Layout, nbytes: float) -> float:
    """A ring over all ranks, as in gloo: 2(n-1) messages of a part of 1/n, 2(h-1) of them between hosts.

    Patarasu and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel
    Distrib. Comput. 69(2); which messages pass the network is counted as in NCCL's own tuning model.
    """
    n, h = layout.hosts * layout.gpus, layout.hosts
    latency_s = 2 * (n - h) * layout.local.latency_s + 2 * (h - 1) * layout.network.latency_s
    return latency_s + 2 * (n - 1) / n * nbytes / layout.slowest_bytes_per_s


def tree_s(layout: Layout, nbytes: float) -> float:
    """Two binary trees over the hosts, as in NCCL, and a chain within each; each carries half of the bytes.

    Sanders, Speck and Träff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel
    Computing 35(12); latencies are counted as in NCCL's own tuning model.
    """
    hops_s = (layout.gpus - 1) * layout.local.latency_s
    hops_s += (layout.hosts - 1).bit_length() * layout.network.latency_s
    return 2 * hops_s + 2 * nbytes / layout.slowest_bytes_per_s


def hierarchy_s(layout: Layout, nbytes: float) -> float:
    """Reduce-scatter in each host, a ring over the hosts for each local rank's part, all-gather, as in ddp's shm.

    Cho, Finkler, Kung and Hunter 2019, "BlueConnect: Decomposing All-Reduce for Deep Learning on Heterogeneous Network
    Hierarchy", SysML. Of the bytes, 2(h-1)/h pass a host's network.
    """
    g, h, local, network = layout.gpus, layout.hosts, layout.local, layout.network
    within_s = 2 * (g - 1) * local.latency_s + 2 * (g - 1) / g * nbytes / local.bytes_per_s
    return within_s + 2 * (h - 1) * network.latency_s + 2 * (h - 1) / h * nbytes / network.bytes_per_s


ALGORITHMS = {"ring": ring_s, "tree": tree_s, "hierarchy": hierarchy_s}


@dataclass(frozen=True)
class ScaledStep:
    """A step in a larger world, in seconds. `straggling_s`: what the slowest rank takes longer than the mean."""

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
        """The step without communication by this one."""
        return self.compute_s / self.step_s


def link_of(cost: LinkCost) -> Link:
    """Return the link on which a ring over the ranks of one host costs what was measured."""
    messages = 2 * (cost.ranks - 1)
    return Link(cost.latency_s / messages, cost.ring_bytes_per_s)


def scaled(report: StepReport, layout: Layout, algorithm: str) -> ScaledStep:
    """Return the step of `report` in a world of this layout."""
    from ddp.data_parallel.planning.link_cost import LinkCost
    from ddp.data_parallel.planning.simulate import simulate

    ranks, all_reduce_s = layout.hosts * layout.gpus, ALGORITHMS[algorithm]
    latency_s = all_reduce_s(layout, 0.0)
    per_byte_s = (all_reduce_s(layout, 1e9) - latency_s) / 1e9
    cost = LinkCost(ranks, latency_s, per_byte_s, report.cost.contention)
    made = simulate(report.record, [time.bucket for time in report.step.buckets] if ranks > 1 else [], cost)
    straggling_s = expected_maximum(report.computed_s, ranks) - expected_maximum(report.computed_s, 1)
    parts = {name: value for name, value in asdict(made).items() if name not in ("total_s", "buckets")}
    return ScaledStep(ranks, layout.hosts, made.total_s + straggling_s, **parts, straggling_s=straggling_s)


def worlds(hosts: int, gpus: int) -> Iterator[tuple[int, int]]:
    """Worlds up to `hosts` full hosts, each about twice the last, as pairs of hosts and ranks on each."""
    yield from ((1, count) for count in doubled(gpus))
    yield from ((count, gpus) for count in doubled(hosts) if count > 1)


def doubled(most: int) -> Iterator[int]:
    count = 1
    while count < most:
        yield count
        count *= 2
    yield most


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
    first = max(0, math.ceil(count * (1 - TAIL)) - 1)
    excesses = [value - ordered[first] for value in ordered[first + 1 :]]
    slope = sum(excesses) / len(excesses) if excesses else 0.0
    return expected + slope * math.log(draws / count)


def worker(arguments: argparse.Namespace) -> None:
    import torch
    from torch.nn import functional as F

    import ddp

    torch.set_num_threads(1)
    world = ddp.init("gloo")
    example = runpy.run_path(str(ROOT / "scripts" / "examples" / "train_gpt.py"))
    model = ddp.DistributedDataParallel(example["GPT"](**SHAPE))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, example["VOCABULARY"], (SEQUENCES, SHAPE["block_size"] + 1))
    for _ in range(arguments.steps):
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    if world.is_main:
        show(model.explain(), arguments)


def show(report: StepReport, arguments: argparse.Namespace) -> None:
    local = link_of(report.cost)
    network = Link(local.latency_s, arguments.gbit * 1e9 / 8)
    if not arguments.json:
        print(f"{arguments.algorithm}, {arguments.gpus} ranks a host, {arguments.gbit:g} Gbit/s a host")
        print(" ranks hosts  step ms     wire  exposed  slowest   times  efficiency")
    for hosts, gpus in worlds(arguments.hosts, arguments.gpus):
        step = scaled(report, Layout(hosts, gpus, local, network), arguments.algorithm)
        speed_up = step.efficiency * step.ranks
        if arguments.json:
            given = {"gbit": arguments.gbit, "ranks_per_host": arguments.gpus}
            print(json.dumps({**asdict(step), "efficiency": step.efficiency, "speed_up": speed_up, **given}))
            continue
        times = "".join(f"{1e3 * each:9.1f}" for each in (step.step_s, step.wire_s, step.exposed_s, step.straggling_s))
        bar = "#" * round(BAR * step.efficiency)
        print(f"{step.ranks:6} {step.hosts:5}{times} {speed_up:7.1f} {100 * step.efficiency:5.0f} % {bar}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=64, help="of the largest world [%(default)s]")
    parser.add_argument("--gpus", type=int, default=8, help="ranks a host [%(default)s]")
    parser.add_argument(
        "--gbit", type=float, default=100.0, help="a second that a host's network carries [%(default)s]"
    )
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="ring", help="of the all-reduce [%(default)s]")
    parser.add_argument("--steps", type=int, default=30, help="to measure [%(default)s]")
    parser.add_argument("--json", action="store_true", help="one object a line instead of the table")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        worker(arguments)
        return 0
    from step import spawn

    return spawn(2)


if __name__ == "__main__":
    sys.exit(main())
