"""The plan of buckets: which gradients share one, in which order, and each one's offset. Pure functions and results.

The plan follows Li et al. 2020 (PyTorch Distributed: Experiences on Accelerating Data Parallel Training,
VLDB 13(12)): gradients become ready roughly in the reverse order of registration, buckets of a few MB keep
the latency of a collective small against its transfer, and a small first bucket starts the communication
early. It adds two things. A gradient that is large enough is a bucket by itself and is reduced in place,
without a copy in or out. And the last bucket is always a flat one, which carries the ranks' statuses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

# From this size on, on the CPU, a call that copies and divides a gradient costs less than a second pass over memory.
_LARGE_BYTES = 32 << 10

# A flat bucket up to this size may wait for a larger gradient behind it, so that the step status needs no
# collective of its own.
_MAY_WAIT_BYTES = 1 << 20


@dataclass(frozen=True)
class BucketLimits:
    """Sizes in bytes at which a flat bucket is closed, and from which a gradient is a bucket of its own.

    The first buckets are closed at `first_caps_bytes`, one after the other, all others at `cap_bytes`. `own_bytes` is
    None if no gradient has its own bucket. Tensors larger than `piece_bytes` are reduced in pieces of that size.
    """

    cap_bytes: int
    first_caps_bytes: tuple[int, ...]
    own_bytes: int | None
    piece_bytes: int | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Member:
    """A parameter of a bucket: its index in the module, its name for messages, the parameter itself."""

    index: int
    name: str
    parameter: torch.nn.Parameter


@dataclass(frozen=True)
class GradSpec:
    """Description of one gradient for the plan. `stride` is dense: the layout that autograd gives."""

    index: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def flat_dtype(self) -> torch.dtype:
        """The dtype on the wire: that of the real and imaginary parts for a complex gradient."""
        return self.dtype.to_real() if self.dtype.is_complex else self.dtype

    @cached_property
    def flat_numel(self) -> int:
        numel = torch.Size(self.shape).numel()
        return 2 * numel if self.dtype.is_complex else numel

    @cached_property
    def nbytes(self) -> int:
        return self.flat_numel * self.flat_dtype.itemsize


@dataclass(frozen=True)
class Slot:
    """A gradient's place in a flat bucket, in elements of the bucket's dtype."""

    spec: GradSpec
    offset: int


@dataclass(frozen=True)
class BucketPlan:
    """Gradients that are reduced together, small ones first; on a device all count as small.

    `is_own`: a single gradient, reduced where it lies. `small_count` slots are small and fill the first
    `small_numel` elements. `numel` excludes the step status.
    """

    slots: tuple[Slot, ...]
    dtype: torch.dtype
    device: torch.device
    numel: int
    is_own: bool
    small_count: int = 0
    small_numel: int = 0
    status_numel: int = 0

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def spec_of(index: int, parameter: torch.Tensor) -> GradSpec:
    """Describe the gradient that autograd will create for `parameter`."""
    dense = torch.empty_like(parameter, device="meta")  # keeps strides if they are dense, else makes them so
    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype  # grad_dtype: torch 2.10 and newer
    return GradSpec(index, tuple(parameter.shape), dense.stride(), dtype, parameter.device)


def plan_buckets(
    specs: Sequence[GradSpec], limits: BucketLimits, *, status_numel: int, status_alone: bool = False
) -> tuple[BucketPlan, ...]:
    """Divide `specs`, given in the order in which they are expected to become ready, into buckets in launch order.

    The last bucket is flat and has room for `status_numel` numbers after its gradients. It holds gradients if possible;
    with `status_alone`, it holds nothing else and is in host memory.
    """
    finished: list[tuple[int, BucketPlan]] = []  # with the position of the gradient that completes it
    open_: dict[tuple[torch.device, torch.dtype], list[GradSpec]] = {}
    held: dict[tuple[torch.device, torch.dtype], int] = {}  # bytes in each of them
    last: dict[tuple[torch.device, torch.dtype], int] = {}
    caps = iter(limits.first_caps_bytes)
    cap = next(caps, limits.cap_bytes)
    for position, spec in enumerate(specs):
        if limits.own_bytes is not None and spec.nbytes >= limits.own_bytes and not spec.dtype.is_complex:
            finished.append((position, _bucket([spec], is_own=True)))
            continue
        key = (spec.device, spec.flat_dtype)
        open_.setdefault(key, []).append(spec)
        last[key] = position
        held[key] = held.get(key, 0) + spec.nbytes
        if held[key] >= cap:
            held[key] = 0
            finished.append((position, _bucket(open_.pop(key))))
            cap = next(caps, limits.cap_bytes)
    finished += [(last[key], _bucket(members)) for key, members in open_.items()]
    plans = [plan for _, plan in sorted(finished, key=lambda pair: pair[0])]
    return (*plans, _alone(status_numel)) if status_alone else _with_status(plans, status_numel)


def _bucket(specs: Iterable[GradSpec], *, is_own: bool = False) -> BucketPlan:
    slots: list[Slot] = []
    offset = small_count = small_numel = 0
    for spec in sorted(specs, key=_is_large):
        offset += offset % 2 if spec.dtype.is_complex else 0  # torch.view_as_complex needs an even offset
        slots.append(Slot(spec, offset))
        offset += spec.flat_numel
        if not _is_large(spec):
            small_count, small_numel = len(slots), offset
    first = slots[0].spec
    return BucketPlan(
        slots=tuple(slots),
        dtype=first.flat_dtype,
        device=first.device,
        numel=offset,
        is_own=is_own,
        small_count=small_count,
        small_numel=small_numel,
    )


def _is_large(spec: GradSpec) -> bool:
    """Return whether to copy a gradient by itself. Never on a device: the number of calls counts there, not bytes."""
    return spec.device.type == "cpu" and spec.nbytes >= _LARGE_BYTES


def _with_status(plans: list[BucketPlan], numel: int) -> tuple[BucketPlan, ...]:
    """Put a flat bucket last, with room for the step status: the last small one, else an empty one."""
    # The step status contains weights, which must not be rounded more than the gradients are.
    is_double = any(plan.dtype == torch.float64 for plan in plans)
    exact = (torch.float64,) if is_double else (torch.float32, torch.float64)
    at = max((i for i, plan in enumerate(plans) if not plan.is_own and plan.dtype in exact), default=None)
    if at is not None and (at == len(plans) - 1 or plans[at].nbytes <= _MAY_WAIT_BYTES):
        return (*plans[:at], *plans[at + 1 :], replace(plans[at], status_numel=numel))
    return (*plans, _alone(numel))


def _alone(numel: int) -> BucketPlan:
    return BucketPlan((), torch.float64, torch.device("cpu"), 0, is_own=False, status_numel=numel)


def slot_view(flat: torch.Tensor, slot: Slot) -> torch.Tensor:
    """Return the view of `flat` for the gradient of `slot`, with its shape, strides and dtype."""
    spec = slot.spec
    part = flat[slot.offset : slot.offset + spec.flat_numel]
    if spec.dtype.is_complex:
        part = torch.view_as_complex(part.view(-1, 2))
    return part.as_strided(spec.shape, spec.stride, part.storage_offset())
