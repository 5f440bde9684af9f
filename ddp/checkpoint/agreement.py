"""Exchange what the ranks must agree on before and after a save or load, and raise its errors on all. Knows no files.

Called by `ddp.checkpoint.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ddp.comm.fingerprint import Digest, fingerprints
from ddp.comm.objects import gather_values
from ddp.data_parallel.checksum import drift_among
from ddp.data_parallel.replicas import replica_of, weights_of
from ddp.errors import CheckpointError, DdpError
from ddp.monitoring.interrupts import is_interrupt
from ddp.monitoring.stall_report import waiting_for_peers
from ddp.torch_internals import torchs_comm_hooks

_OTHERWISE = ". If they may differ at a save, as between two averages of weights: Checkpoint(check_replicas=False)"

T = TypeVar("T")


def place() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def exchange(mine: T, what: str) -> list[T]:
    """Give every rank's value to every rank. Every rank must call it; blocks."""
    if place()[1] == 1:
        return [mine]
    with waiting_for_peers(f"exchange of {what}"):
        return gather_values(mine)


def reason_of(problem: Exception | None, what: str = "") -> str | None:
    """Return why this rank could not do `what`; without `what`, the text of the exception alone.

    Raises an exception of a signal handler: it is this rank's own, not a problem of the code that it interrupted.
    """
    if problem is None:
        return None
    if is_interrupt(problem):
        raise problem
    text = str(problem) if isinstance(problem, DdpError | OSError) else f"{type(problem).__name__}: {problem}"
    return f"could not {what}: {text}" if what else text


def raise_together(problems: Sequence[str | None], mine: Exception | None) -> None:
    """Raise CheckpointError if any rank had a problem; its cause is this rank's own problem, if it has one."""
    for rank, problem in enumerate(problems):
        if problem is not None:
            who = f"rank {rank}: " if len(problems) > 1 else ""
            together = CheckpointError(f"{who}{problem}")
            if mine is None:
                together.failed_ranks = tuple(each for each, other in enumerate(problems) if other is not None)
            raise together from mine


@dataclass(frozen=True)
class SaveNote:
    """A rank's message to the others before rank 0 writes."""

    step: int
    random: Mapping[str, Any]
    in_background: bool
    names: tuple[str, ...] = ()
    position: Mapping[str, Any] | None = None  # of the sampler
    replica: tuple[tuple[int, ...], int] | None = None  # the ranks that should have the same weights, and a digest
    is_last_written: bool = True  # False if this rank had to write it and failed
    can_write: bool = True


def require_agreement(notes: Sequence[SaveNote]) -> None:
    for rank, note in enumerate(notes):
        for what, theirs, first in (
            ("step", note.step, notes[0].step),
            ("in_background", note.in_background, notes[0].in_background),
            ("names", note.names, notes[0].names),
            ("position of the sampler", note.position, notes[0].position),
        ):
            if theirs != first:
                raise CheckpointError(
                    f"the ranks do not save the same: {what} is {theirs} on rank {rank}, but {first} on rank 0"
                )


@dataclass(frozen=True)
class Weights:
    """The weights of a wrapped model, and the ranks that should have the same."""

    ranks: tuple[int, ...]
    tensors: Mapping[str, torch.Tensor]

    def note(self) -> tuple[tuple[int, ...], int]:
        return self.ranks, Digest(self.tensors.values()).start()()


def replicated(model: nn.Module | None) -> Weights | None:
    """Return the weights that other ranks should have as well; None if there are none, or if they may differ.

    They may differ between two averages of LocalSGD, and with a user's communication hook, such as torch's
    post_localSGD_hook.
    """
    wrapper = replica_of(model)
    group = getattr(wrapper, "process_group", None)
    if group is None or getattr(wrapper, "steps_alone", False) or not dist.is_initialized():
        return None
    is_hooked = getattr(wrapper, "has_comm_hook", False) and getattr(wrapper, "compression", None) is None
    if is_hooked or torchs_comm_hooks(wrapper):
        return None
    return Weights(tuple(dist.get_process_group_ranks(group)), weights_of(wrapper))


def require_equal_replicas(notes: Sequence[SaveNote], mine: Weights | None) -> None:
    """Raise DriftError on every rank if the ranks of a group hold different weights. Collective only then."""
    replicas = [None if note.replica is None else (tuple(note.replica[0]), note.replica[1]) for note in notes]
    found = {replica for replica in replicas if replica is not None}
    groups = {ranks for ranks, _ in found}
    if len(found) == len(groups):
        return
    every = exchange(None if mine is None else fingerprints(mine.tensors), "checksums of the replicas")
    for group in sorted(groups):
        of_group = [
            sums if replica is not None and replica[0] == group else None
            for sums, replica in zip(every, replicas, strict=True)
        ]
        if (drift := drift_among(of_group, otherwise=_OTHERWISE)) is not None:
            raise drift
