"""Whether a slow rank is named, and none where all ranks are equal: runs of a small model with BatchNorm.

    python scripts/bench/stragglers.py [--equal 200] [--at-once 8] [--slow 20]

First runs of two equal ranks, so many at once that they share the processors, for 20 s each; then, one after the other,
runs in which the forward and backward pass of rank 1 take 1.5 times as long. Shows how many runs named a rank, how many
said that processors are shared, and after how many seconds of training the slow rank was named.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TRAIN_S = 20.0
SCRIPT = """
import sys, time, torch, ddp
from torch import nn
world = ddp.init()
seconds, times = map(float, sys.argv[1:])
layers = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU()]
model = ddp.DistributedDataParallel(nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 28 * 28, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
images, labels = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
began = time.monotonic()
print("training", flush=True)
step = 0
while True:
    begun = time.monotonic()
    loss = nn.functional.cross_entropy(model(images), labels)
    if world.rank == 1:
        time.sleep((times - 1) * 3 * (time.monotonic() - begun))  # backward takes twice as long as forward
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    over = torch.tensor(float(time.monotonic() - began > seconds))
    if step % 20 == 0:
        torch.distributed.all_reduce(over)
        if over:
            break
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--equal", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--slow", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(SCRIPT)
        with ThreadPoolExecutor(args.at_once) as pool:
            equal = [*pool.map(lambda _: said(folder, 1.0), range(args.equal))]
        slow = [said(folder, 1.5) for _ in range(args.slow)]
    print(f"{'':24}{'runs':>8}{'a rank named':>16}{'rank 1 named':>16}{'processors shared':>20}{'after s':>10}")
    show(f"equal, {args.at_once} at once", equal)
    show("rank 1 takes 1.5 times", slow)


def said(folder: str, times: float) -> tuple[list[tuple[int, float]], bool]:
    """Run it; return which ranks were named, each with the seconds of training, and whether a host was."""
    argv = [sys.executable, "-m", "launcher", "run", "--nproc-per-node", "2", "train.py", str(TRAIN_S), str(times)]
    named, is_shared, began = [], False, 0.0
    with subprocess.Popen(argv, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if "training" in line and not began:
                began = time.monotonic()
            if found := re.search(r"rank (\d+) on \S+ is slow since", line):
                named.append((int(found[1]), time.monotonic() - began))
            is_shared |= "the processors of" in line
    if run.returncode != 0:
        raise SystemExit(f"a run ended with {run.returncode}")
    return named, is_shared


def show(name: str, runs: list[tuple[list[tuple[int, float]], bool]]) -> None:
    named = [ranks for ranks, _ in runs if ranks]
    after = [ranks[0][1] for ranks in named]
    shown = f"{statistics.median(after):.1f} ({max(after):.1f})" if after else "-"
    ones = sum({rank for rank, _ in ranks} == {1} for ranks in named)
    print(f"{name:24}{len(runs):8}{len(named):16}{ones:16}{sum(shared for _, shared in runs):20}{shown:>10}")


if __name__ == "__main__":
    main()
