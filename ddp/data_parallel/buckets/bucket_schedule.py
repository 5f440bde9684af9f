"""The transfers of one module, in the order in which every rank starts them.

The reducer reports which gradients are ready and when backward ends. The schedule starts, awaits and delivers the
buckets, including the step status, and plans them again when the order or the parameters change.
"""

from __future__ import annotations

import cmath
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from ddp.comm.channel import Channel
from ddp.comm.small_sum import SmallAdder
from ddp.data_parallel.buckets.bucket_plan import (
    BucketLimits,
    BucketPlan,
    GradSpec,
    Member,
    plan_buckets,
    spec_of,
)
from ddp.data_parallel.buckets.comm_hook import CommHook, GradBucket, HookSender
from ddp.data_parallel.buckets.flat_transfer import FlatTransfer
from ddp.data_parallel.buckets.step_status import HEADER_NUMEL, RankStatus, StatusSum, read, used_among, write
from ddp.data_parallel.buckets.transfers import AT_THE_END, Adder, OwnTransfer, Sender, Transfer
from ddp.data_parallel.buckets.unbucketed import average_sparse
from ddp.errors import CheckpointError
from ddp.monitoring import timeline

_PROBED_NUMEL = 1 << 16
_SMALL_NUMEL = 1 << 12  # summed in 2 us


class BucketSchedule:
    """Buckets of `members` in launch order. With `as_views`, gradients in flat buckets stay views of them.

    `sparse` are the indices of members whose gradients are sparse: they are in no bucket. `own_status` returns this
    rank's status; it is called before the last bucket is sent.
    """

    def __init__(
        self,
        channel: Channel,
        members: list[Member],
        sparse: Collection[int],
        *,
        limits: BucketLimits,
        as_views: bool,
        own_status: Callable[[], RankStatus],
    ) -> None:
        self.order: list[int] = []
        self.specs: list[GradSpec] = []  # of the gradients, in this order
        self.repeated: frozenset[int] = frozenset()
        self.state: dict[str, Any] = {}  # the plan in names and numbers; without sizes if these are `limits`
        self.transfer_of: list[Transfer] = []  # by index; never replaced, since the hooks hold this list
        self._channel = channel
        self._members = members
        self._sparse = [members[index] for index in sorted(sparse)]
        self.limits = self._first_limits = limits
        self._as_views = as_views
        self._own_status = own_status
        self._hook: CommHook | None = None
        self._transfers: list[Transfer] = []
        self._next = 0  # the first transfer that has not been sent in this pass
        self._absent: list[int] = []
        self.is_finite = True  # the probed gradient, on this rank, in this pass
        self._statuses = torch.empty(0)  # the last step status
        self.plan([index for index in reversed(range(len(members))) if index not in sparse])

    def plan(self, order: Sequence[int], repeated: Collection[int] = ()) -> None:
        """Plan the buckets for gradients that become ready in this order. Every rank must call it between passes.

        Those in `repeated` become ready more than once in a pass: their buckets are sent at its end.
        """
        self.repeated = frozenset(repeated)
        self.order = list(order)
        self.specs = [spec_of(index, self._members[index].parameter) for index in order]
        plans = self.plans_for(self.limits)
        self._transfers = [self._transfer(index, plan, len(plans)) for index, plan in enumerate(plans)]
        carrier = self._transfers[-1]
        assert isinstance(carrier, FlatTransfer)
        self._carrier = carrier
        # Sparse gradients are in no bucket and complete none: any bucket sent at the end of backward will do.
        self.transfer_of[:] = [carrier] * len(self._members)
        for transfer in self._transfers:
            for member in transfer.members:
                self.transfer_of[member.index] = transfer
            transfer.hold_back(self.repeated)
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
        self.state = {**names, **sizes}

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
        self.end()
        self.plan(self.order, self.repeated)

    def check_plan_state(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError if the plan is of other parameters."""
        mine = {self._members[index].name for index in self.order}
        if set(state["order"]) != mine:
            odd = sorted(mine ^ set(state["order"]))[0]
            raise CheckpointError(
                f"the checkpoint's buckets are of another model: {odd!r} is trained only "
                f"{'here' if odd in mine else 'there'}"
            )

    def load_plan_state(self, state: Mapping[str, Any], repeated: Collection[int]) -> None:
        """Restore the plan from `state`; gradients in `repeated` become ready more than once."""
        index_of = {member.name: member.index for member in self._members}
        if (limits := state.get("limits")) is not None:
            firsts = tuple(map(int, limits["first_caps_bytes"]))
            self.limits = BucketLimits(limits["cap_bytes"], firsts, limits["own_bytes"], limits.get("piece_bytes"))
        self.plan([index_of[name] for name in state["order"]], repeated)

    def _transfer(self, index: int, plan: BucketPlan, count: int) -> Transfer:
        members = [self._members[slot.spec.index] for slot in plan.slots]
        sender: Sender
        if not members:
            sender = SmallAdder(self._channel.control)
        elif self._hook is None:
            sender = Adder(self._channel.group, plan.device, self.limits.piece_bytes)
        else:
            sender = HookSender(self._hook, GradBucket(index, plan, members, is_last=index == count - 2), plan.numel)
        if plan.is_own:
            return OwnTransfer(plan, members, sender)
        return FlatTransfer(plan, members, sender, as_views=self._as_views)

    def use_hook(self, hook: CommHook) -> None:
        """Let `hook` reduce the buckets from now on. The step status is sent by itself."""
        self._hook = hook
        self.plan(self.order, self.repeated)

    @property
    def has_hook(self) -> bool:
        return self._hook is not None

    def begin(self) -> None:
        """Prepare for the gradients of a backward pass."""
        self.is_finite = True
        for transfer in self._transfers:
            transfer.begin()

    def send_complete(self, touched: Mapping[int, None]) -> None:
        """Send complete buckets as far as the order allows; the last one waits for the end of backward."""
        while self._next < len(self._transfers) - 1 and not self._transfers[self._next].missing:
            if self._is_chained_to_previous():
                return
            self._send_next(touched)

    def send_rest(self, touched: Mapping[int, None]) -> None:
        """Send all remaining buckets; gradients that are not ready now are absent."""
        while self._next < len(self._transfers):
            self._send_next(touched)

    def _is_chained_to_previous(self) -> bool:
        """Return whether the previous bucket may still start collectives of its own."""
        previous = self._transfers[self._next - 1].work if self._next else None
        return self._hook is not None and self._hook.is_chained and not (previous is None or previous.is_completed())

    def _await_previous(self) -> None:
        previous = self._transfers[self._next - 1].work
        if previous is not None and self._is_chained_to_previous():
            self._channel.report.wait(previous, f"communication hook of bucket {self._next}")

    def _send_next(self, touched: Mapping[int, None]) -> None:
        self._await_previous()
        transfer = self._transfers[self._next]
        self._absent += transfer.gather(touched)
        probe = self._probe
        if probe is not None and probe.index in transfer.indices and probe.index in touched:
            self.is_finite = _is_finite(probe.parameter.grad)
        if transfer is self._carrier:
            if self._hook is not None:  # the step status must include a hook that fails later
                self._wait_for(self._transfers[:-1])
            self._absent += [member.index for member in self._sparse if member.index not in touched]
            write(self._own_status(), self._carrier.status, self._absent)
        self._send(transfer)

    def _send(self, transfer: Transfer) -> None:
        if self._hook is not None and transfer is not self._carrier:  # its exceptions are not those of a collective
            transfer.send()
            self._next += 1
            return
        self._channel.report.begin("all-reduce of gradients")
        transfer.send()
        self._next += 1
        self._channel.report.counted()

    def send_nothing(self, status: RankStatus) -> None:
        """Send zeros for all that has not been sent."""
        while self._next < len(self._transfers):
            self._await_previous()
            transfer = self._transfers[self._next]
            transfer.gather_nothing()
            if transfer is self._carrier:
                write(status, self._carrier.status, ())
            self._send(transfer)

    def absent(self) -> list[int]:
        """Return the indices of the gradients that this rank did not have in this pass."""
        return self._absent

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
        used = used_among(self._carrier.status, [*absent, *sparse])
        for transfer in self._transfers:
            transfer.deliver(used, factor)
        for member in self._sparse:
            if member.index in used:
                average_sparse(self._channel, member, factor)

    def end(self) -> None:
        """Reset after a pass, whether or not it was delivered."""
        for transfer in self._transfers:
            transfer.drop()
        self._absent = []
        self._next = 0

    def used_map(self) -> torch.Tensor:
        """Return how many ranks had a gradient in the last pass, by index: (parameters,), int32."""
        counts = self._statuses[HEADER_NUMEL:] if len(self._statuses) else torch.zeros(len(self._members))
        return counts.round().to(torch.int32)

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
