"""The optimizer state of central storage: each rank keeps the state of its chunks in memory that all ranks can read.

One rank can thus save the whole state by itself, as scripts for all-reduce do. Called by `step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch

from ddp.comm.shared_memory import SharedSegment
from ddp.errors import UnsupportedError
from ddp.strategies.sharding.partition import Chunk, aligned, view_of
from ddp.strategies.sharding.shards import Shards


class Published:
    """This rank's optimizer state in shared memory, where the others may read it while no rank steps."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._entries: list[StateEntry] = []
        self._places: list[torch.Tensor | None] = []
        self._segment: SharedSegment | None = None
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def announcement(self) -> tuple[Any, list[tuple[Any, ...]]] | None:
        """Return what the others need to read it, or None if they have it."""
        return None if self._segment is None else (self._segment.ticket, [astuple(entry) for entry in self._entries])

    def is_known(self) -> None:
        """Close it to other processes, once all ranks have it open."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def update(self) -> bool:
        """Update shared memory after a step; return whether the others must open another segment now."""
        found = [
            (_entry(chunk, first, stop, name, value), state, value)
            for chunk, first, stop, state in self._shards.live()
            for name, value in state.items()
        ]
        moves = [entry for entry, _, _ in found] != [replace(entry, at=0) for entry in self._entries]
        if moves:
            self._move([entry for entry, _, _ in found])
        for (_, state, value), entry, place in zip(found, self._entries, self._places, strict=True):
            if place is not value:
                self._store(entry, state, value, place)
        return moves

    def _move(self, found: Sequence[StateEntry]) -> None:
        self._entries, end = [], 0
        for entry in found:
            self._entries.append(replace(entry, at=end))
            end = aligned(end + entry.nbytes)
        self._segment = SharedSegment(max(end, 1))
        self._memory = memory = self._segment.tensor
        self._places = [entry.place(memory) if entry.kind in ("tensor", "number") else None for entry in self._entries]

    def _store(self, entry: StateEntry, state: dict[str, Any], value: Any, place: torch.Tensor | None) -> None:
        if entry.kind == "sparse":  # a step reallocates such a tensor
            numbers, values = entry.sparse_places(self._memory)
            coalesced = value.coalesce()
            numbers.copy_(coalesced.indices()[0])
            values.copy_(coalesced.values())
        elif place is not None:
            place.copy_(value) if entry.kind == "tensor" else place.fill_(value)
            if entry.kind == "tensor":
                state[entry.name] = place  # the optimizer's steps change it there from now on


@dataclass(frozen=True)
class StateEntry:
    """One value of an optimizer's state, at byte `at`: for pieces `first` to `stop` of a chunk, under `name`.

    `kind`: "tensor", "sparse" (row numbers (count,) int64, then values (count, *row)), "number" or "none".
    """

    chunk: int
    first: int
    stop: int
    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    count: int = 0
    at: int = 0

    @property
    def nbytes(self) -> int:
        if self.kind == "sparse":
            return self._values_at + self.count * torch.Size(self.shape[1:]).numel() * self.dtype.itemsize
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def _values_at(self) -> int:
        return aligned(8 * self.count)

    def place(self, memory: torch.Tensor) -> torch.Tensor:
        return view_of(memory, self.at, self.shape, self.dtype)

    def sparse_places(self, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            view_of(memory, self.at, (self.count,), torch.int64),
            view_of(memory, self.at + self._values_at, (self.count, *self.shape[1:]), self.dtype),
        )

    def read(self, memory: torch.Tensor) -> Any:
        if self.kind == "none":
            return None
        if self.kind == "sparse":
            numbers, values = self.sparse_places(memory)
            numbers, values = numbers[None].clone(), values.clone()
            return torch.sparse_coo_tensor(
                numbers, values, self.shape, device="cpu", is_coalesced=True, check_invariants=False
            )
        place = self.place(memory)
        return place.item() if self.kind == "number" else place


def _entry(chunk: Chunk, first: int, stop: int, name: str, value: Any) -> StateEntry:
    where = (chunk.index, first, stop, name)
    if isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo and value.sparse_dim() == 1:
        coalesced = value.coalesce()
        return StateEntry(*where, "sparse", tuple(value.shape), value.dtype, len(coalesced.values()))
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return StateEntry(*where, "tensor", tuple(value.shape), value.dtype)
    if isinstance(value, bool | int | float):
        dtype = torch.float64 if isinstance(value, float) else torch.bool if isinstance(value, bool) else torch.int64
        return StateEntry(*where, "number", (), dtype)
    if value is None:
        return StateEntry(*where, "none", (), torch.uint8)
    raise UnsupportedError(
        f"the optimizer keeps {name!r}, a {type(value).__name__}, of each parameter: central storage takes those that "
        "keep tensors and numbers"
    )
