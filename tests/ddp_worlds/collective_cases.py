"""What torch.distributed promises on the CPU, for any backend: each case takes a fresh group of all ranks.

`run_cases` runs all of them in one world and returns what went wrong in each, so that a test states one promise and a
world starts once. Torch's own tests of gloo are the source of what is promised; expected values are computed here from
the inputs of all ranks.
"""

from __future__ import annotations

import itertools
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ddp.comm.shm import backend

Group = dist.ProcessGroup
Case = Callable[[Group], None]

CASES: dict[str, Case] = {}
LIMIT_S = 20.0  # of a group that nothing is wrong with; less than that of the world, in which cases take turns

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
Op = dist.ReduceOp


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def run_cases(how: str, only: Sequence[str] = ()) -> dict[str, str]:
    """Run the cases, all by default; return what each said: nothing, or the traceback of this rank.

    `how` is a backend; "shm 0,1|2" is shm of a world in which ranks 0 and 1 share memory, and rank 2 does not.
    """
    name_of_backend, _, hosts = how.partition(" ")
    if hosts:
        pretend_hosts([[int(rank) for rank in ranks.split(",")] for ranks in hosts.split("|")])
    said = {}
    for name in only or CASES:
        group = dist.new_group(backend=name_of_backend, timeout=timedelta(seconds=LIMIT_S))
        try:
            with warnings.catch_warnings():
                for kind in (DeprecationWarning, FutureWarning):  # of names that some versions of torch give up
                    warnings.simplefilter("ignore", kind)
                CASES[name](group)
            said[name] = ""
        except BaseException:  # a failed test of pytest is one
            said[name] = traceback.format_exc()
        dist.barrier()
        dist.destroy_process_group(group)
    return said


def pretend_hosts(hosts: Sequence[Sequence[int]]) -> None:
    """Let groups of shm believe from now on that only these ranks of the world share memory."""

    def sharing(store: Any, rank: int, size: int, timeout: timedelta) -> list[tuple[int, ...]]:
        store.set(f"global/{rank}", str(dist.get_rank()))
        known = [int(store.get(f"global/{other}")) for other in range(size)]
        found = [tuple(known.index(each) for each in ranks if each in known) for ranks in hosts]
        return sorted(ranks for ranks in found if ranks)

    backend.sharing = sharing


def given(rank: int, shape: Sequence[int] = (5,), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a rank gives: small whole numbers, whose sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randint(1, 4, tuple(shape), generator=generator).to(dtype)


def every(group: Group, *arguments: Any) -> list[torch.Tensor]:
    return [given(rank, *arguments) for rank in range(group.size())]


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def added(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    total = tensors[0].clone()
    for each in tensors[1:]:
        total += each
    return total


# All-reduce


@case
def all_reduce_sums_every_dtype(group: Group) -> None:
    for dtype in (*FLOATS, *INTEGERS):
        for shape in ((), (1,), (7,), (3, 5), (1000,)):
            mine = given(group.rank(), shape, dtype)
            dist.all_reduce(mine, group=group)
            same(mine, added(every(group, shape, dtype)))


@case
def all_reduce_knows_products_and_extremes(group: Group) -> None:
    ways = {
        Op.PRODUCT: lambda stack: stack.prod(0, dtype=stack.dtype),
        Op.MIN: lambda stack: stack.amin(0),
        Op.MAX: lambda stack: stack.amax(0),
    }
    for (op, expected), dtype in itertools.product(ways.items(), (torch.float32, torch.float64, *INTEGERS)):
        mine = given(group.rank(), (11,), dtype)
        dist.all_reduce(mine, op, group=group)
        same(mine, expected(torch.stack(every(group, (11,), dtype))))


@case
def all_reduce_knows_bits(group: Group) -> None:
    ways = {Op.BAND: torch.bitwise_and, Op.BOR: torch.bitwise_or, Op.BXOR: torch.bitwise_xor}
    for (op, combine), dtype in itertools.product(ways.items(), INTEGERS):
        mine = given(group.rank(), (9,), dtype)
        dist.all_reduce(mine, op, group=group)
        expected = given(0, (9,), dtype)
        for other in every(group, (9,), dtype)[1:]:
            expected = combine(expected, other)
        same(mine, expected)


@case
def all_reduce_refuses_bits_of_floats(group: Group) -> None:
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(3), Op.BAND, group=group)
    dist.all_reduce(mine := torch.ones(3), group=group)  # on all ranks alike, so the group goes on
    assert mine[0] == group.size()


@case
def all_reduce_sums_complex_numbers(group: Group) -> None:
    mine = torch.complex(given(group.rank()), given(group.rank() + 10))
    dist.all_reduce(mine, group=group)
    size = range(group.size())
    same(mine, torch.complex(added([given(r) for r in size]), added([given(r + 10) for r in size])))
    with pytest.raises(ValueError, match="complex"):
        dist.all_reduce(torch.ones(2, dtype=torch.complex64), Op.MAX, group=group)


@case
def all_reduce_is_the_same_bits_on_all_ranks(group: Group) -> None:
    for numel in (1, 100, 5000, 300_001):
        mine = torch.randn(numel, generator=torch.Generator().manual_seed(group.rank())) * 1e3
        dist.all_reduce(mine, group=group)
        others = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(others, mine, group=group)
        assert all(torch.equal(other, mine) for other in others)


@case
def all_reduce_of_pieces_gives_the_same_bits(group: Group) -> None:
    """However a tensor is cut: the order of a sum depends on the element and the ranks only."""
    if dist.get_backend(group) == "gloo":
        return  # its order depends on where in a tensor an element is
    for dtype in (torch.float32, torch.bfloat16):
        mine = (torch.randn(300_007, generator=torch.Generator().manual_seed(group.rank())) * 1e3).to(dtype)
        whole = mine.clone()
        dist.all_reduce(whole, group=group)
        for cuts in ([1, 5, 1000, 100_000, 199_001], [299_990, 17]):
            pieces = [piece.clone() for piece in mine.split(cuts)]
            works = [dist.all_reduce(piece, group=group, async_op=True) for piece in pieces]
            for work in works:
                work.wait()
            same(torch.cat(pieces), whole)


@case
def all_reduce_in_chunks_gives_the_same_bits(group: Group) -> None:
    """More chunks than are on their way at once, whose borders the cuts do not meet."""
    if dist.get_backend(group) == "gloo":
        return
    for dtype, op in ((torch.float32, Op.SUM), (torch.bfloat16, Op.AVG)):
        numel = 18_000_000 // dtype.itemsize + 7
        mine = (torch.randn(numel, generator=torch.Generator().manual_seed(group.rank())) * 1e3).to(dtype)
        whole = mine.clone()
        dist.all_reduce(whole, op, group=group)
        for cuts in ([numel // 3 + 1, 11, numel - numel // 3 - 12], [5, numel - 5]):
            pieces = [piece.clone() for piece in mine.split(cuts)]
            for piece in pieces:
                dist.all_reduce(piece, op, group=group)
            same(torch.cat(pieces), whole)
        others = whole.clone()
        dist.broadcast(others, group_src=0, group=group)
        same(whole, others)


@case
def all_reduce_of_many_sizes(group: Group) -> None:
    for numel in (2, 63, 64, 65, 1023, 4097, 65_537, 1_000_003, 5_000_000):
        mine = torch.full((numel,), float(group.rank() + 1))
        mine[-1] = 7.0
        dist.all_reduce(mine, group=group)
        assert mine[-1] == 7.0 * group.size()
        assert (mine[:-1] == sum(range(1, group.size() + 1))).all()


@case
def all_reduce_keeps_what_surrounds_a_view(group: Group) -> None:
    whole = torch.arange(100.0)
    dist.all_reduce(whole[10:20], group=group)
    expected = torch.arange(100.0)
    expected[10:20] *= group.size()
    same(whole, expected)


@case
def all_reduce_of_not_a_number_and_infinity(group: Group) -> None:
    mine = torch.tensor([float("nan"), float("inf"), 1.0]) if group.rank() == 0 else torch.ones(3)
    dist.all_reduce(mine, group=group)
    assert mine[0].isnan()
    assert mine[1:].tolist() == [float("inf"), group.size()]


@case
def all_reduce_averages(group: Group) -> None:
    mine = given(group.rank(), (12,))
    dist.all_reduce(mine, Op.AVG, group=group)
    torch.testing.assert_close(mine, added(every(group, (12,))) / group.size())


@case
def all_reduce_of_strided_memory(group: Group) -> None:
    """What is dense in another order is reduced in place."""
    image = given(group.rank(), (2, 3, 4, 5)).to(memory_format=torch.channels_last)
    stride = image.stride()
    dist.all_reduce(image, group=group)
    assert image.stride() == stride
    same(image, added(every(group, (2, 3, 4, 5))))
    dist.all_reduce(turned := given(group.rank(), (6, 4)).t(), group=group)
    same(turned, added(every(group, (6, 4))).t())


@case
def all_reduce_of_memory_with_holes_is_right_or_refused(group: Group) -> None:
    if dist.get_backend(group) == "gloo":
        return  # reduces the wrong numbers: the first ones in memory
    whole = given(group.rank(), (6, 4))
    if _is_refused(lambda: dist.all_reduce(whole[:, ::2], group=group)):
        same(whole, given(group.rank(), (6, 4)))
    else:
        same(whole[:, ::2], added(every(group, (6, 4)))[:, ::2])
    same(whole[:, 1::2], given(group.rank(), (6, 4))[:, 1::2])


def _is_refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return "contiguous" in str(error) or "dense" in str(error)
    return False


@case
def empty_tensors_go_through_everything(group: Group) -> None:
    size = group.size()
    dist.all_reduce(torch.empty(0), group=group)
    dist.broadcast(torch.empty(0, 3), 0, group=group)
    dist.all_gather([torch.empty(0) for _ in range(size)], torch.empty(0), group=group)
    dist.all_gather_into_tensor(torch.empty(0), torch.empty(0), group=group)
    dist.reduce(torch.empty(0), 0, group=group)
    dist.all_to_all_single(torch.empty(0), torch.empty(0), group=group)
    dist.reduce_scatter_tensor(torch.empty(0), torch.empty(0), group=group)
    dist.all_reduce(mine := torch.ones(2), group=group)
    assert mine.tolist() == [size] * 2


# From and to one rank


@case
def broadcast_from_each_rank(group: Group) -> None:
    for root in range(group.size()):
        for dtype in (*FLOATS, *INTEGERS, torch.bool, torch.complex64):
            mine = given(group.rank(), (3, 7), dtype)
            dist.broadcast(mine, group_src=root, group=group)
            same(mine, given(root, (3, 7), dtype))
        large = torch.full((300_000,), float(group.rank()))
        dist.broadcast(large, group_src=root, group=group)
        assert (large == root).all()


@case
def reduce_to_each_rank(group: Group) -> None:
    for root in range(group.size()):
        for numel in (5, 200_000):
            mine = given(group.rank(), (numel,))
            dist.reduce(mine, group_dst=root, group=group)
            if group.rank() == root:
                same(mine, added(every(group, (numel,))))


@case
def gather_to_each_rank(group: Group) -> None:
    for root in range(group.size()):
        mine = given(group.rank(), (2, 3))
        places = [torch.empty(2, 3) for _ in range(group.size())] if group.rank() == root else None
        dist.gather(mine, places, group_dst=root, group=group)
        for place, expected in zip(places or (), every(group, (2, 3)), strict=False):
            same(place, expected)


@case
def scatter_from_each_rank(group: Group) -> None:
    for root in range(group.size()):
        pieces = [given(10 * root + rank, (2, 3)) for rank in range(group.size())]
        mine = torch.empty(2, 3)
        dist.scatter(mine, pieces if group.rank() == root else None, group_src=root, group=group)
        same(mine, pieces[group.rank()])


# Each to each


@case
def all_gather_into_lists(group: Group) -> None:
    for dtype, shape in itertools.product((torch.float32, torch.int64, torch.bool), ((), (3,), (2, 500))):
        places = [torch.empty(shape, dtype=dtype) for _ in range(group.size())]
        dist.all_gather(places, given(group.rank(), shape, dtype), group=group)
        for place, expected in zip(places, every(group, shape, dtype), strict=True):
            same(place, expected)


@case
def all_gather_of_strided_memory(group: Group) -> None:
    mine = given(group.rank(), (4, 6))[:, ::2]
    places = [torch.empty(4, 3) for _ in range(group.size())]
    dist.all_gather(places, mine, group=group)
    for place, expected in zip(places, every(group, (4, 6)), strict=True):
        same(place, expected[:, ::2])


@case
def all_gather_into_one_tensor(group: Group) -> None:
    size = group.size()
    for numel in (1, 1000, 100_003):
        place = torch.empty(size * numel)
        dist.all_gather_into_tensor(place, given(group.rank(), (numel,)), group=group)
        same(place, torch.cat(every(group, (numel,))))
    rows = torch.empty(size * 2, 3)
    dist.all_gather_into_tensor(rows, given(group.rank(), (2, 3)), group=group)
    same(rows, torch.cat(every(group, (2, 3))))


@case
def reduce_scatter_of_lists(group: Group) -> None:
    size = group.size()
    for numel in (3, 50_000):
        pieces = [given(group.rank() * size + to, (numel,)) for to in range(size)]
        mine = torch.empty(numel)
        dist.reduce_scatter(mine, pieces, group=group)
        same(mine, added([given(rank * size + group.rank(), (numel,)) for rank in range(size)]))


@case
def reduce_scatter_of_one_tensor(group: Group) -> None:
    size, rank = group.size(), group.rank()
    for op, numel in itertools.product((Op.SUM, Op.MAX), (1, 4, 70_001)):
        mine = torch.empty(numel)
        dist.reduce_scatter_tensor(mine, given(rank, (size * numel,)), op, group=group)
        parts = [each[rank * numel : (rank + 1) * numel] for each in every(group, (size * numel,))]
        same(mine, added(parts) if op == Op.SUM else torch.stack(parts).amax(0))


@case
def all_to_all_of_equal_parts(group: Group) -> None:
    size, rank = group.size(), group.rank()
    for numel in (1, 5, 40_000):
        place = torch.empty(size * numel)
        dist.all_to_all_single(place, given(rank, (size * numel,)), group=group)
        same(place, torch.cat([each[rank * numel : (rank + 1) * numel] for each in every(group, (size * numel,))]))


@case
def all_to_all_of_unequal_parts(group: Group) -> None:
    """Rank r gives rank k (r + 2k) rows of 3: to rank 0 none of its own."""
    size, rank = group.size(), group.rank()
    gives = [rank + 2 * to for to in range(size)]
    gets = [source + 2 * rank for source in range(size)]
    mine = given(rank, (sum(gives), 3))
    place = torch.empty(sum(gets), 3)
    dist.all_to_all_single(place, mine, gets, gives, group=group)
    expected = []
    for source in range(size):
        rows = [source + 2 * to for to in range(size)]
        expected.append(given(source, (sum(rows), 3)).split(rows)[rank])
    same(place, torch.cat(expected))


@case
def all_to_all_of_lists(group: Group) -> None:
    size, rank = group.size(), group.rank()
    pieces = [given(rank * size + to, (2, 3)) for to in range(size)]
    places = [torch.empty(2, 3) for _ in range(size)]
    dist.all_to_all(places, pieces, group=group)
    for source, place in enumerate(places):
        same(place, given(source * size + rank, (2, 3)))


@case
def coalesced_all_reduce(group: Group) -> None:
    mine = [given(group.rank(), shape) for shape in ((3,), (2, 4), (100_000,))]
    group.allreduce_coalesced(mine).wait()
    for found, shape in zip(mine, ((3,), (2, 4), (100_000,)), strict=True):
        same(found, added(every(group, shape)))


@case
def a_coalescing_manager_starts_all_at_its_end(group: Group) -> None:
    tensors = [torch.full((numel,), float(group.rank() + 1)) for numel in (1, 10, 1000)]
    with dist._coalescing_manager(group, async_ops=True) as manager:
        for each in tensors:
            dist.all_reduce(each, group=group)
    manager.wait()
    for each in tensors:
        assert (each == sum(range(1, group.size() + 1))).all()


# Messages


@case
def messages_between_all_pairs(group: Group) -> None:
    rank, size = group.rank(), group.size()
    for sender in range(size):
        for numel in (1, 1000, 400_000):
            if rank == sender:
                for other in range(size):
                    if other != rank:
                        dist.send(given(rank, (numel,)), group_dst=other, group=group)
            else:
                dist.recv(came := torch.empty(numel), group_src=sender, group=group)
                same(came, given(sender, (numel,)))


@case
def a_rank_may_wait_for_the_first_message_of_a_group(group: Group) -> None:
    if group.rank() == 0:
        time.sleep(0.3)
        dist.send(torch.ones(3), group_dst=1, group=group)
    elif group.rank() == 1:
        dist.recv(came := torch.empty(3), group_src=0, group=group)
        assert (came == 1).all()


@case
def messages_both_ways_at_once(group: Group) -> None:
    rank, size = group.rank(), group.size()
    to, source = (rank + 1) % size, (rank - 1) % size
    for numel in (1, 300_000):
        sent = dist.isend(torch.full((numel,), float(rank)), group_dst=to, group=group)
        received = dist.irecv(came := torch.empty(numel), group_src=source, group=group)
        assert sent is not None
        assert received is not None
        received.wait()
        sent.wait()
        assert (came == source).all()


@case
def messages_are_told_apart_by_tags(group: Group) -> None:
    """Received in another order than they were sent in."""
    if group.rank() == 0:
        works = [dist.isend(torch.full((4,), float(tag)), group_dst=1, group=group, tag=tag) for tag in (1, 2, 3)]
        for work in works:
            work.wait()
    elif group.rank() == 1:
        for tag in (3, 1, 2):
            dist.recv(came := torch.empty(4), group_src=0, group=group, tag=tag)
            assert (came == tag).all()


@case
def messages_of_one_tag_keep_their_order(group: Group) -> None:
    if group.rank() == 0:
        works = [dist.isend(torch.full((n + 1,), float(n)), group_dst=1, group=group) for n in range(20)]
        for work in works:
            work.wait()
    elif group.rank() == 1:
        for n in range(20):
            dist.recv(came := torch.empty(n + 1), group_src=0, group=group)
            assert (came == n).all()


@case
def a_message_from_anybody_says_from_whom(group: Group) -> None:
    if group.rank() == 0:
        heard = set()
        for _ in range(group.size() - 1):
            source = dist.recv(came := torch.empty(3), group=group)
            assert (came == source).all()
            heard.add(source)
        assert heard == set(range(1, group.size()))
    else:
        dist.send(torch.full((3,), float(group.rank())), group_dst=0, group=group)


@case
def messages_in_a_batch(group: Group) -> None:
    rank, size = group.rank(), group.size()
    to, source = (rank + 1) % size, (rank - 1) % size
    came = torch.empty(50_000)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.full((50_000,), float(rank)), group=group, group_peer=to),
            dist.P2POp(dist.irecv, came, group=group, group_peer=source),
        ]
    )
    for work in works:
        work.wait()
    assert (came == source).all()


@case
def a_message_beside_a_sum_in_another_order(group: Group) -> None:
    """Rank 0 starts the sum and then sends; rank 1 receives first and then joins the sum."""
    mine = torch.ones(100_000)
    if group.rank() == 0:
        work = dist.all_reduce(mine, group=group, async_op=True)
        dist.send(torch.full((3,), 9.0), group_dst=1, group=group)
        work.wait()
    else:
        if group.rank() == 1:
            dist.recv(came := torch.empty(3), group_src=0, group=group)
            assert (came == 9).all()
        dist.all_reduce(mine, group=group)
    assert (mine == group.size()).all()


# Works, futures, order


@case
def a_work_that_is_waited_for_is_done(group: Group) -> None:
    for numel in (1, 400_000):
        mine = given(group.rank(), (numel,))
        work = dist.all_reduce(mine, group=group, async_op=True)
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        same(mine, added(every(group, (numel,))))
        assert work.wait()  # again
        same(mine, added(every(group, (numel,))))


@case
def a_work_ends_without_being_waited_for(group: Group) -> None:
    for numel in (1, 400_000):
        mine = torch.ones(numel)
        work = dist.all_reduce(mine, group=group, async_op=True)
        deadline = time.monotonic() + LIMIT_S
        while not work.is_completed():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert (mine == group.size()).all()


@case
def a_work_has_a_future_with_its_result(group: Group) -> None:
    for numel in (1, 400_000):
        work = dist.all_reduce(torch.ones(numel), group=group, async_op=True)
        doubled = work.get_future().then(lambda future: 2 * future.value()[0])
        assert (doubled.wait() == 2 * group.size()).all()
        work.wait()
        assert len(work.result()) == 1
        assert (work.result()[0] == group.size()).all()


@case
def a_future_s_callback_may_wait_for_another_collective(group: Group) -> None:
    """As torch's PowerSGD hook does."""

    def again(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        inner = dist.all_reduce(future.value()[0], group=group, async_op=True)
        return inner.get_future().wait()[0]

    for numel in (1, 400_000):
        future = dist.all_reduce(torch.ones(numel), group=group, async_op=True).get_future().then(again)
        assert (future.wait() == group.size() ** 2).all()


@case
def a_wait_may_be_given_less_time(group: Group) -> None:
    """It ends with an error when time is up, and the collective goes on."""
    if group.rank() == 0:
        work = dist.all_reduce(mine := torch.ones(10), group=group, async_op=True)
        with pytest.raises(RuntimeError):
            work.wait(timedelta(milliseconds=30))
        assert not work.is_completed()
        dist.barrier()
        assert work.wait(timedelta(seconds=LIMIT_S))
    else:
        dist.barrier()
        dist.all_reduce(mine := torch.ones(10), group=group)
    assert (mine == group.size()).all()


@case
def many_works_at_once_keep_their_order(group: Group) -> None:
    """Waited for in the other order; sums between broadcasts, small and large."""
    size, rank = group.size(), group.rank()
    tensors = [torch.full((numel,), float(rank + n)) for n, numel in enumerate([1, 300_000, 5, 2000, 300_001, 7] * 3)]
    works = [
        dist.all_reduce(each, group=group, async_op=True)
        if n % 3
        else dist.broadcast(each, group_src=n % size, group=group, async_op=True)
        for n, each in enumerate(tensors)
    ]
    for work in reversed(works):
        work.wait()
    for n, each in enumerate(tensors):
        expected = sum(other + n for other in range(size)) if n % 3 else n % size + n
        assert (each == expected).all()


@case
def a_tensor_may_be_used_again_after_its_wait(group: Group) -> None:
    mine = torch.ones(200_000)
    for _ in range(20):
        dist.all_reduce(mine, group=group)
        mine /= group.size()
    assert (mine == 1).all()
    for numel in (3, 200_000):  # what is sent may change as soon as the call returns
        for step in range(10):
            flat = torch.full((numel,), float(step))
            dist.broadcast(flat, group_src=step % group.size(), group=group)
            assert (flat == step).all()
            flat.fill_(-1.0)


@case
def no_rank_leaves_a_barrier_before_all_have_come(group: Group) -> None:
    store = dist.distributed_c10d._get_default_store()
    for round_ in range(5):
        key = f"{group.group_name}/came/{round_}"
        if group.rank() == round_ % group.size():
            time.sleep(0.05)
        store.add(key, 1)
        dist.barrier(group)
        assert store.add(key, 0) == group.size()


@case
def groups_of_some_ranks_work_side_by_side(group: Group) -> None:
    """Pairs, a group of one, and the whole at the same time, each rank in its own order of groups."""
    size, rank, backend = group.size(), group.rank(), dist.get_backend(group)
    pairs = {pair: dist.new_group(list(pair), backend=backend) for pair in itertools.combinations(range(size), 2)}
    alone = [dist.new_group([each], backend=backend) for each in range(size)]
    works, tensors = [], []
    own = [(members, made) for members, made in pairs.items() if rank in members]
    for members, made in own if rank % 2 else reversed(own):
        tensors.append((members, torch.full((1000,), float(rank))))
        works.append(dist.all_reduce(tensors[-1][1], group=made, async_op=True))
    works.append(dist.all_reduce(whole := torch.full((1000,), float(rank)), group=group, async_op=True))
    dist.all_reduce(mine := torch.ones(3), group=alone[rank])
    assert (mine == 1).all()
    for work in works:
        work.wait()
    for members, each in tensors:
        assert (each == sum(members)).all()
    assert (whole == sum(range(size))).all()
    dist.broadcast(low := torch.full((2,), float(rank)), 0, group=group)
    assert (low == 0).all()


@case
def a_group_numbers_its_ranks_itself(group: Group) -> None:
    """Rank 0 of the group is another rank of the world: roots are given as either."""
    size, backend = group.size(), dist.get_backend(group)
    members = list(range(1, size))
    made = dist.new_group(members, backend=backend)
    if dist.get_rank() in members:
        assert (dist.get_rank(made), dist.get_world_size(made)) == (dist.get_rank() - 1, size - 1)
        dist.broadcast(mine := torch.full((3,), float(dist.get_rank())), size - 1, group=made)
        assert (mine == size - 1).all()
        dist.broadcast(mine := torch.full((3,), float(dist.get_rank())), group_src=0, group=made)
        assert (mine == 1).all()


# What torch builds on them


@case
def objects_travel(group: Group) -> None:
    rank, size = group.rank(), group.size()
    mine = {"rank": rank, "text": "x" * (1000 * rank)}
    dist.all_gather_object(found := [None] * size, mine, group=group)
    assert [each["rank"] for each in found] == list(range(size))
    assert [len(each["text"]) for each in found] == [1000 * each for each in range(size)]
    said = [mine, rank]
    dist.broadcast_object_list(said, group_src=size - 1, group=group)
    assert said[1] == size - 1
    places = [None] * size if rank == 0 else None
    dist.gather_object(mine, places, group_dst=0, group=group)
    assert places is None or [each["rank"] for each in places] == list(range(size))
    dist.scatter_object_list(out := [None], [("for", each) for each in range(size)], group_src=0, group=group)
    assert out == [("for", rank)]
    if rank == 0:
        dist.send_object_list([mine, "more"], group_dst=1, group=group)
    elif rank == 1:
        dist.recv_object_list(came := [None, None], group_src=0, group=group)
        assert came == [{"rank": 0, "text": ""}, "more"]


@case
def functional_collectives(group: Group) -> None:
    rank, size = group.rank(), group.size()
    mine = given(rank, (size, 3))
    total = functional.all_reduce(mine, "sum", group)
    same(functional.wait_tensor(total), added(every(group, (size, 3))))
    same(mine, given(rank, (size, 3)))
    same(functional.wait_tensor(functional.all_gather_tensor(mine, 0, group)), torch.cat(every(group, (size, 3))))
    part = functional.wait_tensor(functional.reduce_scatter_tensor(mine, "sum", 0, group))
    same(part, added(every(group, (size, 3)))[rank : rank + 1])
    came = functional.wait_tensor(functional.all_to_all_single(mine, None, None, group))
    same(came, torch.stack([each[rank] for each in every(group, (size, 3))]))
    same(functional.wait_tensor(functional.broadcast(mine, size - 1, group)), given(size - 1, (size, 3)))


@case
def a_device_mesh_moves_dtensors(group: Group) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = DeviceMesh.from_group(group, "cpu")
    whole = torch.arange(4.0 * group.size() * 3).view(-1, 3)
    sharded: Any = distribute_tensor(whole, mesh, [Shard(0)])
    assert sharded.to_local().shape == (4, 3)
    same(sharded.redistribute(placements=[Replicate()]).to_local(), whole)
    same((sharded + sharded).full_tensor(), 2 * whole)
    same(sharded.sum().full_tensor(), whole.sum())


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[torch.Tensor]) -> None:
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 300), nn.ReLU(), nn.BatchNorm1d(300), nn.Linear(300, 1)).double()


@case
def torchs_own_ddp_trains_to_one_process(group: Group) -> None:
    """With buckets of many sizes, in parameters and in views of buckets; without BatchNorm's split of the batch."""
    rank, size = group.rank(), group.size()
    batches = [torch.randn(2 * size, 6, generator=torch.Generator().manual_seed(n)).double() for n in range(4)]
    alone = nn.Sequential(*[each for each in _net() if not isinstance(each, nn.BatchNorm1d)])
    _trained(alone, torch.optim.SGD(alone.parameters(), lr=0.1), batches)
    for cap_mb, views in ((25, False), (0.001, True)):
        net = nn.Sequential(*[each for each in _net() if not isinstance(each, nn.BatchNorm1d)])
        model = nn.parallel.DistributedDataParallel(
            net, process_group=group, bucket_cap_mb=cap_mb, gradient_as_bucket_view=views
        )
        shards = [batch[rank * 2 : rank * 2 + 2] for batch in batches]
        _trained(model, torch.optim.SGD(model.parameters(), lr=0.1), shards)
        for mine, other in zip(net.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


@case
def torchs_zero_optimizer_trains_to_one_process(group: Group) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    rank, size = group.rank(), group.size()
    batches = [torch.randn(2 * size, 6, generator=torch.Generator().manual_seed(n)).double() for n in range(3)]
    alone, net = (nn.Sequential(*[each for each in _net() if not isinstance(each, nn.BatchNorm1d)]) for _ in range(2))
    _trained(alone, torch.optim.Adam(alone.parameters(), lr=0.1), batches)
    model = nn.parallel.DistributedDataParallel(net, process_group=group)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, process_group=group, lr=0.1)
    _trained(model, optimizer, [batch[rank * 2 : rank * 2 + 2] for batch in batches])
    for mine, other in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-8, atol=1e-9)


# What is refused


@case
def wrong_arguments_are_refused_before_anything_moves(group: Group) -> None:
    size = group.size()
    with pytest.raises((RuntimeError, ValueError)):
        dist.all_gather([torch.empty(3) for _ in range(size + 1)], torch.empty(3), group=group)
    with pytest.raises((RuntimeError, ValueError)):
        dist.all_gather_into_tensor(torch.empty(3 * size + 1), torch.empty(3), group=group)
    with pytest.raises((RuntimeError, ValueError)):
        dist.reduce_scatter_tensor(torch.empty(3), torch.empty(3 * size + 1), group=group)
    with pytest.raises((RuntimeError, ValueError)):
        dist.all_to_all_single(torch.empty(size), torch.empty(size), [1] * size, [2] * size, group=group)
    with pytest.raises((RuntimeError, ValueError)):
        dist.broadcast(torch.empty(3), group_src=size, group=group)
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        dist.all_reduce(torch.ones(3).to_sparse().to("meta"), group=group)
    dist.all_reduce(mine := torch.ones(3), group=group)
    assert (mine == size).all()


@case
def a_rank_that_does_not_come_is_an_error_in_time(group: Group) -> None:
    """In a group of its own, with a timeout of a second, in which nothing can follow."""
    made = dist.new_group(backend=dist.get_backend(group), timeout=timedelta(seconds=1))
    if group.rank() == 0:
        dist.barrier()  # of the world: comes to it when the others have given up
        return
    start = time.monotonic()
    store, key = dist.distributed_c10d._get_default_store(), f"{made.group_name}/come"
    store.add(key, 1)
    while store.add(key, 0) < group.size() - 1:  # else one that comes late hears of the end of another's second
        time.sleep(0.001)
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(3), group=made)
    assert time.monotonic() - start > 0.9
    dist.barrier()


@case
def a_rank_that_leaves_is_an_error_on_all_others_at_once(group: Group) -> None:
    if dist.get_backend(group) == "gloo":
        return  # whose default group, which is not this one, then fails as well
    for numel in (1, 3_000_000):
        made = dist.new_group(backend=dist.get_backend(group), timeout=timedelta(seconds=LIMIT_S))
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
