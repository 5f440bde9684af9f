"""Cross entropy is a mean over labels that count: the same for any number of replicas, under each strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.fits import BATCH, CLASSES, F64, SAMPLES, batches, flat
from testbed.seeds import Seeds
from testbed.servers import in_roles
from testbed.simulated_device import DEVICE, simulated_device
from testbed.worlds import world
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import ddp
from ddp.errors import ArgumentError, UnsupportedError
from ddp.training import trainer
from ddp.training.losses_and_metrics import Loss
from ddp.training.trainer import Trainer

PLACES = 4  # labels of a sample
IGNORED = -100
CLASS_WEIGHTS = torch.tensor([1.0, 5.0, 0.2], dtype=F64)


class Net(nn.Module):
    """Sequences (B, PLACES, 6) to logits (B, CLASSES, PLACES)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8, dtype=F64), nn.Linear(8, CLASSES, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.second(torch.tanh(self.first(x))).transpose(1, 2)
        return logits


def data(*, ignored: int | None = IGNORED) -> tuple[Tensor, Tensor]:
    """Inputs, and labels of which most are ignored, in ever other numbers; those of one batch all are."""
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(SAMPLES, PLACES, 6, generator=generator, dtype=F64)
    y = torch.randint(CLASSES, (SAMPLES, PLACES), generator=generator)
    if ignored is not None:
        y[torch.rand(SAMPLES, PLACES, generator=generator) < torch.rand(SAMPLES, 1, generator=generator)] = ignored
        y[list(batches(0))[1]] = ignored
    return x, y


def made() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(1)
    net = Net()
    return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def by_hand(loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor, *, accumulate: int = 1) -> Net:
    net, optimizer = made()
    for epoch in range(2):
        parts = list(batches(epoch))
        for start in range(0, len(parts), accumulate):
            rows = [row for part in parts[start : start + accumulate] for row in part]
            loss(net(x[rows]), y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return net


LOSSES: dict[str, tuple[Callable[[], Any], int]] = {
    "padding": (nn.CrossEntropyLoss, IGNORED),
    "a class": (lambda: nn.CrossEntropyLoss(ignore_index=1), 1),
    "class weights": (lambda: nn.CrossEntropyLoss(CLASS_WEIGHTS.clone()), IGNORED),
    "smoothing": (lambda: nn.CrossEntropyLoss(CLASS_WEIGHTS.clone(), ignore_index=2, label_smoothing=0.1), 2),
    "nll": (lambda: _log_first(nn.NLLLoss(CLASS_WEIGHTS.clone(), ignore_index=0)), 0),
}


def _log_first(loss: Any) -> Any:
    """The loss, of what is not yet log-probabilities: its own class would not be known as torch's."""
    loss.register_forward_pre_hook(lambda _, given: (given[0].log_softmax(1), given[1]))
    return loss


@world(1, 2, 3, deadline_s=200)
def test_gradients_and_losses_are_those_of_the_global_batch() -> None:
    strategies = [("all_reduce", {}), ("central_storage", {}), ("local_sgd", {"every": 1})]
    for kind, (make, ignored) in LOSSES.items():
        x, y = data(ignored=ignored)
        for name, options in strategies:
            for accumulate in (1, 3):
                loss = make()
                one = Trainer(*made(), loss, strategy=ddp.strategy(name, **options), accumulate=accumulate, seed=4)
                history = one.fit(TensorDataset(x, y), epochs=2, global_batch_size=BATCH)
                expected = by_hand(make(), x, y, accumulate=accumulate)
                difference = (flat(one.module) - flat(expected)).abs().max().item()
                assert difference < 1e-12, (kind, name, accumulate, difference)
                whole = make()(expected(x), y).item()
                found = one.evaluate(TensorDataset(x, y), global_batch_size=5)["loss"]
                assert found == pytest.approx(whole, abs=1e-12), (kind, name)
                assert history["loss"][1] < history["loss"][0]


@world(3)
def test_soft_targets_are_averaged_over_samples() -> None:
    """Soft targets: torch divides by the samples, whatever the class weights are."""
    x, _ = data(ignored=None)
    soft = torch.rand(SAMPLES, CLASSES, PLACES, generator=torch.Generator().manual_seed(3), dtype=F64).softmax(1)
    loss = nn.CrossEntropyLoss(CLASS_WEIGHTS.clone(), label_smoothing=0.1)
    one = Trainer(*made(), loss, accumulate=2, seed=4)
    one.fit(TensorDataset(x, soft), epochs=2, global_batch_size=BATCH)
    assert (flat(one.module) - flat(by_hand(loss, x, soft, accumulate=2))).abs().max() < 1e-12
    assert one.evaluate(TensorDataset(x, soft))["loss"] == pytest.approx(loss(one.module(x), soft).item(), abs=1e-12)


@world(2)
def test_labels_are_counted_without_a_collective_for_each_batch() -> None:
    """How often a training of 8 steps of 3 micro-batches each, at most, adds up numbers over the replicas."""
    counts = {}
    x, y = data()
    for name, loss in (("none", nn.CrossEntropyLoss(reduction="none")), ("mean", nn.CrossEntropyLoss())):
        for strategy in ("all_reduce", "central_storage", "local_sgd"):
            one = Trainer(*made(), loss, strategy=strategy, accumulate=3, seed=4, log_every=100)
            reduce = one.strategy.reduce
            calls: list[int] = []
            vars(one.strategy)["reduce"] = lambda *given, to=reduce, calls=calls: calls.append(1) or to(*given)
            one.fit(TensorDataset(x, y), epochs=4, global_batch_size=BATCH)
            assert one.step == 8
            counts[f"{strategy} {name}"] = len(calls)
    assert counts["all_reduce mean"] == counts["all_reduce none"], "they travel with the gradients"
    assert counts["central_storage mean"] == counts["central_storage none"] + 8, "one a step, of several batches"
    assert counts["local_sgd mean"] == counts["local_sgd none"], "a replica that steps by itself waits for no one"


@world(2)
@pytest.mark.parametrize("after", [0, 1])
def test_replicas_that_step_by_themselves_take_means_of_their_own(after: int) -> None:
    """A replica that steps by itself takes the mean over its own labels; before, gradients are of that over all."""
    replicas = dist.get_world_size()
    x, y = data()
    strategy = ddp.strategy("local_sgd", every=3, after=after)
    one = Trainer(*made(), nn.CrossEntropyLoss(), strategy=strategy, seed=4)
    one.fit(TensorDataset(x, y), epochs=2, global_batch_size=BATCH)
    strategy.sync()

    all_of_them = [made() for _ in range(replicas)]
    steps = [rows for epoch in range(2) for rows in batches(epoch)]
    for step, rows in enumerate(steps):
        for replica, (net, optimizer) in enumerate(all_of_them):
            own = rows if step < after else rows[replica::replicas]
            losses = nn.functional.cross_entropy(net(x[own]), y[own], reduction="sum")
            (losses / max(1, int((y[own] != IGNORED).sum()))).backward()
            optimizer.step()
            optimizer.zero_grad()
        own_steps = step % 4 + 1 - (after if step < 4 else 0)  # of this round; an epoch, of 4 steps, ends one
        if own_steps == 3 or step % 4 == 3:
            mean = torch.stack([flat(net) for net, _ in all_of_them]).mean(0)
            for net, _ in all_of_them:
                nn.utils.vector_to_parameters(mean.clone(), net.parameters())
    assert (flat(one.module) - flat(all_of_them[0][0])).abs().max() < 1e-12


@world(3)
def test_parameter_servers_refuse_labels_that_do_not_count() -> None:
    """Those that wait for all average by samples; a worker of servers that do not wait has a mean of its own."""

    def sync() -> None:
        strategy = ddp.strategy("parameter_server", timeout_s=20.0)
        x, y = data(ignored=None)
        one = Trainer(*made(), nn.CrossEntropyLoss(), strategy=strategy, accumulate=2, seed=4)
        one.fit(TensorDataset(x, y), epochs=2, global_batch_size=BATCH)
        expected = by_hand(nn.CrossEntropyLoss(), x, y, accumulate=2)
        assert (flat(one.module) - flat(expected)).abs().max() < 1e-12
        with pytest.raises(UnsupportedError, match="class weights under strategy 'parameter_server'"):
            Trainer(*made(), nn.CrossEntropyLoss(CLASS_WEIGHTS), strategy=strategy)
        y[:] = IGNORED
        with pytest.raises(UnsupportedError, match=r"labels equal to ignore_index under .* reduction=\"none\""):
            one.fit(TensorDataset(x, y), epochs=3, global_batch_size=BATCH)
        strategy.close()  # type: ignore[attr-defined]

    def own() -> None:
        strategy = ddp.strategy("parameter_server", mode="async", timeout_s=20.0)
        x, y = data()
        one = Trainer(*made(), nn.CrossEntropyLoss(), strategy=strategy, accumulate=3, seed=4)
        one.fit(TensorDataset(x, y), epochs=2, global_batch_size=BATCH)
        expected = by_hand(nn.CrossEntropyLoss(), x, y, accumulate=3)
        assert (flat(one.module) - flat(expected)).abs().max() < 1e-12
        strategy.close()  # type: ignore[attr-defined]

    in_roles(2, 1, sync)
    in_roles(1, 1, own)


@world(3)
def test_a_step_of_ones_own_adds_to_the_mean() -> None:
    """An own `train_step` may change the labels and add a term to the mean; called twice, it is refused."""
    x, y = data(ignored=None)

    def kept(x: Tensor, y: Tensor) -> Tensor:
        return y.masked_fill(x[..., 0] > 0.5, IGNORED)

    def another(batch: list[Tensor]) -> Any:
        return batch[0], kept(*batch)

    def with_other_labels(batch: list[Tensor]) -> Any:
        batch[1] = kept(*batch)
        return batch

    def changed_in_place(batch: list[Tensor]) -> Any:
        batch[1].copy_(kept(*batch))
        return batch

    class Own(Trainer):
        def __init__(self, change: Callable[[list[Tensor]], Any]) -> None:
            super().__init__(*made(), nn.CrossEntropyLoss(), seed=4)
            self.change = change

        def train_step(self, batch: Any) -> Tensor:
            penalty = sum(parameter.square().sum() for parameter in self.module.parameters())
            return super().train_step(self.change(batch)) + 0.01 * penalty

    found = []
    with pytest.MonkeyPatch.context() as patch:  # batches are copied, as to a device
        patch.setattr(trainer, "on_device", lambda batch, _: [tensor.clone() for tensor in batch])
        for change in (another, with_other_labels, changed_in_place):
            found.append(Own(change))
            found[-1].fit(TensorDataset(x, y), epochs=2, global_batch_size=BATCH)
    net, optimizer = made()
    for rows in (rows for epoch in range(2) for rows in batches(epoch)):
        penalty = sum(parameter.square().sum() for parameter in net.parameters())
        (nn.CrossEntropyLoss()(net(x[rows]), kept(x[rows], y[rows])) + 0.01 * penalty).backward()
        optimizer.step()
        optimizer.zero_grad()
    for one in found:
        assert (flat(one.module) - flat(net)).abs().max() < 1e-12, one.change

    class Twice(Trainer):
        def train_step(self, batch: Any) -> Tensor:
            return super().train_step(batch) + super().train_step(batch)

    with pytest.raises(ArgumentError, match="called twice for one batch"):
        Twice(*made(), nn.CrossEntropyLoss(), seed=4).fit(TensorDataset(x, y), epochs=1, global_batch_size=BATCH)


@world(2)
def test_compression_rounds_means_over_labels_no_more_than_others() -> None:
    """Sums over labels travel as short as means do."""
    tolerances = {"fp16": 0.002, "bf16": 0.01, "int8": 0.03}
    x, y = data()
    expected = flat(by_hand(nn.CrossEntropyLoss(), x, y))
    distance = (expected - flat(made()[0])).norm()
    for compression, tolerance in tolerances.items():
        strategy = ddp.strategy("all_reduce", compression=compression)
        one = Trainer(*made(), nn.CrossEntropyLoss(), strategy=strategy, seed=4)
        one.fit(TensorDataset(x, y), epochs=2, global_batch_size=BATCH)
        difference = (flat(one.module) - expected).norm() / distance
        assert tolerance / 50 < difference < tolerance, (compression, difference)


@world(1)
def test_counting_labels_on_a_device_does_not_wait_for_it(seeds: Seeds) -> None:
    with simulated_device(*seeds(1)) as device:
        loss = Loss(nn.CrossEntropyLoss(torch.arange(3.0).to(DEVICE)))
        labels = torch.tensor([1, 2, 2, -100]).to(DEVICE)
        device.may_wait = False
        weight = loss.weight(labels)
        device.may_wait = True
        assert weight is not None
        assert (weight.device.type, weight.dtype, weight.item()) == (labels.device.type, torch.float64, 5)


def test_no_label_of_unsigned_numbers_is_ignored_by_default() -> None:
    weight = Loss(nn.CrossEntropyLoss()).weight(torch.tensor([0, 156, 2], dtype=torch.uint8))
    assert weight is not None
    assert weight.item() == 3
