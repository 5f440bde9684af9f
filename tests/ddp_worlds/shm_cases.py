"""What the backend `shm` does between the ranks of a test world: each asserts on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import ddp  # noqa: F401  # registers the backend

# Around where chunks, slices and small ones end.
SIZES = (0, 1, 5, 1000, 4096, 4097, 65_535, 131_073, 300_001)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def make() -> Any:
    group = dist.new_group(backend="shm")
    assert dist.get_backend(group) == "shm"
    return group


def _values(size: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank * 1000 + size)
    if dtype == torch.bool:
        return torch.randint(0, 2, (size,), generator=generator).bool()
    if dtype.is_floating_point:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-9 if dtype.is_signed else 0, 9, (size,), generator=generator).to(dtype)


def _all_values(size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [_values(size, dtype, rank) for rank in range(dist.get_world_size())]


_STEPS: dict[Any, Any] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}
_EXACT = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)


def expected(op: Any, parts: list[torch.Tensor]) -> torch.Tensor:
    """Rank 0 with rank 1 with ...; half precision in float32, rounded once."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype.itemsize < 4 and dtype.is_floating_point else dtype
    average = op == dist.ReduceOp.AVG
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = _STEPS[dist.ReduceOp.SUM if average else op](total, part.to(wide))
    return (total / len(parts) if average else total).to(dtype)


def _calls() -> Iterator[tuple[Any, torch.dtype, int]]:
    for size in SIZES:
        for dtype in (*FLOATS, *INTEGERS, torch.bool):
            yield dist.ReduceOp.SUM, dtype, size
    for op in _STEPS:
        for dtype in (*(() if op in _EXACT else FLOATS), *INTEGERS, torch.bool):
            yield op, dtype, 20_000
    for dtype in FLOATS:
        yield dist.ReduceOp.AVG, dtype, 20_000


def every_sum_has_the_bits_of_the_ranks_in_order() -> None:
    group, rank = make(), dist.get_rank()
    for op, dtype, size in _calls():
        parts = _all_values(size, dtype)
        wanted = expected(op, parts)
        for is_async in (False, True):
            mine = parts[rank].clone()
            work = dist.all_reduce(mine, op, group=group, async_op=is_async)
            if is_async:
                assert work is not None
                work.wait()
            assert torch.equal(mine, wanted), (op, dtype, size, is_async)


def all_that_is_moved_arrives() -> None:
    group, rank, size = make(), dist.get_rank(), dist.get_world_size()
    for count in SIZES:
        for dtype in (torch.float32, torch.bool, torch.complex64, torch.int16, torch.float8_e4m3fn):
            parts = [part.to(dtype) for part in _all_values(count, torch.float32)]
            bits = [part.view(torch.uint8) for part in parts]
            outs = [torch.zeros_like(parts[0]) for _ in range(size)]
            dist.all_gather(outs, parts[rank], group=group)
            assert all(torch.equal(out.view(torch.uint8), bit) for out, bit in zip(outs, bits, strict=True))
            for root in range(size):
                mine = parts[rank].clone()
                dist.broadcast(mine, root, group=group)
                assert torch.equal(mine.view(torch.uint8), bits[root])
    dist.barrier(group)
