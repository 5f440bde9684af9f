"""Describes and compares the ranks' modules: names, shapes, strides, dtypes and order of parameters and buffers.

Two ranks with different modules would add up unrelated numbers, or wait for ever, so the ranks compare first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import zip_longest

import torch
import torch.distributed as dist

from ddp.comm.objects import gather_values
from ddp.errors import LayoutMismatchError


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
    """Describe a rank's module; the order of the entries matters."""
    return (
        *(Entry("setting", name, repr(value)) for name, value in settings.items()),
        *(Entry("parameter", name, _facts(tensor)) for name, tensor in parameters),
        *(Entry("buffer", name, _facts(tensor)) for name, tensor in buffers),
    )


def _facts(tensor: torch.Tensor) -> str:
    trains = ", requires_grad" if tensor.requires_grad else ""
    return f"shape {tuple(tensor.shape)}, stride {tensor.stride()}, {tensor.dtype}, on {tensor.device.type}{trains}"


def check_same_layout(group: dist.ProcessGroup, entries: Sequence[Entry]) -> None:
    """Raise LayoutMismatchError on every rank of `group` if any rank's entries differ from those of its rank 0.

    Every rank must call it; blocks. Only digests are sent while all agree.
    """
    digest = hashlib.sha256(repr(entries).encode()).hexdigest()
    if len(set(gather_values(digest, group=group))) == 1:
        return
    reference, *others = (
        [Entry(*entry) for entry in each] for each in gather_values([*map(astuple, entries)], group=group)
    )
    for rank, other in enumerate(others, 1):
        if reference != other:
            entry, here, there = first_difference(reference, other)
            raise LayoutMismatchError(
                f"rank {rank} wraps another module than rank 0: where rank 0 has {here}, rank {rank} has {there}; "
                "build the same module, in the same order, with the same arguments on every rank",
                rank=rank,
                entry=entry,
            )


def first_difference(here: Sequence[Entry], there: Sequence[Entry]) -> tuple[str, str, str]:
    """Return the name of the first entry that differs, and both sides' entries; for unequal sides."""
    ours, theirs = next(pair for pair in zip_longest(here, there) if pair[0] != pair[1])
    return (ours or theirs).name, str(ours or "nothing more"), str(theirs or "nothing more")
