"""Four ranks train under ddp.resilient, and the bench kills one (pytorch#147064, horovod#3264)."""

import time

import torch
from failing import note

import ddp

world = ddp.init()
note("process")
model = ddp.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
state = ddp.State(model=model, optimizer=optimizer, step=0)


@ddp.resilient
def train(state: ddp.State) -> None:
    began = state.step
    while state.step < 150:
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state.step += 1
        state.commit()
        if state.step == began + 5:
            note("step", f"{began}")
        time.sleep(0.02)


train(state)
