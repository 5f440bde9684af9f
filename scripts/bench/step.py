"""Compare the time of a training step with torch's DistributedDataParallel, in turns in one run.

    python scripts/bench/step.py [--steps 2] [--rounds 30] [--models mlp,small,conv,gpt,nano,unused,accumulate]
    python scripts/bench/step.py --models many --variants ddp,"ddp checksum","ddp again"  # what weight_checksum costs

Two processes on this machine train replicas of the same model over gloo: one wrapped by ddp, one by torch's
class with its defaults, one by torch's class with gradient_as_bucket_view=True, and one by torch's class a
second time, whose ratio to the first shows how far noise alone goes. "ddp shm" and "torch shm" are the first two over
the backend shm. "alone" is the same model without a wrapper,
which sends nothing: what others take longer, divided by the number of parameters, is the overhead of each. Where
a model leaves parameters unused, torch's class gets find_unused_parameters=True, which it needs. A round gives each
variant a block of steps, in random order; a block's time is that of the slower rank. The table gives medians over the
rounds, and the median of the ratios within rounds. CPU time is that of all threads of both ranks: it says less
about overlap, but much more than wall time on a machine that does other things too. Without one of torch's among the
`--variants`, ratios are to the first of them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import ddp  # noqa: E402

_DEADLINE_S = 1800.0


class Block(nn.Module):
    """A transformer block. x: (batch, tokens, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A small GPT with tied embeddings. tokens: (batch, length) -> logits (batch, length, vocabulary)."""

    def __init__(
        self, vocabulary: int = 2048, length: int = 64, width: int = 256, depth: int = 4, heads: int = 4
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


class Halves(nn.Module):
    """Two chains of linear layers, of which a forward pass uses one, in turns. x: (batch, 32)."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.chains = nn.ModuleList(nn.Sequential(*(nn.Linear(32, 32) for _ in range(depth))) for _ in range(2))
        self.turn = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.turn = 1 - self.turn
        return self.chains[self.turn](x)


def _conv_layer(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


_SGD = functools.partial(torch.optim.SGD, lr=1e-4, momentum=0.9)


@dataclass(frozen=True)
class Subject:
    """A model to measure and a batch for it."""

    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[], torch.Tensor]
    micro_batches: int = 1
    find_unused: bool = False
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = _SGD
    clip: float | None = None


SUBJECTS = {
    "mlp": Subject(
        "MLP, comm-bound: 4 layers of 1024x1024 or more",
        lambda: nn.Sequential(
            nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 1024),
            nn.Linear(1024, 10),
        ),
        lambda: torch.randn(8, 1024),
    ),
    "small": Subject(
        "600 small tensors",
        lambda: nn.Sequential(*(nn.Linear(32, 32) for _ in range(300))),
        lambda: torch.randn(8, 32),
    ),
    "many": Subject(
        "1,000 small tensors",
        lambda: nn.Sequential(*(nn.Linear(32, 32) for _ in range(500))),
        lambda: torch.randn(8, 32),
    ),
    "conv": Subject(
        "convnet with 8 BatchNorm",
        lambda: nn.Sequential(
            *_conv_layer(3, 16), *_conv_layer(16, 16), nn.MaxPool2d(2), *_conv_layer(16, 32), *_conv_layer(32, 64),
            nn.MaxPool2d(2), *_conv_layer(64, 128), *_conv_layer(128, 128), *_conv_layer(128, 128),
            *_conv_layer(128, 128), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
        ),
        lambda: torch.randn(4, 3, 24, 24),
    ),
    "unused": Subject(
        "400 small tensors, half of them unused in each step", lambda: Halves(100), lambda: torch.randn(8, 32),
        find_unused=True,
    ),
    "accumulate": Subject(
        "MLP, 4 micro-batches with no_sync",
        lambda: nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.Linear(1024, 10)),
        lambda: torch.randn(8, 1024), micro_batches=4,
    ),
    "gpt": Subject("GPT, 4 blocks of width 256", Gpt, lambda: torch.randint(2048, (2, 64))),
    "nano": Subject(
        "nanoGPT as its README runs it on a CPU: 4 blocks of width 128, AdamW, clipped",
        lambda: Gpt(vocabulary=65, length=64, width=128, depth=4, heads=4),
        lambda: torch.randint(65, (12, 64)),
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-3, betas=(0.9, 0.99)), clip=1.0,
    ),
}  # fmt: skip

VARIANTS = ("ddp", "ddp views", "ddp shm", "torch", "torch views", "torch shm", "torch again", "alone")
ASKED = ("ddp checksum", "ddp again")  # only where they are asked for
THEIRS = ("torch", "torch views")


def wrap(name: str, subject: Subject) -> nn.Module:
    """A fresh replica in the wrapper that `name` stands for."""
    torch.manual_seed(0)
    module = subject.build()
    if name == "alone":
        return module
    views = name.endswith("views")
    group = _shm_group() if name.endswith("shm") else None
    if name.startswith("ddp"):
        return ddp.DistributedDataParallel(
            module, process_group=group, gradient_as_bucket_view=views, weight_checksum=name.endswith("checksum")
        )
    return nn.parallel.DistributedDataParallel(
        module, process_group=group, gradient_as_bucket_view=views, find_unused_parameters=subject.find_unused
    )


@functools.cache
def _shm_group() -> dist.ProcessGroup:
    return dist.new_group(backend="shm")


def stepper(subject: Subject, name: str) -> Callable[[], None]:
    """A function that makes one training step of a fresh replica."""
    model = wrap(name, subject)
    optimizer = subject.optimizer(model.parameters())
    batch = subject.batch()

    def step() -> None:
        optimizer.zero_grad()
        with getattr(model, "no_sync", contextlib.nullcontext)():
            for _ in range(subject.micro_batches - 1):
                model(batch).square().mean().backward()
        model(batch).square().mean().backward()
        if subject.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), subject.clip)
        optimizer.step()

    return step


@dataclass(frozen=True)
class Times:
    """Seconds a step in each round: wall clock of the slower rank, and CPU time of all threads of all ranks."""

    wall_s: list[float]
    cpu_s: list[float]


def measure(subject: Subject, variants: Sequence[str], *, steps: int, rounds: int) -> dict[str, Times]:
    """Measure every variant, in turns."""
    every = {name: stepper(subject, name) for name in variants}
    names = list(every)
    wall_s, cpu_s = torch.zeros(2, rounds, len(names), dtype=torch.float64)
    for step in every.values():
        for _ in range(3):
            step()
    order = random.Random(0)  # the same on every rank
    for index in range(rounds):
        for which in order.sample(range(len(names)), len(names)):
            every[names[which]]()  # not timed: brings this replica's memory back into the caches
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            for _ in range(steps):
                every[names[which]]()
            wall_s[index, which] = (time.perf_counter() - start) / steps
            cpu_s[index, which] = (time.process_time() - cpu_start) / steps
    dist.all_reduce(wall_s, dist.ReduceOp.MAX)
    dist.all_reduce(cpu_s)
    return {name: Times(wall_s[:, i].tolist(), cpu_s[:, i].tolist()) for i, name in enumerate(names)}


def ratio(left: list[float], right: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(left, right, strict=True))


def report(subject: Subject, times: dict[str, Times]) -> None:
    theirs = [name for name in THEIRS if name in times] or [next(iter(times))]
    best = min(theirs, key=lambda name: statistics.median(times[name].wall_s))
    count = len(list(subject.build().parameters()))
    print(
        f"\n{subject.title}\n  {'':12} {'ms a step':>9} {'to ' + best:>14} {'CPU ms':>9} {'to ' + best:>14} "
        f"{'CPU us a tensor more than alone':>32}"
    )
    for name, its in times.items():
        wall, cpu = (statistics.median(values) * 1e3 for values in (its.wall_s, its.cpu_s))
        wall_ratio, cpu_ratio = ratio(its.wall_s, times[best].wall_s), ratio(its.cpu_s, times[best].cpu_s)
        more = [mine - alone for mine, alone in zip(its.cpu_s, times.get("alone", times[best]).cpu_s, strict=True)]
        overhead_us = statistics.median(more) * 1e6 / count / dist.get_world_size()
        print(
            f"  {name:12} {wall:9.2f} {wall_ratio:14.3f} {cpu:9.2f} {cpu_ratio:14.3f} {overhead_us:32.2f}", flush=True
        )


def worker(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    world = ddp.init("gloo")
    for name in arguments.models.split(","):
        times = measure(SUBJECTS[name], arguments.variants.split(","), steps=arguments.steps, rounds=arguments.rounds)
        if world.is_main:
            report(SUBJECTS[name], times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2, help="steps in a block (default 2)")
    parser.add_argument("--rounds", type=int, default=30, help="rounds of one block for each variant (default 30)")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--models", default=",".join(SUBJECTS), help=f"which of {','.join(SUBJECTS)} (default all)")
    parser.add_argument("--variants", default=",".join(VARIANTS), help=f"of {','.join(VARIANTS + ASKED)}")
    arguments = parser.parse_args()
    if unknown := set(arguments.variants.split(",")) - {*VARIANTS, *ASKED}:
        parser.error(f"--variants: no {', '.join(sorted(unknown))}; there are {', '.join(VARIANTS + ASKED)}")
    if unknown := set(arguments.models.split(",")) - set(SUBJECTS):
        parser.error(f"--models: no {', '.join(sorted(unknown))}; there are {', '.join(SUBJECTS)}")
    if "RANK" in os.environ:
        worker(arguments)
        return 0
    print(
        f"{arguments.ranks} processes with gloo on {os.cpu_count()} cores ({platform.machine()}), "
        f"torch {torch.__version__}, one thread each; {arguments.rounds} rounds of {arguments.steps} steps"
    )
    return spawn(arguments.ranks)


def spawn(ranks: int, argv: Sequence[str] = sys.argv, *, deadline_s: float = _DEADLINE_S) -> int:
    """Start a script once for each rank; return the first exit code that is not 0, after stopping the others."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *argv]
    commands = [(command, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)]
    return run_all(commands, deadline_s=deadline_s)


def run_all(commands: Sequence[tuple[list[str], dict[str, str]]], *, deadline_s: float = _DEADLINE_S) -> int:
    """Run commands, with variables to add, side by side; the first exit code that is not 0 stops the others."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for argv, variables in commands:
            processes.append(subprocess.Popen(argv, env={**os.environ, **variables}))
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            codes = [process.poll() for process in processes]
            if any(codes) or None not in codes:
                return next((code for code in codes if code), 0)
            time.sleep(0.1)
        print(f"not finished after {deadline_s:.0f} s: try fewer --rounds", file=sys.stderr)
        return 1
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
