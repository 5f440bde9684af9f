"""Which rows of the chunks have changed since a peer last had their values: of an embedding, only those travel."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddp.strategies.sharding.partition import Chunk

__all__ = ["ChangedRows"]

_Masks = list[torch.Tensor | None]  # of the rows of each piece; None for all rows


class ChangedRows:
    """The changed rows of one peer, by chunk. Of a chunk that it has not had yet, all rows count as changed."""

    def __init__(self) -> None:
        self._masks: dict[int, _Masks] = {}

    def forget(self, chunk: int) -> None:
        """Count all rows of a chunk as changed."""
        self._masks.pop(chunk, None)

    def begin(self, chunk: Chunk) -> None:
        """Count from now on: the peer has all values of the chunk."""
        self._masks[chunk.index] = [
            torch.zeros(piece.shape[0] if piece.shape else 1, dtype=torch.bool) for piece in chunk.pieces
        ]

    def add(self, chunk: Chunk, changed: Sequence[torch.Tensor | None] | None) -> None:
        """Count what a step changed: the numbers of each piece's rows, None for all of them."""
        masks = self._masks.get(chunk.index, [])
        for position, numbers in enumerate([None] * len(masks) if changed is None else changed[: len(masks)]):
            mask = masks[position]
            if numbers is None:
                masks[position] = None
            elif mask is not None:
                mask[numbers] = True

    def numbers(self, chunk: Chunk) -> list[torch.Tensor | None] | None:
        """Return the changed rows of each piece, None for all of them; None if the whole chunk has to be given."""
        masks = self._masks.get(chunk.index)
        if not masks:
            return None
        return [None if mask is None else mask.nonzero().flatten() for mask in masks]
