"""The gradients of a chunk, and the way between whole parameters and chunks.

Workers cut gradients and write values with these functions; servers take them apart again. Pure but for what is
written into tensors that the caller gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ddp.strategies.sharding.partition import Chunk, Piece
from ddp.torch_internals import foreach_copy

__all__ = ["ChunkGradient", "Gradient", "Rows", "flatten_gradients", "in_flat", "in_parameters"]


class Rows(NamedTuple):
    """Some rows of a piece: their numbers (n,) int64, counted from the piece's first row, and values (n, *row)."""

    numbers: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class ChunkGradient:
    """The gradients of a chunk's pieces, where they are not simply one flat tensor.

    `flat` (numel,) holds those that are neither in `absent` (no gradient: not stepped, as with a grad of None) nor in
    `sparse`; both go by the position of the piece in the chunk. None if there is no other.
    """

    flat: torch.Tensor | None
    absent: frozenset[int] = frozenset()
    sparse: Mapping[int, Rows] = field(default_factory=dict)


Gradient = torch.Tensor | ChunkGradient


def flatten_gradients(
    chunk: Chunk, gradients: Sequence[torch.Tensor | None], out: torch.Tensor | None = None
) -> Gradient:
    """Gather what `Shards.step` takes for one chunk from the gradients of the parameters, None where there is none.

    A sparse gradient gives the rows of the piece; it should be coalesced, or it is here once a chunk. `out` (numel,)
    is filled and used if any gradient is dense, else a new tensor.
    """
    absent, sparse, dense = set(), {}, []
    for position, piece in enumerate(chunk.pieces):
        gradient = gradients[piece.parameter]
        if gradient is None:
            absent.add(position)
        elif gradient.is_sparse and gradient.sparse_dim() == 1:
            sparse[position] = _rows_of(gradient, piece)
        else:
            dense.append(piece)
    if not dense and chunk.pieces:
        return ChunkGradient(None, frozenset(absent), sparse)
    flat = torch.empty(chunk.numel, dtype=chunk.dtype) if out is None else out
    rows = [_dense_rows(gradients[piece.parameter], piece) for piece in dense]
    if absent or sparse:
        foreach_copy([flat[piece.offset : piece.stop].view(piece.shape) for piece in dense], rows)
        return ChunkGradient(flat, frozenset(absent), sparse)
    if len(rows) == 1:
        return flat.copy_(rows[0].reshape(-1))
    # Measured for 1000 small pieces: half the time of copying each to its place.
    return _concatenated(rows, flat)


def _concatenated(rows: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    parts = [each.reshape(-1) for each in rows]
    if all(part.device == out.device for part in parts):
        return torch.cat(parts, out=out)
    return out.copy_(torch.cat(parts))  # one transfer


def _dense_rows(gradient: torch.Tensor | None, piece: Piece) -> torch.Tensor:
    assert gradient is not None
    dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
    is_whole = not piece.shape or len(dense) == piece.end - piece.begin
    return dense if is_whole else dense[piece.begin : piece.end]


def _rows_of(gradient: torch.Tensor, piece: Piece) -> Rows:
    gradient = gradient.detach().coalesce()
    numbers, values = gradient.indices()[0], gradient.values()
    edges = torch.searchsorted(numbers, torch.tensor([piece.begin, piece.end], device=numbers.device)).tolist()
    return Rows(numbers[edges[0] : edges[1]] - piece.begin, values[edges[0] : edges[1]])


def in_parameters(chunk: Chunk, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The rows of each piece of `chunk` in its parameter, as views without a graph. `tensors` go by parameter."""
    return [
        tensors[piece.parameter].detach()[piece.begin : piece.end] if piece.shape else tensors[piece.parameter].detach()
        for piece in chunk.pieces
    ]


def in_flat(chunk: Chunk, flat: torch.Tensor) -> list[torch.Tensor]:
    """Each piece of `chunk` in its flat tensor (numel,), as views."""
    return [flat[piece.offset : piece.stop].view(piece.shape) for piece in chunk.pieces]
