"""Compare collectives of tensors in host memory: ddp's backend shm beside gloo, in turns in one run.

    python scripts/bench/collectives.py [--ranks 2,4] [--sizes 4KB,64KB,1MB,25MB,100MB]
        [--operations all_reduce,broadcast,all_gather,reduce_scatter] [--rounds 15] [--json]
    sudo python scripts/bench/collectives.py --hosts 2 [--ranks 4] [--rate 1gbit] [--sizes 4KB,1MB,25MB]

The processes of one world have a group of each backend. A round gives each backend a few calls, in random order, after
a barrier; its time is that of the slowest rank, for one call. The table has medians over the rounds, and the median of
the ratios within rounds. Sizes are those of the whole tensor, of float32: of the output of an all-gather, and of the
input of a reduce-scatter.

With `--hosts 2`, half of the ranks are in each of two network and process namespaces, with a link between them that
lets through `--rate` in each direction: ranks of two namespaces share no memory. There shm adds up within a host over
memory and between hosts over gloo; "gloo" is one flat group.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts" / "bench")]

BACKENDS = ("gloo", "shm")
OPERATIONS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")
UNITS = {"KB": 1 << 10, "MB": 1 << 20}
GOALS = {4 << 10: 0.15, 1 << 20: 0.25, 25 << 20: 0.45, 100 << 20: 0.45}  # of an all-reduce, on one host
_BLOCK_S = 0.02  # how long a block of calls should take, at 2 GB/s and 0.2 ms a call


@dataclass(frozen=True)
class Figure:
    """Medians of one operation: milliseconds a call, and shm's time by gloo's in the same round."""

    operation: str
    ranks: int
    hosts: int
    nbytes: int
    gloo_ms: float
    shm_ms: float
    ratio: float
    gloo_cpu_ms: float
    shm_cpu_ms: float


def calls_of(operation: str, nbytes: int, group: Any) -> Callable[[], object]:
    """What makes one call over tensors of its own."""
    import torch
    import torch.distributed as dist

    size = group.size()
    numel = max(1, nbytes // 4 // size) * size
    whole, part = torch.zeros(numel), torch.zeros(numel // size)
    ways: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, group_src=0, group=group),
        "all_gather": lambda: group._allgather_base(whole, part).wait(),
        "reduce_scatter": lambda: group._reduce_scatter_base(part, whole).wait(),
    }
    return ways[operation]


def measure(operation: str, nbytes: int, groups: dict[str, Any], rounds: int, *, rate: float | None) -> Figure:
    """Measure both backends, in turns. `rate`: bytes a second between hosts, by which a block gets its length."""
    import torch
    import torch.distributed as dist

    calls = {name: calls_of(operation, nbytes, group) for name, group in groups.items()}
    count = max(1, min(200, int(_BLOCK_S / (nbytes / (rate or 2e9) + 2e-4))))
    wall_s, cpu_s = torch.zeros(2, rounds, len(BACKENDS), dtype=torch.float64)
    order = random.Random(0)  # the same on every rank
    for call in calls.values():
        for _ in range(3 if nbytes > 1 << 20 else 20):
            call()
    for index in range(rounds):
        for which in order.sample(range(len(BACKENDS)), len(BACKENDS)):
            call = calls[BACKENDS[which]]
            call()  # not timed: brings its memory back into the caches
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            for _ in range(count):
                call()
            wall_s[index, which] = (time.perf_counter() - start) / count
            cpu_s[index, which] = (time.process_time() - cpu_start) / count
    dist.all_reduce(wall_s, dist.ReduceOp.MAX)
    dist.all_reduce(cpu_s)
    gloo_ms, shm_ms, gloo_cpu_ms, shm_cpu_ms = (
        statistics.median(column) * 1e3 for times in (wall_s, cpu_s) for column in times.T.tolist()
    )
    ratio = statistics.median(shm / gloo for gloo, shm in wall_s.tolist())
    hosts = int(os.environ.get("BENCH_HOSTS", "1"))
    return Figure(
        operation, dist.get_world_size(), hosts, nbytes, gloo_ms, shm_ms, ratio, gloo_cpu_ms, shm_cpu_ms
    )  # fmt: skip


def worker(arguments: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    import ddp

    torch.set_num_threads(1)
    world = ddp.init("gloo")
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    rate = rate_of(arguments.rate) if arguments.hosts > 1 else None
    for operation in arguments.operations.split(","):
        for nbytes in map(bytes_of, arguments.sizes.split(",")):
            figure = measure(operation, nbytes, groups, arguments.rounds, rate=rate)
            if world.is_main:
                print(json.dumps(asdict(figure)) if arguments.json else _line(figure), flush=True)


def bytes_of(text: str) -> int:
    """4KB, 25MB: the bytes of a tensor."""
    return int(text[:-2]) * UNITS[text[-2:].upper()]


def rate_of(text: str) -> float:
    """Bytes a second, of a rate as tc writes it: 1gbit, 100mbit."""
    return float(text[:-4]) * {"g": 1e9, "m": 1e6}[text[-4]] / 8


def _line(figure: Figure) -> str:
    unit = "MB" if figure.nbytes >= UNITS["MB"] else "KB"
    goal = GOALS.get(figure.nbytes) if figure.operation == "all_reduce" and figure.hosts == 1 else None
    return (
        f"{figure.operation:15} {figure.ranks:5} {figure.nbytes // UNITS[unit]:6} {unit} {figure.gloo_ms:10.3f} "
        f"{figure.shm_ms:10.3f} {figure.ratio:8.3f} {'' if goal is None else goal:6} {figure.gloo_cpu_ms:12.3f} "
        f"{figure.shm_cpu_ms:12.3f}"
    )


_HEADER = (
    f"{'operation':15} {'ranks':>5} {'size':>9} {'gloo ms':>10} {'shm ms':>10} {'ratio':>8} {'goal':>6} "
    f"{'gloo CPU ms':>12} {'shm CPU ms':>12}"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", help="world sizes [2,4; with --hosts 2: 4]")
    parser.add_argument("--sizes", default="4KB,64KB,1MB,25MB,100MB", help="of tensors [%(default)s]")
    parser.add_argument("--operations", default=",".join(OPERATIONS), help="[%(default)s]")
    parser.add_argument("--rounds", type=int, default=15, help="blocks of each backend [%(default)s]")
    parser.add_argument("--hosts", type=int, choices=[1, 2], default=1, help="2 are emulated, which needs root [1]")
    parser.add_argument("--rate", default="1gbit", help="of the link between hosts, as tc writes it [%(default)s]")
    parser.add_argument("--json", action="store_true", help="one object a line instead of the table")
    arguments = parser.parse_args()
    if unknown := set(arguments.operations.split(",")) - set(OPERATIONS):
        parser.error(f"--operations: no {', '.join(sorted(unknown))}; there are {', '.join(OPERATIONS)}")
    if "RANK" in os.environ:
        worker(arguments)
        return 0
    if "BENCH_HOST" in os.environ:
        return run_host(int(os.environ["BENCH_HOST"]))
    if arguments.hosts > 1 and os.geteuid():
        parser.error("--hosts: network namespaces need root: run it with sudo")
    if not arguments.json:
        print(f"{os.cpu_count()} cores ({platform.machine()}), one thread a rank, {arguments.rounds} rounds\n{_HEADER}")
        sys.stdout.flush()
    codes = list(run_worlds(arguments))
    return next((code for code in codes if code), 0)


def run_worlds(arguments: argparse.Namespace) -> Iterator[int]:
    from step import spawn

    if arguments.hosts == 1:
        for ranks in map(int, (arguments.ranks or "2,4").split(",")):
            yield spawn(ranks)
        return
    from link import ADDRESSES, LINK, Link
    from step import run_all
    from testbed.namespaces import path_of

    own_processes = [path_of("unshare"), "--pid", "--fork", "--kill-child", "--mount-proc"]
    shared = {"BENCH_HOSTS": "2", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29501", "GLOO_SOCKET_IFNAME": LINK}
    with Link(arguments.rate) as namespaces:
        enter = [[path_of("nsenter"), f"--net=/proc/{holder}/ns/net", "--"] for holder in namespaces]
        for ranks in (arguments.ranks or "4").split(","):
            yield run_all(
                [
                    (
                        [*inside, *own_processes, sys.executable, *sys.argv],
                        {**shared, "BENCH_RANKS": ranks, "BENCH_HOST": str(index)},
                    )
                    for index, inside in enumerate(enter)
                ]
            )


def run_host(index: int) -> int:
    """Start the ranks of one emulated host."""
    from step import run_all

    ranks, hosts = int(os.environ["BENCH_RANKS"]), int(os.environ["BENCH_HOSTS"])
    mine = [rank for rank in range(ranks) if rank * hosts // ranks == index]
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(len(mine)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *sys.argv]
    return run_all(
        [(command, {**shared, "RANK": str(rank), "LOCAL_RANK": str(local)}) for local, rank in enumerate(mine)]
    )


if __name__ == "__main__":
    sys.exit(main())
