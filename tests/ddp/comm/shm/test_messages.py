"""Messages, works and futures of the backend `shm`, on one host and over hosts."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.processes import wait_until
from testbed.shm import LIMIT_S, over_shm
from testbed.training import assert_weights_close, batch, build, loss_of
from testbed.worlds import world

import ddp
from ddp.errors import CollectiveError

Group = Any
LARGE = 1_000_003  # elements: several times what a channel holds


@over_shm
def test_messages_between_all_pairs(group: Group) -> None:
    rank, size = group.rank(), group.size()
    for sender in range(size):
        for numel in (1, 1000, 400_000):
            if rank != sender:
                dist.recv(came := torch.empty(numel), group_src=sender, group=group)
                assert (came == sender).all()
            for other in range(size) if rank == sender else ():
                if other != rank:
                    dist.send(torch.full((numel,), float(rank)), group_dst=other, group=group)


@over_shm
def test_a_rank_may_wait_for_the_first_message_of_a_group(group: Group) -> None:
    if group.rank() == 0:
        time.sleep(0.3)
        dist.send(torch.ones(3), group_dst=1, group=group)
    elif group.rank() == 1:
        dist.recv(came := torch.empty(3), group_src=0, group=group)
        assert (came == 1).all()


@over_shm
def test_messages_in_a_ring_and_in_a_batch(group: Group) -> None:
    """All send more than a channel holds before they receive."""
    rank, size = group.rank(), group.size()
    to, source = (rank + 1) % size, (rank - 1) % size
    for numel in (1, LARGE):
        sent = dist.isend(torch.full((numel,), float(rank)), group_dst=to, group=group)
        dist.recv(came := torch.empty(numel), group_src=source, group=group)
        assert sent is not None
        sent.wait()
        assert (came == source).all()
    came = torch.zeros(LARGE, 2)
    operations = [
        dist.P2POp(dist.isend, torch.full((LARGE, 2), float(rank)), group=group, group_peer=to),
        dist.P2POp(dist.irecv, came, group=group, group_peer=source),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert (came == source).all()


@over_shm
def test_messages_are_distinguished_by_tags(group: Group) -> None:
    """Received in another order than they were sent in."""
    counts = {3: 0, 4: 4, 5: LARGE}
    if group.rank() == 0:
        messages = [torch.full((counts[tag],), float(tag)) for tag in (5, 4, 3)]
        works: list[Any] = [
            dist.isend(each, group_dst=1, group=group, tag=tag) for tag, each in zip((5, 4, 3), messages, strict=True)
        ]
        for work in works:
            work.wait()
    elif group.rank() == 1:
        for tag, count in counts.items():
            assert dist.recv(came := torch.empty(count), group_src=0, group=group, tag=tag) == 0
            assert (came == tag).all()


@over_shm
def test_messages_of_one_tag_keep_their_order(group: Group) -> None:
    if group.rank() == 0:
        works: list[Any] = [dist.isend(torch.full((n + 1,), float(n)), group_dst=1, group=group) for n in range(20)]
        for work in works:
            work.wait()
    elif group.rank() == 1:
        for n in range(20):
            dist.recv(came := torch.empty(n + 1), group_src=0, group=group)
            assert (came == n).all()


@world(2, 3)
def test_large_messages_of_one_tag_keep_their_order() -> None:
    """The second is asked for while the first, which no one had asked for, is still arriving."""
    group, rank, size = dist.new_group(backend="shm"), dist.get_rank(), dist.get_world_size()
    for _ in range(5):
        got = [torch.zeros(3_000_000) for _ in range(2)]
        works: list[Any] = []
        if rank == 0:
            works = [dist.isend(torch.full((3_000_000,), float(value)), 1, group=group) for value in (1, 2)]
        elif rank == 1:
            works = [dist.irecv(torch.zeros(1), size - 1, group=group, tag=7)] if size > 2 else []
            works += [dist.irecv(each, 0, group=group) for each in got]
        dist.barrier()
        if rank == size - 1 and size > 2:
            works = [dist.isend(torch.ones(1), 1, group=group, tag=7)]
        for work in works:
            work.wait()
        assert rank != 1 or [(each == value).all().item() for value, each in enumerate(got, 1)] == [True, True]


@world(2)
def test_a_message_comes_into_strided_memory() -> None:
    group, strided = dist.new_group(backend="shm"), torch.zeros(2, LARGE).t()
    if dist.get_rank() == 0:
        dist.send(torch.ones(LARGE, 2), 1, group=group)
    else:
        dist.recv(strided, 0, group=group)
        assert (strided == 1).all()


@over_shm
def test_a_message_from_any_rank_says_from_whom(group: Group) -> None:
    if group.rank():
        dist.send(torch.full((3,), float(group.rank())), group_dst=0, group=group, tag=9)
        return
    heard = []
    for _ in range(group.size() - 1):
        heard.append(dist.recv(came := torch.empty(3), group=group, tag=9))
        assert (came == heard[-1]).all()
    assert sorted(heard) == [*range(1, group.size())]


@world(2)
def test_a_message_of_another_size_is_an_error_on_both() -> None:
    group, rank = dist.new_group(backend="shm"), dist.get_rank()
    said = "rank 0 sent 5 elements of torch.float32 with tag 0, rank 1 expects 4"
    if rank == 0:
        dist.send(torch.ones(5), 1, group=group)
    with pytest.raises(CollectiveError, match=said):
        dist.recv(torch.ones(4), 0, group) if rank else dist.barrier(group)


# Works and futures


@over_shm
def test_an_asynchronous_sum_lets_messages_pass(group: Group) -> None:
    """Rank 0 starts a sum and then sends; the others receive first and then join the sum."""
    size = group.size()
    for numel in (10, 3_000_000):
        mine, came = torch.ones(numel), torch.zeros(3)
        if group.rank() == 0:
            work = dist.all_reduce(mine, group=group, async_op=True)
            assert work is not None
            assert not work.is_completed()
            for other in range(1, size):
                dist.send(torch.full((3,), 7.0), group_dst=other, group=group)
            work.wait()
        else:
            dist.recv(came, group_src=0, group=group)
            dist.all_reduce(mine, group=group)
            assert (came == 7).all()
        assert (mine == size).all()


@over_shm
def test_a_work_is_done_with_or_without_a_wait(group: Group) -> None:
    for numel in (1, 400_000):
        works: list[Any] = [dist.all_reduce(mine := torch.ones(numel), group=group, async_op=True)]
        wait_until(works[0].is_completed, "the sum is done", LIMIT_S)
        works.append(dist.all_reduce(mine, group=group, async_op=True))
        for work in (works[1], works[1]):  # twice is once
            assert work.wait()
        assert all(work.is_completed() and work.is_success() and work.exception() is None for work in works)
        assert (mine == group.size() ** 2).all()


@over_shm
def test_a_future_has_the_result_and_calls_back(group: Group) -> None:
    """A callback may wait for another collective, as torch's PowerSGD hook does."""

    def again(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        inner: Any = dist.all_reduce(future.value()[0].clone(), group=group, async_op=True)
        result: torch.Tensor = inner.get_future().wait()[0]
        return result

    if group.rank() == 0:
        time.sleep(0.2)  # so that the others cannot finish within their call
    for numel in (1, 400_000, 2_000_000):
        work: Any = dist.all_reduce(torch.ones(numel), group=group, async_op=True)
        assert (work.get_future().then(again).wait() == group.size() ** 2).all()
        work.wait()
        (result,) = work.result()
        assert (result == group.size()).all()


@over_shm
def test_a_wait_may_be_given_less_time(group: Group) -> None:
    """It ends with an error when time is up, and the collective goes on."""
    mine = torch.ones(10)
    if group.rank() == 0:
        work: Any = dist.all_reduce(mine, group=group, async_op=True)
        with pytest.raises(CollectiveError, match=r"was not done within 0.03 s; it goes on"):
            work.wait(timedelta(milliseconds=30))
        assert not work.is_completed()
        dist.barrier()
        assert work.wait(timedelta(seconds=LIMIT_S))
    else:
        dist.barrier()
        dist.all_reduce(mine, group=group)
    assert (mine == group.size()).all()


@over_shm
def test_many_works_at_once_keep_their_order(group: Group) -> None:
    """Waited for in the other order; sums between broadcasts, small and large."""
    size, rank = group.size(), group.rank()
    tensors = [torch.full((numel,), float(rank + n)) for n, numel in enumerate([1, 300_000, 5, 2000, 300_001, 7] * 3)]
    works: list[Any] = [
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


@over_shm
def test_a_tensor_may_be_used_again_after_its_call(group: Group) -> None:
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


# What is built on them


@over_shm
def test_both_classes_train_to_one_process(group: Group) -> None:
    """torch's class and ours, with buckets of many sizes."""
    rank, size = group.rank(), group.size()
    alone = build("mlp")
    wraps: list[Any] = [torch.nn.parallel.DistributedDataParallel, ddp.DistributedDataParallel]
    models = [
        wrap(build("mlp"), process_group=group, bucket_cap_mb=cap_mb, gradient_as_bucket_view=views)
        for wrap in wraps
        for cap_mb, views in ((25, False), (0.001, True))
    ]
    for step in range(4):
        x, y = batch(step, 2 * size)
        for module, rows in ((alone, slice(2 * size)), *((model, slice(2 * rank, 2 * rank + 2)) for model in models)):
            module.zero_grad()
            loss_of(module, x[rows], y[rows]).backward()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter -= 0.1 * parameter.grad
        for model in models:
            assert_weights_close(model.module, alone, f"step {step}")
