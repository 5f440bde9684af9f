"""What a callback is: hooks that a trainer calls on every replica, at the same moments on each."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from ddp.data.replica_loader import ReplicaLoader
from ddp.strategies.strategy import Strategy

__all__ = ["HOOKS", "Callback", "Training"]

HOOKS = (
    "on_restore",
    "on_fit_begin",
    "on_fit_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_step_begin",
    "on_step_end",
    "on_evaluate_begin",
    "on_evaluate_end",
)


class Training(Protocol):
    """The trainer, as callbacks see it: `ddp.Trainer`."""

    strategy: Strategy
    module: nn.Module
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    train_loader: ReplicaLoader | None
    epoch: int
    epochs: int
    step: int
    epoch_step: int
    steps_per_epoch: int | None
    rate_factor: float
    learning_rate: float
    logs: dict[str, float]

    @property
    def steps(self) -> int: ...
    def stop(self) -> None: ...
    def record(self, name: str, total: Any, count: Any) -> None: ...
    def evaluate(self, data: Any, *, global_batch_size: int | None = None) -> dict[str, float]: ...
    def predict(self, data: Any, *, global_batch_size: int | None = None) -> Any: ...
    def weights(self) -> dict[str, Tensor]: ...
    def load_weights(self, weights: Mapping[str, Any]) -> None: ...
    def save(self, path: str | PathLike[str]) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Callback:
    """Override the hooks that you need; `self.trainer` is the trainer.

    Epochs count from 0. Steps are the optimizer's, over all epochs: `on_step_begin(0)` comes before the first one,
    `on_step_end(1, logs)` after it. `logs` are numbers by name, the same on every replica. Those of a step are the
    means over the epoch so far, exchanged at its first step and at every `log_every`-th; between these they stay. A
    hook that writes files or prints asks `self.trainer.strategy.is_main` first; one that communicates must do so on
    every replica. An exception ends the training on all replicas, with an error that names the callback.
    """

    trainer: Training
    runs_last: ClassVar[bool] = False  # whether its hooks come after those of the others

    def on_restore(self) -> None:
        """Before `on_fit_begin`: put back what was saved."""

    def on_fit_begin(self) -> None:
        """When `fit` begins, at `trainer.epoch` and `trainer.step`; it may still change `trainer.epochs`."""

    def on_fit_end(self) -> None:
        """When the last epoch has ended, or training was stopped; not after an error."""

    def on_epoch_begin(self, epoch: int) -> None:
        """Before the steps of an epoch, and again when a resumed run enters its middle."""

    def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
        """After the steps of an epoch and the evaluation; `trainer.stop()` ends the training."""

    def on_step_begin(self, step: int) -> None:
        """Before the first batch of a step; `step` are done."""

    def on_step_end(self, step: int, logs: dict[str, float]) -> None:
        """After a step; `step` are done."""

    def on_evaluate_begin(self) -> None:
        """Before an evaluation, within `fit` or not."""

    def on_evaluate_end(self, logs: dict[str, float]) -> None:
        """After an evaluation; the names in `logs` have no "val_"."""

    def close(self) -> None:
        """When `fit` ends, also with an error: close files."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of this callback: None, numbers, strings, tensors, and lists and dicts of them."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
