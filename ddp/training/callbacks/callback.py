"""What a callback is: hooks that a trainer calls on every replica, at the same moments on each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from ddp.training.trainer import Trainer

__all__ = ["HOOKS", "Callback"]

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


class Callback:
    """Override the hooks that you need; `self.trainer` is the trainer.

    Epochs count from 0. Steps are the optimizer's, over all epochs: `on_step_begin(0)` comes before the first one,
    `on_step_end(1, logs)` after it. `logs` are numbers by name, the same on every replica. Those of a step are the
    means over the epoch so far, exchanged at its first step and at every `log_every`-th; between these they stay. A
    hook that writes files or prints asks `self.trainer.strategy.is_main` first; one that communicates must do so on
    every replica. An exception ends the training on all replicas, with an error that names the callback.
    """

    trainer: Trainer
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
