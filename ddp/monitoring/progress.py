"""Report the progress of this process to the launcher: six numbers in a file that both have mapped.

DTRAIN_PROGRESS_FILE names a file that the launcher made. It begins with these little-endian 64-bit integers: the
number of backward passes whose gradients are in place; the number of durable checkpoints; the consequence of a failure
of this process for the others (`set_restart_policy`); a number that changes when a phase begins or ends, and whose
remainder by three is that phase (`phase`), so that a long evaluation or save is not mistaken for a hang; and the first
number at the time of the newest checkpoint. The ninth number is the step of the ledger (`ddp.data.ledger`) that is
being made, 0 without a ledger; the three before it are step_counter.py's. Only this process writes to it. Without the
variable, or with a file that cannot be mapped, nothing is reported; that is never an error. Once this module is
imported, the launcher does not count steps itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

from ddp.monitoring import timeline
from ddp.torch_internals import call_after_backward

_VARIABLE = "DTRAIN_PROGRESS_FILE"
_SIZE_BYTES = 72
_STEPS, _CHECKPOINTS, _RESTART_POLICY, _PHASE, _SAVED_STEPS, _RECORDED_STEP = 0, 1, 2, 3, 4, 8
_PHASES = 3
EVALUATION, SAVE = 1, 2  # of `phase`; 0 is everything else


@cache
def _counters() -> memoryview | None:
    """Return the mapped file. It is opened at first use, not at import: a forked worker has its own variable then."""
    file = timeline.mapped_file(_VARIABLE, _SIZE_BYTES)
    return None if file is None else memoryview(file).cast("Q")


_is_queued = False  # for the end of the backward pass that runs


def count_step() -> None:
    """Count one backward pass whose gradients are in place."""
    if (counters := _counters()) is not None:
        counters[_STEPS] += 1
        timeline.counted()


def set_recorded_step(number: int) -> None:
    """Report the number of the ledger's step that is being made, so that a replay of a failure ends with it."""
    if (counters := _counters()) is not None:
        counters[_RECORDED_STEP] = number


def count_checkpoint() -> None:
    """Count one checkpoint that is durable."""
    if (counters := _counters()) is not None:
        counters[_SAVED_STEPS] = counters[_STEPS]
        counters[_CHECKPOINTS] += 1


@contextmanager
def phase(kind: int, *, loads: bool = False) -> Iterator[None]:
    """Report that this process evaluates (EVALUATION), or saves or `loads` (SAVE), during the block. May be nested."""
    counters = _counters()
    if counters is None:
        yield
        return
    outer = counters[_PHASE] % _PHASES
    _begin_phase(counters, kind)
    try:
        with timeline.span("evaluation" if kind == EVALUATION else "load" if loads else "save"):
            yield
    finally:
        _begin_phase(counters, outer)


def _begin_phase(counters: memoryview, kind: int) -> None:
    counters[_PHASE] = (counters[_PHASE] // _PHASES + 1) * _PHASES + kind


def set_restart_policy(kind: int) -> None:
    """Set what the launcher does when this process fails, from now on.

    0, an ordinary process: the attempt ends, as by default. 1: it alone is restarted, or the others continue without
    it. 2: it alone is restarted, and the others wait for that; without restarts left the attempt ends.
    3, resilient: as 2, and the others are notified at once to meet it again, in the next generation: each reads its
    number from the FIFO in DTRAIN_GENERATION_PIPE, and the replacement process has it in DTRAIN_GENERATION
    (launcher/agent/workers/worker.py has the format). That requires all ranks: once one has ended for good, the attempt
    ends with the next failure. 4: as 3, but only among as many ranks as before: with a lost or a new host all start
    again.
    A restarted process inherits the policy of its predecessor until it sets another.
    """
    if kind not in (0, 1, 2, 3, 4):
        raise ValueError(
            f"set_restart_policy({kind!r}): 0 is an ordinary process, 1 one to do without, 2 one to wait for, "
            "3 one to meet again, 4 one to meet again among as many ranks"
        )
    if (counters := _counters()) is not None:
        counters[_RESTART_POLICY] = kind


def count_step_after(outputs: Iterable[torch.Tensor]) -> None:
    """Count one step at the end of each backward pass through any of `outputs` of a forward."""
    global _is_queued
    if _counters() is None:
        return
    _is_queued = False
    for output in outputs:
        if output.grad_fn is not None:  # a hook on a leaf would outlive the graph
            output.register_hook(_on_grad)


def _on_grad(_: torch.Tensor) -> None:
    global _is_queued
    if not _is_queued:
        _is_queued = True
        call_after_backward(_at_the_end)


def _at_the_end() -> None:
    global _is_queued
    _is_queued = False
    count_step()
