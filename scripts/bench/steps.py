"""Steps of ddp.StepLoader: what they cost beside the same micro-batches without it, and their bits, by number of ranks.

    python scripts/bench/steps.py [--ranks 1,2,3,4,5,6,7,8] [--backend shm] [--steps 40] [--rounds 5]
    python scripts/bench/steps.py --ledger sampled [--rounds 30]
    python scripts/bench/steps.py --bits [--steps 500] [--model cnn] [--hosts 1,2,3]
    python scripts/bench/steps.py --schedules 100 [--steps 60] [--seed 1]

Without `--bits`: ms of a step of 8 micro-batches, in turns: "plain" accumulates this rank's share of them with
no_sync(), with the backend's sums; "steps" is the loop of ddp.StepLoader on the same samples, which are in memory. The
medians of the rounds, and the ratio. Both have the loader's processor time in them, "plain" that of torch's DataLoader.

With `--ledger`: the loop of ddp.StepLoader without a ledger, and with one, sampled or full.

With `--bits`: SHA-256 of parameters, buffers, the optimizer's state, losses and random numbers after so many steps, by
number of ranks and of simulated hosts. With `--schedules`: the same after random kills, lost hosts, hosts that join,
and restarts from files on other ranks (step_runs/).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from step_runs.schedules import Part, run_part, run_schedules
from step_runs.training import MICRO_BATCHES, MODELS, SIZE, Training
from torch.utils.data import DataLoader

import ddp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,3,4,5,6,7,8", help="world sizes [%(default)s]")
    parser.add_argument("--backend", default="shm", help="[%(default)s]")
    parser.add_argument("--model", default="mlp", choices=MODELS, help="[%(default)s]")
    parser.add_argument("--steps", type=int, default=40, help="of a round [%(default)s]")
    parser.add_argument("--rounds", type=int, default=5, help="[%(default)s]")
    parser.add_argument("--ledger", choices=("sampled", "full"), help="what a ledger costs instead")
    parser.add_argument("--bits", action="store_true", help="compare the bits instead of times")
    parser.add_argument("--hosts", default="1", help="simulated, for --bits [%(default)s]")
    parser.add_argument("--schedules", type=int, default=0, metavar="N", help="compare those of N random schedules")
    parser.add_argument("--seed", type=int, default=1, help="of the first schedule [%(default)s]")
    args = parser.parse_args()
    print(f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, {args.backend}, {args.model}")
    if args.schedules:
        sys.exit(run_schedules(args.schedules, args.seed, args.steps))
    if args.bits:
        _compare_bits(args)
        return
    for size in map(int, args.ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            for pid in [_fork(rank, size, args, folder) for rank in range(size)]:
                os.waitpid(pid, 0)


def _fork(rank: int, size: int, args: argparse.Namespace, folder: str) -> int:
    pid = os.fork()
    if not pid:
        try:
            torch.set_num_threads(1)
            ddp.StepLoader  # noqa: B018  # registers shm
            store = dist.FileStore(f"{folder}/store", size)
            dist.init_process_group(args.backend, store=store, rank=rank, world_size=size, timeout=timedelta(minutes=5))
            _measure(args, folder)
            dist.barrier()
            sys.stdout.flush()
        finally:
            os._exit(0)
    return pid


def _plain(model: str) -> Callable[[int], None]:
    """Return the usual loop: each rank accumulates its share of the micro-batches."""
    training, rank, size = Training(model), dist.get_rank(), dist.get_world_size()
    share = MICRO_BATCHES // size + (rank < MICRO_BATCHES % size)

    def run(steps: int) -> None:
        for _, loader in zip(
            range(steps), iter(lambda: DataLoader(training.data, SIZE, shuffle=True), None), strict=False
        ):
            batches = iter(loader)
            while steps:
                for at in range(share):
                    batch = next(batches, None)
                    if batch is None:
                        break
                    with training.model.no_sync() if at + 1 < share else contextlib.nullcontext():
                        training.backward(*batch)
                else:
                    training.step()
                    steps -= 1
                    continue
                break
            if not steps:
                return

    return run


def _steps(model: str, **options: Any) -> Callable[[int], None]:
    training = Training(model)
    epochs = training.loader(drop_last=True, **options).epochs(10**9)

    def run(steps: int) -> None:
        for _, step in zip(range(steps), epochs, strict=False):
            for x, y in step:
                training.backward(x, y)
            training.step()

    return run


def _measure(args: argparse.Namespace, folder: str) -> None:
    if args.ledger:
        ddp.ledger(f"{folder}/ledger")
        ways = {"without": _steps(args.model, ledger="off"), args.ledger: _steps(args.model, ledger=args.ledger)}
    else:
        ways = {"plain": _plain(args.model), "steps": _steps(args.model)}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for each in range(args.rounds + 1):  # the first one warms up
        for name, run in ways.items():
            dist.barrier()
            began = time.perf_counter()
            run(args.steps)
            dist.barrier()
            if each:
                found[name].append(1e3 * (time.perf_counter() - began) / args.steps)
    if dist.get_rank() == 0:
        first, second = (statistics.median(times) for times in found.values())
        ratio = statistics.median(after / before for before, after in zip(*found.values(), strict=True))
        shown = "  ".join(f"{name} {ms:7.2f} ms" for name, ms in zip(ways, (first, second), strict=True))
        print(f"{dist.get_world_size():2} ranks  {shown}  ratio {ratio:.3f}")


def _compare_bits(args: argparse.Namespace) -> None:
    """Print the SHA-256 of each number of ranks and hosts; exit with 1 if they differ."""
    digests = set()
    for size in map(int, args.ranks.split(",")):
        for hosts in [each for each in map(int, args.hosts.split(",")) if size % each == 0]:
            with tempfile.TemporaryDirectory() as folder:
                part = Part(hosts, size // hosts, args.backend if hosts == 1 else "", args.steps)
                ended = run_part(part, args.model, Path(folder))
            if ended.code:
                sys.exit(f"{ended.text}\n{part} ended with {ended.code}")
            print(f"{size:2} ranks  {hosts} hosts  {args.steps} steps  {', '.join(ended.results)}", flush=True)
            digests |= ended.results
    if len(digests) != 1:
        sys.exit("the bits differ")


if __name__ == "__main__":
    main()
