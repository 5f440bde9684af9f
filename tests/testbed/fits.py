"""A small model that a Trainer fits, and its oracle: the loop for one process on whole batches, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from ddp import callbacks as cb
from ddp.data.replica_loader import ReplicaLoader
from ddp.training.trainer import Trainer

F64 = torch.float64
SAMPLES, BATCH, CLASSES = 23, 7, 3  # the last batch has two samples: none for the third replica


class Net(nn.Module):
    """Images (B, 2, 3) to logits (B, 3). Cannot run on an empty batch, as many models cannot."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8, dtype=F64), nn.Linear(8, CLASSES, dtype=F64)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x.view(x.shape[0], -1)))
        logits: Tensor = self.second(nn.functional.dropout(hidden, self.dropout, self.training))
        return logits


class ByName(Dataset[dict[str, Tensor]]):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index >= SAMPLES:
            raise IndexError
        x, y, weight = tensors()
        return {"x": x[index], "label": y[index], "sample_weight": weight[index]}

    def __len__(self) -> int:
        return SAMPLES


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 2, 3, generator=generator, dtype=F64)
    return x, torch.arange(SAMPLES) % CLASSES, torch.rand(SAMPLES, generator=generator, dtype=F64)


def data() -> TensorDataset:
    return TensorDataset(*tensors()[:2])


def made(*, dropout: float = 0.0, rate: float = 0.1) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(1)
    net = Net(dropout=dropout)
    return net, torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9)


def trainer(callbacks: Any = (), *, dropout: float = 0.0, rate: float = 0.1, **options: Any) -> Trainer:
    net, optimizer = made(dropout=dropout, rate=rate)
    options = {"metrics": ["accuracy"], "seed": 4, **options}
    loss = options.pop("loss", nn.CrossEntropyLoss())
    return Trainer(net, optimizer, loss, callbacks=callbacks, **options)


def flat(net: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def batches(epoch: int) -> Iterator[list[int]]:
    loader = ReplicaLoader(range(SAMPLES), global_batch_size=BATCH, replica=0, replicas=1, shuffle=True, seed=4)  # type: ignore[arg-type]
    loader.set_epoch(epoch)
    for batch in loader:
        yield batch.tolist()


Reference = Callable[[Net, Tensor, Tensor, Tensor], Tensor]
KINDS: dict[str, tuple[Any, Reference]] = {
    "mean": (nn.CrossEntropyLoss(), lambda net, x, y, w: nn.CrossEntropyLoss()(net(x), y)),
    "none": (nn.CrossEntropyLoss(reduction="none"), lambda net, x, y, w: nn.CrossEntropyLoss()(net(x), y)),
    "function": (
        lambda out, y: (out - y[:, None]).square(),
        lambda net, x, y, w: (net(x) - y[:, None]).square().mean(),
    ),
    "class weights": (
        nn.CrossEntropyLoss(torch.tensor([1.0, 5.0, 0.2], dtype=F64)),
        lambda net, x, y, w: nn.CrossEntropyLoss(torch.tensor([1.0, 5.0, 0.2], dtype=F64))(net(x), y),
    ),
    "ignored": (
        nn.CrossEntropyLoss(ignore_index=1, label_smoothing=0.1),
        lambda net, x, y, w: nn.CrossEntropyLoss(ignore_index=1, label_smoothing=0.1)(net(x), y),
    ),
    "weights": (
        nn.CrossEntropyLoss(reduction="none"),
        lambda net, x, y, w: (nn.functional.cross_entropy(net(x), y, reduction="none") * w).mean(),
    ),
    "dict": (
        lambda out, batch: nn.functional.cross_entropy(out, batch["label"], reduction="none"),
        lambda net, x, y, w: (nn.functional.cross_entropy(net(x), y, reduction="none") * w).mean(),
    ),
}


def by_hand(reference: Reference, *, accumulate: int = 1, max_grad_norm: float | None = None) -> Net:
    net, optimizer = made()
    columns = tensors()
    for epoch in range(2):
        parts = list(batches(epoch))
        for start in range(0, len(parts), accumulate):
            rows = [row for part in parts[start : start + accumulate] for row in part]
            reference(net, *(column[rows] for column in columns)).backward()
            if max_grad_norm is not None:
                nn.utils.clip_grad_norm_(net.parameters(), max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
    return net


class Breaks(cb.Callback):
    """Raises in one hook at one step, on one replica or on all."""

    def __init__(self, hook: str, step: int, replica: int | None = None) -> None:
        self.step, self.replica = step, replica

        def failing(*_: object) -> None:
            strategy = self.trainer.strategy
            if self.trainer.step >= self.step and self.replica in (None, strategy.replica):
                raise KeyError("no such thing")

        setattr(self, hook, failing)
