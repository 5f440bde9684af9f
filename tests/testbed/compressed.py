"""Buckets as torch's reducer passes them to a hook, of numbers that any rank can compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ddp.compression.compressors import CompressionHook

SIZES = (1, 3, 0, 511, 512, 4097, 60_000)
_parameters: dict[tuple[int, int, tuple[int, ...]], torch.Tensor] = {}


@dataclass
class Bucket:
    number: int
    flat: torch.Tensor
    last: bool = False
    shapes: Sequence[tuple[int, ...]] = field(default=())
    owners: Sequence[torch.Tensor] = field(default=())

    def index(self) -> int:
        return self.number

    def buffer(self) -> torch.Tensor:
        return self.flat

    def gradients(self) -> list[torch.Tensor]:
        if not self.shapes:
            return [self.flat]
        parts = self.flat.split([torch.Size(shape).numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def parameters(self) -> list[torch.Tensor]:
        """Its own, or the same ones for buckets of the same number and shapes."""
        if self.owners:
            return list(self.owners)
        shapes = [tuple(each.shape) for each in self.gradients()]
        return [
            _parameters.setdefault((self.number, place, shape), torch.empty(shape))
            for place, shape in enumerate(shapes)
        ]

    def is_last(self) -> bool:
        return self.last


def gradients(step: int, rank: int, sizes: Sequence[int] = SIZES) -> list[torch.Tensor]:
    """What `rank` contributes in `step`: any rank can compute any other's."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(size, generator=generator) * 10.0 ** (index - 3) for index, size in enumerate(sizes)]


def true_means(step: int, sizes: Sequence[int] = SIZES) -> list[torch.Tensor]:
    every = zip(*(gradients(step, rank, sizes) for rank in range(dist.get_world_size())), strict=True)
    return [torch.stack(each).double().mean(0) for each in every]


def reduced(
    made: CompressionHook, flats: Sequence[torch.Tensor], shapes: Sequence[Sequence[tuple[int, ...]]] | None = None
) -> list[torch.Tensor]:
    """Send all buckets, then wait for all, as a backward pass does."""
    futures = []
    for number, flat in enumerate(flats):
        bucket = Bucket(number, flat, number == len(flats) - 1, shapes[number] if shapes else ())
        futures.append(made.hook(made.state, bucket))
    results = [future.wait() for future in futures]
    for flat, result in zip(flats, results, strict=True):
        assert (result.dtype, result.shape) == (flat.dtype, flat.shape)
    return results


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the norm, relative."""
    return float((actual.double() - expected).norm() / expected.norm())
