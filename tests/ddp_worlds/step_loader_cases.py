"""Trainings with `ddp.StepLoader`, whose bits are those of any number of ranks."""

from __future__ import annotations

import hashlib
import itertools
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from testbed.present import present
from torch import nn
from torch.utils.checkpoint import checkpoint

import ddp
from ddp.errors import ArgumentError, BackwardError, UnsupportedError

SAMPLES = 71  # the last step of an epoch has a micro-batch of 4 and one of 3


class Data(torch.utils.data.Dataset[Any]):
    """Pictures with noise of all random numbers, or texts."""

    def __init__(self, kind: str) -> None:
        self._are_texts = kind in ("transformer", "sparse")

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        if self._are_texts:
            return torch.randint(0, 20, (6,), generator=generator), index % 3
        noise = 0.1 * torch.randn(1, 8, 8) + random.random() + float(np.random.rand())
        return torch.randn(1, 8, 8, generator=generator) + noise, index % 3


class Transformer(nn.Module):
    """Has tied weights, a layer that is never used, and one that some micro-batches use, with a gradient of -0.0."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.tied = nn.Linear(16, 20, bias=False)
        self.tied.weight = self.embedding.weight
        self.out = nn.Linear(20, 3)
        self.sometimes, self.never = nn.Linear(16, 16), nn.Linear(4, 4)
        self.zero = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(self.embedding(x))
        if int(x.sum()) % 2:
            zero = self.zero.clone()
            if zero.requires_grad:
                zero.register_hook(lambda grad: grad.abs() * -0.0)
            hidden = hidden + self.sometimes(hidden) + zero
        output: torch.Tensor = self.out(self.tied(hidden).mean(1))
        return output


class Twice(nn.Module):
    """Has a layer in two reentrant checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(64, 64), nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x.flatten(1).requires_grad_()
        for _ in range(2):
            hidden = checkpoint(self.layer, hidden, use_reentrant=True)
        output: torch.Tensor = self.out(hidden)
        return output


class Shared(nn.Module):
    """Has two parameters whose gradients are views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.out = nn.Parameter(torch.ones(64)), nn.Parameter(torch.ones(64)), nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.out(x.flatten(1) * (self.one.view(-1) + self.other.view(-1)))
        return output


def _net(kind: str) -> nn.Module:
    torch.manual_seed(1)
    nets: dict[str, Any] = {
        "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.ReLU(), nn.Dropout(0.3), nn.Linear(40, 3)),
        "cnn": lambda: nn.Sequential(
            nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(216, 3)
        ),
        "bf16": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 3)).bfloat16(),
        "transformer": Transformer,
        "twice": Twice,
        "shared": Shared,
        "sparse": lambda: nn.Sequential(nn.EmbeddingBag(20, 16, sparse=True), nn.Linear(16, 3)),
    }
    net: nn.Module = nets[kind]()
    return net


class Training:
    """A model and what trains it."""

    def __init__(self, kind: str, micro_batch_size: int = 4, *, weighs: bool = False, **loading: Any) -> None:
        self._weighs = weighs
        self.net = _net(kind)
        self.loader = ddp.StepLoader(
            Data(kind), seed=3, global_batch_size=32, micro_batch_size=micro_batch_size, **loading
        )
        self.model = ddp.DistributedDataParallel(self.net)
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(self.net.parameters(), lr=0.05)
            if kind == "sparse"
            else torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        )
        self._digest = hashlib.sha256()

    def run(self, steps: int) -> str:
        """Train; return a digest of parameters, buffers, the optimizer's state, losses and random numbers."""
        dtype = next(self.net.parameters()).dtype
        for step in self.loader.epochs(1000):
            losses = []
            for x, y in step:
                output = self.model(x.to(dtype) if x.is_floating_point() else x)
                loss = nn.functional.cross_entropy(output.float(), y)
                if self._weighs:
                    self.model.backward(loss, weight=max(0.0, float(torch.rand(1)) - 0.3))
                else:
                    loss.backward()
                losses.append(loss.item())
            self._add(*(each.grad for each in self.net.parameters() if each.grad is not None))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self._add(repr(step.mean(losses)), torch.rand(2), repr(random.random()))
            steps -= 1
            if not steps:
                break
        state = self.optimizer.state_dict()["state"]
        self._add(*self.net.state_dict().values(), *(value for each in state.values() for value in each.values()))
        return self._digest.hexdigest()

    def _add(self, *values: Any) -> None:
        for value in values:
            value = value.to_dense() if isinstance(value, torch.Tensor) else value
            data = value.reshape(-1).view(torch.uint8).numpy().tobytes() if isinstance(value, torch.Tensor) else value
            self._digest.update(data if isinstance(data, bytes) else repr(data).encode())

    @property
    def state(self) -> dict[str, Any]:
        parts: dict[str, Any] = {"net": self.net, "optimizer": self.optimizer, "loader": self.loader}
        return {name: part.state_dict() for name, part in parts.items()}

    def load(self, state: dict[str, Any]) -> None:
        for name, part in state.items():
            getattr(self, name).load_state_dict(part)


def trained(kind: str, steps: int = 4, **options: Any) -> str:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "9 ranks, but only 8 micro-batches")
        return Training(kind, **options).run(steps)


def saved(kind: str, steps: int, folder: str) -> None:
    training = Training(kind)
    training.run(steps)
    if dist.get_rank() == 0:
        torch.save(training.state, Path(folder) / "state.pt")


def resumed(kind: str, steps: int, folder: str) -> str:
    training = Training(kind)
    training.load(torch.load(Path(folder) / "state.pt", weights_only=True))
    return training.run(steps)


def _saved_parts(training: Training) -> dict[str, Any]:
    return {"model": training.model, "optimizer": training.optimizer, "sampler": training.loader}


def random_numbers_saved(folder: str) -> list[float]:
    training = Training("mlp")
    training.run(3)
    checkpoint = ddp.Checkpoint(folder)
    checkpoint.save(3, **_saved_parts(training))
    checkpoint.wait()
    return [*torch.rand(2).tolist(), random.random()]


def random_numbers_loaded(folder: str) -> list[float]:
    assert ddp.Checkpoint(folder).load(**_saved_parts(Training("mlp")))
    return [*torch.rand(2).tolist(), random.random()]


def ranks_without_micro_batches_are_named() -> list[str]:
    loader = ddp.StepLoader(Data("mlp"), global_batch_size=8, micro_batch_size=4)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            next(iter(loader.epochs(1)))
    return [str(each.message) for each in warned]


def weights_are_those_of_the_mean_over_everything() -> None:
    """In float64, with a last step of unequal micro-batches; a weight of 0 hides a loss that is not finite."""
    torch.manual_seed(1)
    x, y, net = torch.randn(22, 6).double(), torch.randn(22).double(), nn.Linear(6, 1).double()
    weights = torch.rand(22).double()
    weights[:3] = 0
    data = torch.utils.data.TensorDataset(x, y, weights)
    loader = ddp.StepLoader(data, global_batch_size=12, micro_batch_size=3, shuffle=False)
    model = ddp.DistributedDataParallel(net)
    for step, rows in zip(loader.epochs(1), torch.arange(22).split(12), strict=True):
        for inputs, targets, each in step:
            losses = (model(inputs)[:, 0] - targets).square()
            model.backward((losses * each).sum() / each.sum(), weight=each.sum())
        losses = (net(x[rows])[:, 0] - y[rows]).square()
        mean = (losses * weights[rows]).sum() / weights[rows].sum()
        (expected,) = torch.autograd.grad(mean, [net.weight])
        assert net.weight.grad is not None
        assert (net.weight.grad - expected).abs().max() < 1e-12
        net.zero_grad()


def averages_of_buffers_are_those_by_hand() -> None:
    """By the samples of micro-batches: the last step has one of 3 and two of 2."""
    torch.manual_seed(1)
    x, norm = torch.randn(19, 4), nn.BatchNorm1d(4)
    data, model = torch.utils.data.TensorDataset(x), ddp.DistributedDataParallel(norm)
    loader = ddp.StepLoader(data, global_batch_size=12, micro_batch_size=3, shuffle=False, buffers="average")
    for step, bounds in zip(loader.epochs(1), ((0, 3, 6, 9, 12), (12, 15, 17, 19)), strict=True):
        parts = [x[begin:end] for begin, end in itertools.pairwise(bounds)]
        expected = [
            0.9 * getattr(norm, f"running_{name}")
            + 0.1 * sum(getattr(part, name)(0) * len(part) for part in parts) / step.samples
            for name in ("mean", "var")
        ]
        for (inputs,) in step:
            model(inputs).sum().backward()
        norm.zero_grad()
        found = torch.stack([present(norm.running_mean), present(norm.running_var)])
        assert torch.allclose(found, torch.stack(expected), atol=1e-6)
        assert norm.num_batches_tracked == step.number + 1


def unfrozen_parameters_count_from_their_first_step_on() -> str:
    """Return a digest of the gradients; the last step has a micro-batch of 3 and one of 2."""
    torch.manual_seed(1)
    net, digest = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 1)), hashlib.sha256()
    net[0].requires_grad_(False)
    model, x = ddp.DistributedDataParallel(net), torch.randn(29, 6)
    loader = ddp.StepLoader(torch.utils.data.TensorDataset(x), global_batch_size=12, micro_batch_size=3, shuffle=False)
    for step, rows in zip(loader.epochs(1), torch.arange(29).split(12), strict=True):
        net[0].weight.requires_grad_(step.number > 0)
        net[0].bias.requires_grad_(step.number > 1)
        for (inputs,) in step:
            model(inputs).square().mean().backward()
        found = [each.grad.clone() for each in net.parameters() if each.grad is not None]
        expected = torch.autograd.grad(net(x[rows]).square().mean(), [p for p in net.parameters() if p.requires_grad])
        assert len(found) == len(expected) == min(4, 2 + step.number)
        for one, other in zip(found, expected, strict=True):
            assert torch.allclose(one, other, rtol=1e-5)
            digest.update(one.numpy().tobytes())
        net.zero_grad()
    return digest.hexdigest()


def a_step_that_was_abandoned_changes_nothing() -> None:
    """Its iterator ends within a forward pass of a later step, as where the traceback of its failure lives on."""
    undisturbed, training = Training("mlp").run(2), Training("mlp")
    start = training.loader.state_dict()
    abandoned = iter(next(training.loader.epochs(1)))
    next(abandoned)
    training.loader.load_state_dict(start)
    training.net.register_forward_pre_hook(lambda *_: abandoned.close())  # type: ignore[attr-defined]  # a generator
    assert training.run(2) == undisturbed


def a_step_that_was_abandoned_after_some_micro_batches_changes_nothing() -> None:
    """Of two ranks each has four; gradients have weights."""
    results = []
    for count in (0, 1, 2, 3):
        training = Training("mlp", weighs=True)
        training.run(1)
        start = training.loader.state_dict()
        for x, y in itertools.islice(next(training.loader.epochs(1)), count):
            training.model.backward(nn.functional.cross_entropy(training.model(x), y), weight=2)
        training.loader.load_state_dict(start)
        results.append(training.run(2))
    assert len({*results}) == 1, results


def what_a_step_cannot_take_is_refused() -> None:
    training = Training("mlp")

    def step(act: Any) -> None:
        """Make a step of eight micro-batches."""
        training.loader.set_epoch(training.loader.epoch + 1)
        for each in training.loader.epochs(1000):
            for x, y in each:
                act(x, y)
            return

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(training.model(x), y)

    def in_no_sync(x: torch.Tensor, y: torch.Tensor) -> None:
        with training.model.no_sync():
            loss_of(x, y).backward()

    step(lambda x, y: loss_of(x, y).backward())
    with pytest.raises(BackwardError, match=r"\.grad held the averages.*zero_grad"):
        step(lambda x, y: loss_of(x, y).backward())
    training.optimizer.zero_grad()
    with pytest.raises(UnsupportedError, match="no_sync"):
        step(in_no_sync)
    for to_none in (True, False):

        def cleared(x: torch.Tensor, y: torch.Tensor, *, to_none: bool = to_none) -> None:
            loss = loss_of(x, y)
            training.optimizer.zero_grad(set_to_none=to_none)
            loss.backward()

        with pytest.raises(BackwardError, match=r"was changed between two micro-batches.* zero_grad\(\) once"):
            step(cleared)
    passes = iter(range(99))

    def weighted_once(x: torch.Tensor, y: torch.Tensor) -> None:
        training.model.backward(loss_of(x, y), weight=None if next(passes) else 2.0)

    with pytest.raises(BackwardError, match=r"gave no weight.* for each micro-batch"):
        step(weighted_once)
    with pytest.raises(BackwardError, match="add up to 0"):
        step(lambda x, y: training.model.backward(loss_of(x, y), weight=0))
    *_, last = (bare := _net("mlp")).parameters()
    last.requires_grad_(False)
    unfrozen = ddp.DistributedDataParallel(bare)

    def unfreezing(x: torch.Tensor, y: torch.Tensor) -> None:
        nn.functional.cross_entropy(unfrozen(x), y).backward()
        last.requires_grad_()

    with pytest.raises(BackwardError, match=r"unfrozen within a step of ddp\.StepLoader"):
        step(unfreezing)
    bare = _net("mlp")
    with pytest.raises(ArgumentError, match="wrap it in"):
        step(lambda x, y: nn.functional.cross_entropy(bare(x), y).backward())
    compressed = ddp.DistributedDataParallel(_net("mlp"), compression="bf16")
    with pytest.raises(UnsupportedError, match="compression or a communication hook"):
        step(lambda x, _: compressed(x))
    with pytest.raises(ArgumentError, match="mean"):
        next(training.loader.epochs(1000)).mean([1.0] * 99)
    for name in ("global_batch_size", "micro_batch_size", "torch", "seed"):
        state = training.loader.state_dict()
        with pytest.raises(ArgumentError, match=name.replace("torch", "last bits")):
            training.loader.load_state_dict({**state, name: 7})
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"batch_size": 4}, "leave batch_size out"),
        ({"buffers": "mean"}, "buffers='mean'; it must be"),
        ({"micro_batch_size": 64}, "micro_batch_size=64 and global_batch_size=32"),
    )
    for options, said in wrong:
        with pytest.raises(ArgumentError, match=said):
            ddp.StepLoader(Data("mlp"), **{"global_batch_size": 32, "micro_batch_size": 4, **options})
