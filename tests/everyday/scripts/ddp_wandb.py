"""ddp with the workers of a DataLoader; rank 0 logs to wandb, offline, and draws a picture."""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
import trouble
import wandb
from torch import nn
from torch.utils.data import DataLoader, Dataset

import ddp


class Waves(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        if trouble.comes(index, "exception"):
            raise ValueError("bad batch")
        generator = np.random.default_rng(index)
        phase = generator.uniform(0, np.pi)
        wave = np.sin(np.linspace(0, 6, 64) + phase) + 0.1 * generator.standard_normal(64)
        return torch.tensor(wave, dtype=torch.float32), torch.tensor([phase], dtype=torch.float32)


def main():
    world = ddp.init()
    torch.manual_seed(world.rank)
    dataset = Waves(1600)
    # Not shuffled: sample 41 is in the first batches of rank 1.
    sampler = ddp.DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=2)
    model = ddp.DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if world.is_main:
        wandb.init(project="waves", mode="offline", config={"lr": 0.05})
    losses = []
    step = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for waves, phases in loader:
            trouble.comes(step, "kill", "hang")
            loss = nn.functional.mse_loss(model(waves), phases)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            step += 1
            if world.is_main:
                wandb.log({"loss": loss.item(), "epoch": epoch})
    if world.is_main:
        plt.plot(losses)
        plt.savefig("loss.png")
        wandb.finish()
        print(f"finished: {step} steps")


if __name__ == "__main__":
    main()
