"""A bucket of one gradient on its way: gradient in, all-reduce, average out. The reducer decides when.

A gradient is *absent* where this rank has none to contribute since the last reduction: it contributes
zeros, or what an older reduction left in `.grad`, which is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist

from ddp.buckets import BucketPlan
from ddp.errors import BackwardError, UnsupportedError

__all__ = ["Adder", "Member", "OwnTransfer", "ready_twice", "refuse_sparse"]


def _owners(tensor: torch.Tensor) -> int:
    """How many own the memory of `tensor`, this question included."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


_SOLE_OWNER = _owners(torch.empty(1))


class Member:
    """A parameter of a bucket: its index in the module, its name for messages, itself."""

    __slots__ = ("index", "name", "parameter")

    def __init__(self, index: int, name: str, parameter: torch.nn.Parameter) -> None:
        self.index = index
        self.name = name
        self.parameter = parameter


class Adder:
    """Starts all-reduces that add over `group`, without blocking; each rank divides its share by `size` before.

    Divided before the sum, float16 does not overflow in it; and a copy that is made anyway divides for nothing.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.size = group.size()
        self._group = group
        self._options = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp.SUM  # type: ignore[assignment]  # torch's stubs have two types for it

    def start(self, flat: torch.Tensor) -> dist.Work:
        return self._group.allreduce([flat], self._options)


class OwnTransfer:
    """A single gradient, reduced in the memory where autograd left it."""

    def __init__(self, plan: BucketPlan, members: Sequence[Member], adder: Adder) -> None:
        (self.member,) = members
        self.indices = frozenset({self.member.index})
        self.missing = set(self.indices)
        self.taken_early: frozenset[int] = frozenset()
        self.work: dist.Work | None = None
        self._adder = adder
        spec = plan.slots[0].spec
        self._shape, self._stride = spec.shape, spec.stride
        self._buffer: torch.Tensor | None = None
        self._is_absent = False

    @property
    def label(self) -> str:
        return repr(self.member.name)

    def begin(self) -> None:
        """Nothing to prepare."""

    def take_early(self, index: int) -> None:
        """Nothing to do: `gather` follows at once, if it is this bucket's turn."""

    def gather(self, touched: Collection[int]) -> list[int]:
        """Get ready to send; return the indices of absent gradients."""
        parameter = self.member.parameter
        grad = parameter.grad
        self._is_absent = grad is None or self.member.index not in touched
        if grad is not None and not self._is_absent and self._may_reduce_in_place(grad):
            self._buffer = grad
        else:
            self._buffer = torch.empty_strided(
                self._shape, self._stride, dtype=parameter.dtype, device=parameter.device
            )
            if grad is None:
                self._buffer.zero_()
            else:
                self._buffer.copy_(grad)
        return [self.member.index] if self._is_absent else []

    def _may_reduce_in_place(self, grad: torch.Tensor) -> bool:
        if grad.layout != torch.strided:
            refuse_sparse(self.member)
        # Two parameters can be given views of one tensor as their gradients (y = a.view(-1) + b.view(-1)).
        return grad.stride() == self._stride and _owners(grad) == _SOLE_OWNER

    def send(self) -> None:
        """Start the all-reduce."""
        buffer = self._buffer
        assert buffer is not None
        if not buffer.is_contiguous():
            buffer = buffer.as_strided((buffer.numel(),), (1,))
        self.work = self._adder.start(buffer.div_(self._adder.size))

    def deliver(self, used: Collection[int]) -> None:
        """Put the average into `.grad`; an absent gradient only if it is in `used`, those that some rank had."""
        parameter, buffer = self.member.parameter, self._buffer
        self._buffer = self.work = None
        self.missing.update(self.indices)
        if self._is_absent and self.member.index not in used:
            return
        if parameter.grad is None:
            parameter.grad = buffer
        elif parameter.grad is not buffer and buffer is not None:
            parameter.grad.copy_(buffer)


def ready_twice(member: Member) -> BackwardError:
    return BackwardError(
        f"the gradient of {member.name!r} became ready again after its bucket was on its way in the same backward "
        "pass: a parameter that several activation checkpoints use needs use_reentrant=False in them",
        parameter=member.name,
    )


def refuse_sparse(member: Member) -> NoReturn:
    raise UnsupportedError(
        f"the gradient of {member.name!r} is sparse, which this version cannot reduce: build it with sparse=False"
    )
