"""Sums of a small vector over many ranks of this machine: recursive doubling beside gloo's ring, in turns in one run.

    python scripts/bench/small_sum.py [--ranks 2,4,8,16,32] [--numbers 60,1000] [--rounds 3]

"ring" is the group's all-reduce, "doubling" what ddp's step status takes from 8 ranks on, by a thread.
Times are medians of 30 sums, in milliseconds, one figure a round; "messages" is the number of messages of one rank that
follow each other. All ranks share the cores of one machine: with more ranks than cores, times grow with the number of
all messages, and only the ratio says something about a cluster, where each message costs a round trip as well.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from ddp.comm.sums import small_sum

SUMS = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4,8,16,32", help="world sizes [%(default)s]")
    parser.add_argument("--numbers", default="60,1000", help="lengths of the vector, float32 [%(default)s]")
    parser.add_argument("--rounds", type=int, default=3, help="figures for each way [%(default)s]")
    args = parser.parse_args()
    print(f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}")
    for numbers in map(int, args.numbers.split(",")):
        for size in map(int, args.ranks.split(",")):
            with tempfile.TemporaryDirectory() as folder:
                pids = [_fork(rank, size, numbers, args.rounds, folder) for rank in range(size)]
                for pid in pids:
                    os.waitpid(pid, 0)


def _fork(rank: int, size: int, numbers: int, rounds: int, folder: str) -> int:
    pid = os.fork()
    if not pid:
        try:
            _measure(rank, size, numbers, rounds, folder)
        finally:
            os._exit(0)
    return pid


def _measure(rank: int, size: int, numbers: int, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120))
    small_sum._LEAST_RANKS = 2
    group, flat = dist.group.WORLD, torch.empty(numbers)
    doubling = small_sum.SmallAdder(group)
    ways: dict[str, Callable[[], object]] = {
        "ring": lambda: group.allreduce([flat.fill_(1.0)]).wait(),
        "doubling": lambda: doubling.start(flat.fill_(1.0)).wait(),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            found[name].append(_median_ms(way))
            assert flat.tolist() == [float(size)] * numbers
    if rank == 0:
        messages = {"ring": 2 * (size - 1), "doubling": size.bit_length() - 1 + 2 * (size & (size - 1) != 0)}
        for name, times in found.items():
            figures = " ".join(f"{figure:8.2f}" for figure in times)
            print(
                f"{size:4} ranks, {numbers:6} numbers  {name:9} messages {messages[name]:3}  ms {figures}", flush=True
            )
    dist.barrier()


def _median_ms(way: Callable[[], object]) -> float:
    times = []
    for _ in range(SUMS):
        start = time.perf_counter()
        way()
        times.append((time.perf_counter() - start) * 1000)
    return statistics.median(times)


if __name__ == "__main__":
    main()
