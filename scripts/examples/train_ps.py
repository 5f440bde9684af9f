"""Train on scikit-learn's handwritten digits with parameter servers, and draw how the loss falls over time.

    dtrain run --ps 1 --nproc-per-node 2 scripts/examples/train_ps.py --mode sync --slow-s 0.05
    dtrain run --ps 1 --nproc-per-node 2 scripts/examples/train_ps.py --mode bounded --slow-s 0.05
    dtrain run --ps 1 --nproc-per-node 2 scripts/examples/train_ps.py --mode async --slow-s 0.05 --plot runs/ps.png

A run has one mode. Each puts its losses into one CSV file, of which --plot draws all runs. `--slow-s` lets the last
worker pause in every step: "sync" waits for it, "async" does not, "bounded" does once it is two steps behind.
"""

import argparse
import csv
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import ddp

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError:
    sys.exit("train_ps.py reads the digits of scikit-learn: pip install scikit-learn")

EVERY = 5  # steps of the first worker between two losses of the test set
Row = tuple[str, float, float]  # run, seconds since its first step, loss of the test set


def main() -> None:
    args = parse_args()
    strategy = ddp.strategy("parameter_server", mode=args.mode)
    train, test = read_digits(args.seed)
    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    model, optimizer = strategy.prepare(model, optimizer)  # where a server serves, to the end of the run
    is_slow = strategy.replica == strategy.replicas - 1

    name = f"{args.mode}, {strategy.replicas} worker{'s' if strategy.replicas > 1 else ''}"
    rows: list[Row] = []
    began = time.monotonic()
    steps = 0
    loader = strategy.loader(train, global_batch_size=args.batch_size, shuffle=True, seed=args.seed)
    for epoch in loader.epochs(args.epochs):
        for images, labels in loader:
            loss = strategy.mean(F.cross_entropy(model(images), labels, reduction="none"))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if is_slow:
                time.sleep(args.slow_s)
            if strategy.is_main and steps % EVERY == 0:
                rows.append((name, time.monotonic() - began, loss_of(model, test.tensors)))
            steps += 1
        if strategy.is_main:
            print(f"epoch {epoch + 1:2d}  {time.monotonic() - began:5.1f} s  test loss {rows[-1][2]:.4f}", flush=True)
    seconds = strategy.reduce("max", time.monotonic() - began)  # blocks until all are through
    strategy.sync()
    if strategy.is_main:
        loss = loss_of(model, test.tensors)
        print(f"{name}: test loss {loss:.4f}, all through after {seconds:.1f} s", flush=True)
        everything = write(args.csv, name, [*rows, (name, seconds, loss)])
        if args.plot:
            draw(args.plot, everything)


def read_digits(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """1797 images (8, 8): four fifths for training, the rest for the test."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    train, test = order.tensor_split([len(order) * 4 // 5])
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


@torch.no_grad()
def loss_of(model: nn.Module, test: tuple[Tensor, ...]) -> float:
    images, labels = test
    return F.cross_entropy(model(images), labels).item()


def write(path: Path, name: str, rows: list[Row]) -> list[Row]:
    """Put the losses of this run into the file, in the place of an earlier run's of this name; return all of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    others: list[Row] = []
    if path.exists():
        with path.open(newline="") as file:
            others = [(run, float(seconds), float(loss)) for run, seconds, loss in csv.reader(file) if run != name]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(others + rows)
    return others + rows


def draw(path: Path, rows: list[Row]) -> None:
    import matplotlib

    matplotlib.use("Agg")  # into a file, on hosts without a screen
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(layout="constrained")
    for name in dict.fromkeys(run for run, _, _ in rows):
        points = [(seconds, loss) for run, seconds, loss in rows if run == name]
        axes.plot(*zip(*points, strict=True), label=name)
    axes.set(xlabel="seconds", ylabel="loss of the test set", yscale="log")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    print(f"drawn: {path}", flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--mode", choices=["sync", "bounded", "async"], default="sync")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="images in a step of all workers together")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slow-s", type=float, default=0.0, help="the last worker's pause in each step")
    parser.add_argument("--csv", type=Path, default=Path("runs/train_ps.csv"), help="losses over time of all runs")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw what the CSV file has, after training")
    args = parser.parse_args()
    if args.plot and find_spec("matplotlib") is None:
        sys.exit("--plot draws with matplotlib: pip install matplotlib")
    return args


if __name__ == "__main__":
    main()
