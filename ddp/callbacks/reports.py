"""Reports: the history in memory, a progress bar on a terminal, a table in a file, TensorBoard's curves."""

from __future__ import annotations

import csv
import importlib.util
import io
import sys
import time
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, TextIO

from ddp.callbacks.callback import Callback
from ddp.checkpoint.atomic_file import replacing
from ddp.errors import DdpError

_BAR_WIDTH = 24
_REDRAW_S = 0.1


class History(Callback):
    """The logs of all epochs, also of those before a restart: `history["val_loss"]` has one number per epoch.

    Every trainer has one, which `fit` returns. An epoch without this log has NaN.
    """

    def __init__(self) -> None:
        self.epoch: list[int] = []
        self.history: dict[str, list[float]] = {}

    def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
        self.epoch.append(epoch)
        for name in {**self.history, **logs}:
            values = self.history.setdefault(name, [float("nan")] * (len(self.epoch) - 1))
            values.append(logs.get(name, float("nan")))

    def __getitem__(self, name: str) -> list[float]:
        return self.history[name]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": list(self.epoch), "history": {name: list(values) for name, values in self.history.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch = list(state["epoch"])
        self.history = {name: list(values) for name, values in state["history"].items()}


class ProgressBar(Callback):
    """Show the progress of the epoch on the main replica's terminal; without a terminal, one line per epoch.

    Writes to `stream`, by default to the current `sys.stdout`.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._began_s = self._drawn_s = 0.0

    def on_epoch_begin(self, epoch: int) -> None:
        self._began_s, self._drawn_s = time.monotonic(), 0.0

    def on_step_end(self, step: int, logs: dict[str, float]) -> None:
        now = time.monotonic()
        if not self.trainer.strategy.is_main or not self._out.isatty() or now - self._drawn_s < _REDRAW_S:
            return
        self._drawn_s = now
        done, steps = self.trainer.epoch_step, self.trainer.steps
        full = _BAR_WIDTH * min(done, steps) // steps
        bar = "=" * full + " " * (_BAR_WIDTH - full)
        self._write(f"\r{self._head(self.trainer.epoch)}  [{bar}] {done}/{steps}  {_formatted(logs)}\x1b[K")

    def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
        if self.trainer.strategy.is_main:
            clear = "\r\x1b[K" if self._out.isatty() else ""
            self._write(f"{clear}{self._head(epoch)}  {_formatted(logs)}  {time.monotonic() - self._began_s:.1f} s\n")

    @property
    def _out(self) -> TextIO:
        return self._stream or sys.stdout

    def _head(self, epoch: int) -> str:
        total = str(self.trainer.epochs)
        return f"epoch {epoch + 1:{len(total)}}/{total}"

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def _formatted(logs: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in logs.items())


class CSVLogger(Callback):
    """Write the logs of each epoch to a CSV file at `path`, from the main replica: one column per log, the epoch first.

    A new training starts a new file. A resumed one appends: rows of epochs that it trains again are removed.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self._rows: list[dict[str, str]] = []
        self._columns: list[str] = []  # of the file

    def on_fit_begin(self) -> None:
        if not self.trainer.strategy.is_main:
            return
        self._rows = []
        if self.trainer.epoch and self.path.exists():
            with open(self.path, newline="") as file:
                self._rows = [row for row in csv.DictReader(file) if _is_before(row, self.trainer.epoch)]
        self._rewrite()

    def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
        if self.trainer.strategy.is_main:
            row = {"epoch": str(epoch), **{name: repr(value) for name, value in logs.items()}}
            self._rows.append(row)
            if row.keys() <= {*self._columns}:
                with open(self.path, "a", newline="") as file:
                    csv.DictWriter(file, self._columns, restval="").writerow(row)
            else:
                self._rewrite()

    def _rewrite(self) -> None:
        """Replace the file atomically, so that no row is ever lost."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._columns = list(dict.fromkeys(name for row in self._rows for name in row)) or ["epoch"]
        with replacing(self.path) as file:
            text = io.TextIOWrapper(file, newline="")
            writer = csv.DictWriter(text, self._columns, restval="")
            writer.writeheader()
            writer.writerows(self._rows)
            text.detach()


def _is_before(row: Mapping[str, str | None], epoch: int) -> bool:
    try:
        return int(row["epoch"] or "") < epoch and None not in row.values()
    except (KeyError, ValueError):  # a line that was cut short
        return False


class TensorBoard(Callback):
    """Write the logs to event files in `folder`, from the main replica.

    Logs of epochs are "epoch/loss" and so on, those of steps "step/loss", all over the number of steps. Those of a
    step are written when the replicas exchange them, every `log_every` steps of the trainer. A resumed training
    continues the same curves. An evaluator writes "evaluation/loss" to `folder`/evaluator.
    Raises DdpError if the package tensorboard is missing.
    """

    def __init__(self, folder: str | PathLike[str]) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise DdpError("TensorBoard needs the package tensorboard, which is not installed: pip install tensorboard")
        self.folder = Path(folder)
        self._writer: Any = None
        self._written: dict[str, float] | None = None  # the logs of steps, as last written

    def on_fit_begin(self) -> None:
        strategy = self.trainer.strategy
        if strategy.is_main or strategy.role == "evaluator":
            from torch.utils.tensorboard import SummaryWriter

            folder = self.folder if strategy.is_main else self.folder / "evaluator"
            # TensorBoard then hides events after the checkpoint from which this run resumes.
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
