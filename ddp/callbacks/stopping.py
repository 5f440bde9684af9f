"""Which epoch was the best so far, and stopping when none is better for long."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from ddp.callbacks.callback import Callback
from ddp.errors import ArgumentError

__all__ = ["EarlyStopping", "Mode", "Monitor"]

Mode = Literal["auto", "min", "max"]


class Monitor:
    """The best value of one of the logs. Mode "auto" is "max" for names with "acc" in them, else "min"."""

    def __init__(self, name: str, *, mode: Mode = "auto", min_delta: float = 0.0) -> None:
        if mode not in ("auto", "min", "max"):
            raise ArgumentError(f"mode={mode!r}; it must be 'auto', 'min' or 'max'")
        self.name = name
        self._sign = 1 if mode == "max" or (mode == "auto" and "acc" in name) else -1
        self._min_delta = abs(min_delta)
        self.best: float | None = None

    def takes(self, logs: Mapping[str, float]) -> bool:
        """Whether this is the best value so far, which it is then. NaN never is. Raises ArgumentError without one."""
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
    """Stop when `monitor` was not better for `patience` epochs.

    Better is by more than `min_delta`. With `restore_best`, the model has the weights of the best epoch when `fit`
    ends, stopped or not; they are kept on the CPU, and in checkpoints.
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
