"""The sums of one module's gradients over the ranks, in buckets, in the order in which every rank starts them.

The reducer opens a pass, adds the hooks that say which gradients are ready, and says when backward has ended. This
module starts, awaits and delivers the buckets, including the step status, with the operations of a process group. It
plans them again when the order or the parameters change.

The plan of buckets is the same on every rank, and so are the bits of sums that depend on it. It follows the order of
gradients in the first pass that succeeds; a later failure does not change it.
"""

from __future__ import annotations

import cmath
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from ddp.comm.broadcast import broadcast_tensors
from ddp.comm.channel import Channel
from ddp.comm.combine import is_narrow
from ddp.comm.failures import changing_together
from ddp.comm.sums.small_sum import SmallAdder
from ddp.data.micro_batch import MicroBatch
from ddp.data_parallel.buckets.bucket_plan import (
    BucketLimits,
    BucketPlan,
    GradSpec,
    Member,
    plan_buckets,
    spec_of,
)
from ddp.data_parallel.buckets.comm_hook import CommHook, GradBucket, HookSender
from ddp.data_parallel.buckets.step_status import HEADER_NUMEL, RankStatus, StatusSum, read, used_among, write
from ddp.data_parallel.buckets.transfers import (
    AT_THE_END,
    Adder,
    FlatTransfer,
    OwnTransfer,
    Sender,
    Transfer,
    has_own_memory,
    ready_twice,
)
from ddp.data_parallel.buckets.unbucketed import average_sparse
from ddp.errors import BackwardError, CheckpointError
from ddp.monitoring import timeline
from ddp.monitoring.interrupts import is_interrupt
from ddp.torch_internals import version_of

_PROBED_NUMEL = 1 << 16
_SMALL_NUMEL = 1 << 12  # summed in 2 us


class GradientSums:
    """Sums of the gradients of `members`. With `as_views`, gradients in flat buckets stay views of them.

    `sparse` are the indices of members whose gradients are sparse: they are in no bucket. `own_status` returns this
    rank's status; it is called before the last bucket is sent. With `by_tree` the bits of a sum depend on the ranks
    alone (`ddp.comm.sums.tree_sum`); None: if the group prefers that.
    """

    def __init__(
        self,
        channel: Channel,
        members: list[Member],
        sparse: Collection[int],
        *,
        limits: BucketLimits,
        as_views: bool,
        by_tree: bool | None,
        own_status: Callable[[], RankStatus],
    ) -> None:
        self.is_open = False  # whether a pass sums the gradients that become ready now: set by the reducer
        self.holds = False  # whether its buckets wait for the end of backward
        self.arrived: dict[int, Any] = {}  # when its gradients were ready, if it holds, by index
        # Members with gradients since the last reduction, over all backward passes, in order of arrival.
        self.touched: dict[int, None] = {}
        self.is_planned = False  # by the order in which gradients arrive; the same on every rank
        self.order: list[int] = []
        self.specs: list[GradSpec] = []  # of the gradients, in this order
        self._state: dict[str, Any] = {}  # the plan in names and numbers; without sizes if these are `limits`
        self.is_finite = True  # the probed gradients, on this rank, since the last reduction
        self.spoilt_by: int | None = None  # the first micro-batch whose gradients are not
        self._found_twice: set[int] = set()  # members whose gradients became ready twice in a pass
        self._repeated: frozenset[int] = frozenset()  # those that the plan knows
        self._last_absent: frozenset[int] = frozenset()
        self._channel = channel
        self._members = members
        self._sparse = [members[index] for index in sorted(sparse)]
        self.limits = self._first_limits = limits
        self._as_views = as_views
        self._by_tree = by_tree
        self._own_status = own_status
        self._hook: CommHook | None = None
        self._transfer_of: list[Transfer] = []  # by index; never replaced, since the hooks hold this list
        self._transfers: list[Transfer] = []
        self._next = 0  # the first transfer that has not been sent in this pass
        self._absent: list[int] = []  # members without a gradient of this rank in this pass
        self._before: dict[int, None] = {}  # those with one in earlier micro-batches of the step
        self._sparse_rows: dict[int, list[torch.Tensor]] = {}  # sparse gradients of these micro-batches, by index
        self._has_older = False  # whether `.grad` has the gradients of the micro-batch before, to be added to
        self._older: list[tuple[Member, torch.Tensor, int]] = []  # these, and their versions
        self._adds_once = False  # whether backward adds to each `.grad` once, as far as passes have shown
        self._statuses = torch.empty(0, device="cpu")  # the last step status
        self.plan([index for index in reversed(range(len(members))) if index not in sparse])

    def hook(
        self, member: Member, at_first: Callable[[], bool], now: Callable[[], Any]
    ) -> Callable[[torch.Tensor], None]:
        """Return the hook for a gradient: the only Python code that runs per parameter, so every lookup counts.

        `at_first` is called for a gradient while no pass is open, and returns whether it has opened one.
        """
        index, touched, transfer_of = member.index, self.touched, self._transfer_of

        def on_grad(_: torch.Tensor) -> None:
            touched[index] = None
            if not (self.is_open or at_first()):
                return
            if self.holds:
                if index in self.arrived:
                    self._found_twice.add(index)  # a parameter in several reentrant checkpoints
                self.arrived[index] = now()
                return
            transfer = transfer_of[index]
            if index in transfer.taken_early:
                transfer.take_early(index)
            transfer.missing.discard(index)
            if not transfer.missing:
                if transfer.work is not None:
                    raise ready_twice(member)
                self._send_complete()

        return on_grad

    # The plan

    def plan(self, order: Sequence[int]) -> None:
        """Plan the buckets for gradients that become ready in this order. Every rank must call it between passes.

        Buckets with a gradient that became ready twice in a pass are sent at the end of backward.
        """
        self.end()
        self._repeated = frozenset(self._found_twice)
        self.order = list(order)
        self.specs = [spec_of(index, self._members[index].parameter) for index in order]
        plans = self.plans_for(self.limits)
        self._transfers = [self._transfer(index, plan, len(plans)) for index, plan in enumerate(plans)]
        carrier = self._transfers[-1]
        assert isinstance(carrier, FlatTransfer)
        self._carrier = carrier
        # Sparse gradients are in no bucket and complete none: any bucket sent at the end of backward will do.
        self._transfer_of[:] = [carrier] * len(self._members)
        for transfer in self._transfers:
            for member in transfer.members:
                self._transfer_of[member.index] = transfer
            transfer.hold_back(self._repeated)
        # A non-finite value in the loss or in backward spreads to later gradients: a small one near the end shows it.
        # Gradients on a device are not probed: the host would wait.
        on_host = [self._members[index] for index in order if self._members[index].parameter.device.type == "cpu"]
        small = [member for member in on_host if member.parameter.numel() <= _SMALL_NUMEL]
        smallest = min(on_host, key=lambda member: member.parameter.numel(), default=None)
        self._probe = small[-1] if small else smallest
        names = {
            "order": [self._members[index].name for index in order],
            "sparse": [each.name for each in self._sparse],
        }
        sizes = {} if self.limits == self._first_limits else {"limits": dataclasses.asdict(self.limits)}
        self._state = {**names, **sizes}

    def plans_for(self, limits: BucketLimits, *, compressed: bool = False) -> tuple[BucketPlan, ...]:
        """Return the buckets for `limits` in launch order, without a change. `compressed`: as with compression."""
        if self._hook is not None and not self._hook.takes_own:
            limits = dataclasses.replace(limits, own_bytes=None)
        return plan_buckets(
            self.specs,
            limits,
            status_numel=HEADER_NUMEL + len(self._members),
            status_alone=compressed
            or self._hook is not None
            or any(member.parameter.device.type != "cpu" for member in self._members),
        )

    def use_limits(self, limits: BucketLimits) -> None:
        """Close buckets at other sizes from now on. Every rank must call it between passes."""
        self.limits = limits
        self.plan(self.order)

    def follow_order(self) -> None:
        """Plan again, if need be: after the first pass, in the order in which its gradients arrived on rank 0.

        Every rank must call it after `deliver`; collective after the first pass.
        """
        before = self.order
        self._last_absent = frozenset(self._absent)
        self._adds_once = not self._found_twice
        if self.is_planned:
            if self._found_twice != self._repeated:
                self.plan(before)
            return
        known = frozenset(before)
        arrived = [index for index in self.touched if index in known]
        order = torch.tensor([*arrived, *(index for index in before if index not in self.touched)], device="cpu")
        with self._channel.report.waiting("broadcast of the order of gradients"):
            broadcast_tensors(self._channel.control, [order])
        with changing_together(self._channel):
            if order.tolist() != before or self._found_twice:
                self.plan(order.tolist())
        self.is_planned = True

    def add(self, members: Sequence[Member]) -> None:
        """Sum these new members, which are last in the list of all, like the others from now on."""
        self.plan([*self.order, *(member.index for member in members)])

    def plan_state(self) -> dict[str, Any]:
        """Return the plan of the next pass in names, to keep the same buckets after a restart. Do not modify it."""
        return {**self._state, "is_planned": self.is_planned}

    def has_members_of(self, state: Mapping[str, Any]) -> bool:
        """Return whether a plan is of these members, with the same ones sparse."""
        return all({*state[kind]} == {*self._state[kind]} for kind in ("order", "sparse"))

    def load_plan_state(self, state: Mapping[str, Any]) -> None:
        """Load a plan. Every rank must call it, between passes. Raises CheckpointError if it is of other parameters."""
        mine = {self._members[index].name for index in self.order}
        if set(state["order"]) != mine:
            odd = sorted(mine ^ set(state["order"]))[0]
            raise CheckpointError(
                f"the checkpoint's buckets are of another model: {odd!r} is trained only "
                f"{'here' if odd in mine else 'there'}"
            )
        index_of = {member.name: member.index for member in self._members}
        if (limits := state.get("limits")) is not None:
            firsts = tuple(map(int, limits["first_caps_bytes"]))
            self.limits = BucketLimits(limits["cap_bytes"], firsts, limits["own_bytes"], limits.get("piece_bytes"))
        self.is_planned = state["is_planned"]
        self.plan([index_of[name] for name in state["order"]])

    def _transfer(self, index: int, plan: BucketPlan, count: int) -> Transfer:
        members = [self._members[slot.spec.index] for slot in plan.slots]
        sender: Sender
        if not members:
            sender = SmallAdder(self._channel.control)
        elif self._hook is None:
            sender = Adder(self._channel.group, plan.device, self.limits.piece_bytes, by_tree=self._by_tree)
        else:
            sender = HookSender(self._hook, GradBucket(index, plan, members, is_last=index == count - 2), plan.numel)
        if plan.is_own:
            return OwnTransfer(plan, members, sender)
        return FlatTransfer(plan, members, sender, as_views=self._as_views)

    def use_hook(self, hook: CommHook) -> None:
        """Let `hook` reduce the buckets from now on. The step status is sent by itself."""
        self._hook = hook
        self.plan(self.order)

    @property
    def has_hook(self) -> bool:
        return self._hook is not None

    # A pass

    def keep(self, micro_batch: MicroBatch) -> None:
        """Keep the gradients of a micro-batch that is not the rank's last, as part of the step's sum."""
        self._enter(micro_batch)
        self._look_at_probe(micro_batch)
        for member in self._sparse:
            if member.index in self.touched and member.parameter.grad is not None:
                self._sparse_rows.setdefault(member.index, []).append(member.parameter.grad / micro_batch.divisor)
            member.parameter.grad = None
        self._before |= self.touched
        self._has_older = not self._has_older and self._adds_next(micro_batch)
        if self._has_older:
            return
        for transfer in self._transfers:
            if transfer.members:
                transfer.keep(self.touched)
        self.touched.clear()

    def _adds_next(self, micro_batch: MicroBatch) -> bool:
        """Return whether autograd may add the next micro-batch's gradients to those in `.grad`: the tree does so next.

        It is the quickest way, since the gradients are still in the caches.
        """
        if not self._adds_once or micro_batch.index % 2 or micro_batch.sum_divisor == 1:
            return False
        grads = [(each, grad) for each in self._members if (grad := each.parameter.grad) is not None]
        if any(is_narrow(grad.dtype) or not has_own_memory(grad) for _, grad in grads):
            return False
        self._older = [(each, grad, version_of(grad)) for each, grad in grads]
        return True

    def check_older(self, *, added: int) -> None:
        """Raise BackwardError if the gradients to be added to are not in `.grad` when a backward pass begins.

        It has `added` at most so many to them.
        """
        older, self._older = self._older, []
        for member, grad, version in older:
            added -= version_of(grad) - version
            if member.parameter.grad is not grad or added < 0:
                raise BackwardError(
                    f"the gradient of {member.name!r} was changed between two micro-batches of a step of "
                    "ddp.StepLoader: call zero_grad() once, after the optimizer's step",
                    parameter=member.name,
                )

    def _enter(self, micro_batch: MicroBatch | None) -> None:
        for transfer in self._transfers:
            transfer.micro_batch, transfer.has_older = micro_batch, self._has_older

    def open(
        self,
        *,
        holds: bool,
        is_first_new: bool,
        micro_batch: MicroBatch | None = None,
        shared: frozenset[int] = frozenset(),
    ) -> None:
        """Prepare for the gradients of a backward pass. With `holds`, all buckets wait for its end.

        `shared` are the parameters that another wrapper reduces too.
        `is_first_new`: this backward pass has made the one gradient in `touched`; others that exist are older.
        `micro_batch` is that of the pass, the last one of this rank.
        """
        self._enter(micro_batch)
        self.holds, self.arrived = holds, {}
        new = next(iter(self.touched), None) if is_first_new and len(self.touched) == 1 else None
        for transfer in self._transfers:
            transfer.shared = shared & transfer.indices
            transfer.begin(new)

    def expect_absent(self, unreached: Callable[[], frozenset[int]]) -> None:
        """Do not wait for gradients that this pass will not reach, if they were absent in the last pass too.

        Buckets do wait for a gradient that came in the last pass, since a reentrant checkpoint may reach it.
        """
        if self._last_absent and (now := unreached()) <= self._last_absent:
            for index in now:
                self._transfer_of[index].missing.discard(index)

    def _send_complete(self) -> None:
        """Send complete buckets as far as the order allows; the last one waits for the end of backward."""
        while self._next < len(self._transfers) - 1 and not self._transfers[self._next].missing:
            if self._is_chained_to_previous():
                return
            self._send_next()

    def send_rest(self) -> None:
        """Send all remaining buckets; gradients that are not ready now are absent."""
        while self._next < len(self._transfers):
            self._send_next()

    def _is_chained_to_previous(self) -> bool:
        """Return whether the previous bucket may still start collectives of its own."""
        previous = self._transfers[self._next - 1].work if self._next else None
        return self._hook is not None and self._hook.is_chained and not (previous is None or previous.is_completed())

    def _await_previous(self) -> None:
        previous = self._transfers[self._next - 1].work
        if previous is not None and self._is_chained_to_previous():
            self._channel.report.wait(previous, f"communication hook of bucket {self._next}")

    def _send_next(self) -> None:
        self._await_previous()
        transfer, touched = self._transfers[self._next], self.touched
        self._absent += transfer.gather(touched)
        if self._probe is not None and self._probe.index in transfer.indices:
            self._look_at_probe(transfer.micro_batch)
        if transfer is self._carrier:
            self._absent = [index for index in self._absent if index not in self._before]
            if self._hook is not None:  # the step status must include a hook that fails later
                self._wait_for(self._transfers[:-1])
            absent = (member.index for member in self._sparse if member.index not in touched)
            self._absent += [index for index in absent if index not in self._before]
            write(self._own_status(), self._carrier.status, self._absent)
        self._send(transfer)

    def _look_at_probe(self, micro_batch: MicroBatch | None) -> None:
        probe = self._probe
        if probe is None or probe.index not in self.touched or not self.is_finite:
            return
        if not _is_finite(probe.parameter.grad):
            self.is_finite = False
            self.spoilt_by = None if micro_batch is None else micro_batch.index

    def _send(self, transfer: Transfer) -> None:
        self._channel.report.begin("all-reduce of gradients")
        try:
            transfer.send()
        except Exception as error:
            if self._hook is not None and transfer is not self._carrier and not is_interrupt(error):
                self._channel.report.counted()  # the hook's own exception, before it has started a collective
            raise
        self._next += 1
        self._channel.report.counted()

    def send_nothing(self, status: RankStatus, micro_batch: MicroBatch | None = None) -> None:
        """Send zeros for all that has not been sent."""
        self._enter(micro_batch)
        while self._next < len(self._transfers):
            self._await_previous()
            transfer = self._transfers[self._next]
            transfer.gather_nothing()
            if transfer is self._carrier:
                write(status, self._carrier.status, ())
            self._send(transfer)

    def taken_away(self) -> list[Member]:
        """Return the members whose gradients have arrived in this pass, and do not exist any more."""
        gone = [i for i in self._absent if i in self.touched and self._members[i].parameter.grad is None]
        return [
            self._members[index]
            for index in gone
            if (index in self.arrived if self.holds else index not in self._transfer_of[index].missing)
        ]

    def wait(self) -> StatusSum:
        """Wait until everything has arrived; return the ranks' statuses. Raises CollectiveError."""
        self._wait_for(self._transfers)
        self._statuses = self._carrier.status.clone()  # does not keep the gradients in the same memory alive
        return read(self._statuses, self._channel.group.size())

    def _wait_for(self, transfers: Sequence[Transfer]) -> None:
        recorded = timeline.wait_begins()
        try:
            for number, transfer in enumerate(transfers):
                assert transfer.work is not None
                what = (
                    f"all-reduce of bucket {number + 1} of {len(self._transfers)} (gradients of {transfer.label})"
                    if transfer.members
                    else "step status at the end of backward"
                )
                timeline.wait_for(number)
                self._channel.report.wait(transfer.work, what)
        finally:
            timeline.wait_ended(recorded)

    def deliver(self, factor: float) -> None:
        """Put `factor` times the averages into `.grad`, after `wait`. Blocks for sparse gradients."""
        absent = self._absent
        sparse = [member.index for member in self._sparse]
        used = {*used_among(self._carrier.status, [*absent, *sparse]), *self._before}
        for transfer in self._transfers:
            transfer.deliver(used, factor)
        for member in self._sparse:
            if member.index in used:
                average_sparse(self._channel, member, factor, self._rows_of(member))

    def _rows_of(self, member: Member) -> list[torch.Tensor] | None:
        """Return this rank's divided gradients of a sparse member, by micro-batch; None outside of a step of them."""
        micro_batch, grad = self._carrier.micro_batch, member.parameter.grad
        if micro_batch is None:
            return None
        rows = self._sparse_rows.get(member.index, [])
        return [*rows, grad / micro_batch.divisor] if grad is not None and member.index in self.touched else rows

    def end(self) -> None:
        """Reset after a pass, whether or not it was delivered."""
        for transfer in self._transfers:
            transfer.drop()
        self.is_finite, self.spoilt_by = True, None
        self._before.clear()
        self._has_older, self._older = False, []
        self._sparse_rows.clear()
        self._absent = []
        self._next = 0

    def used_map(self) -> torch.Tensor:
        """Return how many ranks had a gradient in the last pass, by index: (parameters,), int32."""
        counts = self._statuses[HEADER_NUMEL:] if len(self._statuses) else torch.zeros(len(self._members), device="cpu")
        return counts.round().to(torch.int32)

    def first_used(self) -> torch.nn.Parameter:
        """Return the first parameter for which any rank had a gradient in the last pass, else the first of all."""
        index = int(torch.argmax((self.used_map() > 0).to(torch.uint8))) if self._last_absent else 0
        return self._members[index].parameter

    # Missing gradients, for messages; called from other threads

    def not_ready(self) -> str:
        """Name the first bucket that waits for gradients of this rank, and these gradients."""
        for position, transfer in enumerate(self._transfers, 1):
            missing = sorted(transfer.missing - {AT_THE_END})
            if transfer.work is None and missing:
                names = [self._members[index].name for index in missing]
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                return f"bucket {position} of {len(self._transfers)} lacks {', '.join(names[:3])}{more}"
        return "all gradients are ready"


def _is_finite(grad: torch.Tensor | None) -> bool:
    """Return whether a small gradient, or the first part of a large one, is finite; a sum takes the least time."""
    if grad is None or grad.layout is not torch.strided:
        return True
    if grad.numel() > _PROBED_NUMEL:
        grad = grad.reshape(-1)[:_PROBED_NUMEL]
    return cmath.isfinite(grad.sum().item()) or bool(grad.isfinite().all())
