"""Trains a small model under dtrain; a rank fails at a place of a step, once for each word of the arguments.

A word is `rank.step.place.how`, such as `1.5.backward.kill`; the first process that comes there makes a file of that
name in the working directory, and fails. "module" is a place in the model's forward pass, "gradient" one in its
backward pass, after some gradients have arrived. Ranks that fail at the same place of a step wait for each other there.
Each rank prints at the end what must not depend on failures.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch

import ddp

nn, dist = torch.nn, torch.distributed
world = ddp.init()
torch.manual_seed(1)
net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
torch.manual_seed(10 + world.rank)
model = ddp.DistributedDataParallel(net)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8)
numbers = torch.Generator().manual_seed(1)
data = torch.utils.data.TensorDataset(torch.randn(96, 6, generator=numbers), torch.randint(3, (96,), generator=numbers))
sampler = ddp.DistributedSampler(data)
loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)
state = ddp.State(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, epoch=0, step=0)
entered = 0


def wait_for(*words: str) -> None:
    deadline = time.monotonic() + 60
    while not all(Path(word).exists() for word in words):
        assert time.monotonic() < deadline, words
        time.sleep(0.001)


def fail(place: str) -> None:
    for word in sys.argv[1:]:
        name, _, how = word.rpartition(".")
        if name != f"{world.rank}.{state.step}.{place}":
            continue
        try:
            Path(word).touch(exist_ok=False)
        except FileExistsError:
            continue
        print("fails", word, time.monotonic(), flush=True)
        if how == "pass":  # no failure: others wait until this rank was here
            continue
        wait_for(*(other for other in sys.argv[1:] if f".{state.step}.{place}.{how}" in other))
        if how == "raise":
            raise ValueError(word)
        if how == "exit":
            os._exit(3)
        if how == "leave":
            sys.exit(0)
        if how == "hear":  # as if this rank's connection had ended and not the others', when the others have failed
            wait_for(*sys.argv[1:])
            raise RuntimeError("Connection closed by peer")
        wait_for(*(other for other in sys.argv[1:] if other.endswith(".pass")))
        os.kill(os.getpid(), signal.SIGKILL)


net[2].register_forward_pre_hook(lambda *_: fail("module"))
net[0].weight.register_hook(lambda _: fail("gradient"))


@ddp.resilient
def train(state: ddp.State) -> str:
    global entered
    entered += 1
    for state.epoch in range(state.epoch, 3):  # noqa: B020
        sampler.set_epoch(state.epoch)
        for x, y in loader:
            fail("load")
            loss = nn.functional.cross_entropy(model(x), y)
            fail("forward")
            loss.backward()
            fail("backward")
            optimizer.step()
            fail("step")
            optimizer.zero_grad()
            scheduler.step()
            state.step += 1
            state.commit()
            fail("commit")
            if state.step % 5 == 0:
                total = torch.tensor([loss.item()])
                dist.all_reduce(total)  # torch's own, between two steps
    fail("end")
    return "trained"


said = train(state)
assert said == "trained"
assert torch.distributed.get_world_size() == world.world_size
sums = [f"{value.double().sum().item():.17g}" for value in net.state_dict().values()]
print("result", state.step, *sums, torch.rand(1).item(), flush=True)
print("entered", entered, "threads", sorted(t.name for t in threading.enumerate()), flush=True)
