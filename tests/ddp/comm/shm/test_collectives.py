"""Collectives of the backend `shm`: what torch.distributed promises, on one host and over hosts."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.nursery import Nursery
from testbed.shm import LIMIT_S, Op, over_shm, pretend_hosts, tree_of
from testbed.slow import slow
from testbed.training import assert_same_bits
from testbed.worlds import world

from ddp.errors import CollectiveError

Group = Any
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
BITS = (Op.BAND, Op.BOR, Op.BXOR)
SIZES = (0, 1, 5, 1000, 4096, 4097, 65_535, 131_073, 300_001)  # around where chunks, slices and small ones end
MANY_SIZES = (2, 63, 64, 65, 1023, 4097, 65_537, 1_000_003, 5_000_000)


def _given(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a rank gives: small whole numbers, whose sums are exact in every dtype."""
    return torch.randint(1, 4, (count,), generator=torch.Generator().manual_seed(1000 + rank)).to(dtype)


def _values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank gives: numbers whose order of additions shows in a sum."""
    generator = torch.Generator().manual_seed(rank * 1000 + count)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-9 if dtype.is_signed else 0, 9, (count,), generator=generator).to(dtype)


# All-reduce


def _calls() -> list[tuple[Any, torch.dtype, int]]:
    every = (*FLOATS, *INTEGERS, torch.bool)
    return [
        *((Op.SUM, dtype, size) for size, dtype in itertools.product(SIZES, every)),
        *((op, dtype, 20_000) for op, dtype in itertools.product((Op.PRODUCT, Op.MIN, Op.MAX), every)),
        *((op, dtype, 20_000) for op, dtype in itertools.product(BITS, (*INTEGERS, torch.bool))),
        *((Op.AVG, dtype, 20_000) for dtype in FLOATS),
    ]


@world(1, slow(2), slow(3), 5)
def test_every_sum_has_the_bits_of_the_tree() -> None:
    group, rank = dist.new_group(backend="shm"), dist.get_rank()
    for op, dtype, size in _calls():
        parts = [_values(each, size, dtype) for each in range(dist.get_world_size())]
        wanted = tree_of(op, parts)
        for is_async in (False, True):
            mine = parts[rank].clone()
            work = dist.all_reduce(mine, op, group=group, async_op=is_async)
            if work is not None:
                work.wait()
            assert torch.equal(mine, wanted), (op, dtype, size, is_async)


@over_shm
def test_all_reduce_of_any_dtype(group: Group) -> None:
    for op, dtype, _ in _calls():
        mine = _given(group.rank(), 11, dtype)
        dist.all_reduce(mine, op, group=group)
        wanted = tree_of(op, [_given(rank, 11, dtype) for rank in range(group.size())])
        torch.testing.assert_close(mine, wanted, msg=f"{op} of {dtype}")


def _all_reduce_of_many_sizes(hosts: str = "", group: Group = None) -> None:
    pretend_hosts(hosts)
    group = group or dist.new_group(backend="shm", timeout=timedelta(seconds=LIMIT_S))
    for numel in MANY_SIZES:
        mine = torch.full((numel,), float(group.rank() + 1))
        mine[-1] = 7.0
        dist.all_reduce(mine, group=group)
        assert mine[-1] == 7.0 * group.size()
        assert (mine[:-1] == sum(range(1, group.size() + 1))).all()
    for numel in (1, 100, 5000, 300_001):
        mine = torch.randn(numel, generator=torch.Generator().manual_seed(group.rank())) * 1e3
        dist.all_reduce(mine, group=group)
        assert_same_bits([mine], group)


@over_shm
def test_all_reduce_of_many_sizes(group: Group) -> None:
    _all_reduce_of_many_sizes(group=group)


def test_all_reduce_of_three_ranks_on_each_of_two_hosts(nursery: Nursery) -> None:
    nursery.run(6, _all_reduce_of_many_sizes, hosts="0,1,2|3,4,5")


@pytest.mark.parametrize(
    ("dtype", "op", "numel"),  # the last is more chunks than are in transit at once, whose borders the cuts do not meet
    [
        (torch.float32, Op.SUM, 300_007),
        (torch.bfloat16, Op.AVG, 300_007),
        (torch.float32, Op.SUM, 4_500_007),
    ],
)  # fmt: skip
@over_shm
def test_all_reduce_of_pieces_gives_the_same_bits(group: Group, dtype: torch.dtype, op: Any, numel: int) -> None:
    """However a tensor is cut: the order of a sum depends on the element and the ranks only."""
    mine = (torch.randn(numel, generator=torch.Generator().manual_seed(group.rank())) * 1e3).to(dtype)
    whole = mine.clone()
    dist.all_reduce(whole, op, group=group)
    for cuts in ([1, 5, 1000, numel // 3 + 1, numel - numel // 3 - 1007], [numel - 17, 17]):
        pieces = [piece.clone() for piece in mine.split(cuts)]
        works = [dist.all_reduce(piece, op, group=group, async_op=True) for piece in pieces]
        for work in works:
            work.wait()
        assert torch.equal(torch.cat(pieces), whole)
    assert_same_bits([whole], group)


@over_shm
def test_all_reduce_of_memory_in_any_order(group: Group) -> None:
    """What is dense is reduced in place; what has holes is reduced or refused; what surrounds it stays."""
    around = torch.arange(100.0)
    dist.all_reduce(around[10:20], group=group)
    expected = torch.arange(100.0)
    expected[10:20] *= group.size()
    assert torch.equal(around, expected)
    total = tree_of(Op.SUM, [_given(rank, 120) for rank in range(group.size())])
    image = _given(group.rank(), 120).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
    stride = image.stride()
    dist.all_reduce(image, group=group)
    assert image.stride() == stride
    assert torch.equal(image, total.view(2, 3, 4, 5))
    dist.all_reduce(turned := _given(group.rank(), 120).view(30, 4).t(), group=group)
    assert torch.equal(turned, total.view(30, 4).t())
    whole, mine = (_given(group.rank(), 120).view(30, 4) for _ in range(2))
    try:
        dist.all_reduce(whole[:, ::2], group=group)
        assert torch.equal(whole[:, ::2], total.view(30, 4)[:, ::2])
    except (RuntimeError, ValueError) as error:
        if "contiguous" not in str(error) and "dense" not in str(error):
            raise
        assert torch.equal(whole, mine)
    assert torch.equal(whole[:, 1::2], mine[:, 1::2])


@over_shm
def test_not_a_number_infinity_and_nothing(group: Group) -> None:
    size = group.size()
    mine = torch.tensor([float("nan"), float("inf"), 1.0]) if group.rank() == 0 else torch.ones(3)
    dist.all_reduce(mine, group=group)
    assert mine[0].isnan()
    assert mine[1:].tolist() == [float("inf"), size]
    dist.all_reduce(torch.empty(0), group=group)
    dist.broadcast(torch.empty(0, 3), 0, group=group)
    dist.all_gather([torch.empty(0) for _ in range(size)], torch.empty(0), group=group)
    dist.all_gather_into_tensor(torch.empty(0), torch.empty(0), group=group)
    dist.reduce(torch.empty(0), 0, group=group)
    dist.all_to_all_single(torch.empty(0), torch.empty(0), group=group)
    dist.reduce_scatter_tensor(torch.empty(0), torch.empty(0), group=group)
    dist.all_reduce(mine := torch.ones(2), group=group)
    assert mine.tolist() == [size] * 2


# What is moved


@over_shm
def test_all_that_is_moved_arrives(group: Group) -> None:
    rank, size = group.rank(), group.size()
    for count, dtype in itertools.product(SIZES, (torch.float32, torch.bool, torch.complex64, torch.float8_e4m3fn)):
        parts = [_values(each, count, torch.float32).to(dtype) for each in range(size)]
        outs = [torch.zeros_like(parts[0]) for _ in range(size)]
        dist.all_gather(outs, parts[rank], group=group)
        for root in range(size):
            mine = parts[rank].clone()
            dist.broadcast(mine, root, group=group)
            for found in (mine, outs[root]):
                assert torch.equal(found.view(torch.uint8), parts[root].view(torch.uint8))


Call = Callable[[Group, bool], tuple[Any, list[torch.Tensor]]]  # (group, is_async): the work, and outputs


def _collectives(mine: list[torch.Tensor], root: int) -> dict[str, Call]:
    """Collectives of what this rank gives to each rank."""
    rank, size, count, dtype = dist.get_rank(), dist.get_world_size(), len(mine[0]), mine[0].dtype
    is_root, together = rank == root, torch.cat(mine)
    sends, takes = ([(rank + other) % 3 for other in range(size)] for _ in range(2))
    uneven = mine[0].repeat(sum(sends), 1)

    def empty(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype)

    def empties() -> list[torch.Tensor]:
        return [empty(count) for _ in range(size)]

    def reduce(group: Group, is_async: bool) -> tuple[Any, list[torch.Tensor]]:
        work = dist.reduce(out := mine[0].clone(), root, group=group, async_op=is_async)
        return work, [out] if is_root else []  # what the others have is not said

    def gather(group: Group, is_async: bool) -> tuple[Any, list[torch.Tensor]]:
        outs = empties() if is_root else None
        return dist.gather(mine[0], outs, root, group=group, async_op=is_async), outs or []

    def gather_strided(group: Group, is_async: bool) -> tuple[Any, list[torch.Tensor]]:
        outs = [empty(count, 2).t() if group is not dist.group.WORLD else empty(2, count) for _ in range(size)]
        return dist.all_gather(outs, torch.stack(mine[:2]), group=group, async_op=is_async), outs

    def gather_of_strided(group: Group, is_async: bool) -> tuple[Any, list[torch.Tensor]]:
        return dist.all_gather(outs := empties(), torch.stack(mine[:2]).t()[:, 1], group=group, async_op=is_async), outs

    def exchange_uneven(group: Group, is_async: bool) -> tuple[Any, list[torch.Tensor]]:
        out = empty(sum(takes), count)
        return dist.all_to_all_single(out, uneven, takes, sends, group=group, async_op=is_async), [out]

    def coalesced(group: Group, is_async: bool) -> tuple[Any, list[torch.Tensor]]:
        outs = [each.clone() for each in mine]
        with dist.distributed_c10d._coalescing_manager(group, async_ops=is_async) as manager:
            for each in outs:
                dist.all_reduce(each, group=group)
        return manager, outs

    def all_reduce_coalesced(group: Group, is_async: bool) -> tuple[Any, list[torch.Tensor]]:
        work = group.allreduce_coalesced(outs := [mine[0].clone(), torch.cat(mine)])
        if not is_async:
            work.wait()
        return work, outs

    def one(call: Callable[..., Any], *given: Any, shape: int = count) -> Call:
        """A call whose output is one tensor."""

        def made(group: Group, is_async: bool) -> tuple[Any, list[torch.Tensor]]:
            return call(out := empty(shape), *given, group=group, async_op=is_async), [out]

        return made

    return {
        "reduce": reduce,
        "gather": gather,
        "scatter": one(dist.scatter, mine if is_root else None, root),
        "all_gather_into_tensor": one(dist.all_gather_into_tensor, mine[0], shape=size * count),
        "all_gather into strided": gather_strided,
        "all_gather of strided": gather_of_strided,
        "reduce_scatter": one(dist.reduce_scatter, mine),
        "reduce_scatter_tensor": one(dist.reduce_scatter_tensor, together),
        "reduce_scatter_tensor, MAX": one(dist.reduce_scatter_tensor, together, Op.MAX),
        "all_to_all_single": one(dist.all_to_all_single, together, shape=size * count),
        "all_to_all_single, uneven": exchange_uneven,
        "coalesced": coalesced,
        "allreduce_coalesced": all_reduce_coalesced,
    }  # fmt: skip


@over_shm
def test_each_collective_gives_what_gloo_gives(group: Group) -> None:
    """Synchronous or not, with each rank as the root."""
    rank, size, turn = dist.get_rank(), dist.get_world_size(), itertools.count()
    for count, dtype in itertools.product((1, 7, 70_000), (torch.float32, torch.int64)):
        mine = [_given(rank * size + to, count, dtype) for to in range(size)]
        for name, call in _collectives(mine, root=next(turn) % size).items():
            work, wanted = call(dist.group.WORLD, True)
            work.wait()
            for is_async in (False, True):
                work, found = call(group, is_async)
                if is_async:
                    work.wait()
                for one, other in zip(found, wanted, strict=True):
                    assert torch.equal(one, other), (name, count, dtype, is_async)


@over_shm
def test_lists_and_objects_are_exchanged(group: Group) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    outs = [torch.zeros(source + rank) for source in range(size)]
    dist.all_to_all(outs, [torch.full((rank + to,), float(rank)) for to in range(size)], group=group)
    assert all(torch.equal(out, torch.full((source + rank,), float(source))) for source, out in enumerate(outs))
    mine = {"rank": rank, "long": "x" * 100_000 * rank}
    dist.all_gather_object(found := [None] * size, mine, group=group)
    assert found == [{"rank": each, "long": "x" * 100_000 * each} for each in range(size)]
    said = [mine, rank]
    dist.broadcast_object_list(said, group_src=size - 1, group=group)
    assert said[1] == size - 1
    places = [None] * size if rank == 0 else None
    dist.gather_object(rank, places, group_dst=0, group=group)
    assert places == (None if rank else [*range(size)])
    dist.scatter_object_list(out := [None], [("for", each) for each in range(size)], group_src=0, group=group)
    assert out == [("for", rank)]
    if rank == 0:
        dist.send_object_list([mine, "more"], group_dst=1, group=group)
    elif rank == 1:
        dist.recv_object_list(came := [None, None], group_src=0, group=group)
        assert came == [{"rank": 0, "long": ""}, "more"]


# Barriers, groups


@over_shm
def test_no_rank_leaves_a_barrier_before_all_have_come(group: Group) -> None:
    store = dist.distributed_c10d._get_default_store()
    for number in range(5):
        key = f"{group.group_name}/came/{number}"
        if group.rank() == number % group.size():
            time.sleep(0.05)
        store.add(key, 1)
        dist.barrier(group)
        assert store.add(key, 0) == group.size()


@over_shm
def test_groups_of_some_ranks_work_side_by_side(group: Group) -> None:
    """Pairs, a group of one, and the whole at the same time, each rank in its own order of groups."""
    size, rank = group.size(), group.rank()
    pairs = {pair: dist.new_group([*pair], backend="shm") for pair in itertools.combinations(range(size), 2)}
    alone = [dist.new_group([each], backend="shm") for each in range(size)]
    own = [(members, made) for members, made in pairs.items() if rank in members]
    tensors = {members: torch.full((1000,), float(rank)) for members, _ in own}
    whole = torch.full((1000,), float(rank))
    ordered = own if rank % 2 else own[::-1]
    works = [dist.all_reduce(tensors[members], group=made, async_op=True) for members, made in ordered]
    works.append(dist.all_reduce(whole, group=group, async_op=True))
    dist.all_reduce(mine := torch.ones(3), group=alone[rank])
    assert (mine == 1).all()
    for work in works:
        work.wait()
    for members, each in tensors.items():
        assert (each == sum(members)).all()
    assert (whole == sum(range(size))).all()


@over_shm
def test_a_group_numbers_its_ranks_itself(group: Group) -> None:
    """Rank 0 of the group is another rank of the world: roots are given as either."""
    size, rank = group.size(), dist.get_rank()
    made = dist.new_group([*range(1, size)], backend="shm")
    if rank:
        assert (dist.get_rank(made), dist.get_world_size(made)) == (rank - 1, size - 1)
        dist.broadcast(mine := torch.full((3,), float(rank)), size - 1, group=made)
        assert (mine == size - 1).all()
        dist.broadcast(mine := torch.full((3,), float(rank)), group_src=0, group=made)
        assert (mine == 1).all()


# What is refused


@over_shm
def test_wrong_arguments_are_refused_before_anything_moves(group: Group) -> None:
    size = group.size()
    wrong: list[Callable[[], object]] = [
        lambda: dist.all_gather([torch.empty(3)] * (size + 1), torch.empty(3), group=group),
        lambda: dist.all_gather_into_tensor(torch.empty(3 * size + 1), torch.empty(3), group=group),
        lambda: dist.reduce_scatter_tensor(torch.empty(3), torch.empty(3 * size + 1), group=group),
        lambda: dist.all_to_all_single(torch.empty(size), torch.empty(size), [1] * size, [2] * size, group=group),
        lambda: dist.broadcast(torch.empty(3), group_src=size, group=group),
        lambda: dist.all_reduce(torch.ones(3), Op.BAND, group=group),
        lambda: dist.all_reduce(torch.ones(3).to_sparse().to("meta"), group=group),
    ]
    for call in wrong:
        with pytest.raises((RuntimeError, ValueError, TypeError)):
            call()
    dist.all_reduce(mine := torch.ones(3), group=group)
    assert (mine == size).all()


WRONG: dict[str, Callable[[Group, bool], object]] = {  # what the last rank does otherwise
    "sizes": lambda group, odd: dist.all_reduce(torch.ones(5 if odd else 4), group=group),
    "large sizes": lambda group, odd: dist.all_reduce(torch.ones(5 if odd else 400_000), group=group),
    "dtypes": lambda group, odd: dist.broadcast(torch.ones(4).int() if odd else torch.ones(4), 0, group=group),
    "reductions": lambda group, odd: dist.all_reduce(torch.ones(4), Op.MAX if odd else Op.SUM, group=group),
    "roots": lambda group, odd: dist.broadcast(torch.ones(4), 1 if odd else 0, group=group),
    "kinds": lambda group, odd: dist.barrier(group) if odd else dist.all_reduce(torch.ones(4), group=group),
}


@pytest.mark.parametrize("wrong", WRONG)
@world(2, 3)
def test_different_calls_are_an_error_on_all(wrong: str) -> None:
    last, group = dist.get_world_size() - 1, dist.new_group(backend="shm")
    with pytest.raises(CollectiveError, match=rf"different things.*rank {last}: |rank {last}: .*different things"):
        WRONG[wrong](group, dist.get_rank() == last)
    with pytest.raises(CollectiveError, match="since the group has failed"):
        dist.barrier(group)


@world(2, 3)
def test_rows_that_do_not_fit_are_an_error_on_all() -> None:
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.new_group(backend="shm")
    inputs = [torch.ones(2 if rank == size - 1 and to == 0 else 1) for to in range(size)]
    with pytest.raises(CollectiveError, match=rf"rank {size - 1} sends 2 elements to rank 0, which expects 1"):
        dist.all_to_all([torch.ones(1) for _ in range(size)], inputs, group)


@world(2, 3)
def test_the_default_device_changes_nothing() -> None:
    group, rank, size = dist.new_group(backend="shm"), dist.get_rank(), dist.get_world_size()
    mine, got, other = torch.full((size,), float(rank)), torch.zeros(size), torch.zeros(1)
    with torch.device("meta"):
        group.alltoall_base(got, mine, [], []).wait()
        for tag in (1, 2):
            if rank == 0:
                group.send([mine[:1]], 1, tag).wait()
        for tag in (2, 1):  # so that the first is kept meanwhile
            if rank == 1:
                group.recv([other], 0, tag).wait()
    assert torch.equal(got, torch.arange(size).float())


@over_shm
def test_a_rank_that_leaves_is_an_error_on_all_others_at_once(group: Group) -> None:
    for numel in (1, 3_000_000):
        made = dist.new_group(backend="shm", timeout=timedelta(seconds=LIMIT_S))
        if group.rank() == group.size() - 1:
            dist.barrier()
            dist.destroy_process_group(made)
            dist.barrier()
            continue
        start = time.monotonic()
        work = dist.all_reduce(torch.ones(numel), group=made, async_op=True)
        dist.barrier()
        with pytest.raises(RuntimeError):
            work.wait()
        assert time.monotonic() - start < LIMIT_S
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(numel), group=made)
        dist.barrier()
