"""The plan that all processes of a run with parameter servers share: the model's layout, its partition, the options.

Every process makes the same plan from its own model and optimizer; a server compares the workers' plans with its own
when they join.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import nn

from ddp.comm.layout import Entry, first_difference
from ddp.data_parallel.module_watch import sparse_names
from ddp.errors import ArgumentError, LayoutMismatchError
from ddp.strategies.parameter_server.consistency import Mode
from ddp.strategies.parameter_server.messages import Compression, MalformedError
from ddp.strategies.sharding.optimizer_state import hyperparameters
from ddp.strategies.sharding.partition import Partition, partition
from ddp.strategies.sharding.shards import splits_by_element

_FRAME_BYTES = 64 << 20
_LEAST_CHUNK_BYTES, _MOST_CHUNK_BYTES = 1 << 20, 16 << 20


@dataclass(frozen=True)
class Options:
    """The arguments of `ParameterServer`, where they are documented; the same in every process of the run."""

    mode: Mode = "sync"
    staleness: int = 2
    backup_workers: int = 0
    overlap: bool = False
    compression: Compression | None = None
    encrypt: bool = False
    shared_memory: bool = True
    snapshots: str | os.PathLike[str] | None = None
    snapshot_every: int = 100
    chunk_mb: float | None = None
    lost_after_s: float = 10.0
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ArgumentError(f"mode={self.mode!r}; it must be one of {', '.join(map(repr, get_args(Mode)))}")
        if self.compression not in (None, *get_args(Compression)):
            known = ", ".join(map(repr, get_args(Compression)))
            raise ArgumentError(f"compression={self.compression!r}; it must be one of {known}, or None")
        if self.staleness < 0 or self.backup_workers < 0 or self.snapshot_every < 1:
            raise ArgumentError(
                f"staleness={self.staleness}, backup_workers={self.backup_workers}, "
                f"snapshot_every={self.snapshot_every}: the first two must be 0 or more, the last 1 or more"
            )
        if self.backup_workers and self.mode != "sync":
            raise ArgumentError(
                f"backup_workers={self.backup_workers} is for mode='sync'; with {self.mode!r} no worker waits"
            )
        if self.overlap and self.mode == "sync":
            raise ArgumentError("overlap=True starts a step before the last one is back: not possible in mode='sync'")
        if (self.chunk_mb is not None and not 0 < self.chunk_mb <= 64) or self.lost_after_s <= 0 or self.timeout_s <= 0:
            raise ArgumentError(
                f"chunk_mb={self.chunk_mb} (more than 0, at most 64), lost_after_s={self.lost_after_s}, "
                f"timeout_s={self.timeout_s}: times must be more than 0"
            )
        if self.snapshots is not None:
            os.fspath(self.snapshots)  # only servers use it; another type is a TypeError in every process


@dataclass(frozen=True)
class RunPlan:
    """See the module. `parameters` are those that the optimizer steps, in its order, and `names` their names.

    `extras` are the model's other tensors, buffers and frozen parameters, by name: replica 0's are used.
    """

    options: Options
    workers: int
    partition: Partition
    entries: tuple[Entry, ...]
    parameters: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    extras: dict[str, torch.Tensor]
    sparse: frozenset[int]  # chunks whose gradients are rows

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(self.entries).encode()).hexdigest()

    @property
    def frame_bytes(self) -> int:
        """Maximum size of one tensor of a message: a chunk, its optimizer state, or an extra."""
        chunks = [4 * chunk.nbytes for chunk in self.partition.chunks]
        return max(_FRAME_BYTES, *chunks, *(each.nbytes for each in self.extras.values())) + (1 << 20)


def make_plan(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: Options, *, workers: int, servers: int
) -> RunPlan:
    """Describe a model and its optimizer, and partition its parameters over the servers.

    Raises UnsupportedError for an optimizer that a server cannot step, ArgumentError if all workers are backups.
    """
    if options.backup_workers >= workers:
        raise ArgumentError(f"backup_workers={options.backup_workers} of {workers} workers leaves none to wait for")
    splits = splits_by_element(optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    name_of = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=True)}
    stepped = {id(parameter) for parameter in parameters}
    extras: dict[str, torch.Tensor] = {n: each for n, each in model.named_parameters() if id(each) not in stepped}
    extras.update(model.named_buffers())
    names = tuple(name_of[id(parameter)] for parameter in parameters)
    sparse = sparse_names(model)
    alone = {number for number, name in enumerate(names) if name in sparse}
    cut = partition(
        parameters,
        servers=servers,
        chunk_bytes=_chunk_bytes(options, parameters),
        splits=splits,
        alone=alone,
    )
    return RunPlan(
        options=options,
        workers=workers,
        partition=cut,
        entries=_describe(model, optimizer, options, extras),
        parameters=tuple(parameters),
        names=names,
        extras=extras,
        sparse=frozenset(c.index for c in cut.chunks if any(piece.parameter in alone for piece in c.pieces)),
    )


def _chunk_bytes(options: Options, parameters: Sequence[torch.Tensor]) -> int:
    """Choose the chunk size: few messages, as each costs 0.1 to 0.3 ms of processor time over both ends, but enough
    of them that servers step some while others are in flight.
    """
    if options.chunk_mb is not None:
        return int(options.chunk_mb * (1 << 20))
    return min(max(_LEAST_CHUNK_BYTES, sum(each.nbytes for each in parameters) // 8), _MOST_CHUNK_BYTES)


def _describe(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: Options, extras: Mapping[str, torch.Tensor]
) -> tuple[Entry, ...]:
    group_of = {id(each): number for number, group in enumerate(optimizer.param_groups) for each in group["params"]}
    shared = ("mode", "staleness", "backup_workers", "compression", "chunk_mb")
    own_groups = [sorted(group) for group in hyperparameters(optimizer.param_groups)]
    return (
        *(Entry("setting", name, repr(getattr(options, name))) for name in shared),
        Entry("optimizer", type(optimizer).__name__, f"{len(own_groups)} groups with {own_groups}"),
        *(
            Entry("parameter", name, f"shape {tuple(each.shape)}, {each.dtype}, group {group_of[id(each)]}")
            for name, each in model.named_parameters()
            if id(each) in group_of
        ),
        *(Entry("buffer", name, f"shape {tuple(each.shape)}, {each.dtype}") for name, each in extras.items()),
    )


def raise_mismatch(mine: Sequence[Entry], theirs: Sequence[Entry], *, rank: int, me: str, other: str) -> None:
    """Raise the LayoutMismatchError that names the first difference between the models of two processes."""
    entry, ours, others = first_difference(mine, theirs)
    raise LayoutMismatchError(
        f"{me} has another model than {other}: where {other} has {others}, {me} has {ours}; "
        "every process of the run must make the same model, optimizer and strategy",
        rank=rank,
        entry=entry,
    )


def plain_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the hyperparameters as JSON values; strings and functions stay with the optimizer."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.item()
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    known = (bool, int, float, list, tuple, torch.Tensor, type(None))
    groups = hyperparameters(optimizer.param_groups)
    return [{name: plain(value) for name, value in group.items() if isinstance(value, known)} for group in groups]


def check_groups(given: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]) -> None:
    """Raise MalformedError unless received hyperparameters have the structure of `own`, from `plain_groups`."""
    if len(given) != len(own):
        raise MalformedError(f"there are {len(given)} param groups, not {len(own)}")
    for number, (group, mine) in enumerate(zip(given, own, strict=True)):
        for name, value in group.items():
            if not _is_like(value, mine.get(name)):
                raise MalformedError(f"field 'groups': {name!r} of param group {number} is {value!r}")


def _is_like(value: Any, own: Any) -> bool:
    if isinstance(own, list):
        return isinstance(value, list) and len(value) == len(own) and all(map(_is_like, value, own))
    if isinstance(own, int | float) and not isinstance(own, bool):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return value is None or isinstance(value, bool | int | float)
