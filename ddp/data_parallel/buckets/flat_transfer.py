"""A flat bucket in transit: many gradients in one tensor, with views of it as gradients where that goes unnoticed.

That saves copying the averages back. It is done for gradients that backward itself made, in memory that nothing else
references any more: code that keeps a step's `.grad`, or anything that shares its memory, finds it unchanged later.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import cast

import torch

from ddp.data_parallel.buckets.bucket_plan import BucketPlan, Member, slot_view
from ddp.data_parallel.buckets.transfers import Sender, Transfer, dense, ready_twice
from ddp.torch_internals import foreach_copy, memory_owner_count, tensor_owner_count

_ONLY_STRIDED = {torch.strided}
_Place = tuple[Member, torch.nn.Parameter, torch.Tensor]


class _Region:
    """Places for gradients in one tensor, those of small ones first."""

    def __init__(self, tensor: torch.Tensor, members: Sequence[Member], plan: BucketPlan) -> None:
        self.tensor = tensor
        self.places: list[_Place] = [
            (member, member.parameter, slot_view(tensor, slot))
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
        super().__init__(members, sender)
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

    def begin(self) -> None:
        if not self._as_views and self._region.is_watched():
            self._renew()
        had = [member.index for member in self.members if member.parameter.grad is not None]
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
        torch.div(dense(grad), self._sender.divisor, out=view)
        if grad is not view:
            self._settle(place, grad)

    def _settle(self, place: _Place, grad: torch.Tensor) -> None:
        """Make the place the gradient if that goes unnoticed, else note to copy the average back."""
        member, parameter, view = place
        if self._as_views or member.index in self._made_by_backward or grad.layout is not torch.strided:
            parameter.grad = view
            self._region.is_given_away = True
        else:
            self._grads.append(grad)
            self._places.append(view)

    def gather(self, touched: Mapping[int, None]) -> list[int]:
        divisor = self._sender.divisor
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
            view.zero_()
        elif grad is view:
            self._old[member.index] = view.clone()
        else:
            view.copy_(dense(grad))

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
        self.work = self._sender.start(self._flat)

    def deliver(self, used: Collection[int], factor: float) -> None:
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
