"""`fit` is the loop that one would write by hand, on whole batches; a resumed run ends as if it had never stopped."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.fits import (
    BATCH,
    F64,
    KINDS,
    SAMPLES,
    Breaks,
    ByName,
    batches,
    by_hand,
    data,
    flat,
    made,
    tensors,
    trainer,
)
from testbed.nursery import Nursery
from testbed.once import once
from testbed.worlds import agreed, world
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import ddp
from ddp import callbacks as cb
from ddp.errors import ArgumentError, DdpError, UnsupportedError
from ddp.strategies.all_reduce import AllReduce
from ddp.training.losses_and_metrics import metrics_of
from ddp.training.optimizer_step import needs_average
from ddp.training.trainer import Trainer


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = made()[0]

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"logits": logits, "found": logits.argmax(1)}


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
        with pytest.raises(DdpError, match=f"callback Breaks failed in {breaks[0]}, at step {breaks[1]}"):
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
    except DdpError:
        assert breaks
    return {"step": one.step, "weights": flat(one.module).tolist(), "loss": one.history.history["loss"]}


def flat_of(state: dict[str, Tensor]) -> list[float]:
    return torch.cat([each.flatten() for each in state.values()]).tolist()


def _averaging_later() -> Any:
    strategy = AllReduce()
    strategy.averages_in_step, strategy.collective = True, False
    return strategy


def writes_programs(folder: str) -> None:
    one = trainer()
    x = tensors()[0]
    expected = one.predict(TensorDataset(x))
    for name, example in (("a.pt2", x[:1]), ("b.pt2", {"x": x[:3]})):
        one.export(Path(folder) / name, example)
        assert sorted(path.name for path in Path(folder).glob("*.tmp")) == []
    for name, kind in (("model.onnx", None), ("model.pt", None), ("model.pt2", "torchscript")):
        with pytest.raises(ArgumentError, match=r"name the file \.pt2"):
            one.export(Path(folder) / name, x, format=kind)  # type: ignore[arg-type]
    with pytest.raises(DdpError, match="could not export"):
        one.export(Path(folder) / "bad", torch.zeros(2, 2), format="export")
    with pytest.raises(DdpError, match="could not save"):
        one.save("/proc/no/weights.pt")
    torch.save({"expected": expected, "x": x}, Path(folder) / f"expected.{dist.get_rank()}")


@world(1, 3)
def test_fit_is_the_loop_by_hand_on_whole_batches() -> None:
    strategies = ["all_reduce", "central_storage"]
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


@world(3)
@pytest.mark.parametrize(("count", "global_batch_size"), [(23, 7), (2, 3)])
def test_evaluation_and_prediction_are_those_of_one_process(count: int, global_batch_size: int) -> None:
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
    agreed(logs)


# In the middle of an epoch; after its last step, before the epoch's end; within the end of an epoch.
@pytest.mark.parametrize("breaks", [("on_step_begin", 6), ("on_evaluate_begin", 8), ("on_epoch_begin", 12)])
def test_a_run_that_is_resumed_ends_with_the_same_bits(
    nursery: Nursery, breaks: tuple[str, int], tmp_path: Path, uninterrupted: list[dict[str, object]]
) -> None:
    assert nursery.run(2, fits, folder=str(tmp_path), dropout=0.3, breaks=breaks) == [{}, {}]
    assert nursery.run(2, fits, folder=str(tmp_path), dropout=0.3) == uninterrupted


@pytest.fixture(scope="module")
def uninterrupted(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    def run() -> list[dict[str, object]]:
        folder = tmp_path_factory.mktemp("uninterrupted")
        results = nursery.run(2, fits, folder=str(folder), dropout=0.3)
        assert results[0]["step"] == 16
        again = nursery.run(2, fits, folder=str(folder), dropout=0.3)  # a run that is over does nothing more
        assert again == results
        return results

    return once(tmp_path_factory, "uninterrupted Trainer", run)


def test_a_run_goes_on_in_a_world_of_another_size(nursery: Nursery, tmp_path: Path) -> None:
    # The scaling of the rate would follow the world.
    whole = nursery.run(1, grows, folder=str(tmp_path / "whole"), until=4)[0]
    for ranks, until in ((2, 1), (3, 2), (1, 4)):
        found = nursery.run(ranks, grows, folder=str(tmp_path / "parts"), until=until, breaks=until < 4)
        assert all(each == found[0] for each in found)
    assert found[0]["step"] == whole["step"]
    assert found[0]["weights"] == pytest.approx(whole["weights"], abs=1e-12)
    assert found[0]["loss"] == pytest.approx(whole["loss"], abs=1e-12)


@world(2)
def test_without_a_process_group_the_main_replica_saves(tmp_path: Path) -> None:
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
        return trainer([cb.ModelCheckpoint(tmp_path, every_n_steps=3), *more], strategy=Alone(), log_every=100)

    with pytest.raises(DdpError, match="Breaks failed in on_epoch_begin"):
        run(Breaks("on_epoch_begin", 7)).fit(data(), epochs=3, global_batch_size=BATCH)
    dist.barrier()
    second = run()
    second.fit(data(), epochs=3, global_batch_size=BATCH)
    assert second.strategy.publications == 1  # type: ignore[attr-defined]
    assert second.step == 12
    whole = trainer()
    whole.fit(data(), epochs=3, global_batch_size=BATCH)
    assert torch.equal(flat(second.module), flat(whole.module))
    assert torch.load(tmp_path / "step-0000000012.pt", weights_only=True)["values"]["trainer"]["epoch"] == 3
    with pytest.raises(UnsupportedError, match="max_grad_norm under strategy"):
        trainer(strategy=_averaging_later(), max_grad_norm=1.0)


@world(1)
def test_an_evaluator_evaluates_until_the_training_ends() -> None:
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
    with pytest.raises(ArgumentError, match="no validation data"):
        one.fit(data(), epochs=3)
    assert [each["step"] for each in seen] == [5, 9]
    assert seen[0]["loss"] == seen[1]["loss"] > 0


@world(2)
def test_every_strategy_trains_saves_and_goes_on(tmp_path: Path) -> None:
    """Under each, with what must be sure: equal numbers on the replicas, files, going on."""
    found = []
    for name in ("all_reduce", "local_sgd", "central_storage"):
        where = tmp_path / name
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
    agreed(found)
    assert found[0] == pytest.approx(found[2], abs=1e-12)  # all_reduce, central_storage


@world(2)
def test_the_outer_momentum_of_local_steps_is_resumed(tmp_path: Path) -> None:
    found = []
    for epochs in (2, 2, 3):
        strategy = ddp.strategy("local_sgd", every=2, after=2, outer_lr=0.7, outer_momentum=0.9)
        one = trainer([cb.ModelCheckpoint(tmp_path)], strategy=strategy)
        one.fit(data(), epochs=epochs, global_batch_size=BATCH)
        found.append(strategy.state_dict()["averages"][0])
    first, same, later = found
    assert (first["step"], same["step"], later["step"]) == (2 * 4, 2 * 4, 3 * 4)
    for name, momentum in first["outer_momentum"].items():
        assert torch.equal(momentum, same["outer_momentum"][name])
        assert momentum.any()


def test_exported_programs_run_without_this_package(nursery: Nursery, tmp_path: Path) -> None:
    nursery.run(2, writes_programs, folder=str(tmp_path))
    script = """
import sys, torch, warnings
warnings.simplefilter("ignore")
folder = sys.argv[1]
told = torch.load(f"{folder}/expected.0", weights_only=True)
for name in ("a.pt2", "b.pt2"):
    program = torch.export.load(f"{folder}/{name}").module()
    found = program(x=told["x"]) if name == "b.pt2" else program(told["x"])
    assert torch.allclose(found, told["expected"], rtol=0, atol=1e-12), name
assert not [name for name in sys.modules if name.split(".")[0] in ("ddp", "launcher")]
"""
    result = subprocess.run(
        [sys.executable, "-I", "-c", script, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr


@world(2)
def test_half_precision_trains() -> None:
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


@world(3)
def test_a_step_of_ones_own() -> None:
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
    assert agreed(history.history)["seen"] == [23 / 4, 23 / 4]


@world(1, 3)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_log_of_a_step_of_ones_own_is_the_loss_that_has_its_gradient(accumulate: int) -> None:
    """What it adds to the mean counts once, not once for each replica; a factor, and a mean of its own, count too."""

    def penalty(net: nn.Module) -> Any:
        return 0.1 * sum(parameter.square().sum() for parameter in net.parameters())

    class Own(Trainer):
        def train_step(self, batch: Any) -> Tensor:
            seen.clear()
            loss = 0.5 * super().train_step(batch)
            aside = self.strategy.mean(seen[0].square()[: len(batch[1])])
            loss += penalty(self.module)  # in place
            return loss + 0.25 * aside

    x, y, _ = tensors()
    targets = nn.functional.one_hot(y).to(F64)
    seen: list[Tensor] = []
    net, optimizer = made()
    net.register_forward_hook(lambda _, __, outputs: seen.append(outputs))
    one = Own(net, optimizer, nn.MSELoss(), accumulate=accumulate, seed=4)
    history = one.fit(TensorDataset(x, targets), epochs=2, global_batch_size=BATCH)

    net, optimizer = made()
    for epoch in range(2):
        total, parts = 0.0, list(batches(epoch))
        for start in range(0, len(parts), accumulate):
            rows = [row for part in parts[start : start + accumulate] for row in part]
            outputs = net(x[rows])
            loss = 0.5 * nn.functional.mse_loss(outputs, targets[rows]) + 0.25 * outputs.square().mean() + penalty(net)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item() * len(rows)
        assert history["loss"][epoch] == pytest.approx(total / SAMPLES, abs=1e-12)
    assert (flat(one.module) - flat(net)).abs().max() < 1e-12


@world(1, 2)
def test_an_evaluation_before_a_step_leaves_the_step_as_it_was() -> None:
    """The size of a global batch is that of the step's, not that of the data which a callback has read since."""

    class Evaluates(cb.Callback):
        def on_step_begin(self, step: int) -> None:
            self.trainer.evaluate(data(), global_batch_size=SAMPLES)
            self.trainer.predict(data(), global_batch_size=SAMPLES)

    for accumulate in (1, 2):
        found = []
        for callbacks in ([], [Evaluates()]):
            one = trainer(callbacks, loss=nn.CrossEntropyLoss(reduction="none"), accumulate=accumulate)
            history = one.fit(data(), epochs=2, global_batch_size=BATCH)
            found.append((flat(one.module).tolist(), history.history))
        assert found[0] == found[1], accumulate


def test_metrics_by_name_take_targets_with_and_without_a_last_dimension_of_1() -> None:
    """As Keras does; torch would compare each of the N outputs with each of the N targets."""
    y, labels, scores = torch.arange(4.0), torch.arange(6), torch.eye(6) + torch.rand(6, 6) / 2
    cases: list[tuple[str, Tensor, Tensor, list[float]]] = [
        ("mean_absolute_error", y, y + 2, [2.0] * 4),
        ("mean_squared_error", y, y + 2, [4.0] * 4),
        ("accuracy", y - 1.5, (y > 1).float(), [1.0] * 4),
        ("accuracy", scores, labels, [1.0] * 6),
        ("top5_accuracy", scores, labels, [1.0] * 6),
        ("top5_accuracy", torch.arange(6.0).expand(6, 6), labels, [0.0] + [1.0] * 5),
    ]
    for name, outputs, targets, expected in cases:
        metric = metrics_of([name])[name]
        columns = [outputs, outputs[:, None]] if outputs.dim() == 1 else [outputs, outputs[..., None]]
        for one in columns:
            for other in (targets, targets[:, None]):
                assert metric(one, other).double().flatten().tolist() == expected, (name, one.shape, other.shape)
        if outputs.dim() == 2:
            assert metric(outputs, torch.eye(6)).double().tolist() == expected, name
        with pytest.raises(ArgumentError, match=r"values of shape .* from the outputs with targets of shape"):
            metric(outputs, torch.zeros(len(outputs), 2))
    with pytest.raises(ArgumentError, match=r"values of shape \(4, 2\) from the outputs with targets of shape \(4,\)"):
        metrics_of(["mean_absolute_error"])["mean_absolute_error"](torch.zeros(4, 2), y)


@world(1)
def test_a_step_without_a_mean_is_refused_before_it_changes_weights() -> None:
    class Own(Trainer):
        def train_step(self, batch: Any) -> Tensor:
            x, y = batch
            return nn.functional.cross_entropy(self.model(x), y, reduction="none")

    net, optimizer = made()
    before = flat(net)
    with pytest.raises(ArgumentError, match=r"train_step\(\) returned a loss of shape \(\d+,\)"):
        Own(net, optimizer, nn.CrossEntropyLoss()).fit(data(), epochs=1, global_batch_size=BATCH)
    assert torch.equal(flat(net), before)


@world(1)
def test_wrong_use_is_refused() -> None:
    for options, message in (
        ({"precision": "float8"}, "precision='float8'"),
        ({"metrics": ["acuracy"]}, "there is no metric 'acuracy'"),
        ({"metrics": [lambda out, y: out]}, "give a dict of names"),
        ({"metrics": "accuracy"}, r"\['accuracy'\]"),
        ({"loss": nn.CrossEntropyLoss(reduction="sum")}, 'reduction="sum"'),
        ({"callbacks": [print]}, "is not an instance of ddp.callbacks.Callback"),
        ({"strategy": "mirrored"}, "did you mean 'all_reduce'?"),
    ):
        with pytest.raises(ArgumentError, match=message):
            trainer(**options)
    one = trainer()
    with pytest.raises(ArgumentError, match=r"a list_iterator cannot be sharded: give the data set"):
        one.fit(iter([1]), epochs=1)
    with pytest.raises(ArgumentError, match=r"a tuple of tensors is not a data set: give .*TensorDataset"):
        one.evaluate((torch.zeros(4, 2), torch.zeros(4)))
    with pytest.raises(ArgumentError, match="must not shuffle"):
        one.predict(one.strategy.loader(data(), global_batch_size=4, shuffle=True))
    with pytest.raises(ArgumentError, match="sample weights, but the loss is a single number"):
        one.fit(TensorDataset(*tensors()), epochs=1)
    with pytest.raises(ArgumentError, match=r"shape \(2, 3\) for 23 samples"):
        trainer(loss=lambda out, y: out[:2]).fit(data(), epochs=1, global_batch_size=SAMPLES)
    with pytest.raises(ArgumentError, match=r"a batch is a list of 4"):
        one.fit(TensorDataset(*tensors(), tensors()[0]), epochs=1)
    with pytest.raises(
        DdpError, match=r"EarlyStopping failed in on_epoch_end, at step 1: .* no 'val_loss' in the logs"
    ):
        trainer([cb.EarlyStopping()]).fit(data(), epochs=1)
