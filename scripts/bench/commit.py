"""What a resilient training pays in each step without a failure: the time of `state.commit()` and of what goes before.

    python scripts/bench/commit.py [--steps 20000] [--step-ms 20]

One process, which takes itself for a worker of dtrain. The model has a BatchNorm, the State an Adam, a schedule, a
sampler and two numbers; NumPy is loaded. Time of the processor, per step: median and least of 9 rounds. In turns with
that: the same with the state of a `Trainer.fit` with early stopping and a schedule, in the schedule's place.
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
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset

import ddp
from ddp.callbacks import EarlyStopping, LearningRateScheduler
from ddp.resilience.commits import Commits
from ddp.training.fit_state import FitState

ROUNDS = 9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--step-ms", type=float, default=20.0, help="of the training that it is compared with")
    args = parser.parse_args()
    states = {"a step": begun(made()), "a step of Trainer.fit": begun(made_by_fit())}
    each_us: dict[str, list[float]] = {name: [] for name in states}
    for _ in range(ROUNDS):
        for name, state in states.items():
            each_us[name].append(round_of(state, state.commits, args.steps // ROUNDS))
    for name, found in each_us.items():
        median = statistics.median(found)
        share = median / args.step_ms / 10
        print(f"{name}: {median:.1f} us (least {min(found):.1f}), {share:.3f} % of {args.step_ms:g} ms")


def begun(state: ddp.State) -> ddp.State:
    with tempfile.NamedTemporaryFile() as page:
        os.environ["DTRAIN_STATE_FILE"] = page.name
        state.commits.begin(has_state=True)
    return state


def made() -> ddp.State:
    ddp.init()
    net = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 10))
    model = ddp.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = CosineAnnealingLR(optimizer, 1000)
    sampler = ddp.DistributedSampler(TensorDataset(torch.zeros(1 << 20, 1)))
    return ddp.State(model=model, optimizer=optimizer, scheduler=schedule, sampler=sampler, epoch=0, step=0)


def made_by_fit() -> ddp.State:
    net = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.Adam(net.parameters())
    scheduler = LearningRateScheduler(scheduler=lambda optimizer: CosineAnnealingLR(optimizer, 1000))
    callbacks = [EarlyStopping("loss"), scheduler]
    trainer = ddp.Trainer(net, optimizer, nn.CrossEntropyLoss(), callbacks=callbacks)
    data = TensorDataset(torch.zeros(1 << 20, 1))
    loader = trainer.strategy.loader(data, global_batch_size=32, shuffle=True)
    return ddp.State(
        model=trainer.model, optimizer=trainer.optimizer, sampler=loader, fit=FitState(trainer), epoch=0, step=0
    )


def round_of(state: ddp.State, commits: Commits, steps: int) -> float:
    """Return microseconds a step."""
    began = time.process_time()
    for state.step in range(steps):
        commits.sending()
        state.commit()
    return (time.process_time() - began) / steps * 1e6


if __name__ == "__main__":
    main()
