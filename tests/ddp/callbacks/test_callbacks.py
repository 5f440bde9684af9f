"""Callbacks do what they say, alike on all replicas, and one that fails is named by all."""

from __future__ import annotations

import contextlib
import copy
import csv
import importlib.util
import io
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from testbed.checkpoints import listed
from testbed.fits import BATCH, Breaks, data, trainer
from testbed.nursery import Nursery
from testbed.require import require
from testbed.worlds import agreed, world

from ddp import callbacks as cb
from ddp.callbacks.monitors import Monitor
from ddp.checkpoint import writer
from ddp.errors import ArgumentError, CheckpointError, DdpError
from ddp.strategies.all_reduce import AllReduce


def _alone() -> Any:
    strategy = AllReduce()
    strategy.collective = False
    return strategy


def draws_curves(folder: str, breaks: bool) -> None:
    callbacks = [
        cb.TensorBoard(Path(folder) / "curves"),
        cb.CSVLogger(Path(folder) / "log.csv"),
        cb.ModelCheckpoint(Path(folder) / "checkpoints", every_n_steps=3),
        *([Breaks("on_epoch_begin", 8)] if breaks else []),
    ]
    one = trainer(callbacks, log_every=2)
    if breaks:
        with pytest.raises(DdpError, match="Breaks failed in on_epoch_begin"):
            one.fit(data(), epochs=3, validation=data(), global_batch_size=BATCH)
    else:
        one.fit(data(), epochs=3, validation=data(), global_batch_size=BATCH)


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
        except DdpError as raised:
            error = str(raised)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return error, stderr.getvalue()


@world(3)
@pytest.mark.parametrize(("hook", "step"), [("on_step_end", 2), ("on_epoch_end", 4), ("on_evaluate_begin", 4)])
def test_an_error_on_one_replica_is_raised_on_all(hook: str, step: int) -> None:
    one = trainer([Breaks(hook, 2, replica=dist.get_world_size() - 1)], log_every=4)
    with pytest.raises(DdpError) as raised:
        one.fit(data(), epochs=3, validation=data(), global_batch_size=BATCH)
    last = dist.get_world_size() - 1
    assert (raised.value.__cause__ is not None) == (dist.get_rank() == last)
    assert raised.value.failed_ranks == (None if dist.get_rank() == last else (last,))  # a consequence of the last
    if hook == "on_evaluate_begin":
        with pytest.raises(DdpError, match="Breaks failed in on_evaluate_begin"):
            one.evaluate(data())
    own = ": KeyError: 'no such thing'" if dist.get_rank() == last else ", on rank 2: see its output"
    assert str(raised.value) == f"the callback Breaks failed in {hook}, at step {step}{own}"


@world(2)
def test_an_error_on_one_replica_is_raised_where_the_callback_communicates_next() -> None:
    class Scores(cb.Callback):
        def on_step_end(self, step: int, logs: dict[str, float]) -> None:
            if step == 2 and self.trainer.strategy.replica == 0:
                raise OSError("disk")
            if step % 4 == 0:
                self.trainer.evaluate(data())

    one = trainer([Scores()], log_every=10)
    with pytest.raises(DdpError) as raised:
        one.fit(data(), epochs=3, global_batch_size=BATCH, steps_per_epoch=4)
    assert one.step == 4
    own = ": OSError: disk" if dist.get_rank() == 0 else ", on rank 0: see its output"
    assert str(raised.value) == f"the callback Scores failed in on_step_end, at step 2{own}"


@world(3)
@pytest.mark.parametrize("by", ["step", "epoch"])
def test_all_replicas_stop_at_the_same_step(by: str) -> None:
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
    assert agreed(one.step) == (8 if by == "step" else 4 * len(history.epoch))
    assert one.step < 36


@world(3)
def test_rates_rise_to_those_of_all_replicas() -> None:
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
    # Eight steps of warm-up from the schedule's rate to three times it; four steps an epoch.
    assert rates["warm"][:8] == pytest.approx([0.1 / (1 + step // 4) * (1 + 2 * step / 8) for step in range(8)])
    assert rates["warm"][8:] == pytest.approx([0.1 / 3 * 3] * 4 + [3])
    assert rates["at once"] == pytest.approx([0.1 / (1 + step // 4) * 3 for step in range(12)] + [3])


def test_tensorboard_reads_the_curves_of_a_resumed_run(nursery: Nursery, tmp_path: Path) -> None:
    require(importlib.util.find_spec("tensorboard"), "tensorboard", "pip install tensorboard")
    for breaks in (True, False):
        nursery.run(2, draws_curves, folder=str(tmp_path), breaks=breaks)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "curves"))
    events.Reload()
    assert {"epoch/loss", "epoch/val_accuracy", "epoch/learning_rate", "step/loss"} <= set(events.Tags()["scalars"])
    losses = events.Scalars("epoch/loss")
    assert [each.step for each in losses] == [4, 8, 12]
    table = list(csv.DictReader(io.StringIO((tmp_path / "log.csv").read_text())))
    assert [row["epoch"] for row in table] == ["0", "1", "2"]
    assert [each.value for each in losses] == pytest.approx([float(row["loss"]) for row in table], rel=1e-6)
    steps = [each.step for each in events.Scalars("step/loss")]
    assert steps == sorted(set(steps))
    assert len(list((tmp_path / "curves").iterdir())) == 2  # of two runs, from one replica


def test_tensorboard_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DdpError, match="not installed: pip install tensorboard"):
        cb.TensorBoard(tmp_path)


@world(2)
def test_a_checkpoint_folder_has_the_best_and_the_last(tmp_path: Path) -> None:
    checkpoint = cb.ModelCheckpoint(tmp_path, monitor="val_loss", every_n_epochs=2, keep=2)
    one = trainer([checkpoint], rate=3.0)
    history = one.fit(data(), epochs=5, validation=data(), global_batch_size=BATCH)
    one.load(checkpoint.best_path)
    with pytest.raises(CheckpointError, match=r"it is a checkpoint: pass its \['model'\]"):
        one.load(tmp_path / "step-0000000020.pt")
    assert sorted(listed(tmp_path)) == ["best.pt", "step-0000000016.pt", "step-0000000020.pt"]
    assert one.evaluate(data())["loss"] == pytest.approx(min(history["val_loss"]), abs=1e-12)
    assert set(torch.load(tmp_path / "best.pt", weights_only=True)) == {
        f"{layer}.{kind}" for layer in ("first", "second") for kind in ("weight", "bias")
    }


@pytest.mark.parametrize("alone", [False, True])
def test_a_full_disk_costs_saves_and_not_the_training(nursery: Nursery, alone: bool, tmp_path: Path) -> None:
    ranks = 1 if alone else 2
    said = nursery.run(ranks, full_disk, folder=str(tmp_path), epochs=range(1, 3), on_error="warn", alone=alone)
    assert [error for error, _ in said] == [""] * ranks
    assert [stderr for _, stderr in said[1:]] == [""] * (ranks - 1)
    lines = said[0][1].splitlines()
    assert len(lines) == 4, lines
    for epoch, (best, file) in enumerate([lines[:2], lines[2:]], 1):
        assert f"rank 0 could not write the weights of epoch {epoch} to {tmp_path}/best.pt: " in best
        assert f"rank 0 could not write step {4 * epoch + 4} to {tmp_path}: " in file
        assert f"The newest whole checkpoint is {tmp_path}/step-0000000004.pt" in file
        assert "File too large" in best
        assert "File too large" in file
    assert sorted(listed(tmp_path)) == ["best.pt", *(f"step-{step:010d}.pt" for step in (4, 16, 20))]


@pytest.mark.parametrize(("on_error", "epochs"), [("warn", range(4, 5)), ("warn", range(1, 5)), ("stop", range(1, 2))])
@pytest.mark.parametrize("alone", [False, True])
def test_a_checkpoint_that_stays_away_is_an_error_of_all_replicas(
    nursery: Nursery, alone: bool, on_error: str, epochs: range, tmp_path: Path
) -> None:
    """The newest at the end, three in a row, or any with "stop"."""
    arguments: dict[str, Any] = {"on_error": on_error, "alone": alone, "epochs": epochs}
    for error, _ in nursery.run(1 if alone else 2, full_disk, folder=str(tmp_path), **arguments):
        assert "the callback ModelCheckpoint failed in" in error


def trainer_at(epoch: int, *, is_main: bool = True) -> Any:
    strategy = SimpleNamespace(is_main=is_main)
    return SimpleNamespace(strategy=strategy, epoch=epoch, epochs=12, epoch_step=3, steps=4, step=4 * epoch + 3)


def test_a_table_has_one_row_for_each_epoch(tmp_path: Path) -> None:
    path = tmp_path / "new" / "log.csv"

    def write(begin: int, end: int, *, is_main: bool = True, **logs: float) -> list[dict[str, str]]:
        logger = cb.CSVLogger(path)
        logger.trainer = trainer_at(begin, is_main=is_main)
        logger.on_fit_begin()
        for epoch in range(begin, end):
            logger.on_epoch_end(epoch, {"loss": 1 / (1 + epoch), **logs})
        with open(path, newline="") as file:
            return list(csv.DictReader(file))

    assert [row["epoch"] for row in write(0, 4)] == ["0", "1", "2", "3"]
    with open(path, "a") as file:
        file.write("4,0.")  # cut short
    assert [row["epoch"] for row in write(2, 5)] == ["0", "1", "2", "3", "4"]
    assert write(5, 6, is_main=False)[-1]["epoch"] == "4"
    rows = write(5, 6, val_loss=0.25)
    assert [row["loss"] for row in rows] == [repr(1 / (1 + epoch)) for epoch in range(6)]
    assert [row["val_loss"] for row in rows] == [""] * 5 + ["0.25"]
    rows = write(6, 8, accuracy=0.5)  # the second is appended
    assert [(row["epoch"], row["val_loss"], row["accuracy"]) for row in rows[5:]] == [
        ("5", "0.25", ""), ("6", "", "0.5"), ("7", "", "0.5")
    ]  # fmt: skip
    assert write(8, 9, accuracy=0.5)[:8] == rows
    assert [row["epoch"] for row in write(0, 1)] == ["0"]
    assert [path.name for path in path.parent.iterdir()] == ["log.csv"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal_and_a_line_in_a_file() -> None:
    written = []
    for stream, is_main in ((Terminal(), True), (io.StringIO(), True), (Terminal(), False)):
        bar = cb.ProgressBar(stream)
        bar.trainer = trainer_at(2, is_main=is_main)
        bar.on_epoch_begin(2)
        bar.on_step_end(11, {"loss": 0.5})
        bar.on_epoch_end(2, {"loss": 0.25, "val_accuracy": 0.975})
        written.append(stream.getvalue())
    assert written[0].startswith("\repoch  3/12  [" + "=" * 18 + " " * 6 + "] 3/4  loss 0.5\x1b[K\r\x1b[K")
    assert written[1] == "epoch  3/12  loss 0.25  val_accuracy 0.975  0.0 s\n"
    assert written[0].endswith(written[1])
    assert written[2] == ""


def test_the_best_value_by_name_and_mode() -> None:
    falling = Monitor("val_loss", min_delta=0.1)
    assert [falling.takes({"val_loss": value}) for value in (1.0, 0.95, float("nan"), 0.8)] == [
        True,
        False,
        False,
        True,
    ]
    assert [Monitor("val_accuracy").takes({"val_accuracy": 0.5}), falling.best] == [True, 0.8]
    rising = Monitor("reward", mode="max")
    assert [rising.takes({"reward": value}) for value in (1.0, 0.5, 2.0)] == [True, False, True]
    with pytest.raises(ArgumentError, match=r"no 'val_loss' in the logs, which have loss: give fit\(\) validation"):
        falling.takes({"loss": 1.0})
    with pytest.raises(ArgumentError, match="mode='best'"):
        Monitor("loss", mode="best")  # type: ignore[arg-type]


@world(1)
def test_schedules_of_torch() -> None:
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


def test_a_resumed_schedule_leaves_the_optimizer_as_it_was_restored() -> None:
    """OneCycleLR sets momenta, too."""
    weight = torch.nn.Parameter(torch.zeros(1))

    def begun(*states: Any) -> tuple[torch.optim.Adam, cb.LearningRateScheduler]:
        optimizer = torch.optim.Adam([weight], 0.01)
        schedule = cb.LearningRateScheduler(
            scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9), by="step"
        )
        alone = SimpleNamespace(goes_on=False)
        schedule.trainer = cast(Any, SimpleNamespace(optimizer=optimizer, strategy=alone))
        parts: list[Any] = [optimizer, schedule]
        for part, state in zip(parts, states, strict=False):
            part.load_state_dict(state)
        schedule.on_fit_begin()
        return optimizer, schedule

    def advance(optimizer: torch.optim.Adam, schedule: cb.LearningRateScheduler, step: int) -> None:
        optimizer.step()
        schedule.on_step_end(step, {})

    optimizer, schedule = begun()
    for step in range(4):
        advance(optimizer, schedule, step)
    again, resumed = begun(copy.deepcopy(optimizer.state_dict()), copy.deepcopy(schedule.state_dict()))
    for step in range(4, 8):
        assert again.state_dict() == optimizer.state_dict(), step
        advance(optimizer, schedule, step)
        advance(again, resumed, step)


def test_a_schedule_by_a_monitored_value_says_that_it_begins_anew() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], 0.1)
    schedule = cb.LearningRateScheduler(scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau, monitor="val_loss")
    goes_on = SimpleNamespace(goes_on=True)
    schedule.trainer = cast(Any, SimpleNamespace(optimizer=optimizer, strategy=goes_on, epoch=2, step=8))
    with pytest.warns(UserWarning, match=r"goes on from step 8, .* begins anew, since the earlier .* 'val_loss'"):
        schedule.on_fit_begin()
    schedule.on_fit_begin()  # of another fit of this process


def test_wrong_schedules_are_refused() -> None:
    with pytest.raises(ArgumentError, match="a function of the epoch or step"):
        cb.LearningRateScheduler()
    with pytest.raises(ArgumentError, match="by='batch'"):
        cb.LearningRateScheduler(lambda epoch: 1.0, by="batch")  # type: ignore[arg-type]
    made = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)]), 1)
    with pytest.raises(ArgumentError, match=r"pass a function that makes one: StepLR, or lambda optimizer: StepLR"):
        cb.LearningRateScheduler(scheduler=made)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="every_n_steps=-1"):
        cb.ModelCheckpoint("x", every_n_steps=-1)
