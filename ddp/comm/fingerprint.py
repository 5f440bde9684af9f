"""Numbers for the bits of tensors: replicas compare these instead of their weights. Knows neither ranks nor modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from ddp.comm.pinned_buffer import PinnedBuffer

__all__ = ["PendingFingerprints", "fingerprints", "start_fingerprints"]

_HASHED_AT_ONCE = 1 << 18
_HASH_FACTOR = 6364136223846793005  # Knuth's for 64 bits: any odd number would do
_BITS_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprints(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """One number for the bits of each tensor: a sum with random weights modulo 2**64, so that order counts.

    Waits for the devices of the tensors.
    """
    return start_fingerprints(tensors).read()


def start_fingerprints(tensors: Mapping[str, torch.Tensor]) -> PendingFingerprints:
    """Start `fingerprints` where the tensors are, as they are now. Waits for no device, once each was asked before."""
    pieces = [(name, part) for name, tensor in tensors.items() for part in torch.split(_bits(tensor), _HASHED_AT_ONCE)]
    found: dict[torch.device, tuple[list[str], list[torch.Tensor]]] = {}
    for batch in _batches(pieces):
        device = batch[0][1].device
        names, sums = found.setdefault(device, ([], []))
        names += [name for name, _ in batch]
        sums.append(_weighted([part for _, part in batch], _weights(device)))
    return PendingFingerprints(tensors, [(names, _fetched(torch.cat(sums))) for names, sums in found.values()])


class PendingFingerprints:
    """The sums of pieces of tensors, on their way from each device; `of` has the names of the tensors."""

    def __init__(self, of: Iterable[str], pieces: Sequence[tuple[Sequence[str], Callable[[], torch.Tensor]]]) -> None:
        self._names = list(of)
        self._pieces = pieces

    def read(self) -> dict[str, int]:
        """Wait until they are in host memory."""
        found = dict.fromkeys(self._names, 0)
        for names, wait in self._pieces:
            for name, piece in zip(names, wait().tolist(), strict=True):
                found[name] = (found[name] * _HASH_FACTOR + piece) % (1 << 64)
        return found


def _fetched(sums: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start copying to host memory; return what waits for the copy."""
    if sums.device.type == "cpu":
        return lambda: sums
    buffer = PinnedBuffer(len(sums), sums.dtype, sums.device)
    buffer.start_fetching([sums])
    return buffer.wait


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    drawn = torch.randint(-(1 << 62), 1 << 62, (_HASHED_AT_ONCE,), generator=torch.Generator().manual_seed(1))
    return drawn.mul_(2).add_(1).to(device)  # odd: no single change is lost


def _weighted(parts: Sequence[torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum of each part: (parts,), int64."""
    bits = torch.cat(list(parts)).to(torch.int64)
    if len(parts) == 1:
        return bits.mul_(weights[: len(bits)]).sum(0, keepdim=True)
    # All in one go, as differences of running sums: integers wrap around, so nothing is lost.
    running = bits.mul_(torch.cat([weights[: len(part)] for part in parts])).cumsum(0)
    ends = torch.cat([part[-1:] for part in torch.split(running, [len(part) for part in parts])])
    return ends.diff(prepend=ends.new_zeros(1))


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
