"""Train a convnet on scikit-learn's handwritten digits with `fit`: rates by epoch, checkpoints, curves, a saved model.

    python scripts/examples/train_fit.py
    dtrain run --nproc-per-node 2 scripts/examples/train_fit.py --tensorboard runs/curves

Started again after it was stopped, it goes on from its last checkpoint; after that, it only evaluates.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddp
from ddp.callbacks import LearningRateScheduler, ModelCheckpoint, ProgressBar, TensorBoard
from ddp.training.trainer import Trainer

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError:
    sys.exit("train_fit.py reads the digits of scikit-learn: pip install scikit-learn")


def main() -> None:
    args = parse_args()
    strategy = ddp.strategy(args.strategy)
    train, test = read_digits(args.seed)
    torch.manual_seed(args.seed)
    model = convnet()
    checkpoints = ModelCheckpoint(args.folder / "checkpoints", monitor="val_accuracy")
    callbacks = [checkpoints, LearningRateScheduler(rate), ProgressBar()]
    if args.tensorboard:
        callbacks.append(TensorBoard(args.tensorboard))
    trainer = Trainer(
        model,
        torch.optim.Adam(model.parameters()),
        nn.CrossEntropyLoss(),
        strategy=strategy,
        metrics=["accuracy"],
        callbacks=callbacks,
        seed=args.seed,
    )
    trainer.fit(train, epochs=args.epochs, validation=test, global_batch_size=args.batch_size)

    if strategy.role != "worker":  # an evaluator, which has evaluated until the training ended
        return
    trainer.load(checkpoints.best_path)
    found = trainer.evaluate(test)
    digits = trainer.predict(test).argmax(1)  # (images,), in the order of the test set, on every replica
    trainer.save(args.folder / "weights.pt")
    trainer.export(args.folder / "digits.pt2", train[:1][0])
    if strategy.is_main:
        alone = evaluate_alone(args.folder / "weights.pt", test)
        program = torch.export.load(args.folder / "digits.pt2").module()
        print(f"best epoch, evaluated by {strategy.replicas} replicas: accuracy {found['accuracy']:.4%}")
        print(f"the same weights in plain PyTorch:  accuracy {alone:.4%}")
        print(f"the first digits: {digits[:10].tolist()}, by the exported program {told_by(program, test)}", flush=True)


def rate(epoch: int) -> float:
    return 1e-3 if epoch < 3 else 1e-4 if epoch < 7 else 1e-5


def convnet() -> nn.Module:
    """Images (B, 1, 8, 8) to logits (B, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),  # (B, 32, 4, 4)
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def read_digits(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """1797 images: four fifths for training, the rest for the test, the same on every replica."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # (1797, 1, 8, 8)
    labels = torch.tensor(digits.target)  # (1797,)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    train, test = order.tensor_split([len(order) * 4 // 5])
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


@torch.no_grad()
def evaluate_alone(weights: Path, test: TensorDataset) -> float:
    """What any program does with the saved weights: nothing of `ddp` is used here."""
    model = convnet()
    model.load_state_dict(torch.load(weights, weights_only=True))
    images, labels = test.tensors
    return (model.eval()(images).argmax(1) == labels).double().mean().item()


@torch.no_grad()
def told_by(program: nn.Module, test: TensorDataset) -> list[int]:
    return program(test[:10][0]).argmax(1).tolist()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--strategy", help="all_reduce, central_storage, local_sgd, ... (default: $DTRAIN_STRATEGY)")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=16, help="images in a step, of all replicas together")
    parser.add_argument("--folder", type=Path, default=Path("runs/fit"), help="for checkpoints and the saved model")
    parser.add_argument("--tensorboard", metavar="FOLDER", help="write curves there; needs the package tensorboard")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
