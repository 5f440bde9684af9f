"""A replay: this process makes steps of an earlier run again, up to one of them, as `dtrain replay` has planned.

DTRAIN_REPLAY_PLAN is a JSON object: `step` is the last one to make, null for no end; with `pdb`, the debugger opens
before its `micro_batch`, or, without a step, where an exception ends the script. `ddp.Checkpoint.load` loads
`checkpoint`, null for none, and saves go to `folder`. A resilient function begins with the snapshot `state`. `threads`
of an operator, if nothing is loaded. DTRAIN_REPLAY=1 is for the script.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import traceback
from dataclasses import dataclass
from functools import cache
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from ddp.data.ledger import record
from ddp.monitoring.user_code import user_frame

if TYPE_CHECKING:
    from pdb import Pdb


@dataclass(frozen=True)
class Plan:
    """The replay of this process; the module's docstring has the fields."""

    folder: str
    step: int | None = None
    micro_batch: int = 0
    pdb: bool = False
    checkpoint: str | None = None
    state: str | None = None
    threads: int | None = None


@cache
def plan() -> Plan | None:
    """Return the replay of this process; None in an ordinary run."""
    text = os.environ.get("DTRAIN_REPLAY_PLAN")
    return Plan(**json.loads(text)) if text else None


def folder(given: str | PathLike[str]) -> Path:
    """Return the folder of a Checkpoint: in a replay, another one."""
    return Path(given if (found := plan()) is None else found.folder)


def begin() -> None:
    """Handle the start of the training."""
    if (found := plan()) is not None and found.pdb and found.step is None:
        sys.excepthook = _examine


def reach(step: int | None, micro_batch: int) -> None:
    """Open the debugger in the user's code if this micro-batch of the step is the one to stop before.

    Raises SystemExit after the last step, whose loop was left.
    """
    if step is None or (found := plan()) is None or found.step is None:
        return
    if step > found.step:
        raise SystemExit(0)
    if found.pdb and (step, micro_batch) == (found.step, found.micro_batch):
        record.add_stop(step, micro_batch)
        _debugger().set_trace(user_frame(inspect.currentframe()))


def _debugger() -> Pdb:
    import pdb  # imports much

    class Debugger(pdb.Pdb):
        def set_stepinstr(self) -> None:  # by Python 3.13, which stops in the loop's line, before it sets its variables
            self.set_step()

    return Debugger()


def end_step(step: int | None) -> None:
    """End the process after the last step of a replay. Raises SystemExit then."""
    if step is not None and (found := plan()) is not None and step == found.step:
        raise SystemExit(0)


def _examine(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    import pdb

    traceback.print_exception(kind, error, trace)
    pdb.post_mortem(trace)
