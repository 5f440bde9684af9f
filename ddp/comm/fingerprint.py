"""Fingerprints of tensors, which replicas compare instead of their weights. Independent of ranks and modules.

A `Digest` is one number for many tensors; `fingerprints` are one for each, to find which differs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter

import torch

from ddp.comm.pinned_buffer import PinnedBuffer
from ddp.torch_internals import flatten_tensors

_HASHED_AT_ONCE = 1 << 18
_SMALL_BYTES = 1 << 16  # up to this size, tensors are copied together: their number costs more than their bytes
_DTYPE, _DEVICE = attrgetter("dtype"), attrgetter("device")
_HASH_FACTOR = 6364136223846793005  # Knuth's for 64 bits: any odd number would do


def fingerprints(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return a `Digest` of each tensor alone. Waits for their devices."""
    started = {name: Digest([tensor]).start() for name, tensor in tensors.items()}
    return {name: read() for name, read in started.items()}


def chained(numbers: Iterable[int]) -> int:
    """Return one number of 64 bits for `numbers` in their order."""
    total = 0
    for number in numbers:
        total = (total * _HASH_FACTOR + number) % (1 << 64)
    return total


class Digest:
    """One number of 64 bits for the bits of all `tensors`: a sum of 8 bytes each with odd random weights, modulo 2**64.

    A change of one tensor element changes it; of several, all but one in 2**64. The order of the tensors counts.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._forms: list[object] = []  # what decides on the runs
        self._runs: list[list[torch.Tensor]] = []  # those whose bytes are one run of memory, or are copied into one

    @torch.no_grad()
    def start(self) -> Callable[[], int]:
        """Read every tensor once, on its device; return a function that waits for the number. Does not block."""
        forms = [*map(_DTYPE, self._tensors), *map(_DEVICE, self._tensors)]
        if forms != self._forms:
            self._forms, self._runs = forms, _runs(self._tensors)
        sums: dict[torch.device, list[torch.Tensor]] = {}
        for run in self._runs:
            words = _words(run)
            weights = _weights(words.device)
            sums.setdefault(words.device, []).extend(
                (part * weights[: len(part)]).sum() for part in torch.split(words, _HASHED_AT_ONCE)
            )
        pending = [_fetched(torch.stack(of_device)) for of_device in sums.values()]

        return lambda: chained(piece for wait in pending for piece in wait().tolist())


def _runs(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group small tensors of one dtype and device, with each large one alone, and without empty ones."""
    small: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    large = []
    for tensor in tensors:
        if tensor.nbytes > _SMALL_BYTES:
            large.append([tensor])
        elif tensor.nbytes:
            small.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return [*small.values(), *large]


def _words(run: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the concatenated bytes of tensors of one dtype as (n,) int64, padded with zeros."""
    flat = flatten_tensors(run) if len(run) > 1 else run[0].detach().contiguous().view(-1)
    raw = (torch.view_as_real(flat.resolve_conj()).view(-1) if flat.is_complex() else flat).view(torch.uint8)
    if len(raw) % 8:
        raw = torch.nn.functional.pad(raw, (0, -len(raw) % 8))
    return (raw.clone() if raw.storage_offset() % 8 else raw).view(torch.int64)


def _fetched(sums: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start copying to host memory; return a function that waits for the copy."""
    if sums.device.type == "cpu":
        return lambda: sums
    buffer = PinnedBuffer(len(sums), sums.dtype, sums.device)
    buffer.start_fetching([sums])
    return buffer.wait


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    drawn = torch.randint(
        -(1 << 62), 1 << 62, (_HASHED_AT_ONCE,), generator=torch.Generator().manual_seed(1), device="cpu"
    )
    return drawn.mul_(2).add_(1).to(device)  # odd: no single change is lost
