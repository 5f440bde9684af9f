"""A bucket in transit: gradients in, all-reduce, averages out; here, a bucket of one gradient.

A gradient is *absent* if this rank has had none to contribute since the last reduction: it contributes zeros, or the
result of an older reduction in `.grad`, which is the same on every rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from ddp.comm.small_sum import reduce_options
from ddp.data_parallel.buckets.bucket_plan import BucketPlan, Member
from ddp.errors import BackwardError
from ddp.monitoring.stall_report import Pending
from ddp.torch_internals import memory_owner_count


def _owners(tensor: torch.Tensor) -> int:
    """Count the owners of the memory of `tensor`, including this call."""
    return memory_owner_count(tensor.untyped_storage())


# Stands for a gradient that never comes, so that the transfer waits for the end of backward.
AT_THE_END = -1

_SOLE_OWNER = _owners(torch.empty(1))


class Sender(Protocol):
    """Starts the reduction of a flat tensor in place, without blocking. Gradients are divided by `divisor` first."""

    divisor: int

    def start(self, flat: torch.Tensor) -> Pending: ...


class Adder:
    """Starts all-reduces over `group` of tensors on `device`, without blocking.

    If the backend averages by itself (NCCL), gradients are not divided. Otherwise each rank divides its share by
    `divisor` before the sum: then float16 does not overflow, and a copy that is made anyway divides at no cost. NCCL
    does the same. A tensor of more than `piece_bytes` is sent in pieces.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, piece_bytes: int | None = None) -> None:
        is_average = device.type != "cpu" and _backends(group).get(device.type) == "nccl"
        self.divisor = 1 if is_average else group.size()
        self._group = group
        self._options = reduce_options(dist.ReduceOp.AVG if is_average else dist.ReduceOp.SUM)
        self._piece_bytes = piece_bytes

    def start(self, flat: torch.Tensor) -> Pending:
        if self._piece_bytes is None or flat.nbytes <= self._piece_bytes:
            return self._group.allreduce([flat], self._options)
        pieces = torch.split(flat, self._piece_bytes // flat.itemsize)
        return _Pieces([self._group.allreduce([piece], self._options) for piece in pieces])


class _Pieces:
    """The pieces of a tensor in transit."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self, *timeout: timedelta) -> bool:
        return all(work.wait(*timeout) for work in self._works)


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the names of a group's backends, by type of device."""
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))


class Transfer(ABC):
    """A bucket of `members` in transit: gradients in, all-reduce, averages out. The schedule decides when."""

    def __init__(self, members: Sequence[Member], sender: Sender) -> None:
        self.members = tuple(members)
        self.indices = frozenset(member.index for member in members)
        self.missing = set(self.indices)  # gradients that it waits for
        self.taken_early: frozenset[int] = frozenset()  # gradients for which `take_early` is called
        self.work: Pending | None = None
        self._sender = sender

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

    def begin(self) -> None:  # noqa: B027  # most have nothing to prepare
        """Prepare for the gradients, before backward reaches the parameters."""

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
        self._forget()

    @abstractmethod
    def _forget(self) -> None:
        """Drop references to the gradients."""


class OwnTransfer(Transfer):
    """A single gradient, reduced in the memory where autograd left it."""

    def __init__(self, plan: BucketPlan, members: Sequence[Member], sender: Sender) -> None:
        super().__init__(members, sender)
        (self._member,) = members
        self._spec = plan.slots[0].spec
        self._buffer: torch.Tensor | None = None
        self._is_absent = False

    def gather(self, touched: Mapping[int, None]) -> list[int]:
        parameter = self._member.parameter
        grad = parameter.grad
        self._is_absent = grad is None or self._member.index not in touched
        if grad is not None and not self._is_absent and self._may_reduce_in_place(grad):
            self._buffer = grad
        else:
            self._buffer = self._empty()
            if grad is None:
                self._buffer.zero_()
            else:
                self._buffer.copy_(dense(grad))
        if self._sender.divisor != 1:
            self._buffer.div_(self._sender.divisor)
        return [self._member.index] if self._is_absent else []

    def gather_nothing(self) -> None:
        self._is_absent = True
        self._buffer = self._empty().zero_()

    def _empty(self) -> torch.Tensor:
        spec = self._spec
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)

    def _may_reduce_in_place(self, grad: torch.Tensor) -> bool:
        # Two parameters can be given views of one tensor as their gradients (y = a.view(-1) + b.view(-1)).
        return grad.layout is torch.strided and grad.stride() == self._spec.stride and _owners(grad) == _SOLE_OWNER

    def send(self) -> None:
        buffer = self._buffer
        assert buffer is not None
        self.work = self._sender.start(buffer.as_strided((buffer.numel(),), (1,)))

    def deliver(self, used: Collection[int], factor: float) -> None:
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


def ready_twice(member: Member) -> BackwardError:
    return BackwardError(
        f"the gradient of {member.name!r} became ready again after its bucket was on its way in the same backward "
        "pass: a parameter that several activation checkpoints use needs use_reentrant=False in them",
        parameter=member.name,
    )


def dense(grad: torch.Tensor) -> torch.Tensor:
    """Return `grad` as a strided tensor: a sparse gradient that no module announced is reduced as a dense one."""
    return grad if grad.layout is torch.strided else grad.to_dense()
