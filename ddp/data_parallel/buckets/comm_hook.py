"""Communication hooks: a user's function reduces each bucket, instead of the all-reduce.

The interface is torch's, so that torch's own hooks (`torch.distributed.algorithms.ddp_comm_hooks`) work unchanged.
Called by `gradient_sums`, which runs the hook once per bucket, in the same order on every rank.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import BuiltinCommHookType
from torch.distributed import GradBucket as TorchBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ddp.data_parallel.buckets.bucket_plan import BucketPlan, Member, slot_view
from ddp.errors import ArgumentError
from ddp.monitoring.stall_report import HostWork
from ddp.torch_internals import AnyFuture

# torch's hooks that start one collective, before they return.
_SINGLE = (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook)

_Future = torch.futures.Future[torch.Tensor]


@dataclass(frozen=True)
class CommHook:
    """A registered hook: `call(state, bucket)` starts a reduction and returns the future of its result.

    `is_chained`: it may start collectives after it has returned, when others are done (PowerSGD does). No other
    collective of the group may start meanwhile: their order would differ between the ranks. `takes_own`: it accepts a
    large gradient in the memory where autograd left it; False for users' hooks, which might keep the bucket.
    """

    call: Callable[[Any, Any], _Future]
    state: object
    is_chained: bool
    takes_own: bool = False


class GradBucket:
    """A hook's argument, with the interface of `torch.distributed.GradBucket`. Gradients are not divided."""

    def __init__(self, index: int, plan: BucketPlan, members: Sequence[Member], *, is_last: bool) -> None:
        self._index = index
        self._plan = plan
        self._members = members
        self._is_last = is_last
        self._buffer = torch.empty(0, device="cpu")

    def index(self) -> int:
        """Return the bucket's position in launch order, from 0; after the first step, in another plan."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """Return all gradients of the bucket, flat (numel,), of one dtype; complex ones as pairs of real numbers."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return views of the buffer, one per parameter."""
        return [slot_view(self._buffer, slot) for slot in self._plan.slots]

    def parameters(self) -> list[torch.Tensor]:
        return [member.parameter for member in self._members]

    def is_last(self) -> bool:
        """Return whether no other bucket follows in this backward pass."""
        return self._is_last

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace the result of `buffer()`, as hooks that wrap others do."""
        self._buffer = buffer


@dataclass
class _HookWork:
    """A hook's future, waited for like a collective; the result is copied into `flat`, over the gradients."""

    future: _Future
    flat: torch.Tensor
    _done: threading.Event = field(default_factory=threading.Event)
    _is_in_place: bool = False

    def __post_init__(self) -> None:
        self.future.add_done_callback(lambda _: self._done.set())

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the result is ready (for CUDA: until it is enqueued). Raises RuntimeError on timeout."""
        if self._is_in_place:
            return True
        if not self._done.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("Operation timed out!")
        result: Any = self.future.wait()
        if isinstance(result, list | tuple):  # from a collective's own future
            (result,) = result
        if not isinstance(result, torch.Tensor):
            raise ArgumentError(
                f"the communication hook's future holds {type(result).__name__}: it must hold one tensor of the "
                f"bucket's size, {self.flat.numel()}"
            )
        if result.numel() != self.flat.numel():
            raise ArgumentError(
                f"the communication hook returned {result.numel()} numbers for a bucket of {self.flat.numel()}: "
                "its future must hold one tensor of the bucket's size"
            )
        if result.data_ptr() != self.flat.data_ptr() or result.dtype != self.flat.dtype:
            self.flat.copy_(result.view_as(self.flat))
        self._is_in_place = True
        return True


class HookSender:
    """Reduces one bucket by the hook. Each pass has a copy of `bucket`, with the gradients of that pass."""

    divisor = 1

    def __init__(self, hook: CommHook, bucket: GradBucket, numel: int) -> None:
        self._hook = hook
        self._bucket = bucket
        self._numel = numel

    def start(self, flat: torch.Tensor) -> HostWork:
        buffer = flat[: self._numel]
        bucket = copy.copy(self._bucket)
        bucket.set_buffer(buffer)
        future = self._hook.call(self._hook.state, bucket)
        if not isinstance(future, AnyFuture):
            raise ArgumentError(
                f"the communication hook {self._hook.call!r} returned {type(future).__name__}: "
                "it must return a torch.futures.Future of one tensor"
            )
        return HostWork(_HookWork(future, buffer))


def checked_hook(state: object, hook: Callable[[Any, Any], _Future]) -> CommHook:
    """Check a hook's signature as torch does. Raises TypeError or ArgumentError."""
    if not callable(hook):
        raise TypeError(
            f"a communication hook must be callable, and {hook!r} is not: Communication hook must be callable."
        )
    parameters = inspect.signature(hook).parameters
    if "bucket" in parameters:
        annotation = parameters["bucket"].annotation
        if annotation not in (inspect.Parameter.empty, TorchBucket, GradBucket, "dist.GradBucket", "GradBucket"):
            raise ArgumentError("Communication hook: bucket annotation should be dist.GradBucket.")
    returned = inspect.signature(hook).return_annotation
    if not isinstance(returned, str) and returned not in (inspect.Signature.empty, _Future):
        raise ArgumentError("Communication hook: return annotation should be torch.futures.Future[torch.Tensor].")
    return CommHook(hook, state, is_chained=hook not in _SINGLE)


def builtin_hook(kind: object, group: dist.ProcessGroup) -> CommHook:
    """Return the hook for one of torch's `dist.BuiltinCommHookType`. Raises ArgumentError for others."""
    known = {
        BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
        BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
    }
    if kind not in known:
        raise ArgumentError(f"{kind!r} is not a built-in communication hook: {', '.join(map(str, known))}")
    return CommHook(known[kind], group, is_chained=False)
