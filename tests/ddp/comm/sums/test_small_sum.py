"""Sums of small vectors over many ranks, and values that are gathered by them."""

from __future__ import annotations

import gc
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.present import present
from testbed.slow import slow
from testbed.worlds import world

from ddp.comm import objects
from ddp.comm.objects import gather_values
from ddp.comm.sums import small_sum
from ddp.comm.sums.small_sum import SmallAdder, add_up


class Counted:
    """A group that counts its messages."""

    def __init__(self) -> None:
        self.sent = self.received = 0

    def rank(self) -> int:
        return dist.get_rank()

    def size(self) -> int:
        return dist.get_world_size()

    def send(self, *given: Any) -> dist.Work:
        self.sent += 1
        return present(dist.group.WORLD).send(*given)

    def recv(self, *given: Any) -> dist.Work:
        self.received += 1
        return present(dist.group.WORLD).recv(*given)


@world(2, 3, 4, slow(7), backend="gloo")
def test_small_sums_take_few_messages_and_have_the_same_bits() -> None:
    """Several at once, between other collectives of the group and messages of the user."""
    group, size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    inner = 1 << (size.bit_length() - 1)
    doublings = inner.bit_length() - 1
    counted: Any = Counted()
    add_up(counted, mine := torch.full((5,), 2.0**rank))
    assert mine.tolist() == [2.0**size - 1] * 5
    expected = 1 if rank >= inner else doublings + (rank + inner < size)
    assert (counted.sent, counted.received) == (expected, expected)

    generator = torch.Generator().manual_seed(rank)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(small_sum, "_LEAST_RANKS", 2)
        for _ in range(10):
            given = [torch.randn(length, generator=generator) for length in (1, 60, 1000)]
            sums = [each.clone() for each in given]
            works = [SmallAdder(present(group)).start(each) for each in sums]
            dist.all_reduce(one := torch.ones(3))
            sent: Any = dist.isend(torch.tensor([rank]), (rank + 1) % size)
            dist.recv(came := torch.tensor([-1]), (rank - 1) % size)
            sent.wait()
            assert (one[0].item(), came[0].item()) == (size, (rank - 1) % size)
            for work, added, each in zip(reversed(works), reversed(sums), reversed(given), strict=True):
                assert work.wait(timedelta(seconds=25))
                assert work.is_completed()
                every = [torch.empty_like(added) for _ in range(size)]
                dist.all_gather(every, added)
                assert all(torch.equal(other, added) for other in every)
                dist.all_reduce(each)
                torch.testing.assert_close(added, each)


@world(2, slow(7), backend="gloo")
def test_a_group_s_small_sums_have_one_thread_that_ends_with_it() -> None:
    def threads() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each.name.startswith("ddp-exchanges")]

    group, before = dist.new_group(backend="gloo"), threads()
    numbers = set()
    for step in range(20):
        add_up(group, flat := torch.full((3,), float(step)))
        assert flat.tolist() == [float(step * dist.get_world_size())] * 3
        numbers |= {each.ident for each in threads() if each not in before}
    (thread,) = (each for each in threads() if each not in before)
    assert numbers == {thread.ident}
    dist.destroy_process_group(group)
    del group
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


@world(2, 3, 4, slow(7), backend="gloo")
def test_values_are_gathered_by_sums() -> None:
    """Short and long ones, of other lengths on each rank, and those that are too long for it."""
    made: list[int] = []

    def add(group: dist.ProcessGroup, flat: torch.Tensor) -> None:
        made.append(len(flat))
        add_up(group, flat)

    ranks = range(dist.get_world_size())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(small_sum, "_LEAST_RANKS", 2)
        patched.setattr(objects, "add_up", add)
        assert gather_values(("x", dist.get_rank())) == [("x", rank) for rank in ranks]
        assert len(made) == 1
        assert gather_values("x" * 1000 * dist.get_rank()) == ["x" * 1000 * rank for rank in ranks]
        assert len(made) == 3
        patched.setattr(small_sum, "_MOST_BYTES", 10_000)
        assert gather_values("x" * 10_000 * dist.get_rank()) == ["x" * 10_000 * rank for rank in ranks]
        assert len(made) == 4  # the lengths travel as a sum
