"""The ledger of a run: what each of its steps made. Written by `ddp`, whose ledger.py describes the lines.

Reads the files in a run's folder, of all attempts and ranks, or one file; compares steps. Of several lines of a step
the last one counts. Torn lines and unknown kinds are ignored. A step is parsed when it is asked for: a long run has
gigabytes of them.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import UsageError
from launcher.output.logfiles import LEDGER_FILE, attempts_in, log_folder
from launcher.placement.job_spec import REPLAYABLE

TOLERANCE = 1e-3  # relative, of losses on different machines
MACHINE = ("torch", "processor", "threads")  # where these are equal, so are all bits
_STEP = re.compile(rb'\{"step": ?([0-9]{1,15}),')


@dataclass(frozen=True)
class Step:
    """A step: its loss, if the script reported it, and by parameter the hashes of its gradient and of itself before."""

    number: int
    micro_batches: int
    loss: float | None
    hashes: Mapping[str, tuple[str, str]]
    machine: Mapping[str, Any]


class Ledger:
    """A ledger. `last` is the step of its last line; `checkpoints` are by path, with the last step before each."""

    def __init__(self) -> None:
        self.machine: Mapping[str, Any] = {}
        self.loader: Mapping[str, Any] = {}
        self.checkpoints: dict[str, int] = {}
        self.last = 0
        self._places: dict[int, tuple[Path, int, Mapping[str, Any]]] = {}  # of lines: file, offset, machine

    @property
    def steps(self) -> list[int]:
        return sorted(self._places)

    @property
    def first(self) -> int:
        return min(self._places, default=1)

    def step(self, number: int) -> Step | None:
        """Return what was written of a step. Raises OSError."""
        if number not in self._places:
            return None
        path, offset, machine = self._places[number]
        with open(path, "rb") as file:
            file.seek(offset)
            return step_of(parsed(file.readline()), machine)

    def note(self, found: Mapping[str, Any]) -> None:
        """Take a line that is no step."""
        kind = next(iter(found), "")
        if kind == "ledger":
            self.machine, self.loader = (_mapping(found.get(name)) for name in ("machine", "loader"))
        elif kind == "checkpoint" and isinstance(step := found.get("step"), int):
            self.checkpoints[str(found[kind])] = step

    def add_file(self, path: Path) -> None:
        """Add the lines of a file. Raises OSError."""
        offset = 0
        with open(path, "rb") as file:
            for line in file:
                if line.endswith(b"}\n") and (match := _STEP.match(line)):
                    self.last = int(match[1])
                    self._places[self.last] = path, offset, self.machine
                else:
                    self.note(parsed(line))
                offset += len(line)


def read_ledger(path: Path) -> Ledger:
    """Read a run's folder, or a file. Raises UsageError if there is no ledger."""
    ledger = Ledger()
    try:
        if not path.is_dir():
            ledger.add_file(path)
        for attempt in sorted(attempts_in(path)):
            files = log_folder(path, attempt).glob(f"*/{LEDGER_FILE}")
            for file in sorted(files, key=lambda each: each.stat().st_mtime):  # one rank writes after the other
                ledger.add_file(file)
    except OSError as error:
        raise UsageError(f"the ledger {path} cannot be read: {error.strerror}") from error
    if not ledger.steps and not ledger.loader:
        raise UsageError(f"{path} has no ledger: a script whose steps come from ddp.StepLoader writes one")
    return ledger


def parsed(line: bytes) -> Mapping[str, Any]:
    """Parse a line; empty if it is torn."""
    try:
        return _mapping(json.loads(line))
    except (ValueError, RecursionError):
        return {}


def step_of(found: Mapping[str, Any], machine: Mapping[str, Any]) -> Step | None:
    """Return the step of a line; None if it has not the form of one."""
    try:
        loss = found["loss"]
        hashes = {name: (str(gradient), str(own)) for name, (gradient, own) in found["hashes"].items()}
        return Step(int(found["step"]), sum(found["shares"]), None if loss is None else float(loss), hashes, machine)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def snapshots(folder: Path) -> dict[int, Path]:
    """Return the files of --replayable in a run's folder, by the last step before each."""
    found = ((re.fullmatch(r"step-([0-9]{1,15})\.pt", path.name), path) for path in (folder / REPLAYABLE).glob("*"))
    return {int(match[1]): path for match, path in found if match is not None}


def keep_snapshots(folder: Path, *, failed: bool) -> str:
    """Remove the files of --replayable, unless the run has failed; return a line about those that are kept."""
    if failed and (found := snapshots(folder)):
        return f"replayable from step {min(found) + 1}"
    shutil.rmtree(folder / REPLAYABLE, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.rmdir()  # if no worker was started
    return ""


@dataclass(frozen=True)
class Difference:
    """The first difference: of the `gradient` or the `parameter` (before the step) of these names, or of the `loss`."""

    step: int
    what: str
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        more = f" and of {len(self.names) - 1} more" if self.names[1:] else ""
        return f"step {self.step}: the {self.what}" + (f" of {self.names[0]}{more}" if self.names else "")


class Comparison:
    """Compares the steps of two ledgers one by one, until they differ: all bits, or between machines the losses."""

    def __init__(self) -> None:
        self.difference: Difference | None = None
        self.steps: list[int] = []  # the first and the last that are equal
        self.hashes = 0
        self.by_loss = ""  # why bits were not compared

    def add(self, then: Step, now: Step) -> Difference | None:
        """Compare a step, and return how it differs, if it is the first that does."""
        if self.difference is not None:
            return None
        others = [name for name in MACHINE if then.machine.get(name) != now.machine.get(name)]
        both = [] if others else [name for name in then.hashes if name in now.hashes]
        for place, what in ((1, "parameter"), (0, "gradient")):  # as they come in a step
            if names := tuple(name for name in both if then.hashes[name][place] != now.hashes[name][place]):
                self.difference = Difference(now.number, what, names)
                return self.difference
        losses = [each.loss for each in (then, now) if each.loss is not None]
        if losses[1:] and not _are_equal(losses[0], losses[1], TOLERANCE if others else 0.0):
            self.difference = Difference(now.number, "loss")
        elif both or losses[1:]:
            self.steps = [*self.steps[:1], now.number]
            self.hashes += 2 * len(both)
        if others:
            self.by_loss = ", ".join(f"{name} {then.machine.get(name)} and {now.machine.get(name)}" for name in others)
        return self.difference

    def __str__(self) -> str:
        if not self.steps:
            return "no step could be compared" if self.difference is None else "no step is equal"
        plural = f"steps {self.steps[0]} to {self.steps[-1]} have" if self.steps[1:] else f"step {self.steps[0]} has"
        if self.by_loss:
            return f"{plural} the same losses within {TOLERANCE:g}; bits are not compared: {self.by_loss}"
        return f"{plural} the same " + (f"bits ({self.hashes} hashes)" if self.hashes else "losses, and no hashes")


def _are_equal(then: float, now: float, tolerance: float) -> bool:
    return math.isclose(then, now, rel_tol=tolerance) or (math.isnan(then) and math.isnan(now))
