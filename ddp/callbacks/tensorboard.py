"""Event files for TensorBoard."""

from __future__ import annotations

import importlib.util
from os import PathLike
from pathlib import Path
from typing import Any

from ddp.callbacks.callback import Callback
from ddp.errors import DdpError

__all__ = ["TensorBoard"]


class TensorBoard(Callback):
    """Write the logs to event files in `folder`, from the main replica.

    Those of epochs are "epoch/loss" and so on, those of steps "step/loss", all over the number of steps. Those of a
    step are written when the replicas exchange them, every `log_every` steps of the trainer. A resumed training goes on
    in the same curves. An evaluator writes "evaluation/loss" to `folder`/evaluator.
    Raises DdpError if the package tensorboard is missing.
    """

    def __init__(self, folder: str | PathLike[str]) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise DdpError("TensorBoard needs the package tensorboard, which is not installed: pip install tensorboard")
        self.folder = Path(folder)
        self._writer: Any = None
        self._written: dict[str, float] | None = None  # the logs of steps, as they were written last

    def on_fit_begin(self) -> None:
        strategy = self.trainer.strategy
        if strategy.is_main or strategy.role == "evaluator":
            from torch.utils.tensorboard import SummaryWriter

            folder = self.folder if strategy.is_main else self.folder / "evaluator"
            # What was written after the checkpoint that this run goes on from is hidden.
            purge = self.trainer.step + 1 if self.trainer.step else None
            self._writer = SummaryWriter(str(folder), purge_step=purge)

    def on_step_end(self, step: int, logs: dict[str, float]) -> None:
        if logs is not self._written:
            self._written = logs
            self._write("step", step, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
        self._write("epoch", self.trainer.step, logs)
        if self._writer is not None:
            self._writer.flush()

    def on_evaluate_end(self, logs: dict[str, float]) -> None:
        if self.trainer.strategy.role == "evaluator":
            self._write("evaluation", self.trainer.step, logs)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, kind: str, step: int, logs: dict[str, float]) -> None:
        if self._writer is not None:
            for name, value in logs.items():
                self._writer.add_scalar(f"{kind}/{name}", value, step)
