"""What the backend `shm` does between the ranks of a test world: each asserts on every rank."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ddp.comm.shm.backend  # noqa: F401
from ddp.errors import CollectiveError

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
    """Neighbours in pairs, then the pairs in pairs, and so on; half precision in float32, rounded once."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype.itemsize < 4 and dtype.is_floating_point else dtype
    average = op == dist.ReduceOp.AVG
    step, level = _STEPS[dist.ReduceOp.SUM if average else op], [part.to(wide) for part in parts]
    while len(level) > 1:
        level = [step(*level[at : at + 2]) if at + 1 < len(level) else level[at] for at in range(0, len(level), 2)]
    (total,) = level
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


def every_sum_has_the_bits_of_the_tree() -> None:
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


def _raises(call: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(CollectiveError) as caught:
        call(*args)
    return str(caught.value)


def each_collective_gives_what_gloo_gives() -> None:
    warnings.filterwarnings("ignore", ".* is deprecated. Please use")  # names that older torchs do not have otherwise
    shm, gloo, rank, size = make(), dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    for count in (1, 7, 70_000):
        for dtype in (torch.float32, torch.int64):
            mine = [_values(count, dtype, rank * size + to) for to in range(size)]
            last = size - 1
            for name, call in _some_collectives(mine, count, dtype, last).items():
                for is_async in (False, True):
                    got, wanted = call(shm, is_async), call(gloo, is_async)
                    for one, other in zip(got, wanted, strict=True):
                        assert torch.allclose(one, other, rtol=1e-6, atol=1e-6), (name, count, dtype, is_async)


def _some_collectives(
    mine: list[torch.Tensor], count: int, dtype: torch.dtype, root: int
) -> dict[str, Callable[[Any, bool], list[torch.Tensor]]]:
    """Each makes its outputs and returns them, of a group, asynchronously or not."""
    rank, size = dist.get_rank(), dist.get_world_size()
    is_root = rank == root

    def empty(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype)

    def finished(work: Any, outs: list[torch.Tensor], is_async: bool) -> list[torch.Tensor]:
        if is_async:
            work.wait()
        return outs

    def reduce(group: Any, is_async: bool) -> list[torch.Tensor]:
        out = mine[0].clone()
        work = dist.reduce(out, root, group=group, async_op=is_async)
        finished(work, [], is_async)
        return [out] if is_root else []  # what the others have is not said

    def gather(group: Any, is_async: bool) -> list[torch.Tensor]:
        outs = [empty(count) for _ in range(size)] if is_root else None
        return finished(dist.gather(mine[0], outs, root, group=group, async_op=is_async), outs or [], is_async)

    def scatter(group: Any, is_async: bool) -> list[torch.Tensor]:
        out = empty(count)
        given = mine if is_root else None
        return finished(dist.scatter(out, given, root, group=group, async_op=is_async), [out], is_async)

    def gather_single(group: Any, is_async: bool) -> list[torch.Tensor]:
        out = empty(size * count)
        return finished(dist.all_gather_into_tensor(out, mine[0], group=group, async_op=is_async), [out], is_async)

    def gather_strided(group: Any, is_async: bool) -> list[torch.Tensor]:
        outs = [empty(count, 2).t() if group is not dist.group.WORLD else empty(2, count) for _ in range(size)]
        each = torch.stack([mine[0], mine[1]])
        return finished(dist.all_gather(outs, each, group=group, async_op=is_async), outs, is_async)

    def reduce_scatter(group: Any, is_async: bool) -> list[torch.Tensor]:
        out = empty(count)
        return finished(dist.reduce_scatter(out, mine, group=group, async_op=is_async), [out], is_async)

    def scatter_single(group: Any, is_async: bool) -> list[torch.Tensor]:
        out = empty(count)
        given = torch.cat(mine)
        return finished(dist.reduce_scatter_tensor(out, given, group=group, async_op=is_async), [out], is_async)

    def exchange(group: Any, is_async: bool) -> list[torch.Tensor]:
        out, given = empty(size * count), torch.cat(mine)
        return finished(dist.all_to_all_single(out, given, group=group, async_op=is_async), [out], is_async)

    def exchange_uneven(group: Any, is_async: bool) -> list[torch.Tensor]:
        sends = [(rank + to) % 3 for to in range(size)]
        takes = [(rank + source) % 3 for source in range(size)]
        out, given = empty(sum(takes), count), torch.stack([mine[0]] * sum(sends)) if sum(sends) else empty(0, count)
        work = dist.all_to_all_single(out, given, takes, sends, group=group, async_op=is_async)
        return finished(work, [out], is_async)

    def sum_strided(group: Any, is_async: bool) -> list[torch.Tensor]:
        whole = torch.stack([mine[0], mine[1]])
        tensor = whole.t() if group is not dist.group.WORLD else whole.t().contiguous()
        return finished(dist.all_reduce(tensor, group=group, async_op=is_async), [tensor], is_async)

    def coalesced(group: Any, is_async: bool) -> list[torch.Tensor]:
        outs = [each.clone() for each in mine]
        with dist.distributed_c10d._coalescing_manager(group, async_ops=is_async) as manager:
            for each in outs:
                dist.all_reduce(each, group=group)
        if is_async:
            manager.wait()
        return outs

    calls = (
        reduce, gather, scatter, gather_single, gather_strided, reduce_scatter, scatter_single, exchange,
        exchange_uneven, sum_strided, coalesced,
    )  # fmt: skip
    return {call.__name__: call for call in calls}


def exchanged_lists_and_objects() -> None:
    group, rank, size = make(), dist.get_rank(), dist.get_world_size()
    outs = [torch.zeros(source + rank) for source in range(size)]
    dist.all_to_all(outs, [torch.full((rank + to,), float(rank)) for to in range(size)], group=group)
    assert all(torch.equal(out, torch.full((source + rank,), float(source))) for source, out in enumerate(outs))
    found: list[Any] = [None] * size
    dist.all_gather_object(found, {"rank": rank, "long": "x" * 100_000 * rank}, group=group)
    assert [each["rank"] for each in found] == [*range(size)]
    reported = ["from 0", 1] if rank == 0 else [None, None]
    dist.broadcast_object_list(reported, 0, group=group)
    assert reported == ["from 0", 1]
    got: list[Any] = [None] * size
    dist.gather_object(rank, got if rank == 0 else None, 0, group=group)
    assert rank or got == [*range(size)]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [*"abcdefgh"[:size]] if rank == 0 else None, 0, group=group)
    assert mine == ["abcdefgh"[rank]]


def an_asynchronous_call_does_not_wait() -> None:
    """Rank 0 starts sums and then sends; the others receive first. Then several in flight, waited for out of order."""
    group, rank, size = make(), dist.get_rank(), dist.get_world_size()
    for count in (10, 3_000_000):
        tensor, reported = torch.ones(count), torch.zeros(3)
        if rank == 0:
            work = dist.all_reduce(tensor, group=group, async_op=True)
            assert work is not None
            assert not work.is_completed()
            for other in range(1, size):
                dist.send(torch.full((3,), 7.0), other, group=group)
            work.wait()
        else:
            dist.recv(reported, 0, group=group)
            dist.all_reduce(tensor, group=group)
            assert (reported == 7).all()
        assert (tensor == size).all()
    tensors = [torch.full((1000 * index + 1,), float(index)) for index in range(20)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    for index in reversed(range(20)):
        work = works[index]
        assert work is not None
        work.wait()
        assert (tensors[index] == index * size).all()
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None


def futures_are_complete_without_a_wait() -> None:
    """The group's thread goes on by itself; callbacks may use the group."""
    group, rank, size = make(), dist.get_rank(), dist.get_world_size()
    if rank == 0:
        time.sleep(0.2)  # so that the others cannot finish within their call
    tensor = torch.ones(2_000_000)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None

    def again(future: Any) -> torch.Tensor:
        (summed,) = future.value()
        other = summed.clone()
        dist.all_reduce(other, group=group)
        return other

    result = work.get_future().then(again).wait()
    assert torch.equal(tensor, torch.full((2_000_000,), float(size)))
    assert torch.equal(result, tensor * size)


def messages_find_their_receivers() -> None:
    group, rank, size = make(), dist.get_rank(), dist.get_world_size()
    large = 1_000_003  # elements: several times what a channel holds
    if rank == 0:
        works = [dist.isend(torch.full((large,), 5.0), 1, group=group, tag=5)]
        works += [dist.isend(torch.full((4,), 4.0), 1, group=group, tag=4)]
        works += [dist.isend(torch.empty(0), 1, group=group, tag=3)]
        for work in works:
            assert work is not None
            work.wait()
    if rank == 1:
        for tag, count in ((3, 0), (4, 4), (5, large)):  # the other way round
            got = torch.zeros(count)
            assert dist.recv(got, 0, group=group, tag=tag) == 0
            assert (got == tag).all()
    dist.barrier(group)
    if rank:
        dist.send(torch.full((3,), float(rank)), 0, group=group, tag=9)
    else:
        sources = []
        for _ in range(size - 1):
            got = torch.zeros(3)
            source = dist.recv(got, group=group, tag=9)
            assert (got == source).all()
            sources.append(source)
        assert sorted(sources) == [*range(1, size)]
    dist.barrier(group)
    if rank < 2:  # both send more than a channel holds before they receive
        strided = torch.zeros(2, large).t()
        ops = [
            dist.P2POp(dist.isend, torch.full((large, 2), float(rank)), 1 - rank, group),
            dist.P2POp(dist.irecv, strided, 1 - rank, group),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert (strided == 1 - rank).all()


def messages_of_a_tag_keep_their_order() -> None:
    """The second is asked for while the first, which no one had asked for, is still arriving."""
    group, rank, size = make(), dist.get_rank(), dist.get_world_size()
    for _ in range(5):
        if rank == 0:
            works = [dist.isend(torch.full((3_000_000,), float(value)), 1, group=group) for value in (1, 2)]
            dist.barrier()
        elif rank == 1:
            later = torch.zeros(1)
            works = [dist.irecv(later, size - 1, group=group, tag=7) if size > 2 else None]
            got = [torch.zeros(3_000_000) for _ in range(2)]
            works += [dist.irecv(each, 0, group=group) for each in got]
            dist.barrier()
        else:
            dist.barrier()
            works = [dist.isend(torch.ones(1), 1, group=group, tag=7) if rank == size - 1 else None]
        for work in works:
            if work is not None:
                work.wait()
        if rank == 1:
            assert [(each == value).all().item() for value, each in enumerate(got, 1)] == [True, True]


def the_default_device_changes_nothing() -> None:
    group, rank, size = make(), dist.get_rank(), dist.get_world_size()
    mine, got, other = torch.full((size,), float(rank)), torch.zeros(size), torch.zeros(1)
    torch.set_default_device("meta")
    try:
        group.alltoall_base(got, mine, [], []).wait()
        for tag in (1, 2):
            if rank == 0:
                group.send([mine[:1]], 1, tag).wait()
        for tag in (2, 1):  # so that the first is kept meanwhile
            if rank == 1:
                group.recv([other], 0, tag).wait()
    finally:
        torch.set_default_device(None)
    assert torch.equal(got, torch.arange(size).float())


def different_calls_are_an_error_on_all() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    odd = rank == size - 1

    def sizes(group: Any) -> None:
        dist.all_reduce(torch.ones(5 if odd else 4), group=group)

    def large_sizes(group: Any) -> None:
        dist.all_reduce(torch.ones(5 if odd else 400_000), group=group)

    def dtypes(group: Any) -> None:
        dist.broadcast(torch.ones(4, dtype=torch.int32 if odd else torch.float32), 0, group=group)

    def reductions(group: Any) -> None:
        dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM, group=group)

    def roots(group: Any) -> None:
        dist.broadcast(torch.ones(4), 1 if odd else 0, group=group)

    def kinds(group: Any) -> None:
        dist.barrier(group) if odd else dist.all_reduce(torch.ones(4), group=group)

    for wrong in (sizes, large_sizes, dtypes, reductions, roots, kinds):
        group = make()
        said = _raises(wrong, group)
        assert f"rank {size - 1}: " in said, said
        assert "different things" in said
        assert "since the group has failed" in _raises(dist.barrier, group)
    group = make()
    inputs = [torch.ones(2 if odd and to == 0 else 1) for to in range(size)]
    said = _raises(dist.all_to_all, [torch.ones(1) for _ in range(size)], inputs, group)
    assert f"rank {size - 1} sends 2 elements to rank 0, which expects 1" in said


def a_message_of_another_size_is_an_error_on_both() -> None:
    group, rank = make(), dist.get_rank()
    if rank == 0:
        dist.send(torch.ones(5), 1, group=group)
        said = _raises(dist.barrier, group)
    else:
        said = _raises(dist.recv, torch.ones(4), 0, group)
    assert "rank 0 sent 5 elements of torch.float32 with tag 0, rank 1 expects 4" in said
