"""Averages gradients over the ranks while backward still runs.

One hook for each parameter tells when its gradient is there. When all gradients of a bucket are, its
all-reduce starts, always in the order of the plan, so that every rank starts the same collectives in the
same order. A callback at the end of backward starts what is left, waits, and puts the averages into place.

A parameter without a gradient on this rank contributes zeros. The last bucket carries one number for each
parameter that says how many ranks had a gradient for it: a parameter that no rank used keeps the gradient
it had, or None.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ddp.broadcast import broadcast_tensors
from ddp.buckets import BucketLimits, plan_buckets, spec_of
from ddp.errors import BackwardError, CollectiveError, UnsupportedError
from ddp.flat import FlatTransfer
from ddp.progress import count_step
from ddp.transfer import Adder, Member, OwnTransfer, ready_twice

__all__ = ["Reducer"]

Transfer = OwnTransfer | FlatTransfer


class _Mode(enum.Enum):
    """What the last forward announced for the gradients that come next."""

    REDUCE = enum.auto()
    ACCUMULATE = enum.auto()
    IDLE = enum.auto()  # nothing: they were computed without the wrapper's forward


class Reducer:
    """Owns the buckets of one module, the hooks on its parameters and the state of the running backward pass.

    `named` are the module's parameters in the order of registration, which all ranks of `group` share; those that
    do not require a gradient now are only watched. With `as_views`, gradients in flat buckets stay views of them.
    Backward passes of one module must not run in two threads at once.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        limits: BucketLimits,
        *,
        as_views: bool,
    ) -> None:
        self._group = group
        self._limits = limits
        self._as_views = as_views
        self._adder = Adder(group)
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self._frozen = [(name, parameter) for name, parameter in named if not parameter.requires_grad]
        self._members = [Member(index, name, parameter) for index, (name, parameter) in enumerate(trained)]
        # The nodes stay alive as long as somebody holds them: autograd only knows them weakly.
        self._nodes = [get_gradient_edge(member.parameter).node for member in self._members]

        self._mode = _Mode.IDLE
        self._running = False
        self._next = 0  # the first transfer that has not been sent in this backward pass
        self._touched: dict[int, None] = {}  # has a gradient since the last reduction, in order of arrival
        self._absent: list[int] = []
        self._last_absent: frozenset[int] = frozenset()
        self._has_arrival_order = False
        self._has_warned = False
        self._transfers: list[Transfer] = []
        self._transfer_of: list[Transfer] = []
        self._plan(list(reversed(range(len(self._members)))))
        self.handles: list[RemovableHandle] = []
        for member in self._members:
            register = member.parameter.register_post_accumulate_grad_hook
            self.handles.append(register(self._hook(member)))  # type: ignore[no-untyped-call]  # torch has no types here

    def prepare(self, outputs: Iterator[torch.Tensor], *, is_syncing: bool) -> None:
        """Announce a forward pass with gradients: those of its backward will be reduced, or only accumulated.

        A backward through any of `outputs` takes part in a reduction even if it reaches no parameter on
        this rank.
        """
        if self._running:
            if torch._C._current_graph_task_id() != -1:
                return  # a forward inside backward: activation checkpointing
            raise BackwardError(
                "the last backward pass of this module ended with an error before its gradients were reduced, so the "
                "ranks may be out of step: start again from a checkpoint (this version cannot continue after it)"
            )
        if not is_syncing:
            self._mode = _Mode.ACCUMULATE
            return
        self._mode = _Mode.REDUCE
        for output in outputs:
            if output.grad_fn is not None:  # a hook on a leaf would outlive the graph
                output.register_hook(self._on_output_grad)  # type: ignore[no-untyped-call]  # torch has no types here

    # During backward

    def _hook(self, member: Member) -> Callable[[torch.Tensor], None]:
        """The hook of one parameter: the only Python code that runs once for each parameter, so every lookup counts."""
        index, touched, transfer_of = member.index, self._touched, self._transfer_of

        def on_grad(_: torch.Tensor) -> None:
            touched[index] = None
            if not self._running and not self._may_begin():
                return
            transfer = transfer_of[index]
            if index in transfer.taken_early:
                transfer.take_early(index)
            transfer.missing.discard(index)
            if not transfer.missing:
                self._advance(member)

        return on_grad

    def _on_output_grad(self, _: torch.Tensor) -> None:
        if not self._running and self._accumulates():
            self._begin()

    def _accumulates(self) -> bool:
        """Whether the running backward pass leaves gradients in `.grad`; `torch.autograd.grad()` does not."""
        will_execute = torch._C._will_engine_execute_node
        try:
            if any(map(will_execute, self._nodes)):
                return True
            return any(map(will_execute, _leaves_below(torch._C._current_autograd_node())))
        except RuntimeError:  # a leaf whose gradient is captured: what torch.autograd.grad() does
            return False

    def _may_begin(self) -> bool:
        if self._mode is _Mode.REDUCE:
            self._begin()
            return True
        if self._mode is _Mode.IDLE and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "gradients came from a backward pass that did not go through the forward of DistributedDataParallel "
                "(model.module(x) instead of model(x)?): they stay on this rank until the next pass that does",
                stacklevel=2,
            )
        return False

    def _begin(self) -> None:
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "backward(create_graph=True) is not supported: the reduced gradients have no graph. "
                "Use torch.autograd.grad(..., create_graph=True), then backward() of a loss that uses its result"
            )
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise BackwardError(
                    f"parameter {name!r} was frozen when it was wrapped and requires a gradient now, which would not "
                    "be reduced: wrap the module in DistributedDataParallel again after unfreezing",
                    parameter=name,
                )
        for transfer in self._transfers:
            transfer.begin()
        self._running = True
        self._next = 0
        Variable._execution_engine.queue_callback(self._finish)
        if self._last_absent:
            self._expect_absent()

    def _expect_absent(self) -> None:
        """Do not let buckets wait for parameters that this pass will not reach, if they were absent last time too.

        Only the engine knows which it will reach, and even it does not see into reentrant checkpoints; so
        a parameter that had a gradient last time is waited for.
        """
        will_execute = torch._C._will_engine_execute_node
        unreached = frozenset(index for index, node in enumerate(self._nodes) if not will_execute(node))
        if unreached <= self._last_absent:
            for index in unreached:
                self._transfer_of[index].missing.discard(index)

    def _advance(self, member: Member) -> None:
        """Send every bucket whose turn it is and which is complete."""
        if self._transfer_of[member.index].work is not None:
            raise ready_twice(member)
        while self._next < len(self._transfers) and not self._transfers[self._next].missing:
            self._send_next()

    def _send_next(self) -> None:
        transfer = self._transfers[self._next]
        self._absent += transfer.gather(self._touched)
        if transfer is self._carrier:
            self._carrier.mark(self._absent)
        transfer.send()
        self._next += 1

    # At its end

    @torch.no_grad()
    def _finish(self) -> None:
        while self._next < len(self._transfers):
            self._send_next()
        self._wait()
        # Only a rank that lacks a gradient must know what the others had, and wait for the device to learn it.
        used = self._carrier.used_among(self._absent) if self._absent else frozenset()
        for transfer in self._transfers:
            transfer.deliver(used)
        self._last_absent = frozenset(self._absent)
        if not self._has_arrival_order:
            self._follow_arrival_order()
        self._touched.clear()
        self._absent.clear()
        self._mode = _Mode.IDLE
        self._running = False
        count_step()

    def _wait(self) -> None:
        for position, transfer in enumerate(self._transfers):
            assert transfer.work is not None
            try:
                transfer.work.wait()
            except RuntimeError as error:
                rank = self._group.rank()
                what = f"all-reduce of bucket {position + 1} of {len(self._transfers)}"
                raise CollectiveError(
                    f"rank {rank} of {self._group.size()}: the {what} (gradients of {transfer.label}) failed, "
                    f"most likely because another rank is gone; see its output. {error}",
                    rank=rank,
                    what=what,
                ) from error

    # The plan

    def _plan(self, order: Sequence[int]) -> None:
        specs = [spec_of(index, self._members[index].parameter) for index in order]
        self._order = list(order)
        self._transfers.clear()
        self._transfer_of[:] = [None] * len(specs)  # type: ignore[list-item]  # filled below
        for plan in plan_buckets(specs, self._limits):
            members = [self._members[slot.spec.index] for slot in plan.slots]
            transfer: Transfer
            if plan.is_own:
                transfer = OwnTransfer(plan, members, self._adder)
            else:
                transfer = self._carrier = FlatTransfer(plan, members, self._adder, as_views=self._as_views)
            self._transfers.append(transfer)
            for member in members:
                self._transfer_of[member.index] = transfer

    def _follow_arrival_order(self) -> None:
        """After the first reduction, plan again in the order in which the gradients arrived on rank 0."""
        self._has_arrival_order = True
        arrived = [*self._touched, *(index for index in self._order if index not in self._touched)]
        order = torch.tensor(arrived, device=self._members[0].parameter.device)
        broadcast_tensors(self._group, [order])
        if order.tolist() != self._order:
            self._plan(order.tolist())


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
