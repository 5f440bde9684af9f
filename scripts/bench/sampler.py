"""The sampler beside torch's: time and memory of one rank's epoch of ten million samples, in turns in one run.

    python scripts/bench/sampler.py [--samples 10000000] [--worlds 1,2,8] [--rounds 7]

Each figure comes from a fresh process that makes a sampler and reads one epoch of rank 0's share in a plain for loop.
"first s" is the time from iter() to the first index, "total s" to the last, "peak MB" by how much the epoch raised the
process's peak of resident memory. "list" is the floor for any sampler: the same number of indices, computed beforehand
and turned into Python integers chunk by chunk. Times and memory are medians over the rounds; ratios are medians of
those within a round, in the order of the columns. Times are CPU time, which says more than wall time on a machine that
does other things too; all is done by one thread.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

CHUNK = 32768
COLUMNS = ("first_s", "total_s", "peak_mb")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000_000, help="length of the data set [%(default)s]")
    parser.add_argument("--worlds", default="1,2,8", help="world sizes [%(default)s]")
    parser.add_argument("--rounds", type=int, default=7, help="processes for each figure [%(default)s]")
    parser.add_argument("--measure", nargs=2, metavar=("SAMPLER", "WORLD"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        name, world_size = args.measure
        print(json.dumps(measure(SAMPLERS[name], args.samples, int(world_size))))
        return
    print(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}; {args.samples:,} samples")
    print(f"{'world':>5} {'sampler':7} {'first s':>8} {'total s':>8} {'peak MB':>8}   ratios to torch's")
    for world_size in map(int, args.worlds.split(",")):
        compare(args.samples, world_size, args.rounds)


def compare(samples: int, world_size: int, rounds: int) -> None:
    found: dict[str, list[dict[str, float]]] = {name: [] for name in SAMPLERS}
    for turn in range(rounds + 1):
        for name in SAMPLERS:
            measured = measure_afresh(name, samples, world_size)
            if turn:  # the first turn warms the file cache
                found[name].append(measured)
    for name, each in found.items():
        first, total, peak = (statistics.median(one[column] for one in each) for column in COLUMNS)
        ratios = (
            statistics.median(a[column] / b[column] for a, b in zip(each, found["torch"], strict=True))
            for column in COLUMNS
        )
        shown = "" if name == "torch" else "   " + ", ".join(f"{ratio:.4f}" for ratio in ratios)
        print(f"{world_size:5} {name:7} {first:8.4f} {total:8.3f} {peak:8.1f}{shown}", flush=True)


def measure_afresh(name: str, samples: int, world_size: int) -> dict[str, float]:
    argv = [sys.executable, __file__, "--samples", str(samples), "--measure", name, str(world_size)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measure(make: Callable[[int, int], Iterable[int]], samples: int, world_size: int) -> dict[str, float]:
    """Read one epoch in this process."""
    for _ in make(100, world_size):  # loads what torch loads late
        pass
    sampler = make(samples, world_size)
    reset_peak()
    before_mb = peak_mb()
    began = time.process_time()
    indices = iter(sampler)
    next(indices)
    first_s = time.process_time() - began
    for _ in indices:
        pass
    total_s = time.process_time() - began
    return {"first_s": first_s, "total_s": total_s, "peak_mb": peak_mb() - before_mb}


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): sets the peak to what is resident now


def peak_mb() -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1e3


def ours(samples: int, world_size: int) -> Iterable[int]:
    import ddp

    return ddp.DistributedSampler(range(samples), world_size, 0)


def theirs(samples: int, world_size: int) -> Iterable[int]:
    from torch.utils.data import DistributedSampler

    return DistributedSampler(range(samples), world_size, 0)  # type: ignore[arg-type]  # torch wants a Dataset


class Listed:
    """What no sampler can save: the integers."""

    def __init__(self, samples: int, world_size: int) -> None:
        import torch

        self.chunk = torch.randint(samples, (CHUNK,))
        self.share = samples // world_size

    def __iter__(self) -> Iterator[int]:
        sizes = (min(CHUNK, self.share - begin) for begin in range(0, self.share, CHUNK))
        return itertools.chain.from_iterable(self.chunk[:size].tolist() for size in sizes)


SAMPLERS: dict[str, Callable[[int, int], Iterable[int]]] = {"torch": theirs, "ddp": ours, "list": Listed}


if __name__ == "__main__":
    main()
