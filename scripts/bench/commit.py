"""What a resilient training pays in each step without a failure: the time of `state.commit()` and of what goes before.

    python scripts/bench/commit.py [--steps 20000] [--step-ms 20]

One process, which takes itself for a worker of dtrain. The model has a BatchNorm, the State an Adam, a schedule, a
sampler and two numbers; NumPy is loaded. Time of the processor, per step: median and least of 9 rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time

import numpy  # noqa: F401  # its state is kept, too
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddp
from ddp.resilience.commits import Commits

ROUNDS = 9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--step-ms", type=float, default=20.0, help="of the training that it is compared with")
    args = parser.parse_args()
    with tempfile.NamedTemporaryFile() as page:
        os.environ["DTRAIN_STATE_FILE"] = page.name
        state = made()
        state.commits.begin(has_state=True)
        each_us = [round_of(state, state.commits, args.steps // ROUNDS) for _ in range(ROUNDS)]
    median = statistics.median(each_us)
    share = median / args.step_ms / 10
    print(f"a step: {median:.1f} us (least {min(each_us):.1f}), {share:.3f} % of {args.step_ms:g} ms")


def made() -> ddp.State:
    ddp.init()
    net = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 10))
    model = ddp.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    sampler = ddp.DistributedSampler(TensorDataset(torch.zeros(1 << 20, 1)))
    return ddp.State(model=model, optimizer=optimizer, scheduler=schedule, sampler=sampler, epoch=0, step=0)


def round_of(state: ddp.State, commits: Commits, steps: int) -> float:
    """Return microseconds a step."""
    began = time.process_time()
    for state.step in range(steps):
        commits.sending()
        state.commit()
    return (time.process_time() - began) / steps * 1e6


if __name__ == "__main__":
    main()
