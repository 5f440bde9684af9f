"""Which backward passes DistributedDataParallel reduces: those of the forward passes that it has announced."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ddp.data_parallel.buckets.step_status import RankStatus, StatusSum
from ddp.data_parallel.buffer_hook import BufferHook
from ddp.data_parallel.checksum import WeightChecksum
from ddp.data_parallel.optimizer_in_backward import OptimizersInBackward
from ddp.data_parallel.reducer import Pass, Reducer
from ddp.data_parallel.status_errors import forwards_differ
from ddp.errors import DdpError

__all__ = ["ForwardPolicy"]


class _Mode(enum.Enum):
    """What the last forward announced for the gradients that come next."""

    REDUCE = enum.auto()
    ACCUMULATE = enum.auto()
    IDLE = enum.auto()  # nothing: they were computed without the wrapper's forward


class _Forward:
    """A forward pass whose gradients shall be reduced, until a backward pass has reached one of its outputs.

    `is_opaque`: its outputs could not be found, so any backward pass may be its own.
    """

    def __init__(self) -> None:
        self.is_open = True
        self.is_opaque = True


class ForwardPolicy:
    """Reduces the backward passes of announced forward passes. With `checksum`, every pass compares the weights."""

    def __init__(self, reducer: Reducer, checksum: WeightChecksum | None) -> None:
        reducer.policy = self
        self._reducer = reducer
        self._checksum = checksum
        self._mode = _Mode.IDLE
        self._forwards: list[_Forward] = []
        self._had_foreign_leaf = False  # in the last forward, in the place of a parameter
        self.divides_by_active = False  # whether only ranks that have not joined count in the average
        self.optimizers: OptimizersInBackward | None = None
        self.buffer_hook: BufferHook | None = None

    # Called by the wrapper

    def enter_forward(self, module: nn.Module) -> None:
        """A forward pass of the wrapper around `module` begins. Raises BackwardError if that has other parameters."""
        self._reducer.settle()
        self._reducer.module_watch = self._reducer.module_watch.follow(module)
        self._reducer.report.at("in forward")

    def prepare(self, outputs: Iterator[torch.Tensor], *, is_syncing: bool, is_training: bool) -> None:
        """Announce a forward pass with gradients: those of its backward will be reduced, or only accumulated.

        A backward through any of `outputs` takes part in a reduction even if it reaches no parameter on
        this rank.
        """
        if not is_syncing:
            self._mode = _Mode.ACCUMULATE
            return
        self._mode = _Mode.REDUCE
        self._reducer.be_last()
        forward = _Forward()
        on_grad = self._output_hook(forward)
        for output in outputs:
            forward.is_opaque = False
            if output.grad_fn is not None:  # a hook on a leaf would outlive the graph
                output.register_hook(on_grad)  # type: ignore[no-untyped-call]  # torch has no types here
        if is_training:
            self._forwards.append(forward)
        self._had_foreign_leaf = self._reducer.module_watch.has_foreign_leaf()
        self._reducer.report.at("between forward and backward")

    def _output_hook(self, forward: _Forward) -> Callable[[torch.Tensor], None]:
        """The hook of what a forward pass returned."""

        def on_grad(_: torch.Tensor) -> None:
            forward.is_open = False
            self._reducer.reach()

        return on_grad

    @property
    def is_announced(self) -> bool:
        """Whether the next backward pass will be reduced: the other ranks wait for it."""
        return self._mode is _Mode.REDUCE

    def reduce_alone(self) -> None:
        """Take part in the reduction that the last forward announced, without a backward pass of this rank."""
        if self.is_announced and self._reducer.current is None:
            for forward in self._forwards[-1:]:
                forward.is_open = False
            self._reducer.reduce_now()

    def reduce_as_joined(self) -> None:
        """Take part in a reduction of the others with nothing: this rank has no more inputs (Join).

        It gets the averages too: an optimizer that is shared between the ranks steps here with them.
        """
        self._reducer.settle()
        self._reducer.drop_gradients()
        self._reducer.reduce_now(joined=True)

    # Called by the reducer: see PassPolicy

    def may_begin(self) -> bool:
        if self._mode is _Mode.REDUCE:
            self.begin()
            return True
        if self._mode is _Mode.IDLE:
            self._reducer.warn(
                "gradients came from a backward pass that did not go through the forward of DistributedDataParallel "
                "(model.module(x) instead of model(x)?): they stay on this rank until the next pass that does"
            )
        return False

    def begin(self) -> None:
        self._reducer.begin()

    def end(self, pass_: Pass) -> None:
        self._reducer.finish(pass_)

    def starting(self) -> None:
        if self._had_foreign_leaf and self._reducer.module_watch.problem() is None:  # else that has named it
            self._reducer.warn(
                "a forward pass used other tensors in the place of parameters (torch.func.functional_call?): their "
                "gradients stay on this rank"
            )
        if self._checksum is not None:
            self._checksum.take()
        opaque = [forward for forward in self._forwards if forward.is_opaque and forward.is_open]
        if opaque:
            opaque[-1].is_open = False

    def fill(self, **common: Any) -> RankStatus:
        return RankStatus(
            open_forwards=self._open_forwards(),
            digest=0 if self._checksum is None else self._checksum.digest(),
            **common,
        )

    def _open_forwards(self) -> int:
        return sum(forward.is_open for forward in self._forwards)

    def disagreement(self, statuses: StatusSum) -> DdpError | None:
        if not statuses.same_forwards:
            return forwards_differ(self._reducer.channel.group, self._open_forwards())
        if self._checksum is not None and not statuses.same_digest:
            return self._checksum.compare(self._reducer.channel.group, self._reducer.report.step + 1)
        return None

    def divisor(self, statuses: StatusSum) -> int:
        return statuses.active if self.divides_by_active else self._reducer.channel.group.size()

    def delivered(self, *, is_first: bool) -> None:
        if self.buffer_hook is not None:
            self.buffer_hook.wait()
        if self.optimizers is not None:
            self.optimizers.step()

    def ended(self, *, has_failed: bool) -> None:
        self._forwards.clear()
        self._mode = _Mode.IDLE

    # What libraries reach for that drive torch's reducer

    def _get_local_used_map(self) -> torch.Tensor:
        """How many ranks had a gradient in the last pass, for each parameter."""
        return self._reducer.used_map()

    def _rebuild_buckets(self) -> bool:
        """Lightning calls it: there is never anything to do."""
        return False

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        """Lightning calls it: the backward pass that follows is reduced."""
        self.prepare(iter(outputs), is_syncing=True, is_training=False)
