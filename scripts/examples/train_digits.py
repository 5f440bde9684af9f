"""Train a small convnet on scikit-learn's handwritten digits, on one process or on many.

    python scripts/examples/train_digits.py
    dtrain run --nproc-per-node 2 scripts/examples/train_digits.py

B is the batch of one worker.
"""

import argparse
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ddp

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError:
    sys.exit("train_digits.py reads the digits of scikit-learn: pip install scikit-learn")

BASE_BATCH = 64  # images in the batch that --lr is meant for


def main() -> None:
    args = parse_args()
    world = ddp.init()
    if args.batch_size % world.world_size:
        sys.exit(f"--batch-size {args.batch_size} does not divide by the {world.world_size} workers")
    torch.manual_seed(args.seed)

    train, test = read_digits(args.seed)
    model = ddp.DistributedDataParallel(convnet().to(world.device))
    sampler = ddp.DistributedSampler(train, shuffle=True, seed=args.seed, drop_last=True)
    batches = DataLoader(train, args.batch_size // world.world_size, sampler=sampler, drop_last=True)
    if not len(batches):
        sys.exit(f"{len(train)} images are less than one batch of {args.batch_size}")
    # Linear scaling with the global batch, warm-up over an epoch (Goyal et al. 2017, arXiv:1706.02677).
    optimizer = torch.optim.SGD(model.parameters(), args.lr * args.batch_size / BASE_BATCH, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=len(batches))

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        losses = torch.zeros((), dtype=torch.float64)
        for images, labels in batches:  # (B, 1, 8, 8), (B,)
            loss = F.cross_entropy(model(images.to(world.device)), labels.to(world.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses += loss.detach().double().cpu()
        mean = sum_over_workers(losses / len(batches), world) / world.world_size
        correct = accuracy(model, test, args, world)
        if world.is_main:
            print(f"epoch {epoch + 1:2d}  loss {mean:.4f}  test accuracy {correct:.2%}", flush=True)


def convnet() -> nn.Module:
    """Images (B, 1, 8, 8) to logits (B, 10). No BatchNorm: its statistics would depend on the world size."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),  # (B, 32, 4, 4)
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def read_digits(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """1797 images: four fifths for training, the rest for the test, the same on every worker."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # (1797, 1, 8, 8)
    labels = torch.tensor(digits.target)  # (1797,)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    train, test = order.tensor_split([len(order) * 4 // 5])
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


@torch.no_grad()
def accuracy(model: nn.Module, test: TensorDataset, args: argparse.Namespace, world: ddp.World) -> float:
    """The exact share of right answers, each image counted once. Every worker must call it."""
    sampler = ddp.DistributedSampler(test, shuffle=False)
    right, place = 0, world.rank
    for images, labels in DataLoader(test, args.batch_size // world.world_size, sampler=sampler):
        found = model(images.to(world.device)).argmax(1).cpu() == labels  # (B,)
        places = place + world.world_size * torch.arange(len(labels))
        right += int(found[places < len(test)].sum())  # beyond it the sampler repeats the first images
        place += world.world_size * len(labels)
    return sum_over_workers(torch.tensor(float(right)), world).item() / len(test)


def sum_over_workers(value: Tensor, world: ddp.World) -> Tensor:
    value = value.to(world.device)
    if world.world_size > 1:
        dist.all_reduce(value)
    return value.cpu()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64, help="images in a step, of all workers together")
    parser.add_argument("--lr", type=float, default=0.1, help=f"learning rate at a batch of {BASE_BATCH}")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
