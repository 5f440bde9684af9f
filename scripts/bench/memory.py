"""Compare the peak memory of training with torch's DistributedDataParallel: each variant in fresh processes.

    python scripts/bench/memory.py [--width 4096] [--layers 4] [--steps 4] [--repeats 3]

Two processes train a chain of large and of small linear layers over gloo, with SGD without momentum and gradients set
to None between steps. The table has the peak resident memory of a process above that of one which has only imported
torch and joined the group: weights, gradients, buckets, activations. Medians over the repeats, which take turns.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

VARIANTS = ("alone", "ddp", "ddp views", "torch", "torch views")


def worker(arguments: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    import ddp

    torch.set_num_threads(1)
    world = ddp.init("gloo")
    before_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    large = [nn.Linear(arguments.width, arguments.width) for _ in range(arguments.layers)]
    model: nn.Module = nn.Sequential(*large, nn.Linear(arguments.width, 64), *(nn.Linear(64, 64) for _ in range(64)))
    views = arguments.variant.endswith("views")
    if arguments.variant.startswith("ddp"):
        model = ddp.DistributedDataParallel(model, gradient_as_bucket_view=views)
    elif arguments.variant.startswith("torch"):
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=views)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(arguments.steps):
        optimizer.zero_grad()
        model(torch.randn(4, arguments.width)).square().mean().backward()
        optimizer.step()
    peak_mb = torch.tensor([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before_mb])
    dist.all_reduce(peak_mb, dist.ReduceOp.MAX)
    if world.is_main:
        print(f"{float(peak_mb):.1f}")


def measure(variant: str, arguments: argparse.Namespace) -> float:
    """Peak memory in MB of one run in fresh processes."""
    shape = ["--width", str(arguments.width), "--layers", str(arguments.layers), "--steps", str(arguments.steps)]
    done = subprocess.run(
        [sys.executable, __file__, *shape, "--variant", variant], stdout=subprocess.PIPE, text=True, check=True
    )
    return float(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=4096, help="of the large layers [%(default)s]")
    parser.add_argument("--layers", type=int, default=4, help="how many large ones [%(default)s]")
    parser.add_argument("--steps", type=int, default=4, help="steps of training [%(default)s]")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each variant [%(default)s]")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        worker(arguments)
        return 0
    if arguments.variant:
        from step import spawn

        return spawn(2)
    print(f"{arguments.layers} layers of {arguments.width}^2, {arguments.layers * arguments.width**2 * 4 / 1e6:.0f} MB")
    peaks: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(arguments.repeats):
        for variant, its in peaks.items():
            its.append(measure(variant, arguments))
    best = statistics.median(peaks["torch views"])
    print(f"  {'':12} {'peak MB':>9} {'to torch views':>15}")
    for variant, its in peaks.items():
        print(f"  {variant:12} {statistics.median(its):9.1f} {statistics.median(its) / best:15.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
