"""Trains a small model under dtrain by ddp.StepLoader, while ranks fail and hosts come and go.

Each rank prints `at STEP WORLD_SIZE RANK PID HOST TIME` after the commit of a step, and `result DIGEST` at the end. The
arguments are the number of epochs, the seconds that a step takes at least, until there is a file `quick` in the working
directory, and perhaps RANK.STEPS: this rank is killed once, after so many steps, between the gradients of the next one
and its commit.
"""

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import torch

import ddp

nn = torch.nn
SAMPLES = 70
epochs, pause_s = int(sys.argv[1]), float(sys.argv[2])
torch.set_num_threads(1)  # rank 0's number counts, which would be another one for other numbers of ranks
world = ddp.init()
torch.manual_seed(1)
net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))
model = ddp.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
numbers = torch.Generator().manual_seed(1)
data = torch.utils.data.TensorDataset(
    torch.randn(SAMPLES, 6, generator=numbers), torch.randint(3, (SAMPLES,), generator=numbers)
)
loader = ddp.StepLoader(data, global_batch_size=16, micro_batch_size=4, seed=5)
state = ddp.State(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, step=0, losses="")


@ddp.resilient
def train(state: ddp.State) -> None:
    for step in loader.epochs(epochs):
        began = time.monotonic()
        losses = []
        for x, y in step:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        loss = step.mean(losses)
        if sys.argv[3:] == [f"{world.rank}.{state.step}"] and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        state.step += 1
        state.losses = hashlib.sha256(f"{state.losses} {loss!r}".encode()).hexdigest()
        state.commit()
        place = f"{world.world_size} {world.rank} {os.getpid()} {os.environ['DTRAIN_HOST']}"
        print("at", state.step, place, time.monotonic(), flush=True)
        while not Path("quick").exists() and time.monotonic() < began + pause_s:
            time.sleep(0.01)


train(state)
digest = hashlib.sha256(state.losses.encode())
for value in [*net.state_dict().values(), torch.rand(2)]:
    digest.update(value.numpy().tobytes())
print("result", state.step, digest.hexdigest(), flush=True)
