"""Record where this process spends its training time, in a ring that the launcher reads.

DTRAIN_TIMELINE_FILE names a file that the launcher made: a header of 16 bytes, then a ring of records of 72 bytes. All
is little-endian. The header is two 64-bit integers: the pid of the writing process, and the number of records that it
has written; only the newest are in the ring. A record is one 64-bit integer, 4 times its number (from 0) plus its kind,
and eight 64-bit floats; if a kind has fewer, the last ones are 0:

    0  a step            its number as ddp.monitoring.progress counts, when it ended, six durations by PHASES
    1  a span            its kind by SPANS, when it began, when it ended
    2  a detail          a phase by PHASES, the bucket that a wait was for (else -1), the step's number, began, ended

Times are seconds of the monotonic clock; they show where the training thread was, also on a device. A step ends with
the optimizer's step, or when a GradScaler has skipped it; if no optimizer was ever seen, at the start of the next
forward after a reduction. If models are known (`prepare`), only optimizers of their parameters count; if none of these
has stepped by the second reduction, as with master copies of the parameters, all count until one does. Time before the
first forward is not a step. Details are recorded for a step now and then. A span counts as "other" in its step.

Only this process writes: one that is forked from it records nothing. Without the variable, or with a file that cannot
be mapped, nothing is recorded; that is never an error. A step makes no system call for it, and keeps no memory.
"""

from __future__ import annotations

import atexit
import mmap
import os
import struct
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from time import monotonic

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddp.torch_internals import after_scaled_steps, call_after_backward, not_traced

PHASES = ("data", "forward", "backward", "wait", "optimizer", "other")
SPANS = ("evaluation", "save", "load", "recovery")
_DATA, _FORWARD, _BACKWARD, _WAIT, _OPTIMIZER, _OTHER = range(len(PHASES))
_VARIABLE = "DTRAIN_TIMELINE_FILE"
_HEADER_BYTES = 16
_RECORD = struct.Struct("<q8d")
_STEP, _SPAN, _DETAIL = range(3)
_KINDS = 4
_TRIED_REDUCTIONS = 2  # until then, an optimizer of the models' own parameters has stepped, if there is one
_DETAIL_EVERY_S = 0.9  # a little less than the pause between the launcher's looks


class _Recorder:
    """Records the main thread, which trains, and the engine's threads while it is in backward."""

    def __init__(self, ring: mmap.mmap) -> None:
        self._ring = ring
        self._header = memoryview(ring).cast("Q")
        self._header[0] = os.getpid()
        self._capacity = (len(ring) - _HEADER_BYTES) // _RECORD.size
        self._written = 0
        self._thread = threading.main_thread().ident
        self._sums = [0.0] * len(PHASES)
        self._phase = _OTHER
        self._bucket = -1
        self._since = 0.0
        self._ended = 0.0  # end of a step not recorded yet, since another optimizer may follow; else 0
        self._number = 0  # of steps
        self._is_by_own = False  # whether an optimizer of the training's own parameters was seen
        self._ended_number = 0
        self._has_begun = self._has_forward = self._has_reduced = self._is_in_span = False
        self._optimizer = 0  # id of the outermost one that steps now
        self._has_optimizer = False
        self._is_detailed = True
        self._detailed_at = 0.0

    def forward(self) -> None:
        if self._is_in_span or threading.get_ident() != self._thread:
            return
        self._has_forward, self._bucket = True, -1
        if not self._has_begun:
            self._has_begun = True
            self._phase, self._since = _FORWARD, monotonic()
            return
        if self._phase == _FORWARD:
            return
        self.record_step()
        if self._phase == _OTHER:
            self._phase = _DATA
        self._enter(_FORWARD)
        if self._has_reduced and not self._has_optimizer:
            self._end_step(self._since)
            self.record_step()

    def backward(self) -> None:
        if self._has_begun and self._phase in (_FORWARD, _OTHER) and not self._is_in_span:
            self.record_step()
            self._enter(_BACKWARD)

    def backward_ended(self) -> None:
        if self._phase == _BACKWARD:
            self._enter(_OPTIMIZER if self._optimizer else _OTHER)

    def wait_begins(self) -> int:
        """Return the argument for `wait_ended`: the phase of the wait, or -1 if it is not recorded."""
        phase = self._phase
        if not self._has_begun or self._is_in_span:
            return -1
        if phase != _BACKWARD and threading.get_ident() != self._thread:
            return -1
        if phase == _OTHER:
            self.record_step()
        self._enter(_WAIT)
        return phase

    def wait_for(self, bucket: int) -> None:
        if self._is_detailed and self._phase == _WAIT:
            if self._bucket >= 0:
                self._enter(_WAIT)
            self._bucket = bucket

    def wait_ended(self, phase: int) -> None:
        if self._phase == _WAIT:
            self._enter(phase)
            self._bucket = -1

    def counted(self) -> None:
        self._number += 1
        self._has_reduced = True

    def counts(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether steps of an optimizer are steps of the training."""
        if _is_of_training(optimizer):
            self._is_by_own = True
            return True
        return not self._is_by_own and self._number >= _TRIED_REDUCTIONS

    def optimizer_begins(self, optimizer: int, *, has_closure: bool = False) -> None:
        if self._is_in_span or (self._optimizer and self._optimizer != optimizer) or not self._is_ours():
            return
        self._optimizer, self._has_optimizer = optimizer, True
        if has_closure or not self._has_forward:  # each is a step
            self.record_step()
        if has_closure and self._phase == _OTHER:
            self._phase = _DATA
        if self._has_begun:
            self._enter(_OPTIMIZER)
        elif has_closure:  # its forward may not be seen
            self._has_begun = True
            self._phase, self._since = _OPTIMIZER, monotonic()

    def optimizer_ended(self, optimizer: int) -> None:
        if optimizer != self._optimizer or self._is_in_span or not self._is_ours():
            return
        self._optimizer = 0
        if not self._has_begun:  # no forward was seen, only steps
            self._has_begun = True
            self._phase, self._since = _OTHER, monotonic()
            return
        self._enter(_OTHER)
        self._end_step(self._since)

    def scaled_step_ended(self) -> None:
        """End the step if the GradScaler has skipped the optimizer's step, which otherwise ends it."""
        if not self._has_reduced or not self._has_begun or self._is_in_span or not self._is_ours():
            return
        self._has_optimizer = True
        if not self._has_forward:
            self.record_step()
        self._enter(_OTHER)
        self._end_step(self._since)

    def _is_ours(self) -> bool:
        return self._phase == _BACKWARD or threading.get_ident() == self._thread

    def span_begins(self) -> float:
        """Return its start; -1 within another span."""
        if self._is_in_span or threading.get_ident() != self._thread:
            return -1.0
        self.record_step()
        if self._has_begun:
            self._enter(_OTHER)
        self._is_in_span, self._bucket = True, -1
        self._optimizer = 0  # of a step that raised
        return monotonic()

    def span_ended(self, kind: int, began: float) -> None:
        if began < 0.0:
            return
        now = monotonic()
        self._is_in_span = False
        self._put(_SPAN, kind, began, now, 0.0, 0.0, 0.0, 0.0, 0.0)
        if self._has_begun:
            self._sums[_OTHER] += now - self._since
            self._phase, self._since = _OTHER, now

    def _enter(self, phase: int) -> None:
        now = monotonic()
        before, since = self._phase, self._since
        self._sums[before] += now - since
        if self._is_detailed and now > since:
            step = self._number if self._has_reduced else self._number + 1
            self._put(_DETAIL, before, self._bucket, step, since, now, 0.0, 0.0, 0.0)
        self._phase, self._since = phase, now

    def _end_step(self, now: float) -> None:
        """Mark the end of a step; that of another optimizer immediately after belongs to it."""
        self._ended, self._ended_number = now, self._number
        self._has_reduced = False

    def record_step(self) -> None:
        """Record the step that has ended, if there is one. Time after it belongs to the next."""
        if not self._ended:
            return
        sums = self._sums
        self._put(_STEP, self._ended_number, self._ended, *sums)
        for phase in range(len(PHASES)):
            sums[phase] = 0.0
        self._is_detailed = self._ended - self._detailed_at >= _DETAIL_EVERY_S
        if self._is_detailed:
            self._detailed_at = self._ended
        self._ended = 0.0

    def _put(self, kind: int, *values: float) -> None:
        number = self._written
        offset = _HEADER_BYTES + number % self._capacity * _RECORD.size
        _RECORD.pack_into(self._ring, offset, number * _KINDS + kind, *values)
        self._written = self._header[1] = number + 1


_is_looked_for = False
_recorder: _Recorder | None = None


def _opened() -> _Recorder | None:
    """Return the recorder. It is opened at first use, not at import: a forked worker has its own variable then."""
    global _is_looked_for, _recorder
    if not _is_looked_for:
        _is_looked_for = True
        if (ring := _map()) is not None:
            _recorder = _Recorder(ring)
            atexit.register(_at_exit)
            _watch_optimizers()
    return _recorder


def _map() -> mmap.mmap | None:
    ring = mapped_file(_VARIABLE)
    if ring is None or len(ring) < _HEADER_BYTES + _RECORD.size or len(ring) % 8 or memoryview(ring).cast("Q")[0]:
        return None  # the last: another process of this worker was first
    return ring


def mapped_file(variable: str, size_bytes: int = 0) -> mmap.mmap | None:
    """Map `size_bytes` (0: all) of the file named by a variable; None without the variable, or if it is shorter."""
    path = os.environ.get(variable)
    if not path or sys.byteorder != "little":
        return None
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return mmap.mmap(descriptor, size_bytes)
        finally:
            os.close(descriptor)
    except (OSError, ValueError):  # ValueError: the file is empty, or shorter
        return None


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    after_scaled_steps(_after_scaled_step)


@not_traced
def _before_step(optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
    if _recorder is not None and _recorder.counts(optimizer):
        has_closure = len(args) > 1 or kwargs.get("closure") is not None
        _recorder.optimizer_begins(id(optimizer), has_closure=has_closure)


@not_traced
def _after_step(optimizer: object, *_: object) -> None:
    if _recorder is not None:
        _recorder.optimizer_ended(id(optimizer))


def _after_scaled_step(optimizer: torch.optim.Optimizer) -> None:
    if _recorder is not None and _recorder.counts(optimizer):
        _recorder.scaled_step_ended()


def _at_exit() -> None:
    if _recorder is not None:
        _recorder.record_step()


def _forked() -> None:
    global _recorder
    _recorder = None


os.register_at_fork(after_in_child=_forked)


_trained: weakref.WeakSet[torch.nn.Module | torch.optim.Optimizer] = weakref.WeakSet()
_known: set[int] | None = None  # ids of their parameters, since the first step after `prepare`


def prepare(trained: torch.nn.Module | torch.optim.Optimizer) -> None:
    """Count the steps of a model, or of its optimizer, as steps of the training, but not those of other parameters.

    Call it before the first step: with a closure, the optimizer begins before the first forward.
    """
    global _known
    _opened()
    _trained.add(trained)
    _known = None


def _is_of_training(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether it steps a parameter of the models given to `prepare`, or none were given."""
    global _known
    if _known is None:
        _known = {id(parameter) for trained in _trained for parameter in _parameters(trained)}
    # Checked in each step: parameters may be added to an optimizer. The first one usually decides.
    return not _known or not _known.isdisjoint(map(id, _parameters(optimizer)))


def _parameters(trained: torch.nn.Module | torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    if isinstance(trained, torch.nn.Module):
        return trained.parameters()
    groups = getattr(trained, "param_groups", ())  # a GradScaler that is not enabled steps whatever has a `step`
    return (parameter for group in groups for parameter in group["params"])


def forward() -> None:
    """Record the start of a forward pass with gradients."""
    if (recorder := _opened()) is not None:
        recorder.forward()


def follow(outputs: Iterable[torch.Tensor]) -> None:
    """Record the backward pass through `outputs` of a forward that no reducer reports."""
    if _opened() is not None:
        for output in outputs:
            if output.grad_fn is not None:  # a hook on a leaf would outlive the graph
                output.register_hook(_on_gradient)


def _on_gradient(_: torch.Tensor) -> None:
    if _recorder is not None and _recorder._phase == _FORWARD:
        _recorder.backward()
        call_after_backward(_recorder.backward_ended)


def backward() -> None:
    """Record the first gradient of a backward pass."""
    if _recorder is not None:
        _recorder.backward()


def backward_ended() -> None:
    if _recorder is not None:
        _recorder.backward_ended()


def wait_begins() -> int:
    """Record the start of a wait for other ranks, perhaps within another one. Pass the result to `wait_ended`."""
    return -1 if _recorder is None or _recorder._phase == _WAIT else _recorder.wait_begins()


def wait_for(bucket: int) -> None:
    """Attribute the wait from now on to this bucket of a model, counted from 0."""
    if _recorder is not None:
        _recorder.wait_for(bucket)


def wait_ended(token: int) -> None:
    if token >= 0 and _recorder is not None:
        _recorder.wait_ended(token)


def counted() -> None:
    """Record that `ddp.monitoring.progress` has counted a step."""
    if (recorder := _opened()) is not None:
        recorder.counted()


@contextmanager
def span(kind: str) -> Iterator[None]:
    """Record the block as one of SPANS. Within another one it is a part of that one."""
    recorder = _opened()
    if recorder is None:
        yield
        return
    began = recorder.span_begins()
    try:
        yield
    finally:
        recorder.span_ended(SPANS.index(kind), began)
