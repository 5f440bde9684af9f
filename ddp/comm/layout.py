"""What a rank wraps, in words that can be compared: names, shapes, strides, dtypes and order of parameters and buffers.

Two ranks whose modules differ would add up unrelated numbers, or wait for ever; so the ranks compare first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist

from ddp.comm.objects import gather_values
from ddp.errors import LayoutMismatchError

__all__ = ["Entry", "check_same_layout", "describe"]


@dataclass(frozen=True)
class Entry:
    """One line of the description: a setting, parameter or buffer by name, and the facts that must agree."""

    kind: str
    name: str
    facts: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r} ({self.facts})"


def describe(
    settings: Mapping[str, object],
    parameters: Iterable[tuple[str, torch.Tensor]],
    buffers: Iterable[tuple[str, torch.Tensor]],
) -> tuple[Entry, ...]:
    """Describe what a rank wraps, in an order that matters."""
    return (
        *(Entry("setting", name, repr(value)) for name, value in settings.items()),
        *(Entry("parameter", name, _facts(tensor)) for name, tensor in parameters),
        *(Entry("buffer", name, _facts(tensor)) for name, tensor in buffers),
    )


def _facts(tensor: torch.Tensor) -> str:
    trains = ", requires_grad" if tensor.requires_grad else ""
    return f"shape {tuple(tensor.shape)}, stride {tensor.stride()}, {tensor.dtype}, on {tensor.device.type}{trains}"


def check_same_layout(group: dist.ProcessGroup, entries: Sequence[Entry], device: torch.device) -> None:
    """Raise LayoutMismatchError on every rank of `group` if any rank's entries differ from those of its rank 0.

    Every rank must call it; blocks. 32 bytes a rank travel while all agree; `device` is one that the group
    can reduce on.
    """
    digest = hashlib.sha256(repr(entries).encode()).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    every = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(every, mine, group=group)
    if all(torch.equal(other, every[0]) for other in every):
        return
    told = gather_values([astuple(entry) for entry in entries], device=device, group=group)
    described = [tuple(Entry(*entry) for entry in theirs) for theirs in told]
    reference = described[0]
    for rank, other in enumerate(described):
        if other != reference:
            raise _mismatch(rank, reference, other)


def _mismatch(rank: int, reference: tuple[Entry, ...], other: tuple[Entry, ...]) -> LayoutMismatchError:
    position = next((i for i, (a, b) in enumerate(zip(reference, other, strict=False)) if a != b), None)
    if position is None:
        position = min(len(reference), len(other))
    theirs, ours = (
        str(entries[position]) if position < len(entries) else "nothing more" for entries in (other, reference)
    )
    entry = (reference + other[len(reference) :])[position].name
    return LayoutMismatchError(
        f"rank {rank} wraps another module than rank 0: where rank 0 has {ours}, rank {rank} has {theirs}; "
        "build the same module, in the same order, with the same arguments on every rank",
        rank=rank,
        entry=entry,
    )
