"""Trains a small model under dtrain while hosts come and go; counts how often each sample of an epoch was trained on.

Each rank prints `at STEP WORLD_SIZE RANK PID HOST TIME` after each commit, and at the end what all must have in common.
The arguments are the number of epochs and the seconds that a step takes at least; in the last epoch ten times as long,
so that hosts may come late. Once there is a file `quick`, no step is made longer. With a third argument, the size of
a global batch, the samples come from the loader of a strategy.
"""

import os
import sys
import time
from typing import Any

import torch

import ddp
from ddp.data.replica_loader import ReplicaLoader

dist, nn = torch.distributed, torch.nn
SAMPLES = 480
epochs, pause_s = int(sys.argv[1]), float(sys.argv[2])
world = ddp.init()
torch.manual_seed(1)
net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
model = ddp.DistributedDataParallel(net)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
numbers = torch.Generator().manual_seed(1)
inputs, labels = torch.randn(SAMPLES, 6, generator=numbers), torch.randint(3, (SAMPLES,), generator=numbers)
data = torch.utils.data.TensorDataset(torch.arange(SAMPLES), inputs, labels)
strategy = ddp.strategy("all_reduce")
sampler: ddp.DistributedSampler | ReplicaLoader = ddp.DistributedSampler(data)
loader: Any = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)
if len(sys.argv) > 3:
    loader = sampler = strategy.loader(data, global_batch_size=int(sys.argv[3]), shuffle=True)
counts = torch.zeros(epochs, SAMPLES, dtype=torch.int64)
state = ddp.State(model=model, optimizer=optimizer, sampler=sampler, epoch=0, step=0, counts=counts)
entered = 0


@ddp.resilient
def train(state: ddp.State) -> None:
    global entered
    entered += 1
    for state.epoch in range(state.epoch, epochs):  # noqa: B020
        sampler.set_epoch(state.epoch)
        for which, x, y in loader:
            began = time.monotonic()
            seen = torch.zeros(SAMPLES, dtype=torch.int64)
            seen[which] += 1
            losses = nn.functional.cross_entropy(model(x), y, reduction="none")
            loss = strategy.mean(losses) if sampler is loader else losses.mean()
            loss.backward()
            dist.all_reduce(seen)
            optimizer.step()
            optimizer.zero_grad()
            state.counts[state.epoch] += seen
            state.step += 1
            state.commit()
            place = f"{world.world_size} {world.rank} {os.getpid()} {os.environ['DTRAIN_HOST']}"
            print("at", state.step, place, time.monotonic(), flush=True)
            until = began + (10 * pause_s if state.epoch == epochs - 1 else pause_s)
            while time.monotonic() < until and not os.path.exists("quick"):
                time.sleep(0.01)


train(state)
assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(world.rank), str(world.world_size))
assert (dist.get_rank(), dist.get_world_size()) == (world.rank, world.world_size)
sums = [f"{value.double().sum().item():.17g}" for value in net.state_dict().values()]
print("result", state.step, *sums, flush=True)
print(
    "counts", int(state.counts.min()), int(state.counts.max()), int(state.counts.sum()) - epochs * SAMPLES, flush=True
)
print("entered", entered, flush=True)
