"""Copies between parameters on a device and shared memory in a step: gradients to it, new values back.

Made and called by `step`, for parameters on one device with asynchronous copies. Copies go through pinned memory,
since shared memory is not pinned: while the host moves one block, the device copies others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ddp.comm.pinned_buffer import PinnedBuffer

_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class _Block:
    """Some parameters of one dtype, by number, with pinned memory for all of their elements."""

    numbers: tuple[int, ...]
    buffer: PinnedBuffer


class DeviceCopies:
    """Pinned memory for `parameters`, which are on `device`, by their numbers."""

    def __init__(self, parameters: Mapping[int, torch.Tensor], device: torch.device) -> None:
        self._parameters = parameters
        self._blocks = [
            _Block(tuple(numbers), PinnedBuffer(sum(parameters[n].numel() for n in numbers), dtype, device))
            for numbers, dtype in _blocks(parameters)
        ]

    def fetch(self, gradients: Mapping[int, torch.Tensor], into: Sequence[torch.Tensor]) -> None:
        """Copy dense gradients, by number, to their tensors in host memory; blocks until done."""
        present = [[number for number in block.numbers if number in gradients] for block in self._blocks]
        for block, numbers in zip(self._blocks, present, strict=True):
            if numbers:
                block.buffer.start_fetching([gradients[number] for number in numbers])
        for block, numbers in zip(self._blocks, present, strict=True):
            if numbers:
                block.buffer.finish_fetching([into[number] for number in numbers])

    def send(self, values: Sequence[torch.Tensor]) -> None:
        """Start copying values, by number, to the parameters; they may change afterwards."""
        for block in self._blocks:
            block.buffer.start_sending(
                [values[number] for number in block.numbers], [self._parameters[number] for number in block.numbers]
            )


def _blocks(parameters: Mapping[int, torch.Tensor]) -> list[tuple[list[int], torch.dtype]]:
    """Split the numbers, in order, into blocks of one dtype and about `_BLOCK_BYTES`."""
    blocks: list[tuple[list[int], torch.dtype]] = []
    open_bytes: dict[torch.dtype, int] = {}
    open_numbers: dict[torch.dtype, list[int]] = {}
    for number, parameter in parameters.items():
        dtype = parameter.dtype
        if dtype not in open_numbers or open_bytes[dtype] + parameter.nbytes > _BLOCK_BYTES:
            open_numbers[dtype], open_bytes[dtype] = [], 0
            blocks.append((open_numbers[dtype], dtype))
        open_numbers[dtype].append(number)
        open_bytes[dtype] += parameter.nbytes
    return blocks
