"""Numbers for the bits of tensors: replicas compare these instead of their weights. Knows neither ranks nor modules."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence

import torch

__all__ = ["fingerprints"]

_HASHED_AT_ONCE = 1 << 18
_HASH_FACTOR = 6364136223846793005  # Knuth's for 64 bits: any odd number would do
_BITS_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprints(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """One number for the bits of each tensor: a sum with random weights modulo 2**64, so that order counts."""
    found = dict.fromkeys(tensors, 0)
    pieces = [(name, part) for name, tensor in tensors.items() for part in torch.split(_bits(tensor), _HASHED_AT_ONCE)]
    for batch in _batches(pieces):
        weights = _weights(batch[0][1].device)
        for (name, _), piece in zip(batch, _weighted([part for _, part in batch], weights), strict=True):
            found[name] = (found[name] * _HASH_FACTOR + piece) % (1 << 64)
    return found


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    drawn = torch.randint(-(1 << 62), 1 << 62, (_HASHED_AT_ONCE,), generator=torch.Generator().manual_seed(1))
    return drawn.mul_(2).add_(1).to(device)  # odd: no single change is lost


def _weighted(parts: Sequence[torch.Tensor], weights: torch.Tensor) -> list[int]:
    """The weighted sum of each part."""
    bits = torch.cat(list(parts)).to(torch.int64)
    if len(parts) == 1:
        return [int(bits.mul_(weights[: len(bits)]).sum())]
    # All in one go, as differences of running sums: integers wrap around, so nothing is lost.
    running = bits.mul_(torch.cat([weights[: len(part)] for part in parts])).cumsum(0).cpu()
    ends = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0)
    sums: list[int] = torch.cat([running.new_zeros(1), running])[ends].diff().tolist()
    return sums


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """(n,) the elements of a tensor, of complex numbers both parts, as integers of their size."""
    plain = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    return plain.contiguous().view(-1).view(_BITS_OF_SIZE[plain.element_size()])


def _batches(pieces: Iterable[tuple[str, torch.Tensor]]) -> list[list[tuple[str, torch.Tensor]]]:
    """Neighbours of one dtype and device, up to `_HASHED_AT_ONCE` elements together, without empty ones."""
    batches: list[list[tuple[str, torch.Tensor]]] = []
    size = 0
    for name, part in pieces:
        if not len(part):
            continue
        last = batches[-1][0][1] if batches else None
        if last is None or (last.dtype, last.device) != (part.dtype, part.device) or size + len(part) > _HASHED_AT_ONCE:
            batches.append([])
            size = 0
        batches[-1].append((name, part))
        size += len(part)
    return batches
