"""A fit with a `ddp.StepLoader` has the same bits on any number of ranks: weights, history, evaluations."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from testbed.nursery import Nursery
from testbed.worlds import world
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import ddp
from ddp import callbacks as cb
from ddp.errors import ArgumentError, UnsupportedError

SAMPLES, BATCH, CLASSES, IGNORED = 46, 16, 3, 2


def data(samples: int = SAMPLES) -> TensorDataset:
    numbers = torch.Generator().manual_seed(samples)
    return TensorDataset(
        torch.randn(samples, 6, generator=numbers), torch.randint(CLASSES, (samples,), generator=numbers)
    )


def made(*, dropout: float, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    norm = nn.BatchNorm1d(16) if dropout else nn.Identity()
    net = nn.Sequential(nn.Linear(6, 16), norm, nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, CLASSES)).to(dtype)
    return net, torch.optim.AdamW(net.parameters(), 0.02)


class Stops(cb.Callback):
    """Raises at a step, once."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, step: int, logs: dict[str, float]) -> None:
        if step == self.step:
            raise KeyError("stops")


def fits(loss: str, folder: str | None = None, stops_at: int = 0, **options: Any) -> dict[str, Any] | None:
    """Three epochs of three steps of 4 micro-batches; what was left, to the bit."""
    warnings.filterwarnings("ignore", "5 ranks, but only 4 micro-batches")
    net, optimizer = made(dropout=0.3)
    losses = {"labels": nn.CrossEntropyLoss(ignore_index=IGNORED), "samples": nn.CrossEntropyLoss(reduction="none")}
    callbacks: list[cb.Callback] = [cb.LinearScaling(1), cb.EarlyStopping("val_loss", patience=50, restore_best=True)]
    callbacks += [cb.ModelCheckpoint(folder, every_n_steps=1)] if folder else []
    callbacks += [Stops(stops_at)] if stops_at else []
    trainer = ddp.Trainer(
        net,
        optimizer,
        losses[loss],
        metrics=["accuracy"],
        callbacks=callbacks,
        accumulate=4,
        max_grad_norm=1.0,
        log_every=1,
        seed=3,
        **options,
    )
    loader = ddp.StepLoader(data(), global_batch_size=BATCH, seed=7)
    if stops_at:
        with pytest.raises(ddp.errors.DdpError, match="callback Stops failed"):
            trainer.fit(loader, epochs=3, validation=data(23))
        return None
    history = trainer.fit(loader, epochs=3, validation=data(23))
    assert loader.micro_batch_size == 4
    assert trainer.steps == 3
    assert trainer.step == 9
    digest = hashlib.sha256()
    moments = [value for each in optimizer.state_dict()["state"].values() for value in each.values()]
    for value in [*net.state_dict().values(), *moments, torch.rand(2)]:
        digest.update(value.numpy().tobytes())
    evaluated = trainer.evaluate(ddp.StepLoader(data(29), global_batch_size=8, shuffle=False))
    return {"history": history.history, "evaluated": evaluated, "digest": digest.hexdigest()}


def resumes(folder: str, stops_at: int) -> None:
    assert fits("labels", folder, stops_at) is None


def _difference(one: nn.Module, other: nn.Module) -> float:
    flat: list[Tensor] = [nn.utils.parameters_to_vector(each.parameters()) for each in (one, other)]
    return (flat[0] - flat[1]).abs().max().item()


@pytest.mark.parametrize("loss", ["samples", "labels"])
def test_a_fit_has_the_same_bits_on_any_number_of_ranks(nursery: Nursery, loss: str) -> None:
    """The last step has 14 samples; of five ranks one has no micro-batch."""
    worlds = [(1, "shm"), (2, "gloo"), (3, "shm"), (5, "shm")]
    results = [each for size, group in worlds for each in nursery.run(size, fits, group=group, loss=loss)]
    assert len(results) == 11
    assert all(each == results[0] for each in results), results


def test_a_fit_goes_on_with_another_number_of_ranks(nursery: Nursery, tmp_path: Path) -> None:
    """From within an epoch, from its last step, and from within the last epoch; the history has all epochs."""
    for ranks, step in ((2, 2), (3, 6), (1, 8)):
        nursery.run(ranks, resumes, folder=str(tmp_path / "parts"), stops_at=step)
    parts = nursery.run(3, fits, loss="labels", folder=str(tmp_path / "parts"))
    (whole,) = nursery.run(1, fits, loss="labels", folder=str(tmp_path / "whole"))
    assert parts == [whole] * 3


@world(1, 3)
def test_a_fit_is_the_loop_by_hand_on_whole_batches() -> None:
    """On whole batches, in float64: also the mean over the labels that count, and its log."""
    x, y = data().tensors
    x = x.double()
    for loss in (nn.CrossEntropyLoss(ignore_index=IGNORED), nn.CrossEntropyLoss()):
        net, optimizer = made(dropout=0, dtype=torch.float64)
        trainer = ddp.Trainer(net, optimizer, loss, accumulate=4)
        loader = ddp.StepLoader(TensorDataset(x, y), global_batch_size=BATCH, shuffle=False)
        history = trainer.fit(loader, epochs=2)
        other, optimizer = made(dropout=0, dtype=torch.float64)
        totals: list[tuple[float, int]] = []
        for rows in [*torch.arange(SAMPLES).split(BATCH)] * 2:
            value = loss(other(x[rows]), y[rows])
            counts = int((y[rows] != loss.ignore_index).sum())
            totals.append((value.item() * counts, counts))
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert _difference(net, other) < 1e-12
        first = totals[:3]
        assert history["loss"][0] == pytest.approx(sum(t for t, _ in first) / sum(c for _, c in first), abs=1e-12)
        whole = loss(other(x), y).item()
        assert trainer.evaluate(loader)["loss"] == pytest.approx(whole, abs=1e-12)


@world(2)
def test_what_does_not_fit_is_refused() -> None:
    net, optimizer = made(dropout=0)
    trainer = ddp.Trainer(net, optimizer, nn.CrossEntropyLoss(), accumulate=4)
    with pytest.raises(ArgumentError, match=r"accumulate=4, but .* have 2 micro-batches of 8"):
        trainer.fit(ddp.StepLoader(data(), global_batch_size=16, micro_batch_size=8), epochs=1)
    with pytest.raises(ArgumentError, match=r"predict\(\) of a ddp.StepLoader"):
        trainer.predict(ddp.StepLoader(data(), global_batch_size=16, micro_batch_size=4))
    trainer.accumulate = 1
    with pytest.raises(ArgumentError, match=r"without micro_batch_size: .*accumulate="):
        trainer.fit(ddp.StepLoader(data(), global_batch_size=16), epochs=1)
    trainer = ddp.Trainer(*made(dropout=0), nn.CrossEntropyLoss(), strategy="local_sgd")
    with pytest.raises(UnsupportedError, match=r"StepLoader under strategy 'local_sgd'"):
        trainer.fit(ddp.StepLoader(data(), global_batch_size=16, micro_batch_size=4), epochs=1)
