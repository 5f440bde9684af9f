"""A training with ddp.StepLoader for scripts/bench/steps.py: its models, and the script that `dtrain run` starts.

    dtrain run scripts/bench/step_runs/training.py MODEL STEPS [FAULTS]

It continues from the newest checkpoint in the folder `saved`. Each rank prints `at STEP WORLD_SIZE` after each commit,
and at the end `result` and a SHA-256 of parameters, buffers, the optimizer's state, all losses and random numbers.
FAULTS is a list of (rank, step, what), in JSON. At that step, once, the rank is killed: with "gradients" before its
commit, with "commit" after it; with "host" its simulated host is, after the commit.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import psutil
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddp

MICRO_BATCHES, SIZE, SAMPLES, CLASSES, TOKENS = 8, 4, 1000, 10, 50
MODELS = ("mlp", "cnn", "transformer", "sparse")
SAVED_EVERY, PAUSE_S = 5, 0.05


class Transformer(nn.Module):
    """Has tied weights, a layer that some micro-batches use, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.tied = nn.Linear(32, TOKENS, bias=False)
        self.tied.weight = self.embedding.weight
        self.out = nn.Linear(TOKENS, CLASSES)
        self.sometimes, self.never = nn.Linear(32, 32), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(self.embedding(x))
        if int(x.sum()) % 2:
            hidden = hidden + self.sometimes(hidden)
        output: torch.Tensor = self.out(self.tied(hidden).mean(1))
        return output


def _net(model: str) -> nn.Module:
    torch.manual_seed(1)
    if model == "cnn":
        features = nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.2), nn.Flatten())
        return nn.Sequential(features, nn.Linear(16 * 900, CLASSES))
    if model == "transformer":
        return Transformer()
    if model == "sparse":
        return nn.Sequential(nn.EmbeddingBag(TOKENS, 32, sparse=True), nn.ReLU(), nn.Linear(32, CLASSES))
    return nn.Sequential(nn.Flatten(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, CLASSES))


class Training:
    """A model in its wrapper, its optimizer and its data, made alike on each rank."""

    def __init__(self, model: str) -> None:
        self.net = _net(model)
        numbers = torch.Generator().manual_seed(2)
        if model in ("transformer", "sparse"):
            inputs = torch.randint(TOKENS, (SAMPLES, 12), generator=numbers)
        else:
            inputs = torch.randn(SAMPLES, 1, 32, 32, generator=numbers)
        self.data = TensorDataset(inputs, torch.randint(CLASSES, (SAMPLES,), generator=numbers))
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(self.net.parameters(), lr=0.1)
            if model == "sparse"
            else torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        )
        self.model = ddp.DistributedDataParallel(self.net)

    def loader(self, **options: Any) -> ddp.StepLoader:
        return ddp.StepLoader(self.data, global_batch_size=MICRO_BATCHES * SIZE, micro_batch_size=SIZE, **options)

    def backward(self, x: torch.Tensor, y: torch.Tensor) -> float:
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        return loss.item()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def digest(self, losses: str) -> str:
        digest = hashlib.sha256(losses.encode())
        state = self.optimizer.state_dict()["state"].values()
        values = [value for each in state for value in each.values() if isinstance(value, torch.Tensor)]
        for value in [*self.net.state_dict().values(), *values, torch.rand(2)]:
            digest.update(value.numpy().tobytes())
        return digest.hexdigest()


def _kill_host() -> None:
    """Kill the agent of this simulated host, whose guard then ends its workers."""
    agents = [each for each in psutil.Process().parents() if "launcher.agent" in each.cmdline()]
    agents[-3].kill()  # the last one is that of the machine, and then there is the guard


def train(model: str, steps: int, faults: list[tuple[int, int, str]]) -> None:
    """Train up to `steps` steps, counted from the beginning of the training."""
    torch.set_num_threads(1)
    world = ddp.init()
    training, checkpoint = Training(model), ddp.Checkpoint("saved")
    loader = training.loader()
    parts: dict[str, Any] = {"model": training.model, "optimizer": training.optimizer, "sampler": loader}
    state = ddp.State(**parts, step=0, losses="")
    if restored := checkpoint.load(**parts):
        state.step, state.losses = restored.step, restored.values["losses"]

    def fail(step: int, *whats: str) -> None:
        for number, (rank, at, what) in enumerate(faults):
            came = Path(f"came{number}")
            if (rank, at) == (world.rank, step) and what in whats and not came.exists():
                came.touch()
                if what == "host":
                    _kill_host()
                else:
                    os.kill(os.getpid(), signal.SIGKILL)

    @ddp.resilient
    def run(state: ddp.State) -> None:
        for step in loader.epochs(10**9):
            if state.step >= steps:
                return
            losses = [training.backward(x, y) for x, y in step]
            mean = step.mean(losses)
            fail(state.step + 1, "gradients")
            training.step()
            state.step += 1
            state.losses = hashlib.sha256(f"{state.losses} {mean!r}".encode()).hexdigest()
            state.commit()
            print("at", state.step, world.world_size, flush=True)
            fail(state.step, "commit", "host")
            if checkpoint.due(state.step, every=SAVED_EVERY):
                checkpoint.save(state.step, **parts, losses=state.losses)
            if "DTRAIN_HOST" in os.environ:
                time.sleep(PAUSE_S)  # so that faults come in the middle of it

    run(state)
    checkpoint.wait()
    print("result", state.step, training.digest(state.losses), flush=True)


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]) if sys.argv[3:] else [])
