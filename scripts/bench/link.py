"""Compare the time of a training step over a slow link: compressed and not, beside torch's DistributedDataParallel.

    sudo python scripts/bench/link.py [--rate 1gbit] [--width 1024] [--layers 8] [--rounds 8] [--variants ...]

Two processes train replicas over gloo, each in a network namespace of its own; a link between them lets through
`--rate` in each direction (a token bucket). The model is a chain of linear layers with a small batch, so that sending
gradients takes most of a step. A round gives each variant one step, in random order; the time is that of the
slower rank. PowerSGD is not measured with torch's class, which mixes up its collectives over gloo. The table gives
medians over the rounds, and the median of the ratios within rounds. "ddp 25 MB" measures nothing and keeps its buckets,
"ddp auto" compresses if that pays. The last line holds the step of "ddp" against what it cannot be quicker than:
"compute", the same step inside no_sync(), or the bytes of its gradients at the rate of the link; and how long these
take with the headers of TCP, IP and Ethernet, which the rate counts too.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts" / "bench")]

ADDRESSES = ("10.213.77.1", "10.213.77.2")
LINK = "dtr0"
_WARM_UP = 7  # steps, after which what is measured has been decided
_FRAME_BYTES, _PAYLOAD_BYTES = 1514, 1448  # of a full frame of Ethernet, and what TCP with time stamps carries in it

_TORCH = "torch views"
_OURS = "ddp"
VARIANTS = (
    "compute", _OURS, "ddp 25 MB", "ddp auto", "ddp bf16", "ddp fp16", "ddp int8", "ddp powersgd",
    "torch", _TORCH, "torch fp16 hook",
)  # fmt: skip


def wrap(name: str, module: Any) -> Any:
    """The module in the wrapper that `name` stands for."""
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    import ddp

    whose, _, how = name.partition(" ")
    if whose == "compute" or how == "25 MB":
        return ddp.DistributedDataParallel(module, measure=False)
    if whose == "ddp":
        compression = ddp.compression.PowerSGD(rank=4, start_step=2) if how == "powersgd" else how or None
        return ddp.DistributedDataParallel(module, compression=compression)
    model = torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=how == "views")
    if how == "fp16 hook":  # torch refuses its bf16 hook without CUDA
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return model


def stepper(name: str, width: int, depth: int) -> Callable[[], None]:
    """A function that makes one training step of a fresh replica."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = wrap(name, nn.Sequential(*layers, nn.Linear(width, 10)))
    is_alone = name == "compute"
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = torch.randn(2, width)

    def step() -> None:
        optimizer.zero_grad()
        with model.no_sync() if is_alone else nullcontext():
            model(batch).square().mean().backward()
        optimizer.step()

    return step


def worker(arguments: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    import ddp

    torch.set_num_threads(1)
    world = ddp.init("gloo")
    names = arguments.variants.split(",")
    every = [stepper(name, arguments.width, arguments.layers) for name in names]
    for step in every:
        for _ in range(_WARM_UP):
            step()
    times = torch.zeros(arguments.rounds, len(names), dtype=torch.float64)
    order = random.Random(0)  # the same on every rank
    for index in range(arguments.rounds):
        for which in order.sample(range(len(names)), len(names)):
            dist.barrier()
            start = time.perf_counter()
            every[which]()
            times[index, which] = time.perf_counter() - start
    dist.all_reduce(times, dist.ReduceOp.MAX)
    if world.is_main:
        report(arguments, names, times.T.tolist())


def report(arguments: argparse.Namespace, names: list[str], times: list[list[float]]) -> None:
    nbytes = (arguments.layers * arguments.width * (arguments.width + 1) + 10 * (arguments.width + 1)) * 4
    megabytes = nbytes / 1e6
    theirs = [name for name in names if name.startswith("torch")] or [name for name in names if name != "compute"]
    best = min(theirs, key=lambda name: statistics.median(times[names.index(name)]))
    own = _OURS if _OURS in names else names[0]
    print(f"\n{arguments.rate}, {megabytes:.0f} MB of float32 gradients, {arguments.rounds} rounds")
    print(f"  {'':20} {'ms a step':>10} {'times as fast as ' + own:>24} {'as ' + best:>24}")
    for name, its in zip(names, times, strict=True):
        ratios = (
            statistics.median(a / b for a, b in zip(times[names.index(other)], its, strict=True))
            for other in (own, best)
        )
        print(f"  {name:20} {statistics.median(its) * 1e3:10.1f} {' '.join(f'{ratio:24.2f}' for ratio in ratios)}")
    rate = re.fullmatch(r"([0-9.]+)([mg])bit", arguments.rate)
    if rate is not None and {_OURS, "compute"} <= {*names}:
        sending_s = nbytes * 8 / float(rate[1]) / (1e9 if rate[2] == "g" else 1e6)
        computing_s, step_s = (statistics.median(times[names.index(name)]) for name in ("compute", _OURS))
        print(
            f"  {_OURS} takes {step_s / max(computing_s, sending_s):.2f} of the longer of compute "
            f"({computing_s * 1e3:.1f} ms) and bytes by rate ({sending_s * 1e3:.1f} ms; with headers "
            f"{sending_s * _FRAME_BYTES / _PAYLOAD_BYTES * 1e3:.1f} ms)"
        )
    sys.stdout.flush()


class Link:
    """Two network namespaces and a link of limited rate between them; leaving the context ends them."""

    def __init__(self, rate: str) -> None:
        self._rate = rate
        self._holders: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> list[int]:
        from testbed.namespaces import await_word, path_of, run_part

        try:
            for _ in ADDRESSES:
                argv = [path_of("unshare"), "--net", "--", "sh", "-c", "echo up; read _"]
                holder = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                self._holders.append(holder)
                await_word(holder, "a network namespace")
            first, second = (holder.pid for holder in self._holders)
            run_part(
                "ip", "link", "add", LINK, "type", "veth", "peer", "name", LINK, "netns", str(second), inside=first
            )
            for holder, address in zip(self._holders, ADDRESSES, strict=True):
                run_part("ip", "link", "set", "lo", "up", inside=holder.pid)
                run_part("ip", "addr", "add", f"{address}/24", "dev", LINK, inside=holder.pid)
                run_part("ip", "link", "set", LINK, "up", inside=holder.pid)
                bucket = ["tbf", "rate", self._rate, "burst", "256kb", "latency", "100ms"]
                run_part("tc", "qdisc", "add", "dev", LINK, "root", *bucket, inside=holder.pid)
            return [first, second]
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        for holder in self._holders:
            assert holder.stdin is not None
            assert holder.stdout is not None
            holder.stdin.close()
            holder.wait()
            holder.stdout.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="of the link, as tc writes it; 'none': no limit [%(default)s]")
    parser.add_argument("--width", type=int, default=1024, help="of the linear layers [%(default)s]")
    parser.add_argument("--layers", type=int, default=8, help="how many [%(default)s]")
    parser.add_argument("--rounds", type=int, default=8, help="steps of each variant [%(default)s]")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="[%(default)s]")
    arguments = parser.parse_args()
    if unknown := set(arguments.variants.split(",")) - set(VARIANTS):
        parser.error(f"--variants: no {', '.join(sorted(unknown))}; there are {', '.join(VARIANTS)}")
    if "RANK" in os.environ:
        worker(arguments)
        return 0
    if os.geteuid():
        parser.error("network namespaces need root: run it with sudo")
    with Link("100gbit" if arguments.rate == "none" else arguments.rate) as namespaces:
        return run_ranks(namespaces)


def run_ranks(namespaces: list[int]) -> int:
    """Start this script in each namespace; return the first exit code that is not 0."""
    from step import run_all
    from testbed.namespaces import path_of

    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29501", "OMP_NUM_THREADS": "1"}
    shared |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": LINK}
    return run_all(
        [
            (
                [path_of("nsenter"), f"--net=/proc/{holder}/ns/net", "--", sys.executable, *sys.argv],
                {**shared, "RANK": str(rank)},
            )
            for rank, holder in enumerate(namespaces)
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
