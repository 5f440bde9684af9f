"""torch's DistributedDataParallel with a DistributedSampler, a scheduler, and a checkpoint after each epoch."""

import argparse
import logging
import os

import torch
import torch.distributed as dist
import trouble
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
log = logging.getLogger(__name__)


def save(path, **state):
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)


def train_epoch(model, loader, optimizer, scheduler, step):
    total = 0.0
    for inputs, targets in loader:
        if trouble.comes(step):
            raise ValueError("bad batch")
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        step += 1
        total += loss.item()
    return total / len(loader), step


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--checkpoint", default="checkpoint.pt")
    args = parser.parse_args()

    dist.init_process_group(backend="gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    x = torch.randn(2000, 16)
    dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=True)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * len(loader))
    first, step = 0, 0
    if os.path.exists(args.checkpoint):
        state = torch.load(args.checkpoint, map_location="cpu")
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first, step = state["epoch"] + 1, state["step"]
        log.info("rank %d resumes at epoch %d", rank, first)
    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        loss, step = train_epoch(model, loader, optimizer, scheduler, step)
        if rank == 0:
            log.info("epoch %d loss %.4f lr %.2e", epoch, loss, scheduler.get_last_lr()[0])
            save(
                args.checkpoint,
                epoch=epoch,
                step=step,
                model=model.module.state_dict(),
                optimizer=optimizer.state_dict(),
                scheduler=scheduler.state_dict(),
            )
        dist.barrier()
    if rank == 0:
        print(f"finished: {step} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
