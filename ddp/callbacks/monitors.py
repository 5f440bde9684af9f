"""Callbacks that monitor a value in the logs: checkpoints, the best model, and early stopping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from ddp import rng
from ddp.callbacks.callback import Callback
from ddp.checkpoint import file as checkpoint_file
from ddp.checkpoint.checkpoint import Checkpoint
from ddp.checkpoint.state import check_plain, restore_parts
from ddp.checkpoint.writer import FailedSaves, OnError, Writer
from ddp.errors import ArgumentError, CheckpointError, DdpError

Mode = Literal["auto", "min", "max"]


class Monitor:
    """The best value of one log. Mode "auto" is "max" for names with "acc" in them, else "min"."""

    def __init__(self, name: str, *, mode: Mode = "auto", min_delta: float = 0.0) -> None:
        if mode not in ("auto", "min", "max"):
            raise ArgumentError(f"mode={mode!r}; it must be 'auto', 'min' or 'max'")
        self.name = name
        self._sign = 1 if mode == "max" or (mode == "auto" and "acc" in name) else -1
        self._min_delta = abs(min_delta)
        self.best: float | None = None

    def takes(self, logs: Mapping[str, float]) -> bool:
        """Return whether this is a new best value, and record it. NaN never is. Raises ArgumentError without one."""
        if self.name not in logs:
            hint = ": give fit() validation data" if self.name.startswith("val_") else ""
            raise ArgumentError(f"there is no {self.name!r} in the logs, which have {', '.join(logs)}{hint}")
        value = logs[self.name]
        if math.isnan(value):
            return False
        if self.best is None or self._sign * (value - self.best) > self._min_delta:
            self.best = value
            return True
        return False


class EarlyStopping(Callback):
    """Stop when `monitor`, a name in the logs, has not improved for `patience` epochs.

    An improvement is larger than `min_delta`: upward with `mode` "max", downward with "min"; "auto" is "max" for names
    with "acc" in them. With `restore_best`, the model has the weights of the best epoch when `fit` ends, stopped or
    not; they are kept on the CPU, and in checkpoints. `fit` raises DdpError if the logs have no `monitor`.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        patience: int = 0,
        *,
        min_delta: float = 0.0,
        mode: Mode = "auto",
        restore_best: bool = False,
    ) -> None:
        self._monitor = Monitor(monitor, mode=mode, min_delta=min_delta)
        self.patience, self.restore_best = patience, restore_best
        self.wait = 0  # epochs since the best one
        self.best_epoch: int | None = None
        self._weights: dict[str, Tensor] | None = None

    @property
    def best(self) -> float | None:
        """The best value so far; None before the first."""
        return self._monitor.best

    def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
        if self._monitor.takes(logs):
            self.wait, self.best_epoch = 0, epoch
            if self.restore_best:
                self._weights = self.trainer.weights()
        else:
            self.wait += 1
            if self.wait >= max(1, self.patience):
                self.trainer.stop()

    def on_fit_end(self) -> None:
        if self.restore_best and self._weights is not None:
            self.trainer.load_weights(self._weights)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "wait": self.wait, "best_epoch": self.best_epoch, "weights": self._weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._monitor.best, self.wait, self.best_epoch = state["best"], state["wait"], state["best_epoch"]
        self._weights = state["weights"]


class ModelCheckpoint(Callback):
    """Save the state of the training in `folder`; `fit` resumes from the newest whole checkpoint there.

    It saves after every `every_n_epochs` epochs, every `every_n_steps` steps (0: not), when SIGUSR1 announces that the
    job's time is nearly up, and at the end; the last `keep` are kept. A run resumes in the middle of an epoch, and in a
    world of any size; with the same size, bitwise. With `monitor`, the weights of the epoch with the best value (`mode`
    as in `EarlyStopping`) are also saved in `folder`/best.pt: a plain `state_dict`, which
    `torch.load(path, weights_only=True)` reads.

    The files are those of `ddp.Checkpoint`; see there for the requirements on a folder on several hosts. The main
    replica writes; under a strategy whose replicas have no process group, it alone also reads. `on_error` is that of
    `ddp.Checkpoint`, also for best.pt: by default a full disk loses a save but does not end the training, as long as a
    later save works.

    Raises ArgumentError for a negative number. `fit` raises DdpError if there are files but none is whole, if the
    newest one could not be written when it ends, or earlier, depending on `on_error`.
    """

    runs_last = True  # so that the file has the other callbacks' states

    def __init__(
        self,
        folder: str | PathLike[str],
        *,
        monitor: str | None = None,
        mode: Mode = "auto",
        every_n_epochs: int = 1,
        every_n_steps: int = 0,
        keep: int = 3,
        on_error: OnError = "warn",
    ) -> None:
        for name, value in (("every_n_epochs", every_n_epochs), ("every_n_steps", every_n_steps)):
            if value < 0:
                raise ArgumentError(f"{name}={value}; it must be 0 or more")
        self.folder = Path(folder)
        self.every_n_epochs, self.every_n_steps = every_n_epochs, every_n_steps
        self._checkpoint = Checkpoint(folder, keep=keep, on_error=on_error)
        self._writer = Writer(self.folder, on_error)  # without a process group
        self._failed_best = FailedSaves(self.best_path, on_error)
        self._monitor = None if monitor is None else Monitor(monitor, mode=mode)
        self._saved: tuple[int, int] | None = None  # (step, epoch) of the newest one

    @property
    def best_path(self) -> Path:
        """The file with the weights of the best epoch, with `monitor`."""
        return self.folder / "best.pt"

    def on_restore(self) -> None:
        trainer = self.trainer
        if trainer.strategy.goes_on:
            return
        parts = _parts(trainer)
        if trainer.strategy.collective:
            restored = self._checkpoint.load(**parts)
            values = None if restored is None else restored.values
        else:
            values = _load_alone(self.folder, trainer, parts)
        if values is None:
            return
        trainer.load_state_dict(values["trainer"])
        if values.get("strategy"):
            trainer.strategy.load_state_dict(values["strategy"])
        trainer.strategy.publish()
        self._saved = (trainer.step, trainer.epoch)

    def on_step_end(self, step: int, logs: dict[str, float]) -> None:
        if self.trainer.strategy.collective:
            is_due = self._checkpoint.due(step, every=self.every_n_steps)
        else:
            is_due = self.every_n_steps > 0 and step % self.every_n_steps == 0
        if is_due:
            self._save()

    def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
        try:
            if self._monitor is not None and self._monitor.takes(logs):
                self._save_best(epoch)
        finally:  # the replicas save together, even if the main one alone has an error
            if self.every_n_epochs and (epoch + 1) % self.every_n_epochs == 0:
                self._save()

    def on_fit_end(self) -> None:
        if self._saved != (self.trainer.step, self.trainer.epoch):
            self._save()
        if self.trainer.strategy.collective:
            self._checkpoint.wait()
        if failure := self._writer.failed.take() or self._failed_best.take():
            raise failure

    def state_dict(self) -> dict[str, Any]:
        return {"best": None if self._monitor is None else self._monitor.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._saved = None  # not known to all replicas
        if self._monitor is not None:
            self._monitor.best = state["best"]

    def _save(self) -> None:
        trainer = self.trainer
        if trainer.strategy.collective:
            trainer.strategy.sync()
            values: dict[str, Any] = {"trainer": trainer.state_dict()}
            if state := trainer.strategy.state_dict():
                values["strategy"] = state
            self._checkpoint.save(trainer.step, **_parts(trainer), **values)
        elif trainer.strategy.is_main:
            trainer.strategy.sync()
            self._save_alone()
        self._saved = (trainer.step, trainer.epoch)

    def _save_alone(self) -> None:
        """Write without a process group, in the format of `ddp.Checkpoint`, which reads these files too."""
        trainer = self.trainer
        states = {name: part.state_dict() for name, part in _parts(trainer).items() if part is not None}
        state = trainer.state_dict()
        for name, part in {**states, "trainer": state}.items():
            check_plain(part, name)
        random = [rng.capture()]
        content = {"step": trainer.step, "world_size": 1, **states, "random": random, "values": {"trainer": state}}
        self._writer.write(trainer.step, trainer.strategy.world.rank, content, keep=self._checkpoint.keep)

    def _save_best(self, epoch: int) -> None:
        try:
            self.trainer.save(self.best_path)
        except DdpError as error:
            if error.failed_ranks is not None:  # an error of the main replica, which decides whether training ends
                return
            if not isinstance(error.__cause__, OSError):
                raise
            path = self.best_path.absolute()
            what = f"the weights of epoch {epoch}"
            rank = self.trainer.strategy.world.rank
            self._failed_best.add(rank, what, error.__cause__, lambda: path if path.exists() else None)
        else:
            self._failed_best.end()


def _parts(trainer: Any) -> dict[str, Any]:
    scaler = trainer.scaler if trainer.scaler.is_enabled() else None
    return {
        "model": trainer.model if trainer.strategy.collective else trainer.module,
        "optimizer": trainer.optimizer,
        "scaler": scaler,
        "sampler": trainer.train_loader,
    }


def _load_alone(folder: Path, trainer: Any, parts: Mapping[str, Any]) -> dict[str, Any] | None:
    """Restore the newest whole file: the model and the optimizer on the main replica, the position on all."""
    refused = []
    for _, path in checkpoint_file.newest_first(folder):
        try:
            with open(path, "rb") as file:
                checkpoint_file.verify(file)
                state = checkpoint_file.read(file)
        except (OSError, CheckpointError) as error:
            refused.append(f"{path.absolute()}: {error}")
            continue
        if trainer.strategy.is_main:
            restore_parts(state, {name: part for name, part in parts.items() if part is not None})
            rng.restore(state["random"][0])
        else:
            trainer.train_loader.load_state_dict(state["sampler"])
        values: dict[str, Any] = state["values"]
        return values
    if refused:
        raise CheckpointError("no checkpoint is whole:\n" + "\n".join(f"  {line}" for line in refused))
    return None
