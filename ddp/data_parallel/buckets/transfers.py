"""A bucket in transit: gradients in, all-reduce, averages out.

A gradient is *absent* if this rank has had none to contribute since the last reduction: it contributes zeros, or the
result of an older reduction in `.grad`, which is the same on every rank.

A flat bucket has many gradients in one tensor, with views of it as gradients where that goes unnoticed. That saves
copying the averages back. It is done for gradients that backward itself made, in memory that nothing else references
any more: code that keeps a step's `.grad`, or anything that shares its memory, finds it unchanged later.
"""

from __future__ import annotations

import operator
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist

from ddp.comm.combine import Shares, Subtrees, is_narrow
from ddp.comm.sums.small_sum import reduce_options
from ddp.comm.sums.tree_sum import prefers_trees, start_tree_sum
from ddp.data.micro_batch import MicroBatch
from ddp.data_parallel.buckets.bucket_plan import BucketPlan, GradSpec, Member, slot_view
from ddp.errors import BackwardError
from ddp.monitoring.stall_report import Pending
from ddp.torch_internals import foreach_copy, memory_owner_count, tensor_owner_count


def has_own_memory(grad: torch.Tensor) -> bool:
    """Return whether nothing else is in the memory of a strided gradient.

    Two parameters can be given views of one tensor as their gradients (y = a.view(-1) + b.view(-1)).
    """
    return grad.layout is torch.strided and _owners(grad) == _SOLE_OWNER


def _owners(tensor: torch.Tensor) -> int:
    """Count the owners of the memory of `tensor`, including this call."""
    return memory_owner_count(tensor.untyped_storage())


# Stands for a gradient that never comes, so that the transfer waits for the end of backward.
AT_THE_END = -1

_SOLE_OWNER = _owners(torch.empty(1, device="cpu"))
_ONLY_STRIDED = {torch.strided}
_Place = tuple[Member, torch.nn.Parameter, torch.Tensor]


class Sender(Protocol):
    """Starts the reduction of a flat tensor in place, without blocking. Gradients are divided by `divisor` first."""

    divisor: int

    def start(self, flat: torch.Tensor) -> Pending: ...


class Adder:
    """Starts all-reduces over `group` of tensors on `device`, without blocking.

    If the backend averages by itself (NCCL), gradients are not divided. Otherwise each rank divides its share by
    `divisor` before the sum: then float16 does not overflow, and a copy that is made anyway divides at no cost. NCCL
    does the same. A tensor of more than `piece_bytes` is sent in pieces. With `by_tree`, in host memory alone, sums are
    those of `ddp.comm.sums.tree_sum`; None: if the group prefers them.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        piece_bytes: int | None = None,
        *,
        by_tree: bool | None = None,
    ) -> None:
        self._group = group
        self._by_tree = by_tree if device.type == "cpu" else False
        is_average = device.type != "cpu" and _backends(group).get(device.type) == "nccl"
        self.divisor = 1 if is_average else group.size()
        self._options = reduce_options(dist.ReduceOp.AVG if is_average else dist.ReduceOp.SUM)
        self._piece_bytes = piece_bytes

    def start(self, flat: torch.Tensor) -> Pending:
        by_tree = prefers_trees(self._group) if self._by_tree is None else self._by_tree
        start = start_tree_sum if by_tree else self._all_reduce
        if self._piece_bytes is None or flat.nbytes <= self._piece_bytes:
            return start(self._group, flat)
        pieces = torch.split(flat, self._piece_bytes // flat.itemsize)
        return _Pieces([start(self._group, piece) for piece in pieces])

    def _all_reduce(self, group: dist.ProcessGroup, flat: torch.Tensor) -> Pending:
        return group.allreduce([flat], self._options)

    def start_rows(self, flat: torch.Tensor, rows: Sequence[torch.Tensor], shares: Shares) -> Pending:
        """Start writing the sum of a step's micro-batches to `flat`; see `ddp.comm.sums.tree_sum`."""
        return start_tree_sum(self._group, flat, rows, shares)


class _Pieces:
    """The pieces of a tensor in transit."""

    def __init__(self, works: Sequence[Pending]) -> None:
        self._works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self, *timeout: timedelta) -> bool:
        return all(work.wait(*timeout) for work in self._works)


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the names of a group's backends, by type of device."""
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))


class Transfer(ABC):
    """A bucket of `members` in transit: gradients in, all-reduce, averages out. `GradientSums` decides when."""

    def __init__(self, plan: BucketPlan, members: Sequence[Member], sender: Sender) -> None:
        self._is_narrow, self._slots = is_narrow(plan.dtype), plan.slots
        self.members = tuple(members)
        self.indices = frozenset(member.index for member in members)
        self.missing = set(self.indices)  # gradients that it waits for
        self.taken_early: frozenset[int] = frozenset()  # gradients for which `take_early` is called
        self.work: Pending | None = None
        self._sender = sender
        self.micro_batch: MicroBatch | None = None  # that of the running pass
        self.has_older = False  # whether its gradients were added to those of the micro-batch before
        self.shared: frozenset[int] = frozenset()  # its parameters that another wrapper reduces too
        self._subtrees = Subtrees()  # of the step's micro-batches so far

    @property
    def divisor(self) -> float:
        """What gradients are divided by before they are added up."""
        return self._sender.divisor if self.micro_batch is None else self.micro_batch.divisor / self._sum_divisor

    @property
    def _sum_divisor(self) -> float:
        return 1.0 if self.micro_batch is None or self._is_narrow else self.micro_batch.sum_divisor

    @property
    def _absent_value(self) -> float:
        """What stands for an absent gradient: a sum of micro-batches is to have the bits of those that are there."""
        return 0.0 if self.micro_batch is None else -0.0

    def keep(self, touched: Mapping[int, None]) -> None:
        """Add the gradients of a micro-batch that is not the rank's last to its subtrees, and set `.grad` to None."""
        self._add(
            [self._leaf(slot.spec, member, touched) for slot, member in zip(self._slots, self.members, strict=True)]
        )
        for member in self.members:
            member.parameter.grad = None

    def _leaf(self, spec: GradSpec, member: Member, touched: Mapping[int, None]) -> torch.Tensor:
        """Return a divided gradient in memory of its own; 16-bit numbers, in float32."""
        grad = member.parameter.grad
        if grad is None or member.index not in touched:
            leaf = _empty(spec).fill_(self._absent_value)
        elif has_own_memory(grad) and grad.stride() == spec.stride:
            leaf = grad.detach()
        else:
            leaf = _empty(spec).copy_(dense(grad))
        return _wide(leaf if self.divisor == 1 else leaf.div_(self.divisor))

    def _add(self, values: Sequence[torch.Tensor]) -> None:
        assert self.micro_batch is not None
        first, size = (self.micro_batch.index - 1, 2) if self.has_older else (self.micro_batch.index, 1)
        self._subtrees.add(first, values, self.micro_batch.shares, size=size)

    def _start(self, flat: torch.Tensor) -> None:
        """Start the reduction of `flat`, which has this pass's gradients."""
        micro_batch = self.micro_batch
        if micro_batch is None or not self.members:
            self.work = self._sender.start(flat)
            return
        assert isinstance(self._sender, Adder)  # hooks take no micro-batches
        rows: list[torch.Tensor] = []
        if micro_batch.shares.counts[micro_batch.rank]:
            last = _wide(flat)
            self._add(self._views(last))
            older = self._subtrees.take(micro_batch.shares, micro_batch.rank)[:-1]
            rows = [*(self._packed(values, last) for values in older), last]
        self.work = self._sender.start_rows(flat, rows, micro_batch.shares)

    @abstractmethod
    def _views(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the gradients in `flat`, by member."""

    @abstractmethod
    def _packed(self, values: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Return gradients as a flat tensor."""

    @property
    def label(self) -> str:
        """The parameters, for messages."""
        if len(self.members) < 2:
            return repr(self.members[0].name) if self.members else "the step status"
        return f"{self.members[0].name!r} to {self.members[-1].name!r}"

    def hold_back(self, repeated: frozenset[int]) -> None:
        """Wait for the end of backward if one of these gradients is in here: they become ready more than once."""
        if repeated & self.indices:
            self.indices |= {AT_THE_END}
            self.missing.update(self.indices)
            self.taken_early -= repeated

    def begin(self, new: int | None) -> None:  # noqa: B027  # most have nothing to prepare
        """Prepare for the gradients of a backward pass, which has made no gradient yet but that of index `new`."""

    def take_early(self, index: int) -> None:  # noqa: B027  # most wait for all their gradients
        """Process a gradient that has just become ready."""

    @abstractmethod
    def gather(self, touched: Mapping[int, None]) -> list[int]:
        """Prepare to send the gradients, divided; return the indices of absent ones."""

    @abstractmethod
    def gather_nothing(self) -> None:
        """Prepare to send zeros instead of the gradients; nothing will be delivered."""

    @abstractmethod
    def send(self) -> None:
        """Start the all-reduce."""

    @abstractmethod
    def deliver(self, used: Collection[int], factor: float) -> None:
        """Put `factor` times the averages into `.grad`; absent ones only if in `used`, because some rank had them."""

    def drop(self) -> None:
        """Reset, once the transfer has arrived or never will."""
        self.work = None
        self.missing.update(self.indices)
        self._subtrees = Subtrees()
        self._forget()

    @abstractmethod
    def _forget(self) -> None:
        """Drop references to the gradients."""


class OwnTransfer(Transfer):
    """A single gradient, reduced in the memory where autograd left it."""

    def __init__(self, plan: BucketPlan, members: Sequence[Member], sender: Sender) -> None:
        super().__init__(plan, members, sender)
        (self._member,) = members
        self._spec = plan.slots[0].spec
        self._buffer: torch.Tensor | None = None
        self._is_absent = False

    def gather(self, touched: Mapping[int, None]) -> list[int]:
        parameter = self._member.parameter
        grad = parameter.grad
        self._is_absent = grad is None or self._member.index not in touched
        if grad is not None and not self._is_absent and not self.shared and self._may_reduce_in_place(grad):
            self._buffer = grad
        else:
            self._buffer = _empty(self._spec)
            if grad is None:
                self._buffer.fill_(self._absent_value)
            else:
                self._buffer.copy_(dense(grad))
        if self.divisor != 1:
            self._buffer.div_(self.divisor)
        return [self._member.index] if self._is_absent else []

    def _views(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        return [flat.as_strided(self._spec.shape, self._spec.stride)]

    def _packed(self, values: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        return values[0].as_strided(like.shape, (1,))

    def gather_nothing(self) -> None:
        self._is_absent = True
        self._buffer = _empty(self._spec).zero_()

    def _may_reduce_in_place(self, grad: torch.Tensor) -> bool:
        return has_own_memory(grad) and grad.stride() == self._spec.stride

    def send(self) -> None:
        buffer = self._buffer
        assert buffer is not None
        self._start(buffer.as_strided((buffer.numel(),), (1,)))

    def deliver(self, used: Collection[int], factor: float) -> None:
        factor /= self._sum_divisor
        parameter, buffer = self._member.parameter, self._buffer
        is_wanted = not self._is_absent or self._member.index in used
        self.drop()
        if not is_wanted or buffer is None:
            return
        if factor != 1.0:
            buffer.mul_(factor)
        if parameter.grad is None or parameter.grad.layout is not torch.strided:
            parameter.grad = buffer
        elif parameter.grad is not buffer:
            parameter.grad.copy_(buffer)

    def _forget(self) -> None:
        self._buffer = None


class _Region:
    """Places for gradients in one tensor, those of small ones first."""

    def __init__(self, tensor: torch.Tensor, members: Sequence[Member], plan: BucketPlan) -> None:
        self.tensor = tensor
        self.places: list[_Place] = [
            (member, member.parameter, slot_view(tensor, slot).data)  # no view to autograd: .detach_() is allowed
            for member, slot in zip(members, plan.slots, strict=True)
        ]
        self.small = self.places[: plan.small_count]
        self.small_views = [view for _, _, view in self.small]
        self.large = {place[0].index: place for place in self.places[plan.small_count :]}
        self.views = [view for _, _, view in self.places]
        self.is_given_away = False  # whether any place is, or was, `.grad` of its parameter
        self._holders_at_first = self._holders()
        self._count_at_first = self._holder_count()

    def is_watched(self) -> bool:
        """Return whether an old gradient in here, no longer `.grad`, may still be referenced. In doubt, True."""
        if not self.is_given_away:
            return False
        # No place has fewer references than at first, so equal sums mean equal counts.
        if self._count_at_first is not None and self._holder_count() == self._count_at_first:
            return False
        holders = self._holders()
        if holders is None or self._holders_at_first is None or holders[0] != self._holders_at_first[0]:
            return any(parameter.grad is not place for _, parameter, place in self.places)
        return any(
            now != then and parameter.grad is not place
            for now, then, (_, parameter, place) in zip(
                holders[1:], self._holders_at_first[1:], self.places, strict=True
            )
        )

    def _holders(self) -> list[tuple[int, int]] | None:
        """Count references to the memory, then to each place: by Python, and by all else. None if not supported."""
        if tensor_owner_count is None:
            return None
        storage = self.tensor.untyped_storage()
        memory = sys.getrefcount(storage), memory_owner_count(storage)
        return [memory, *((sys.getrefcount(view), tensor_owner_count(view)) for _, _, view in self.places)]

    def _holder_count(self) -> int | None:
        if tensor_owner_count is None:
            return None
        storage = self.tensor.untyped_storage()
        memory = sys.getrefcount(storage) + memory_owner_count(storage)
        return int(memory + sum(map(sys.getrefcount, self.views)) + sum(map(tensor_owner_count, self.views)))


class FlatTransfer(Transfer):
    """Many gradients in one flat tensor.

    Small gradients, and on a device all, are copied into it with one call when the last is ready. Large ones are
    divided into it when they become ready. With `as_views`, every place becomes `.grad`, even if an older gradient may
    still be referenced. The last bucket's flat tensor also carries the step status: one number for each parameter of
    the module.
    """

    def __init__(self, plan: BucketPlan, members: Sequence[Member], sender: Sender, *, as_views: bool) -> None:
        super().__init__(plan, members, sender)
        self.taken_early = frozenset(member.index for member in members[plan.small_count :])
        self._plan = plan
        self._as_views = as_views
        self._small_indices = frozenset(member.index for member in members[: plan.small_count])
        self._small_parameters = [member.parameter for member in members[: plan.small_count]]
        self._renew()
        self._own = self.indices
        self._made_by_backward: frozenset[int] = frozenset()
        self._taken: set[int] = set()  # large ones that are in their places
        self._grads: list[torch.Tensor] = []  # those in other memory, to which the average is copied from...
        self._places: list[torch.Tensor] = []  # ...these
        self._absent: list[_Place] = []
        self._old: dict[int, torch.Tensor] = {}  # old contents of the place of an absent gradient, by index

    def _renew(self) -> None:
        """Allocate new memory, filled with zeros since hooks also see the gaps between the places."""
        plan = self._plan
        self._flat = torch.zeros(plan.numel + plan.status_numel, dtype=plan.dtype, device=plan.device)
        self._region = _Region(self._flat, self.members, plan)

    def begin(self, new: int | None) -> None:
        if not self._as_views and self._region.is_watched():
            self._renew()
        had = [each.index for each in self.members if each.parameter.grad is not None and each.index != new]
        had += self.shared.difference(had)
        had = [] if self.micro_batch is not None else had  # a step of micro-batches began without any
        self._made_by_backward = self._own.difference(had) if had else self._own

    def take_early(self, index: int) -> None:
        """Divide a large gradient that has just become ready into its place.

        It is still in the caches, and its memory becomes free for autograd's next one. Another gradient for the same
        parameter would be added to one that is divided already, so it is refused.
        """
        place = self._region.large[index]
        if index in self._taken:
            raise ready_twice(place[0])
        grad = place[1].grad
        if grad is not None:
            self._take(place, grad)

    def _take(self, place: _Place, grad: torch.Tensor) -> None:
        """Divide a large gradient into its place with one call, so that its memory is read and written once."""
        member, _, view = place
        self._taken.add(member.index)
        torch.div(dense(grad), self.divisor, out=view)
        if grad is not view:
            self._settle(place, grad)

    def _settle(self, place: _Place, grad: torch.Tensor) -> None:
        """Make the place the gradient if that goes unnoticed, else note to copy the average back."""
        member, parameter, view = place
        is_view = self._as_views and member.index not in self.shared
        if is_view or member.index in self._made_by_backward or grad.layout is not torch.strided:
            parameter.grad = view
            self._region.is_given_away = True
        else:
            self._grads.append(grad)
            self._places.append(view)

    def gather(self, touched: Mapping[int, None]) -> list[int]:
        divisor = self.divisor
        if self._region.small:
            self._gather_small(touched)
            if divisor != 1:
                self._flat[: self._plan.small_numel].div_(divisor)
        for index, place in self._region.large.items():
            if index in self._taken:
                continue
            grad = place[1].grad
            if grad is None or index not in touched:
                self._gather_absent(place, grad)
                place[2].div_(divisor)
            else:  # made inside no_sync() before
                self._take(place, grad)
        return [member.index for member, _, _ in self._absent]

    def _gather_small(self, touched: Mapping[int, None]) -> None:
        """Copy all small gradients with one call: the number of calls counts, not the bytes."""
        parameters, views, indices = self._small_parameters, self._region.small_views, self._small_indices
        all_grads = [parameter.grad for parameter in parameters]
        layouts = {None if grad is None else grad.layout for grad in all_grads}
        is_usual = layouts == _ONLY_STRIDED and indices <= self._made_by_backward and touched.keys() >= indices
        if is_usual and not any(map(operator.is_, all_grads, views)):
            foreach_copy(views, cast("list[torch.Tensor]", all_grads))
            for parameter, view in zip(parameters, views, strict=True):
                parameter.grad = view
            self._region.is_given_away = True
            return
        self._gather_small_each(touched)

    def _gather_small_each(self, touched: Mapping[int, None]) -> None:
        """Copy small gradients one by one if some are absent, sparse, or in the bucket already."""
        places, views, grads = [], [], []
        for place in self._region.small:
            member, parameter, view = place
            grad = parameter.grad
            if grad is None or member.index not in touched:
                self._gather_absent(place, grad)
            elif grad is not view:
                places.append(place)
                views.append(view)
                grads.append(grad)
        if grads:
            foreach_copy(views, [dense(grad) for grad in grads])
        for place, grad in zip(places, grads, strict=True):
            self._settle(place, grad)

    def _gather_absent(self, place: _Place, grad: torch.Tensor | None) -> None:
        member, _, view = place
        self._absent.append(place)
        if grad is None:
            view.fill_(self._absent_value)
        elif grad is view:
            self._old[member.index] = view.clone()
        else:
            view.copy_(dense(grad))

    def _views(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        return self._region.views if flat is self._flat else [slot_view(flat, slot) for slot in self._slots]

    def _packed(self, values: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        flat = torch.zeros_like(like)
        foreach_copy([slot_view(flat, slot) for slot in self._slots], values)
        return flat

    def gather_nothing(self) -> None:
        if self._region.is_given_away:  # it has gradients of an older step, which the user may have kept
            self._renew()
        else:
            self._flat.zero_()
        self._forget()

    @property
    def status(self) -> torch.Tensor:
        """The place of the step status; write it between `gather` and `send`, read it after the reduction."""
        return self._flat[self._plan.numel :]

    def send(self) -> None:
        self._start(self._flat)

    def deliver(self, used: Collection[int], factor: float) -> None:
        factor /= self._sum_divisor
        if factor != 1.0:
            self._flat[: self._plan.numel].mul_(factor)
        if self._grads:
            foreach_copy(self._grads, self._places)
        for member, parameter, view in self._absent:
            if member.index not in used:
                if member.index in self._old:
                    view.copy_(self._old[member.index])
            elif parameter.grad is None or parameter.grad.layout is not torch.strided:
                parameter.grad = view if self._as_views else view.clone()
            elif parameter.grad is not view:
                parameter.grad.copy_(view)
        self.drop()

    def _forget(self) -> None:
        for record in (self._grads, self._places, self._absent, self._old, self._taken):
            record.clear()


def _empty(spec: GradSpec) -> torch.Tensor:
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)


def _wide(row: torch.Tensor) -> torch.Tensor:
    """Return 16-bit numbers in float32, in which subtrees are added up."""
    return row.float() if is_narrow(row.dtype) else row


def ready_twice(member: Member) -> BackwardError:
    return BackwardError(
        f"the gradient of {member.name!r} became ready again after its bucket was on its way in the same backward "
        "pass: a parameter that several activation checkpoints use needs use_reentrant=False in them",
        parameter=member.name,
    )


def dense(grad: torch.Tensor) -> torch.Tensor:
    """Return `grad` as a strided tensor: a sparse gradient that no module announced is reduced as a dense one."""
    return grad if grad.layout is torch.strided else grad.to_dense()
