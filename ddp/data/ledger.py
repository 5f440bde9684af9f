"""The ledger of a run: a line for each step of a `ddp.StepLoader`, from which `dtrain replay` and `dtrain diff` tell
where a training differs.

Rank 0 writes it, to the FIFO or file in DTRAIN_LEDGER_FILE, or to the path given to `ddp.ledger`, as JSON lines:

    {"ledger": 1, "machine": {torch, processor, threads}, "loader": {...}}    a loader begins to yield steps
    {"step": 12, "shares": [3, 3, 2], "loss": 0.5, "every": 4, "hashes": {"weight": [gradient, parameter]}}
    {"checkpoint": "/path/of/a/file.pt", "step": 12}
    {"stopped": 12, "micro_batch": 0}                                         by `ddp.data.replay`

Steps are counted over all epochs, from 1. A checkpoint's step is the last one before it. `shares` are the numbers of
micro-batches of each rank. `loss` is what `step.mean()` returned ("nan" and "inf" as texts), else null. Hashes are 64
bits in hex, of the averaged gradient and of the parameter before the optimizer's step; each parameter has them in one
of `every` steps (`ddp.data_parallel.step_hashes`). A step that is repeated after a failure has several lines; the last
one counts. Only the first StepLoader of a script that trains is in the ledger. Lines are written ten times a second at
most, and when the process ends; of one that is killed, those of the last 0.1 s are lost.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import sys
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cached_property
from os import PathLike
from time import perf_counter
from typing import Any, Literal, get_args

from ddp.errors import ArgumentError
from ddp.monitoring.interrupts import is_interrupt
from ddp.monitoring.progress import set_recorded_step

Kind = Literal["sampled", "full", "off"]
KINDS = get_args(Kind)
_VARIABLE = "DTRAIN_LEDGER_FILE"
_PAUSE_S = 0.1  # between writes, each of which wakes the process that reads


class Ledger:
    """The ledger of this process. Owns its file, which is opened for the first lines and stays open."""

    def __init__(self) -> None:
        self.path: str | None = None  # given by `ddp.ledger`
        self.kind: Kind = "sampled"  # of the loader that trains
        self.lines_s = deque([0.0], maxlen=64)  # that the last lines took
        self._loader: weakref.ref[object] | None = None  # whose steps are recorded
        self._lines: list[str] = []  # not written yet
        self._written = 0.0  # when the last ones were
        self._is_writer = False  # whether this process was rank 0 when the last step began
        self._step: int | None = None  # the last one, whose line is not written yet
        self._owner: object = None
        self._loaded: Mapping[str, Any] | None = None  # the line of a checkpoint, before the first step
        self._shares: Sequence[int] = ()
        self._loss: float | str | None = None
        self._every = 0
        self._hashes: dict[str, tuple[str, str]] = {}

    @property
    def is_kept(self) -> bool:
        """Whether steps are recorded."""
        return self._loader is not None

    def begin(self, loader: object, rank: int, facts: Mapping[str, Any], kind: Kind) -> None:
        """Begin to record a loader, if it is the first one and the run keeps a ledger."""
        if kind == "off" or not (self.path or os.environ.get(_VARIABLE)):
            return
        if self._loader is None:
            self._loader = weakref.ref(loader)
        if self._loader() is loader:
            self.end()
            self.kind, self._is_writer = kind, rank == 0
            self._add({"ledger": 1, **facts})
            if self._loaded is not None:
                self._add(self._loaded)
                self._loaded = None

    def begin_step(self, loader: object, owner: object, step: int, shares: Sequence[int], rank: int) -> bool:
        """Write the line of the last step, and begin that of `step`; return whether steps of this loader have lines.

        `owner` ends it, unless another step begins.
        """
        self.end()
        if self._loader is None or self._loader() is not loader:
            return False
        self._owner, self._step, self._shares, self._is_writer = owner, step, shares, rank == 0
        set_recorded_step(step)
        return True

    def add(self, every: int, hashes: Mapping[str, tuple[int, int]]) -> None:
        """Add hashes of gradients and parameters of the step, of which all come within `every` steps."""
        if self._is_writer:
            self._every = every
            self._hashes |= {name: (f"{first:016x}", f"{second:016x}") for name, (first, second) in hashes.items()}

    def add_loss(self, step: int | None, loss: float) -> None:
        if step is not None and step == self._step:
            self._loss = loss if math.isfinite(loss) else str(loss)

    def add_checkpoint(self, path: PathLike[str], step: int) -> None:
        """Add a line for a checkpoint that was saved or loaded."""
        line = {"checkpoint": os.path.abspath(path), "step": step}
        if self.is_kept:
            self.end()
            self._add(line)
        else:
            self._loaded = line

    def add_stop(self, step: int, micro_batch: int) -> None:
        self._add({"stopped": step, "micro_batch": micro_batch})
        self.flush()

    def end(self, owner: object = None) -> None:
        """Write the line of the last step, if its gradients were averaged. With `owner`, only that of this one."""
        if owner is not None and owner is not self._owner:
            return
        step, self._step, self._owner = self._step, None, None
        if step is not None and self._every:
            line = {"step": step, "shares": self._shares, "loss": self._loss, "every": self._every}
            self._add({**line, "hashes": self._hashes})
        self._loss, self._every, self._hashes = None, 0, {}

    def _add(self, content: Mapping[str, Any]) -> None:
        if not self._is_writer or self._file is None:
            return
        began = perf_counter()
        self._lines.append(json.dumps(content) + "\n")
        if began - self._written >= _PAUSE_S:
            self.flush()
        self.lines_s.append(perf_counter() - began)

    def flush(self) -> None:
        """Write the lines that are not written yet."""
        data = memoryview("".join(self._lines).encode())
        self.forget()
        if not data or self._file is None:
            return
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            if is_interrupt(error):
                raise
            self._give_up(error)
        self._written = perf_counter()

    def forget(self) -> None:
        """Leave the lines that are not written yet to another process."""
        self._lines.clear()

    @cached_property
    def _file(self) -> int | None:
        try:
            path = self.path or os.environ[_VARIABLE]
            return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if is_interrupt(error):
                raise
            self._give_up(error)
            return None

    def _give_up(self, error: OSError) -> None:
        self.__dict__["_file"] = None
        print(f"ddp: the ledger cannot be written: {error}. Training goes on without it", file=sys.stderr, flush=True)


record = Ledger()
atexit.register(record.flush)
os.register_at_fork(after_in_child=record.forget)


def ledger(path: str | PathLike[str]) -> None:
    """Record each step of a `ddp.StepLoader` in a file at `path`, as `dtrain run` does in the run's folder.

    Call it before the training, on every rank, also if rank 0 alone writes: the ranks compare their hashes. Lines are
    appended. `dtrain diff` reads such files. Raises ArgumentError once steps were recorded.
    """
    if record.is_kept:
        raise ArgumentError("ddp.ledger() after the first step of a ddp.StepLoader: call it before the training")
    record.path = os.path.abspath(path)
