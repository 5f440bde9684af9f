"""Steps of ddp.StepLoader: what they cost beside the same micro-batches without it, and their bits, by number of ranks.

    python scripts/bench/steps.py [--ranks 1,2,3,4,5,6,7,8] [--backend shm] [--steps 40] [--rounds 5]
    python scripts/bench/steps.py --bits [--steps 500] [--model cnn]

Without `--bits`: ms of a step of 8 micro-batches, in turns: "plain" accumulates this rank's share of them with
no_sync(), with the backend's sums; "steps" is the loop of ddp.StepLoader on the same samples, which are in memory. The
medians of the rounds, and the ratio. Both have the loader's processor time in them, "plain" that of torch's DataLoader.

With `--bits`: SHA-256 of parameters, buffers, the optimizer's state, losses and random numbers after so many steps.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
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
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ddp

MICRO_BATCHES, SIZE, SAMPLES = 8, 4, 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,3,4,5,6,7,8", help="world sizes [%(default)s]")
    parser.add_argument("--backend", default="shm", help="[%(default)s]")
    parser.add_argument("--model", default="mlp", choices=["mlp", "cnn"], help="[%(default)s]")
    parser.add_argument("--steps", type=int, default=40, help="of a round [%(default)s]")
    parser.add_argument("--rounds", type=int, default=5, help="[%(default)s]")
    parser.add_argument("--bits", action="store_true", help="compare the bits instead of times")
    args = parser.parse_args()
    print(f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, {args.backend}, {args.model}")
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
            (_compare_bits if args.bits else _measure)(args)
            dist.barrier()
            sys.stdout.flush()
        finally:
            os._exit(0)
    return pid


class _Training:
    def __init__(self, model: str) -> None:
        torch.manual_seed(1)
        if model == "cnn":
            self.net: nn.Module = nn.Sequential(
                nn.Conv2d(1, 16, 3),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.Dropout(0.2),
                nn.Flatten(),
                nn.Linear(16 * 900, 10),
            )
        else:
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
        numbers = torch.Generator().manual_seed(2)
        inputs = torch.randn(SAMPLES, 1, 32, 32, generator=numbers)
        self.data = TensorDataset(inputs, torch.randint(10, (SAMPLES,), generator=numbers))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        self.model = ddp.DistributedDataParallel(self.net)

    def backward(self, x: torch.Tensor, y: torch.Tensor) -> float:
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        return loss.item()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def _plain(model: str) -> Callable[[int], None]:
    """Return the usual loop: each rank accumulates its share of the micro-batches."""
    training, rank, size = _Training(model), dist.get_rank(), dist.get_world_size()
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


def _steps(model: str) -> Callable[[int], None]:
    training = _Training(model)
    loader = ddp.StepLoader(
        training.data, global_batch_size=MICRO_BATCHES * SIZE, micro_batch_size=SIZE, drop_last=True
    )
    epochs = loader.epochs(10**9)

    def run(steps: int) -> None:
        for _, step in zip(range(steps), epochs, strict=False):
            for x, y in step:
                training.backward(x, y)
            training.step()

    return run


def _measure(args: argparse.Namespace) -> None:
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
        plain, steps = (statistics.median(found[name]) for name in ways)
        print(
            f"{dist.get_world_size():2} ranks  plain {plain:7.2f} ms  steps {steps:7.2f} ms  ratio {steps / plain:.2f}"
        )


def _compare_bits(args: argparse.Namespace) -> None:
    training, digest, left = _Training(args.model), hashlib.sha256(), args.steps
    loader = ddp.StepLoader(training.data, global_batch_size=MICRO_BATCHES * SIZE, micro_batch_size=SIZE)
    for step in loader.epochs(10**9):
        losses = [training.backward(x, y) for x, y in step]
        training.step()
        digest.update(repr(step.mean(losses)).encode())
        left -= 1
        if not left:
            break
    state = training.optimizer.state_dict()["state"]
    values = [*training.net.state_dict().values(), *(value for each in state.values() for value in each.values())]
    for value in [*values, torch.rand(2)]:
        digest.update(value.numpy().tobytes())
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size():2} ranks  {args.steps} steps  {digest.hexdigest()}")


if __name__ == "__main__":
    main()
