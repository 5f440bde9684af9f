"""Trains a small model under dtrain while hosts come and go, by a plain loop with State(keep_global_batch=True).

Each rank prints `pass STEP SAMPLES LOSS` after each backward pass, and `at STEP WORLD_SIZE RANK PID HOST TIME` after
the commit of a step. The arguments are the number of epochs and the seconds that a pass takes at least, until there is
a file `quick` in the working directory.
"""

import os
import sys
import time
from pathlib import Path

import torch

import ddp

nn = torch.nn
SAMPLES = 70
epochs, pause_s = int(sys.argv[1]), float(sys.argv[2])
world = ddp.init()
torch.manual_seed(1)
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
model = ddp.DistributedDataParallel(net)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
plateau = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda _: 0.97)
numbers = torch.Generator().manual_seed(1)
inputs = torch.randn(SAMPLES, 6, generator=numbers, dtype=torch.float64)
labels = torch.randint(3, (SAMPLES,), generator=numbers)
data = torch.utils.data.TensorDataset(torch.arange(SAMPLES), inputs, labels)
sampler = ddp.DistributedSampler(data)
loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)
state = ddp.State(
    model=model, optimizer=optimizer, scheduler=scheduler, plateau=plateau, sampler=sampler, epoch=0, begun=0, step=0,
    keep_global_batch=True,
)  # fmt: skip


@ddp.resilient
def train(state: ddp.State) -> None:
    for state.epoch in range(state.epoch, epochs):  # noqa: B020
        sampler.set_epoch(state.epoch)
        for which, x, y in loader:
            began = time.monotonic()
            state.begun += 1
            step = state.step + 1
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            print("pass", step, ",".join(map(str, sorted(which.tolist()))), f"{loss.item():.15g}", flush=True)
            optimizer.step()
            scheduler.step()
            state.step += 1
            if state.commit():
                assert state.begun == state.step == step, (state.begun, state.step, step)
                place = f"{world.world_size} {world.rank} {os.getpid()} {os.environ['DTRAIN_HOST']}"
                print("at", step, place, time.monotonic(), flush=True)
            while not Path("quick").exists() and time.monotonic() < began + pause_s:
                time.sleep(0.01)
        plateau.step()


train(state)
sums = [f"{value.sum().item():.12g}" for value in net.state_dict().values()]
print("result", state.step, *sums, f"{optimizer.param_groups[0]['lr']:.12g}", flush=True)
