"""Fits a model under dtrain with callbacks that keep files; a rank fails at hooks, as the words of the arguments say.

A word is `rank.hook.number`, such as `1.on_step_end.5`: the first process that comes there kills itself. Each rank
prints at the end what must not depend on failures.
"""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import ddp

torch.manual_seed(0)  # what is imported after this is no matter of testbed.warm
from torch import nn  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

from ddp import callbacks as cb  # noqa: E402
from ddp.callbacks.callback import Callback  # noqa: E402


def fail(place: str) -> None:
    word = f"{ddp.init().rank}.{place}"
    if word in sys.argv[1:]:
        try:
            Path(word).touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


class Fails(Callback):
    """Also sees what a user's callback sees, and keeps it."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_step_begin(self, step: int) -> None:
        fail(f"on_step_begin.{step}")

    def on_step_end(self, step: int, logs: dict[str, float]) -> None:
        self.trainer.record("drawn", torch.rand(1).item(), 1)
        self.seen.append([step, dict(logs)])
        fail(f"on_step_end.{step}")

    def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
        self.seen.append(["epoch", epoch, dict(logs)])
        fail(f"on_epoch_end.{epoch}")

    def on_evaluate_begin(self) -> None:
        fail(f"on_evaluate_begin.{self.trainer.epoch}")

    def on_fit_end(self) -> None:
        fail("on_fit_end.0")

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: Any) -> None:
        self.seen = list(state["seen"])


class Trainer(ddp.Trainer):
    def train_step(self, batch: Any) -> torch.Tensor:
        fail(f"train_step.{self.step}")
        return super().train_step(batch)


def main() -> None:
    numbers = torch.Generator().manual_seed(1)
    x, y = torch.randn(58, 6, generator=numbers), torch.randint(3, (58,), generator=numbers)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    fails = Fails()
    stopping = cb.EarlyStopping("val_loss", patience=1, min_delta=0.02, restore_best=True)
    trainer = Trainer(
        net,
        optimizer,
        nn.CrossEntropyLoss(ignore_index=2),
        metrics=["accuracy"],
        callbacks=[
            stopping,
            cb.LearningRateScheduler(scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 5, 0.9), by="step"),
            cb.LinearScaling(1),
            cb.CSVLogger("log.csv"),
            cb.ModelCheckpoint("saved", monitor="val_loss", every_n_steps=3),
            fails,
        ],
        precision="bfloat16" if "bfloat16" in sys.argv else "float32",
        accumulate=2,
        max_grad_norm=1.0,
        log_every=3,
        seed=3,
        resilient="plain" not in sys.argv,
    )
    world = trainer.strategy.world
    data: Any = TensorDataset(x[:46], y[:46])
    if "steps" in sys.argv:
        data = ddp.StepLoader(data, global_batch_size=6)
    history = trainer.fit(data, epochs=9, validation=TensorDataset(x[46:], y[46:]), global_batch_size=6)
    sums = [f"{value.double().sum().item():.17g}" for value in net.state_dict().values()]
    reported = json.dumps([history.history, fails.seen, stopping.best, stopping.wait, trainer.step])
    print("history", reported, flush=True)
    draws = torch.rand(1).item()
    table = hashlib.sha256(Path("log.csv").read_bytes()).hexdigest()
    best = [f"{each.double().sum().item():.17g}" for each in torch.load("saved/best.pt", weights_only=True).values()]
    print("result", *sums, hashlib.sha256(reported.encode()).hexdigest(), draws, table, *best, flush=True)
    saved = sorted(path.name for path in Path("saved").glob("step-*"))
    print("saved", world.rank, *saved, flush=True)


if __name__ == "__main__":
    main()
