"""One of three hosts is lost within an epoch (torchft#292). The weights count how much each sample has counted.

A sample's weight grows by 1 / (ranks x batch) in each step that it is in. Under dtrain the script is ddp's; under
others it is torch's, with a snapshot at each step, from which a new attempt goes on.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from failing import FOLDER, begin, note
from torch.utils.data import DataLoader, DistributedSampler

import ddp

SAMPLES, BATCH = 96, 4


def torchs() -> torch.Tensor:
    rank = begin()
    model = torch.nn.Embedding(SAMPLES, 1)
    torch.nn.init.zeros_(model.weight)
    first, snapshot = 0, FOLDER / "snapshot.pt"
    if snapshot.exists():
        saved = torch.load(snapshot)
        model.load_state_dict(saved["model"])
        first = saved["step"]
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    sampler = DistributedSampler(range(SAMPLES), seed=1)
    loader = DataLoader(range(SAMPLES), batch_size=BATCH, sampler=sampler)
    for step, ids in enumerate(loader):
        if step < first:
            continue
        (-model(ids).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            torch.save({"model": model.module.state_dict(), "step": step + 1}, f"{snapshot}.new")
            os.rename(f"{snapshot}.new", snapshot)
        note("step", f"{dist.get_world_size()}")
        time.sleep(0.5)
    return model.module.weight


def ddps() -> torch.Tensor:
    ddp.init()
    model = torch.nn.Embedding(SAMPLES, 1)
    torch.nn.init.zeros_(model.weight)
    model = ddp.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    loader = ddp.StepLoader(range(SAMPLES), global_batch_size=3 * BATCH, micro_batch_size=BATCH, seed=1)
    state = ddp.State(model=model, optimizer=optimizer, loader=loader)

    @ddp.resilient
    def train(state: ddp.State) -> None:
        for step in loader.epochs(1):
            for ids in step:
                (-model(ids).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            state.commit()
            note("step", f"{dist.get_world_size()}")
            time.sleep(0.5)

    train(state)
    return model.module.weight


counted = (ddps() if sys.argv[2] == "dtrain" else torchs()).detach().flatten()
if os.environ["RANK"] == "0":
    note("counted", " ".join(f"{weight * 3 * BATCH:.2f}" for weight in counted.tolist()))
