"""DistributedDataParallel's choice of backward passes to reduce: those of the forward passes that it has announced."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp.comm.broadcast import BufferSync
from ddp.comm.small_sum import reduce_options
from ddp.data_parallel.backward_pass import EndOfBackward, Pass
from ddp.data_parallel.buckets.step_status import RankStatus, StatusSum
from ddp.data_parallel.checksum import WeightChecksum
from ddp.data_parallel.micro_batches import MicroBatches
from ddp.data_parallel.reducer import Reducer
from ddp.data_parallel.status_errors import (
    drifted_meanwhile,
    forwards_differ,
    starts_differ,
    stepped_inside,
    steps_of_each,
)
from ddp.data_parallel.step_watch import InBackwardOptimizers, StepWatch
from ddp.errors import BackwardError, DdpError
from ddp.monitoring import timeline
from ddp.monitoring.stall_report import finish
from ddp.torch_internals import call_after_backward, current_backward

_NO_RANK = -1
_MOST_OF_EQUAL_REPLICAS = 3  # times that replicas stay equal though ranks step unequally: then the user equalises them


class _Mode(enum.Enum):
    """The last forward's announcement for the next gradients."""

    REDUCE = enum.auto()
    SET_ASIDE = enum.auto()  # this rank has further passes in this step, or does not count
    SETTING_ASIDE = enum.auto()  # the same, while its backward pass runs
    ACCUMULATE = enum.auto()
    IDLE = enum.auto()  # nothing: gradients now did not come through the wrapper's forward


class _Forward:
    """A forward pass whose gradients will be reduced; open until a backward pass has reached one of its outputs.

    `is_opaque`: its outputs could not be found, so any backward pass may belong to it.
    """

    def __init__(self) -> None:
        self.is_open = True
        self.is_opaque = True


class ForwardPolicy:
    """Reduces the backward passes of announced forward passes, and decides when a forward pass needs rank 0's buffers.

    With `checksum`, every pass compares the weights. Without `buffer_sync`, every rank keeps its own buffers;
    `buffer_hook` replaces it. With `micro_batches`, these determine the number of passes of a step on each rank.
    """

    def __init__(
        self,
        reducer: Reducer,
        *,
        checksum: WeightChecksum | None,
        buffer_sync: BufferSync | None,
        buffer_hook: BufferHook | None,
        micro_batches: MicroBatches | None = None,
    ) -> None:
        reducer.policy = self
        self.reducer = reducer
        self.buffer_hook = buffer_hook
        self.micro_batches = micro_batches
        self._buffer_sync = buffer_sync
        self._buffers_are_of = -1  # number of reductions when buffers were last made equal
        self._checksum = checksum
        self._mode = _Mode.IDLE
        self._forwards: list[_Forward] = []
        self._had_foreign_leaf = False  # instead of a parameter, in the last forward
        self.divides_by_active = False  # whether only ranks that have not joined count in the average
        self._in_backward_optimizers: InBackwardOptimizers | None = None  # from the first forward pass on
        self._watch = StepWatch(reducer.module_watch.parameters, self._before_step)
        self._is_kept: bool | None = None  # the gradient of the last reduction, when this pass began
        self._steps_alone = False
        self._equal_after_other_steps = 0

    def enter_forward(self, module: nn.Module, *, steps_alone: bool = False) -> None:
        """Begin a forward pass of the wrapper around `module`. Raises BackwardError if that has other parameters.

        With `steps_alone`, this rank's next steps are not compared with the others' (LocalSGD).
        """
        if self._mode is _Mode.SETTING_ASIDE:
            self._mode = _Mode.IDLE
            self.reducer.fail("its backward pass was interrupted")
            self.reducer.settle()
        if self.micro_batches is not None and torch.is_grad_enabled():
            self.micro_batches.before_pass()
        if steps_alone or self._steps_alone:
            self._watch.restart()
        self._steps_alone = steps_alone
        self.reducer.module_watch = self.reducer.module_watch.follow(module)
        self.reducer.report.at("in forward")
        self.reducer.mark("forward")
        if self._in_backward_optimizers is None:
            self._in_backward_optimizers = InBackwardOptimizers(self.reducer.module_watch.parameters)

    @property
    def has_stale_buffers(self) -> bool:
        """Return whether the next forward pass starts with new buffers: once between two reductions.

        Reductions are counted, because their number is the same on every rank; that of forward passes may not be.
        """
        return self._buffer_sync is not None and self.reducer.report.step != self._buffers_are_of

    def sync_buffers(
        self, root: int, named: Callable[[], Sequence[tuple[str, torch.Tensor]]]
    ) -> AbstractContextManager[None]:
        """Copy the buffers of `root` to every rank before a forward pass, or return a context that runs the hook."""
        self._buffers_are_of = self.reducer.report.step
        if self.buffer_hook is not None:
            return self._hooked(self.buffer_hook, named)
        if self._buffer_sync is not None:
            self._buffer_sync.run(root)
        return nullcontext()

    @contextmanager
    def _hooked(self, hook: BufferHook, named: Callable[[], Sequence[tuple[str, torch.Tensor]]]) -> Iterator[None]:
        """Run the hook before or after forward; after it also if forward raises, as the other ranks run it."""
        if hook.is_before:
            hook.run(named())
        try:
            yield
        except Exception:
            if not hook.is_before:
                hook.run(named())
            raise
        if not hook.is_before:
            hook.run(named())

    def prepare(self, output: Any, *, is_syncing: bool, is_training: bool) -> None:
        """Announce a forward pass with gradients: its backward's gradients will be reduced, or only accumulated.

        A backward through any tensor in `output` takes part in a reduction even if it reaches no parameter on
        this rank.
        """
        if not is_syncing:
            self._mode = _Mode.ACCUMULATE
            if self.micro_batches is not None:
                self.micro_batches.users_own += 1
            timeline.follow(tensors_in(output))
            return
        steps = self.micro_batches
        self._mode = _Mode.REDUCE if steps is None or (steps.is_last and not steps.is_spare) else _Mode.SET_ASIDE
        self.reducer.hooks.be_last()
        forward = _Forward()
        on_grad = self._output_hook(forward)
        for tensor in tensors_in(output):
            forward.is_opaque = False
            if tensor.grad_fn is not None:  # a hook on a leaf would outlive the graph
                tensor.register_hook(on_grad)
        if is_training:
            self._forwards.append(forward)
        self._had_foreign_leaf = self.reducer.module_watch.has_foreign_leaf()
        self.reducer.report.at("between forward and backward")

    def _output_hook(self, forward: _Forward) -> Callable[[torch.Tensor], None]:
        """Return the hook for the outputs of a forward pass."""

        def on_grad(_: torch.Tensor) -> None:
            forward.is_open = False
            self.reducer.reach()

        return on_grad

    @property
    def is_announced(self) -> bool:
        """Whether the other ranks wait for the next backward pass, or for a later one of the same step."""
        return self._mode not in (_Mode.ACCUMULATE, _Mode.IDLE)

    def is_inside_backward(self) -> bool:
        """Return whether an announced backward pass runs in this thread: a forward now is a checkpoint's."""
        return self.reducer.is_inside_backward() or (self._mode is _Mode.SETTING_ASIDE and current_backward() != -1)

    def reduce_alone(self) -> None:
        """Take part in the reduction that the last forward announced, without a backward pass of this rank."""
        if self.is_announced and self.reducer.current is None:
            for forward in self._forwards[-1:]:
                forward.is_open = False
            if self._mode is _Mode.REDUCE:
                self.reducer.reduce_now()
            else:
                self._set_aside()

    def reduce_as_joined(self) -> None:
        """Take part in a reduction without gradients: this rank has no more inputs (Join).

        It receives the averages too: an optimizer that is sharded over the ranks steps here with them.
        """
        self.reducer.settle()
        self.reducer.drop_gradients()
        self.reducer.reduce_now(joined=True)

    def share_iteration(self, *, syncs: bool, has_buffers: bool) -> tuple[bool, int]:
        """Return whether any rank reduces gradients, and the last rank that `has_buffers`. Collective; blocks."""
        channel = self.reducer.channel
        largest = torch.tensor([int(syncs), channel.report.rank if has_buffers else _NO_RANK], device="cpu")
        with channel.report.waiting("agreement on an iteration with uneven inputs"):
            finish(channel.control.allreduce([largest], reduce_options(dist.ReduceOp.MAX)), device=largest.device)
        any_syncs, root = largest.tolist()
        return bool(any_syncs), root

    # Called by the reducer: see PassPolicy

    def may_begin(self) -> bool:
        if self._mode in (_Mode.REDUCE, _Mode.SET_ASIDE):
            self.begin()
            return self._mode is _Mode.REDUCE
        if self._mode is _Mode.IDLE:
            self.reducer.warn(
                "gradients came from a backward pass that did not go through the forward of DistributedDataParallel "
                "(model.module(x) instead of model(x)?): they stay on this rank until the next pass that does"
            )
        return False

    def begin(self) -> None:
        if self._mode is _Mode.SET_ASIDE:
            self._refuse_other_grads(self._watch.is_kept())
            self._mode = _Mode.SETTING_ASIDE
            call_after_backward(EndOfBackward(self._set_aside, self._was_dropped))
        elif self._mode is not _Mode.SETTING_ASIDE:
            self.reducer.begin()

    def _set_aside(self) -> None:
        """End the backward pass of a micro-batch that is not the last one of a step, or does not count."""
        steps = self.micro_batches
        assert steps is not None
        self._mode = _Mode.IDLE
        if steps.is_spare:
            self.reducer.leave_out()
        if steps.is_last:
            self.reducer.reduce_now()
        else:
            steps.set_aside(self.reducer.parameters())
            steps.passes += 1
        self.reducer.report.at("outside forward and backward")

    def _was_dropped(self) -> None:
        if self._mode is _Mode.SETTING_ASIDE:
            self._mode = _Mode.IDLE
            with self.reducer.lock:
                self.reducer.fail("its backward pass raised an exception")

    def _refuse_other_grads(self, is_kept: bool | None) -> None:
        """Raise BackwardError for gradients in the sum of a step that are not of its micro-batches."""
        if self.micro_batches is None:
            return
        if self.micro_batches.passes:
            raise BackwardError(
                "State(keep_global_batch=True): a backward pass began, and there was no state.commit() since the one "
                "before: make one of each for a batch, and let the State accumulate"
            )
        if is_kept:
            raise BackwardError(
                "State(keep_global_batch=True): a backward pass began while .grad held the averages of the last step, "
                "so their sum would depend on the number of ranks: call optimizer.zero_grad() in each step"
            )

    def end(self, pass_: Pass) -> None:
        self.reducer.finish(pass_)

    def starting(self) -> None:
        if self._had_foreign_leaf and self.reducer.module_watch.problem() is None:  # else the problem names it
            self.reducer.warn(
                "a forward pass used other tensors instead of the parameters (torch.func.functional_call?): their "
                "gradients stay on this rank"
            )
        self._is_kept = self._watch.is_kept()
        if self.micro_batches is not None:
            self._refuse_other_grads(self._is_kept)
            self.micro_batches.put_back()
        if self._checksum is not None:
            self._checksum.start()
        opaque = [forward for forward in self._forwards if forward.is_opaque and forward.is_open]
        if opaque:
            opaque[-1].is_open = False

    def fill(self, **common: Any) -> RankStatus:
        return RankStatus(
            open_forwards=self._open_forwards(),
            digest=0 if self._checksum is None else self._checksum.digest(),
            steps=self._watch.steps if self._equal_after_other_steps < _MOST_OF_EQUAL_REPLICAS else 0,
            kept=self._is_kept is True,
            emptied=self._is_kept is False,
            **common,
        )

    def _open_forwards(self) -> int:
        return sum(forward.is_open for forward in self._forwards)

    def disagreement(self, statuses: StatusSum) -> DdpError | None:
        if not statuses.same_forwards:
            return forwards_differ(self.reducer.channel, self._open_forwards())
        if self._checksum is not None and not statuses.same_digest:
            return self._drift(self._checksum) or drifted_meanwhile(self.reducer.report.step + 1)
        if not statuses.same_start:
            return starts_differ(self.reducer.channel, self._is_kept)
        if not statuses.same_steps:
            why = steps_of_each(self.reducer.channel, self._watch.steps)
            drift = self._drift(WeightChecksum([(each.name, each.parameter) for each in self.reducer.members]), why)
            self._equal_after_other_steps += 1
            return drift
        return None

    def _drift(self, checksum: WeightChecksum, why: str = "") -> DdpError | None:
        """Find out how the replicas differ now. Every rank must call it; blocks."""
        pass_ = self.reducer.current
        counts = pass_ is None or not pass_.has_joined
        return checksum.compare(self.reducer.channel, self.reducer.report.step + 1, counts=counts, why=why)

    def _before_step(self, optimizer: Any) -> bool:
        """Return whether a step of an optimizer of these parameters counts. Refuse one before averages are in place."""
        pass_ = self.reducer.current
        if pass_ is not None and not pass_.has_sent_status and not self.reducer.has_users_hook:
            self.reducer.refuse(pass_, stepped_inside(optimizer, self.reducer.members))
        self.reducer.nonfinite.before_step()
        return pass_ is None

    def replicas_equalised(self) -> None:
        """Forget earlier steps: every rank has the weights of one now."""
        self._watch.restart()

    def rank_count(self, statuses: StatusSum) -> int:
        if self.micro_batches is not None:
            return self.micro_batches.count
        return statuses.active if self.divides_by_active else self.reducer.channel.group.size()

    def delivered(self, *, is_first: bool) -> None:
        if self.micro_batches is not None:
            self.micro_batches.passes += 1
        if self.buffer_hook is not None:
            self.buffer_hook.wait()
        if self._in_backward_optimizers is not None:
            self._in_backward_optimizers.step()
        self._watch.delivered(self.reducer.first_used())

    def ended(self, *, has_failed: bool) -> None:
        self._watch.pass_ended()
        self._forwards.clear()
        self._mode = _Mode.IDLE

    def _get_local_used_map(self) -> torch.Tensor:
        """Return how many ranks had a gradient in the last pass, for each parameter."""
        return self.reducer.used_map()

    def _rebuild_buckets(self) -> bool:
        """Do nothing. Lightning calls it."""
        return False

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        """Announce that the next backward pass is reduced. Lightning calls it."""
        self.prepare(outputs, is_syncing=True, is_training=False)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a module's output, however nested."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


class BufferHook:
    """Runs a user's function that synchronises buffers, instead of the broadcast from rank 0.

    It is registered by `_register_buffer_comm_hook`, as in torch's class. `call(state, buffers by name)` runs before or
    after forward. Its futures are waited for at the end of backward, or before it runs again.
    """

    def __init__(self, state: object, call: Callable[..., Any], location: object) -> None:
        self._state = state
        self._call = call
        # torch's enum is private, so compare the name; the default is after forward.
        self.is_before = getattr(location, "name", None) == "PRE_FORWARD"
        self._futures: list[torch.futures.Future[Any]] = []

    def run(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        self.wait()
        with torch.no_grad():
            returned = self._call(self._state, dict(named))
        if returned is not None:
            self._futures += returned if isinstance(returned, list | tuple) else [returned]

    def wait(self) -> None:
        """Wait for the hook's futures."""
        while self._futures:
            self._futures.pop().wait()
