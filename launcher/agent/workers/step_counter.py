"""Counts steps of a worker that trains without ddp: those of torch's optimizers, or calls of `launcher.step`.

The numbers are in the file named by DTRAIN_PROGRESS_FILE, after those of ddp/monitoring/progress.py: the steps of the
optimizers, the number of calls, and when the newest of both was (time.monotonic_ns). Calls count instead of the
optimizers, and ddp's steps instead of both. Without the variable, or with a file that cannot be mapped, nothing is
counted; that is never an error.

bootstrap.py loads this file besides the script's modules, `launcher.step` as a module of the launcher: the two share
nothing but the mapped file.
"""

from __future__ import annotations

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_VARIABLE = "DTRAIN_PROGRESS_FILE"
_SIZE_BYTES = 64
_STEPS_OF_DDP, _OPTIMIZER_STEPS, _CALLS, _ENDED_NS = 0, 5, 6, 7

_is_looked_for = False
_counters: memoryview | None = None
_stepped: set[int] = set()  # ids of the optimizers that have stepped since the newest counted step


def step() -> None:
    """Count one step of this process, for `dtrain ps`, `dtrain top` and `--hang`; call it once a step in each worker.

    Use it for training that dtrain cannot see: without torch, or if a step is not one of an optimizer. From the first
    call on, only calls count. Does nothing outside of dtrain, or if ddp counts.
    """
    counters = _counters or _opened()
    if counters is not None and not counters[_STEPS_OF_DDP]:
        counters[_ENDED_NS] = time.monotonic_ns()
        counters[_CALLS] += 1


def count_optimizer_steps(after_first: Callable[[], object]) -> None:
    """Count the steps of torch's optimizers in this process, but not in those that it forks.

    `after_first` is called once, after the first of them.

    torch.optim.optimizer must be imported already; the rest of torch need not be.
    """
    if _opened() is None:
        return
    torch: Any = sys.modules["torch"]
    optimizers: Any = sys.modules["torch.optim.optimizer"]
    stepped = _optimizer_stepped
    once = [after_first]

    def after_step(optimizer: object, *_: object) -> None:
        # Uses no globals: torch.compile would import their module. A compiled step is not counted.
        if not torch.compiler.is_compiling():
            stepped(id(optimizer))
            if once:
                once.pop()()

    optimizers.register_optimizer_step_post_hook(after_step)


def _optimizer_stepped(optimizer: int) -> None:
    """Count a step if this optimizer has stepped since the last counted one: several may step one after another."""
    if optimizer in _stepped or not _stepped:
        counters = _counters
        if counters is None or counters[_CALLS] or "ddp.monitoring.progress" in sys.modules:
            return
        counters[_ENDED_NS] = time.monotonic_ns()
        counters[_OPTIMIZER_STEPS] += 1
        _stepped.clear()
    _stepped.add(optimizer)


def _opened() -> memoryview | None:
    global _is_looked_for, _counters
    if not _is_looked_for:
        _is_looked_for = True
        _counters = _map()
        os.register_at_fork(after_in_child=_stop)
    return _counters


def _stop() -> None:
    global _counters
    _counters = None


def _map() -> memoryview | None:
    path = os.environ.get(_VARIABLE)
    if not path or sys.byteorder != "little":
        return None
    import mmap

    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return memoryview(mmap.mmap(descriptor, _SIZE_BYTES)).cast("Q")
        finally:
            os.close(descriptor)
    except (OSError, ValueError):  # ValueError: the file is shorter
        return None
