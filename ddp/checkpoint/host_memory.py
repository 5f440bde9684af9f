"""Pinned host memory for copies of a state, in few blocks that are kept for the next copy.

Called by `ddp.checkpoint.host_copy`. torch's allocator rounds each request for pinned memory up to a power of two, and
keeps what is given back: with a request for each tensor, GPT-2 (124M) with AdamW would take 1.66 times its bytes,
in blocks as here 1.01 times. A tensor alone, or a few large ones, may still take up to twice their bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["HostMemory"]

_ALIGNMENT = 64  # bytes


class HostMemory:
    """Blocks whose sizes are powers of two. They are given back to torch when the object is."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []

    def free(self) -> None:
        """Let what was taken be taken again: nobody may use it any more."""
        for block in self._blocks:
            block.used = 0

    def take(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return pinned memory of so many bytes each (size,), ordinary memory where the system pins no more.

        The largest are placed first, each in the first block with room for it. A new block has the largest power of two
        that the rest fills.
        """
        taken = [torch.empty(0, dtype=torch.uint8, device="cpu")] * len(sizes)
        needs = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        rest, may_pin = sum(needs), True
        for at in sorted(range(len(sizes)), key=lambda at: -needs[at]):
            need = needs[at]
            block = next((block for block in self._blocks if block.used + need <= len(block.memory)), None)
            if block is None and may_pin and need:
                try:
                    block = _Block(_pinned(max(1 << (need - 1).bit_length(), 1 << (rest.bit_length() - 1))))
                    self._blocks.append(block)
                except RuntimeError:
                    may_pin = False
            if block is None:
                taken[at] = torch.empty(sizes[at], dtype=torch.uint8, device="cpu")
            else:
                taken[at] = block.memory[block.used : block.used + sizes[at]]
                block.used += need
            rest -= need
        return taken


@dataclass
class _Block:
    memory: torch.Tensor  # (bytes,)
    used: int = 0


def _pinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
