"""Train on scikit-learn's handwritten digits as a script written for Horovod does: only its import line is another.

    python scripts/examples/train_horovod_style.py
    dtrain run --nproc-per-node 2 scripts/examples/train_horovod_style.py

With --checkpoint, rank 0 saves after each epoch and alone reads the file when the script starts again.
B is the batch of one worker.
"""

import argparse
import os
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import ddp.horovod as hvd  # instead of: import horovod.torch as hvd

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError:
    sys.exit("train_horovod_style.py reads the digits of scikit-learn: pip install scikit-learn")

BASE_BATCH = 64  # images in the batch that --lr is meant for


def main() -> None:
    args = parse_args()
    hvd.init()
    if args.batch_size % hvd.size():
        sys.exit(f"--batch-size {args.batch_size} does not divide by the {hvd.size()} workers")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
        device = torch.device("cuda", hvd.local_rank())
    torch.manual_seed(args.seed + hvd.rank())  # the workers start from rank 0's weights all the same

    train, test = read_digits(args.seed)
    sampler = DistributedSampler(train, hvd.size(), hvd.rank(), seed=args.seed, drop_last=True)
    batches = DataLoader(train, args.batch_size // hvd.size(), sampler=sampler, drop_last=True)
    if not len(batches):
        sys.exit(f"{len(train)} images are less than one batch of {args.batch_size}")
    model = convnet().to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr * args.batch_size / BASE_BATCH, momentum=0.9)
    done = 0
    if hvd.rank() == 0 and args.checkpoint and os.path.exists(args.checkpoint):
        saved = torch.load(args.checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["epochs"]
    done = int(hvd.broadcast(torch.tensor(done), root_rank=0, name="epochs that are done"))

    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(done, args.epochs):
        sampler.set_epoch(epoch)
        losses = torch.zeros(())
        for images, labels in batches:  # (B, 1, 8, 8), (B,)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            with optimizer.skip_synchronize():
                optimizer.step()
            losses += loss.detach().cpu()
        mean = hvd.allreduce(losses / len(batches), name="loss")
        right = hvd.allreduce(count_right(model, test, device), name="right answers", op=hvd.Sum)
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1:2d}  loss {mean:.4f}  test accuracy {right / len(test):.2%}", flush=True)
            if args.checkpoint:
                save(
                    args.checkpoint,
                    {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epoch + 1},
                )
    hvd.shutdown()


def convnet() -> nn.Module:
    """Images (B, 1, 8, 8) to logits (B, 10)."""
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
def count_right(model: nn.Module, test: TensorDataset, device: torch.device) -> torch.Tensor:
    """This worker's right answers among every size-th image of the test."""
    mine = Subset(test, range(hvd.rank(), len(test), hvd.size()))
    right = torch.tensor(0)
    for images, labels in DataLoader(mine, BASE_BATCH):
        right += (model(images.to(device)).argmax(1).cpu() == labels).sum()
    return right


def save(path: str, state: dict[str, object]) -> None:
    """Write beside it first: whenever the script is stopped, there is a whole checkpoint or none."""
    torch.save(state, path + ".new")
    os.replace(path + ".new", path)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64, help="images in a step, of all workers together")
    parser.add_argument("--lr", type=float, default=0.1, help=f"learning rate at a batch of {BASE_BATCH}")
    parser.add_argument("--clip", type=float, default=5.0, help="largest norm of a step's gradient")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients in 16 bits")
    parser.add_argument("--checkpoint", help="file to save to, and to go on from")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
