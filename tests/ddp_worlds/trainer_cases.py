"""What the ranks of a test world do with a Trainer: each function runs on every rank.

The oracle is the loop that a script for one process would have, on whole batches, in float64.
"""

from __future__ import annotations

import contextlib
import io
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import ddp
from ddp import callbacks as cb
from ddp.checkpoint import writer
from ddp.data.replica_loader import ReplicaLoader
from ddp.strategies.all_reduce import AllReduce
from ddp.training.optimizer_step import needs_average
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
        return self.second(nn.functional.dropout(hidden, self.dropout, self.training))


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


# One process on whole batches

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


def fit_is_the_loop_by_hand(strategies: list[str]) -> None:
    for kind, (loss, reference) in KINDS.items():
        dataset: Any = {"weights": TensorDataset(*tensors()), "dict": ByName()}.get(kind, data())
        found = trainer(loss=loss, metrics=())
        history = found.fit(dataset, epochs=2, global_batch_size=BATCH)
        expected = by_hand(reference)
        assert (flat(found.module) - flat(expected)).abs().max() < 1e-12, kind
        x, y, w = tensors()
        whole = reference(expected, x, y, w).item()
        assert found.evaluate(dataset, global_batch_size=5)["loss"] == pytest.approx(whole, abs=1e-12), kind
        assert history["loss"][1] < history["loss"][0]
    for name in strategies:
        for options in ({"accumulate": 3}, {"max_grad_norm": 0.05}):
            found = trainer(metrics=(), strategy=ddp.strategy(name), **options)
            if name == "central_storage":
                found.strategy.averages_in_step = True
                found._averages_first = needs_average(found.strategy, "float32", found.max_grad_norm)
            found.fit(data(), epochs=2, global_batch_size=BATCH)
            difference = flat(found.module) - flat(by_hand(KINDS["mean"][1], **options))
            assert difference.abs().max() < 1e-12, (name, options)


# Evaluation and prediction


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = made()[0]

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"logits": logits, "found": logits.argmax(1)}


def in_the_order_of_the_data() -> list[dict[str, float]]:
    return [_in_the_order_of_the_data(*sizes) for sizes in ((23, 7), (2, 3))]


def _in_the_order_of_the_data(count: int, global_batch_size: int) -> dict[str, float]:
    x, y, w = (column[:count] for column in tensors())
    one = trainer(
        metrics={
            "accuracy": "accuracy",
            "largest": lambda out, _: out.amax(1),
            "pair": lambda out, labels: (out.sum(), len(labels)),
            "mean": lambda out, _: out.mean(),
        }
    )
    logs = one.evaluate(TensorDataset(x, y), global_batch_size=global_batch_size)
    out = one.module(x)
    assert logs["loss"] == pytest.approx(nn.CrossEntropyLoss()(out, y).item(), abs=1e-12)
    assert logs["accuracy"] == (out.argmax(1) == y).double().mean().item()
    assert logs["largest"] == pytest.approx(out.amax(1).mean().item(), abs=1e-12)
    assert logs["pair"] == pytest.approx(out.sum().item() / count, abs=1e-12)
    assert logs["mean"] == pytest.approx(out.mean().item(), abs=1e-12)
    weighted = trainer(loss=nn.CrossEntropyLoss(reduction="none"))
    found = weighted.evaluate(TensorDataset(x, y, w), global_batch_size=global_batch_size)["accuracy"]
    assert found == pytest.approx((((out.argmax(1) == y) * w).sum() / w.sum()).item(), abs=1e-12)

    assert torch.allclose(one.predict(TensorDataset(x), global_batch_size=global_batch_size), out, rtol=0, atol=1e-12)
    heads = TwoHeads()
    two = Trainer(heads, torch.optim.SGD(heads.parameters(), lr=1.0), nn.CrossEntropyLoss())
    both = two.predict(TensorDataset(x, y), global_batch_size=global_batch_size)
    assert torch.equal(both["found"], out.argmax(1))
    assert torch.allclose(both["logits"], out, rtol=0, atol=1e-12)
    assert one.module.training
    return logs


# Going on


class Breaks(cb.Callback):
    """Raises in one hook at one step, on one replica or on all."""

    def __init__(self, hook: str, step: int, replica: int | None = None) -> None:
        self.step, self.replica = step, replica

        def failing(*_: object) -> None:
            strategy = self.trainer.strategy
            if self.trainer.step >= self.step and self.replica in (None, strategy.replica):
                raise KeyError("no such thing")

        setattr(self, hook, failing)


def all_of(folder: str, *more: cb.Callback) -> list[cb.Callback]:
    return [
        cb.ModelCheckpoint(folder, monitor="val_loss", every_n_steps=2),
        cb.EarlyStopping(patience=50, restore_best=True),
        cb.CSVLogger(Path(folder) / "log.csv"),
        cb.LinearScaling(warmup_epochs=2),
        cb.LearningRateScheduler(
            scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), by="step"
        ),
        *more,
    ]


def fits(folder: str, *, dropout: float, breaks: tuple[str, int] | None = None, **options: Any) -> dict[str, Any]:
    """Four epochs of four steps; what was left, as bits."""
    more = [] if breaks is None else [Breaks(*breaks)]
    one = trainer(all_of(folder, *more), dropout=dropout, rate=0.02, log_every=3, **options)
    if breaks is not None:
        with pytest.raises(ddp.errors.DdpError, match=f"callback Breaks failed in {breaks[0]}, at step {breaks[1]}"):
            one.fit(data(), epochs=4, validation=data(), global_batch_size=BATCH)
        return {}
    history = one.fit(data(), epochs=4, validation=data(), global_batch_size=BATCH)
    optimizer = io.BytesIO()
    torch.save(one.optimizer.state_dict(), optimizer)
    return {
        "weights": flat(one.module).tolist(),
        "optimizer": [state["momentum_buffer"].tolist() for state in one.optimizer.state_dict()["state"].values()],
        "history": history.history,
        "table": (Path(folder) / "log.csv").read_text(),
        "best": flat_of(torch.load(Path(folder) / "best.pt", weights_only=True)),
        "step": one.step,
        "draw": torch.rand(()).item(),
    }


def grows(folder: str, *, until: int, breaks: bool = False) -> dict[str, Any]:
    """Train to the middle of epoch `until`, or four epochs; the size of the world may change from run to run."""
    more = [Breaks("on_step_begin", 4 * until + 2)] if breaks else []
    one = trainer([cb.ModelCheckpoint(folder, every_n_steps=2), *more], log_every=1)
    try:
        one.fit(data(), epochs=4, global_batch_size=BATCH)
    except ddp.errors.DdpError:
        assert breaks
    return {"step": one.step, "weights": flat(one.module).tolist(), "loss": one.history.history["loss"]}


def flat_of(state: dict[str, Tensor]) -> list[float]:
    return torch.cat([each.flatten() for each in state.values()]).tolist()


def saves_without_a_group(folder: str) -> list[float]:
    """A strategy whose replicas have no process group: the main one saves, and every one goes on from its file."""

    class Alone(AllReduce):
        collective = False
        publications = 0

        def _prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
            self.given = model, optimizer
            return super()._prepare(model, optimizer)

        def publish(self) -> None:
            """What servers do."""
            self.publications += 1
            states: list[Any] = [[each.state_dict() for each in self.given]]
            dist.broadcast_object_list(states, src=0)
            each: Any
            for each, state in zip(self.given, states[0], strict=True):
                each.load_state_dict(state)

    def run(*more: cb.Callback) -> Trainer:
        return trainer([cb.ModelCheckpoint(folder, every_n_steps=3), *more], strategy=Alone(), log_every=100)

    with pytest.raises(ddp.errors.DdpError, match="Breaks failed in on_epoch_begin"):
        run(Breaks("on_epoch_begin", 7)).fit(data(), epochs=3, global_batch_size=BATCH)
    dist.barrier()
    second = run()
    second.fit(data(), epochs=3, global_batch_size=BATCH)
    assert second.strategy.publications == 1  # type: ignore[attr-defined]
    assert second.step == 12
    whole = trainer()
    whole.fit(data(), epochs=3, global_batch_size=BATCH)
    assert torch.equal(flat(second.module), flat(whole.module))
    assert torch.load(Path(folder) / "step-0000000012.pt", weights_only=True)["values"]["trainer"]["epoch"] == 3
    with pytest.raises(ddp.errors.UnsupportedError, match="max_grad_norm under strategy"):
        trainer(strategy=_averaging_later(), max_grad_norm=1.0)
    return flat(second.module).tolist()


def _alone() -> Any:
    strategy = AllReduce()
    strategy.collective = False
    return strategy


def _averaging_later() -> Any:
    strategy = AllReduce()
    strategy.averages_in_step, strategy.collective = True, False
    return strategy


def evaluates_until_the_end() -> list[dict[str, float]]:
    class Evaluator(AllReduce):
        role = "evaluator"

        def evaluations(self) -> Iterator[int]:
            yield from (5, 9)

    seen = []

    class Sees(cb.Callback):
        def on_evaluate_end(self, logs: dict[str, float]) -> None:
            seen.append({"step": float(self.trainer.step), **logs})

    one = trainer([Sees()], strategy=Evaluator())
    one.fit(data(), epochs=3, validation=data())
    with pytest.raises(ddp.errors.ArgumentError, match="no validation data"):
        one.fit(data(), epochs=3)
    return seen


# Callbacks


def breaks_on_one_replica(hooks: list[str]) -> list[str]:
    """The others hear of it, and none waits."""
    return [_breaks_on_one_replica(hook) for hook in hooks]


def _breaks_on_one_replica(hook: str) -> str:
    one = trainer([Breaks(hook, 2, replica=dist.get_world_size() - 1)], log_every=4)
    with pytest.raises(ddp.errors.DdpError) as raised:
        one.fit(data(), epochs=3, validation=data(), global_batch_size=BATCH)
    last = dist.get_world_size() - 1
    assert (raised.value.__cause__ is not None) == (dist.get_rank() == last)
    assert raised.value.failed_ranks == (None if dist.get_rank() == last else (last,))  # a consequence of the last
    if hook == "on_evaluate_begin":
        with pytest.raises(ddp.errors.DdpError, match="Breaks failed in on_evaluate_begin"):
            one.evaluate(data())
    return str(raised.value)


def stop_together() -> list[tuple[int, int]]:
    return [_stops_together(by) for by in ("step", "epoch")]


def _stops_together(by: str) -> tuple[int, int]:
    class Stops(cb.Callback):
        def on_step_end(self, step: int, logs: dict[str, float]) -> None:
            if by == "step" and step == 6 and self.trainer.strategy.replica == dist.get_world_size() - 1:
                self.trainer.stop()

    stopping: list[cb.Callback] = [cb.EarlyStopping("val_loss", patience=2, restore_best=True)] if by == "epoch" else []
    # With a rate of 30, no epoch is better than the first.
    one = trainer([*stopping, Stops()], rate=30.0 if by == "epoch" else 0.1, log_every=2)
    history = one.fit(data(), epochs=9, validation=data(), global_batch_size=BATCH)
    if by == "epoch":
        assert isinstance(stopping[0], cb.EarlyStopping)
        best = stopping[0].best_epoch
        assert best is not None
        assert len(history.epoch) == best + 3
        assert one.evaluate(data())["loss"] == pytest.approx(history["val_loss"][best], abs=1e-12)
    return len(history.epoch), one.step


def scaled_rates() -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {}
    for name, scaling in (("warm", cb.LinearScaling(2)), ("at once", cb.LinearScaling(0))):
        used: list[float] = []

        class Notes(cb.Callback):
            def on_step_end(self, step: int, logs: dict[str, float], used: list[float] = used) -> None:
                used.append(self.trainer.learning_rate)

        one = trainer([scaling, cb.LearningRateScheduler(lambda epoch: 0.1 / (1 + epoch)), Notes()])
        history = one.fit(data(), epochs=3, global_batch_size=BATCH)
        rates[name] = [*used, float(len(history.epoch))]
        assert one.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / len(history.epoch))
    return rates


def every_strategy_fits(folder: str) -> list[float]:
    """Under each, with what must be sure: equal numbers on the replicas, files, going on."""
    found = []
    for name in ("all_reduce", "local_sgd", "central_storage"):
        where = Path(folder) / name
        for epochs in (1, 3):
            callbacks = [cb.ModelCheckpoint(where, every_n_steps=3), cb.EarlyStopping(patience=9, restore_best=True)]
            one = trainer(callbacks, strategy=name)
            history = one.fit(data(), epochs=epochs, validation=data(), global_batch_size=BATCH)
            assert history.epoch == list(range(epochs))
        found.append(history["val_loss"][-1])
        one.save(where / "weights.pt")
        alone = made()[0]
        alone.load_state_dict(torch.load(where / "weights.pt", weights_only=True))
        x, y, _ = tensors()
        assert one.evaluate(data())["loss"] == pytest.approx(nn.CrossEntropyLoss()(alone(x), y).item(), abs=1e-12)
        other = trainer()
        other.load(where / "weights.pt")
        assert torch.equal(flat(other.module), flat(alone))
    return found


# Files and wrong use


def writes_programs(folder: str) -> None:
    one = trainer()
    x = tensors()[0]
    expected = one.predict(TensorDataset(x))
    for name, example in (("a.pt2", x[:1]), ("b.pt2", {"x": x[:3]})):
        one.export(Path(folder) / name, example)
        assert sorted(path.name for path in Path(folder).glob("*.tmp")) == []
    for name, kind in (("model.onnx", None), ("model.pt", None), ("model.pt2", "torchscript")):
        with pytest.raises(ddp.errors.ArgumentError, match=r"name the file \.pt2"):
            one.export(Path(folder) / name, x, format=kind)  # type: ignore[arg-type]
    with pytest.raises(ddp.errors.DdpError, match="could not export"):
        one.export(Path(folder) / "bad", torch.zeros(2, 2), format="export")
    with pytest.raises(ddp.errors.DdpError, match="could not save"):
        one.save("/proc/no/weights.pt")
    torch.save({"expected": expected, "x": x}, Path(folder) / f"expected.{dist.get_rank()}")


def refuses() -> None:
    for options, message in (
        ({"precision": "float8"}, "precision='float8'"),
        ({"metrics": ["acuracy"]}, "there is no metric 'acuracy'"),
        ({"metrics": [lambda out, y: out]}, "give a dict of names"),
        ({"metrics": "accuracy"}, r"\['accuracy'\]"),
        ({"loss": nn.CrossEntropyLoss(reduction="sum")}, 'reduction="sum"'),
        ({"callbacks": [print]}, "is not an instance of ddp.callbacks.Callback"),
        ({"strategy": "mirrored"}, "did you mean 'all_reduce'?"),
    ):
        with pytest.raises(ddp.errors.ArgumentError, match=message):
            trainer(**options)
    one = trainer()
    with pytest.raises(ddp.errors.ArgumentError, match=r"a list_iterator cannot be sharded: give the data set"):
        one.fit(iter([1]), epochs=1)
    with pytest.raises(ddp.errors.ArgumentError, match=r"a tuple of tensors is not a data set: give .*TensorDataset"):
        one.evaluate((torch.zeros(4, 2), torch.zeros(4)))
    with pytest.raises(ddp.errors.ArgumentError, match="must not shuffle"):
        one.predict(one.strategy.loader(data(), global_batch_size=4, shuffle=True))
    with pytest.raises(ddp.errors.ArgumentError, match="sample weights, but the loss is a single number"):
        one.fit(TensorDataset(*tensors()), epochs=1)
    with pytest.raises(ddp.errors.ArgumentError, match=r"shape \(2, 3\) for 23 samples"):
        trainer(loss=lambda out, y: out[:2]).fit(data(), epochs=1, global_batch_size=SAMPLES)
    with pytest.raises(ddp.errors.ArgumentError, match=r"a batch is a list of 4"):
        one.fit(TensorDataset(*tensors(), tensors()[0]), epochs=1)
    with pytest.raises(
        ddp.errors.DdpError, match=r"EarlyStopping failed in on_epoch_end, at step 1: .* no 'val_loss' in the logs"
    ):
        trainer([cb.EarlyStopping()]).fit(data(), epochs=1)


def half_precision() -> None:
    for precision in ("bfloat16", "float16"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        seen: list[torch.dtype] = []
        net[1].register_forward_hook(lambda _, __, out, seen=seen: seen.append(out.dtype))
        one = Trainer(
            net, torch.optim.Adam(net.parameters(), 0.05), nn.CrossEntropyLoss(), precision=precision, max_grad_norm=1.0
        )
        x, y, _ = tensors()
        history = one.fit(TensorDataset(x.float(), y), epochs=6, global_batch_size=BATCH)
        assert set(seen) == {getattr(torch, precision)}
        assert history["loss"][-1] < history["loss"][0]
        assert one.scaler.is_enabled() == (precision == "float16")
        assert one.predict(TensorDataset(x.float())).dtype == torch.float32


def own_step() -> dict[str, list[float]]:
    class Own(Trainer):
        def train_step(self, batch: Any) -> Tensor:
            x, y = batch
            if not len(y):
                x, y = torch.zeros(1, 2, 3, dtype=F64), torch.zeros(1, dtype=torch.int64)
            losses = nn.functional.cross_entropy(self.model(x), y, reduction="none")[: len(batch[1])]
            self.record("seen", len(batch[1]), 1 if self.strategy.replica == 0 else 0)
            return self.strategy.mean(losses)

    net, optimizer = made()
    own = Own(net, optimizer, nn.CrossEntropyLoss(), seed=4)
    history = own.fit(data(), epochs=2, global_batch_size=BATCH, steps_per_epoch=4)
    assert (flat(own.module) - flat(by_hand(KINDS["mean"][1]))).abs().max() < 1e-12
    return history.history


def draws_curves(folder: str, breaks: bool) -> None:
    callbacks = [
        cb.TensorBoard(Path(folder) / "curves"),
        cb.CSVLogger(Path(folder) / "log.csv"),
        cb.ModelCheckpoint(Path(folder) / "checkpoints", every_n_steps=3),
        *([Breaks("on_epoch_begin", 8)] if breaks else []),
    ]
    one = trainer(callbacks, log_every=2)
    if breaks:
        with pytest.raises(ddp.errors.DdpError, match="Breaks failed in on_epoch_begin"):
            one.fit(data(), epochs=3, validation=data(), global_batch_size=BATCH)
    else:
        one.fit(data(), epochs=3, validation=data(), global_batch_size=BATCH)


def keeps_the_best(folder: str) -> tuple[float, list[float]]:
    checkpoint = cb.ModelCheckpoint(folder, monitor="val_loss", every_n_epochs=2, keep=2)
    one = trainer([checkpoint], rate=3.0)
    history = one.fit(data(), epochs=5, validation=data(), global_batch_size=BATCH)
    one.load(checkpoint.best_path)
    with pytest.raises(ddp.errors.CheckpointError, match=r"it is a checkpoint: pass its \['model'\]"):
        one.load(Path(folder) / "step-0000000020.pt")
    return one.evaluate(data())["loss"], history["val_loss"]


class FullDisk(cb.Callback):
    """The main replica writes no file of more than 500 bytes in some epochs."""

    def __init__(self, epochs: range) -> None:
        self.epochs = epochs

    def on_epoch_begin(self, epoch: int) -> None:
        self._set(self.trainer.strategy.is_main and epoch in self.epochs)

    def on_fit_end(self) -> None:
        self._set(False)

    def _set(self, is_full: bool) -> None:
        if writer._thread is not None:
            writer._thread.join()
        resource.setrlimit(resource.RLIMIT_FSIZE, (500 if is_full else resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def full_disk(folder: str, epochs: range, on_error: Any, alone: bool) -> tuple[str, str]:
    """Return what `fit` raised, and what it wrote to stderr."""
    options: dict[str, Any] = {"strategy": _alone()} if alone else {}
    checkpoint = cb.ModelCheckpoint(folder, monitor="val_loss", on_error=on_error)
    one = trainer([FullDisk(epochs), checkpoint], rate=0.01, **options)
    stderr = io.StringIO()
    error = ""
    with contextlib.redirect_stderr(stderr):
        try:
            one.fit(data(), epochs=5, validation=data(), global_batch_size=BATCH)
        except ddp.errors.DdpError as raised:
            error = str(raised)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return error, stderr.getvalue()


def schedules() -> None:
    plateau = cb.LearningRateScheduler(
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1),
        monitor="val_loss",
    )
    # With a rate of 30, the second epoch is not better than the first.
    history = trainer([plateau], rate=30.0).fit(data(), epochs=4, validation=data(), global_batch_size=BATCH)
    rates, losses = history["learning_rate"], history["val_loss"]
    best, rate, expected = losses[0], 30.0, [30.0]
    for loss in losses[1:-1]:
        rate, best = (rate, loss) if loss < best * (1 - 1e-4) else (rate * 0.1, best)
        expected.append(rate)
    assert rates == pytest.approx([*expected[:1], *expected][:4])
    assert rates[-1] < 30.0
    steps = trainer([cb.LearningRateScheduler(lambda step: 1 / (1 + step), by="step")])
    steps.fit(data(), epochs=2, global_batch_size=BATCH)
    assert steps.learning_rate == 1 / 8
