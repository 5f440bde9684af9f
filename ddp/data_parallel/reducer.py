"""Averages gradients over the ranks while backward still runs.

One hook for each parameter tells when its gradient is there. When all gradients of a bucket are, its
reduction starts, always in the order of the plan, so that every rank starts the same collectives in the
same order. A callback at the end of backward starts what is left, waits, and puts the averages into place.

The last bucket carries the verdict, what every rank has to say about this pass: which parameters had
gradients, whether it failed. A parameter without a gradient on this rank contributes zeros; one that no rank used
keeps the gradient it had, or None. A rank whose pass ends with an exception sends zeros for the rest and says
so; then every rank raises in the same iteration, and the next one finds all of them in step.
"""

from __future__ import annotations

import enum
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ddp.comm.broadcast import broadcast_tensors
from ddp.data_parallel.buckets.bucket_plan import BucketLimits
from ddp.data_parallel.buckets.bucket_schedule import Channel, Lineup
from ddp.data_parallel.buckets.comm_hook import CommHook
from ddp.data_parallel.buckets.step_status import Tally, Word
from ddp.data_parallel.buckets.transfers import Member, ready_twice
from ddp.data_parallel.buffer_hook import BufferHook
from ddp.data_parallel.checksum import WeightChecksum
from ddp.data_parallel.double_backward import GraphKeeper
from ddp.data_parallel.module_watch import Roster
from ddp.data_parallel.optimizer_in_backward import OptimizersInBackward
from ddp.data_parallel.status_errors import (
    describe_failure,
    forwards_differ,
    numbers_differ,
    peers_failed,
    weights_differ,
)
from ddp.data_parallel.unfrozen import average_late
from ddp.errors import BackwardError, CheckpointError, DdpError, UnsupportedError
from ddp.monitoring.progress import count_step

__all__ = ["Reducer"]


class _Mode(enum.Enum):
    """What the last forward announced for the gradients that come next."""

    REDUCE = enum.auto()
    ACCUMULATE = enum.auto()
    IDLE = enum.auto()  # nothing: they were computed without the wrapper's forward


class _Pass:
    """The end of one backward pass, for the engine to call. Dropped without having been called, the pass has failed."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer: Reducer | None = reducer

    def __call__(self) -> None:
        reducer, self._reducer = self._reducer, None
        assert reducer is not None
        reducer._finish()

    def __del__(self) -> None:
        if self._reducer is not None:
            reducer = self._reducer
            reducer.fail(f"its backward pass raised an exception ({reducer.not_ready()})")


class _Forward:
    """A forward pass whose gradients shall be reduced, until a backward pass has reached one of its outputs.

    `is_opaque`: its outputs could not be found, so any backward pass may be its own.
    """

    def __init__(self, *, is_opaque: bool = False) -> None:
        self.is_open = True
        self.is_opaque = is_opaque


class Reducer:
    """Owns the buckets of one module, the hooks on its parameters and the state of the running backward pass.

    `named` are the module's parameters in the order of registration, which all ranks share; those that do not require
    a gradient now are only watched. `sparse` names those with sparse gradients. With `as_views`, gradients in flat
    buckets stay views of them. With `with_checksum`, every pass compares the weights.
    Backward passes of one module must not run in two threads at once.
    """

    def __init__(
        self,
        channel: Channel,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        roster: Roster,
        limits: BucketLimits,
        *,
        sparse: frozenset[str],
        as_views: bool,
        with_checksum: bool,
    ) -> None:
        self._channel = channel
        self._group = channel.group
        self._place = channel.whereabouts
        self._roster = roster
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self._members = [Member(index, name, parameter) for index, (name, parameter) in enumerate(trained)]
        self._frozen = [(name, parameter) for name, parameter in named if not parameter.requires_grad]
        everything = [Member(index, name, parameter) for index, (name, parameter) in enumerate(named)]
        self._checksum = WeightChecksum(everything) if with_checksum else None
        self._lineup = Lineup(
            channel,
            self._members,
            [member.index for member in self._members if member.name in sparse],
            limits,
            as_views=as_views,
            say=self._word,
        )
        self.has_hook = False
        self._is_closed = False
        self.divides_by_active = False  # whether only ranks that have not joined count in the average
        self.optimizers: OptimizersInBackward | None = None
        self.buffer_hook: BufferHook | None = None

        self._mode = _Mode.IDLE
        self._running = False
        self._unsettled = False  # whether a failed pass of this rank is still on its way
        self._touched: dict[int, None] = {}  # has a gradient since the last reduction, in order of arrival
        self._last_absent: frozenset[int] = frozenset()
        self._forwards: list[_Forward] = []
        self._weight: float | None = None
        self._has_joined = False
        self._had_foreign_leaf = False  # in the last forward, in the place of a parameter
        self._late: list[tuple[str, torch.nn.Parameter]] = []
        self._problem: DdpError | None = None  # why this rank's pass will count as failed
        self._graphs: GraphKeeper | None = None
        # In the first pass nothing leaves early: it shows which gradients become ready more than once.
        self._is_first = True
        self._arrived: set[int] = set()
        self._repeated: set[int] = set()
        self._holds = False  # whether all buckets wait for the end of the running pass
        self._warned: set[str] = set()
        # The nodes stay alive as long as somebody holds them: autograd only knows them weakly.
        self._nodes: list[Node] = []
        self.handles: list[RemovableHandle] = []
        self._hooks_beside: list[Any] = []  # an ordered dict for each parameter, and the key of ours
        self._hook_ids: list[int] = []
        for member in self._members:
            self._watch(member)

    def close(self) -> None:
        """Remove the hooks: the wrapper is gone, or leaves the group."""
        self._is_closed = True
        while self.handles:
            self.handles.pop().remove()
        self._place.close()

    def use_hook(self, hook: CommHook) -> None:
        """Let `hook` reduce the buckets, from the next pass on. Raises BackwardError if there is one already."""
        if self.has_hook:
            raise BackwardError(
                "register_comm_hook or register_builtin_comm_hook can only be called once. compression= registers one "
                "too; wrap the module again for another hook"
            )
        self.has_hook = True
        self._lineup.use_hook(hook)

    def plan_state(self) -> dict[str, list[str]]:
        """The plan in names, to go on with the same buckets after a restart."""
        return {
            "order": [self._members[index].name for index in self._lineup.order],
            "repeated": [self._members[index].name for index in sorted(self._repeated)],
        }

    def load_plan_state(self, state: Mapping[str, Sequence[str]]) -> None:
        """Plan as `plan_state` says. Every rank must do it, between passes. Raises CheckpointError for other names."""
        index_of = {member.name: member.index for member in self._members}
        mine = {self._members[index].name for index in self._lineup.order}
        if set(state["order"]) != mine:
            odd = sorted(mine ^ set(state["order"]))[0]
            raise CheckpointError(
                f"the checkpoint's buckets are of another model: {odd!r} is trained only "
                f"{'here' if odd in mine else 'there'}"
            )
        self.settle()
        self._is_first = False
        self._repeated = {index_of[name] for name in state["repeated"]}
        self._lineup.end()
        self._lineup.plan([index_of[name] for name in state["order"]], repeated=self._repeated)

    @property
    def order(self) -> list[int]:
        """The order of the parameters in the plan, which all ranks share."""
        return self._lineup.order

    def _watch(self, member: Member) -> None:
        self._nodes.append(get_gradient_edge(member.parameter).node)
        register = member.parameter.register_post_accumulate_grad_hook
        handle = register(self._hook(member))  # type: ignore[no-untyped-call]  # torch has no types here
        self.handles.append(handle)
        self._hooks_beside.append(member.parameter._post_accumulate_grad_hooks)
        self._hook_ids.append(handle.id)

    # Before backward

    def enter_forward(self, module: torch.nn.Module) -> None:
        """A forward pass of the wrapper around `module` begins. Raises BackwardError if that has other parameters."""
        self.settle()
        self._roster = self._roster.follow(module)
        self._place.at("in forward")

    def prepare(self, outputs: Iterator[torch.Tensor], *, is_syncing: bool, is_training: bool) -> None:
        """Announce a forward pass with gradients: those of its backward will be reduced, or only accumulated.

        A backward through any of `outputs` takes part in a reduction even if it reaches no parameter on
        this rank.
        """
        if not is_syncing:
            self._mode = _Mode.ACCUMULATE
            return
        self._mode = _Mode.REDUCE
        self._be_last()
        forward = _Forward(is_opaque=True)
        on_grad = self._output_hook(forward)
        for output in outputs:
            forward.is_opaque = False
            if output.grad_fn is not None:  # a hook on a leaf would outlive the graph
                output.register_hook(on_grad)  # type: ignore[no-untyped-call]  # torch has no types here
        if is_training:
            self._forwards.append(forward)
        self._had_foreign_leaf = self._roster.has_foreign_leaf()
        self._place.at("between forward and backward")

    def _be_last(self) -> None:
        """Let hooks that the user registered after wrapping run before ours, which sends what they leave."""
        if max(map(len, self._hooks_beside)) > 1:
            for hooks, own in zip(self._hooks_beside, self._hook_ids, strict=True):
                if own in hooks:  # torch goes by the order of insertion, which move_to_end() does not change
                    hooks[own] = hooks.pop(own)

    def is_inside_backward(self) -> bool:
        """Whether a backward pass runs that will be reduced, in this thread: a forward now is a checkpoint's."""
        return self._running and torch._C._current_graph_task_id() != -1

    def settle(self) -> None:
        """Wait for what a failed pass of this rank left on its way. Every rank's next pass begins after it."""
        if self._running and torch._C._current_graph_task_id() == -1:
            self.fail("its backward pass was interrupted")
        if self._unsettled:
            self._unsettled = False
            self._lineup.wait()
            self._lineup.end()
            self._place.step += 1

    @property
    def is_announced(self) -> bool:
        """Whether the next backward pass will be reduced: the other ranks wait for it."""
        return self._mode is _Mode.REDUCE

    def add_weight(self, weight: float) -> None:
        """Count `weight` for the gradients that the next backward pass adds to those of this rank."""
        self._weight = (self._weight or 0.0) + weight

    def reduce_alone(self) -> None:
        """Take part in the reduction that the last forward announced, without a backward pass of this rank."""
        if self._mode is _Mode.REDUCE and not self._running:
            for forward in self._forwards[-1:]:
                forward.is_open = False
            self._start()
            self._finish()

    def keep_company(self) -> None:
        """Take part in a reduction of the others with nothing: this rank has no more inputs (Join).

        It gets the averages too: an optimizer that is shared between the ranks steps here with them.
        """
        self.settle()
        self._drop_gradients()
        self._has_joined = True
        self._start()
        self._finish()

    def fail(self, why: str) -> None:
        """End this rank's part in the running or announced pass: the others raise PeerFailedError in theirs.

        Does not block and never raises, since a destructor calls it.
        """
        self._place.tell_failure(self._place.step, why)
        self._is_first = True
        self._drop_gradients()
        try:
            self._lineup.send_nothing(Word(failed=True))
            self._unsettled = True
        except Exception:  # a hook's again, or the group is broken: the others find out by waiting
            self._lineup.end()
        self._reset()

    # During backward

    def _hook(self, member: Member) -> Callable[[torch.Tensor], None]:
        """The hook of one parameter: the only Python code that runs once for each parameter, so every lookup counts."""
        index, touched, transfer_of = member.index, self._touched, self._lineup.transfer_of

        def on_grad(_: torch.Tensor) -> None:
            touched[index] = None
            if not self._running and not self._may_begin():
                return
            if self._holds:
                self._note_arrival(index)
                return
            transfer = transfer_of[index]
            if index in transfer.taken_early:
                transfer.take_early(index)
            transfer.missing.discard(index)
            if not transfer.missing:
                if transfer.work is not None:
                    raise ready_twice(member)
                self._lineup.send_complete(touched)

        return on_grad

    def _note_arrival(self, index: int) -> None:
        if index in self._arrived:
            self._repeated.add(index)  # a parameter in several reentrant checkpoints
        self._arrived.add(index)

    def _output_hook(self, forward: _Forward) -> Callable[[torch.Tensor], None]:
        """The hook of what a forward pass returned."""

        def on_grad(_: torch.Tensor) -> None:
            if self._is_closed:
                raise BackwardError(
                    "the DistributedDataParallel that made this output was deleted before backward, so gradients would "
                    "not be averaged: keep it as long as you train"
                )
            forward.is_open = False
            if not self._running and self._accumulates():
                self._begin()

        return on_grad

    def _accumulates(self) -> bool:
        """Whether the running backward pass leaves gradients in `.grad`; `torch.autograd.grad()` does not."""
        will_execute = torch._C._will_engine_execute_node
        try:
            if any(map(will_execute, self._nodes)):
                return True
        except RuntimeError:  # a leaf whose gradient is captured: what torch.autograd.grad() does
            self._warn(
                "torch.autograd.grad() returns the gradients of this rank's parameters alone: nothing averages them. "
                "Use backward(), or average what it returns, unless that is what you want"
            )
            return False
        try:
            return any(map(will_execute, _leaves_below(torch._C._current_autograd_node())))
        except RuntimeError:  # the same of a leaf that is no parameter: a gradient penalty, say
            return False

    def _may_begin(self) -> bool:
        if self._mode is _Mode.REDUCE:
            self._begin()
            return True
        if self._mode is _Mode.IDLE:
            self._warn(
                "gradients came from a backward pass that did not go through the forward of DistributedDataParallel "
                "(model.module(x) instead of model(x)?): they stay on this rank until the next pass that does"
            )
        return False

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=2)

    def _begin(self) -> None:
        if torch.is_grad_enabled():
            self._graphs = GraphKeeper()  # backward(create_graph=True)
        compiled = sys.modules.get("torch._dynamo.compiled_autograd")
        if compiled is not None and getattr(compiled, "in_compiled_autograd_region", False):
            raise UnsupportedError(
                "compiled autograd is not supported, gradients would not be averaged: turn "
                "torch._dynamo.config.compiled_autograd off; torch.compile itself may stay"
            )
        self._start()
        Variable._execution_engine.queue_callback(_Pass(self))
        if self._last_absent:
            self._expect_absent()

    def _start(self) -> None:
        self._problem = self._roster.problem()
        if self._problem is not None:
            self._place.tell_failure(self._place.step, str(self._problem))
        elif self._had_foreign_leaf:  # and it is no parameter any more, or problem() would have named it
            self._warn(
                "a forward pass used other tensors in the place of parameters (torch.func.functional_call?): their "
                "gradients stay on this rank"
            )
        self._late = self._unfrozen()
        if self._checksum is not None:
            self._checksum.take()
        opaque = [forward for forward in self._forwards if forward.is_opaque and forward.is_open]
        if opaque:
            opaque[-1].is_open = False
        self._lineup.begin()
        self._holds = self._is_first or self._graphs is not None or self._problem is not None
        self._running = True
        self._place.at("in backward", self._lineup.not_ready)

    def not_ready(self) -> str:
        """Which gradients of this rank its running pass still waits for."""
        return self._lineup.not_ready()

    def _unfrozen(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(name, parameter) for name, parameter in self._frozen if parameter.requires_grad]

    def _expect_absent(self) -> None:
        """Do not let buckets wait for parameters that this pass will not reach, if they were absent last time too.

        Only the engine knows which it will reach, and even it does not see into reentrant checkpoints; so
        a parameter that had a gradient last time is waited for.
        """
        will_execute = torch._C._will_engine_execute_node
        unreached = frozenset(index for index, node in enumerate(self._nodes) if not will_execute(node))
        if unreached <= self._last_absent:
            for index in unreached:
                self._lineup.transfer_of[index].missing.discard(index)

    def _note_taken_gradients(self) -> None:
        """Refuse what a hook of the user took away between its arrival and now."""
        for index in self._lineup.absent():
            member = self._members[index]
            if index not in self._touched or member.parameter.grad is not None:
                continue
            if len(self._hooks_beside[index]) < 2:
                continue  # autograd calls the hook also for a gradient that a custom function left undefined
            if index in self._arrived if self._holds else index not in self._lineup.transfer_of[index].missing:
                self._problem = BackwardError(
                    f"the gradient of {member.name!r} was taken away before it was averaged, in a hook that sets .grad "
                    "to None: for an optimizer that steps in backward use "
                    "torch.distributed.optim._apply_optimizer_in_backward, which is known here",
                    parameter=member.name,
                )
                self._place.tell_failure(self._place.step, str(self._problem))
                return

    def _word(self) -> Word:
        if self._problem is None:
            self._note_taken_gradients()
        return Word(
            failed=self._problem is not None,
            joined=self._has_joined,
            weight=self._weight,
            open_forwards=sum(forward.is_open for forward in self._forwards),
            late=len(self._late),
            number=self._channel.number,
            digest=0 if self._checksum is None else self._checksum.digest(),
        )

    # At its end

    @torch.no_grad()
    def _finish(self) -> None:
        try:
            if self._graphs is not None:
                self._graphs.set_aside(self._members[index] for index in self._touched)
            if self._problem is None:
                self._lineup.send_rest(self._touched)
            else:
                self._lineup.send_nothing(self._word())
        except BaseException as error:
            self.fail(describe_failure("the end of its backward pass", error))
            raise
        try:
            if self.buffer_hook is not None:
                self.buffer_hook.wait()
            self._conclude(self._lineup.wait())
        except BaseException:
            self._drop_gradients()
            raise
        finally:
            self._place.step += 1
            self._lineup.end()
            self._reset()
        count_step()

    def _conclude(self, tally: Tally) -> None:
        """Do what the ranks' verdict says: every rank does the same."""
        if tally.failed:
            self._is_first = True  # learn anew what becomes ready when
        if self._problem is not None:
            raise self._problem
        if tally.failed:
            raise peers_failed(self._place, tally.failed)
        if not tally.same_number:
            raise numbers_differ(self._group, self._channel.number)
        if not tally.same_forwards:
            raise forwards_differ(self._group, self._word().open_forwards)
        if tally.weighted not in (0, tally.active) or (tally.weighted and not tally.weight > 0):
            raise weights_differ(self._group, self._weight)
        if self._checksum is not None and not tally.same_digest:
            raise self._checksum.compare(self._group, self._place.step + 1)
        factor = 1.0
        if tally.weighted:
            factor = self._group.size() / tally.weight
        elif self.divides_by_active:
            factor = self._group.size() / tally.active
        self._lineup.deliver(factor)
        self._last_absent = frozenset(self._lineup.absent())
        if self._is_first:
            self._follow_first_pass()
        if tally.late:
            self._take_in(average_late(self._group, self._late, factor))
        if self._graphs is not None:
            self._graphs.restore(self._output_hook(_Forward()))
        if self.optimizers is not None:
            self.optimizers.step()

    def leave_company(self) -> None:
        """Forget the averages of passes in which this rank only kept the others company."""
        self._drop_gradients()

    def _get_local_used_map(self) -> torch.Tensor:
        """Of torch's reducer: how many ranks had a gradient in the last pass, for each parameter."""
        return self._lineup.used_map()

    def _rebuild_buckets(self) -> bool:
        """Of torch's reducer, which Lightning calls: there is never anything to do."""
        return False

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        """Of torch's reducer, which Lightning calls: the backward pass that follows is reduced."""
        self.prepare(iter(outputs), is_syncing=True, is_training=False)

    def _drop_gradients(self) -> None:
        """Set every `.grad` to None: what is in there is neither this rank's gradient nor an average."""
        for parameter in (*(member.parameter for member in self._members), *(late for _, late in self._unfrozen())):
            parameter.grad = None

    def _reset(self) -> None:
        self._touched.clear()
        self._forwards.clear()
        self._late = []
        self._arrived.clear()
        self._weight = self._problem = self._graphs = None
        self._has_joined = False
        self._mode = _Mode.IDLE
        self._running = False
        self._place.at("outside forward and backward")

    # The plan

    def _follow_first_pass(self) -> None:
        """Plan again in the order in which the gradients arrived on rank 0."""
        self._is_first = False
        before = self._lineup.order
        known = frozenset(before)
        arrived = [index for index in self._touched if index in known]
        order = torch.tensor([*arrived, *(index for index in before if index not in self._touched)])
        order = order.to(device=self._members[0].parameter.device)
        broadcast_tensors(self._group, [order])
        if order.tolist() != before or self._repeated:
            self._lineup.end()
            self._lineup.plan(order.tolist(), repeated=self._repeated)

    def _take_in(self, unfrozen: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        """Reduce these like all others from now on."""
        taken = {id(parameter) for _, parameter in unfrozen}
        self._frozen = [(name, parameter) for name, parameter in self._frozen if id(parameter) not in taken]
        new = [Member(len(self._members) + at, name, parameter) for at, (name, parameter) in enumerate(unfrozen)]
        self._members += new
        for member in new:
            self._watch(member)
        self._lineup.end()
        self._lineup.plan([*self._lineup.order, *(member.index for member in new)], repeated=self._repeated)


def _leaves_below(node: Node | None) -> Iterator[Node]:
    """The nodes that accumulate into leaves, among those that `node` leads to."""
    seen, stack = {node}, [node]
    while stack:
        current = stack.pop()
        if current is None:
            continue
        following = [next_node for next_node, _ in current.next_functions]
        if not following and hasattr(current, "variable"):
            yield current
        for next_node in following:
            if next_node not in seen:
                seen.add(next_node)
                stack.append(next_node)
