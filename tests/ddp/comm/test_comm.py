"""Broadcasts between real ranks: what is large travels in pieces, through little memory."""

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
from torch import nn

from ddp.comm import broadcast, objects
from ddp.comm.broadcast import BufferSync, broadcast_tensors
from ddp.comm.objects import gather_values
from ddp.comm.sums import small_sum
from ddp.comm.sums.small_sum import SmallAdder, add_up
from ddp.monitoring.stall_report import Pending
from ddp.torch_internals import not_split_off

LIMIT_BYTES = 1000


def _odd_tensors(seed: int) -> list[torch.Tensor]:
    """Above and below the limit: with strides of their own, one long row, long rows, no rows, one number."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(40, 50, generator=generator)
    return [
        numbers,
        numbers.clone().t(),
        torch.randn(3, 4, 6, 7, generator=generator).to(memory_format=torch.channels_last),
        torch.randn(1, 1, 600, generator=generator),
        torch.randn(2, 300, generator=generator).to(torch.complex128),
        numbers.reshape(-1)[:1500] > 0,
        numbers.clone()[:, ::2],
        torch.empty(0, 5),
        torch.tensor(float(seed)),
        nn.Parameter(torch.randn(700, generator=generator)),
    ]


@world(3)
def test_large_tensors_travel_in_pieces() -> None:
    """All arrive, into the same memory; staging tensors are within the limit, and what is in one piece has none."""
    sizes: list[int] = []
    staged: list[torch.Tensor] = []

    class Package(broadcast._Package):
        def __init__(self, tensors: list[torch.Tensor]) -> None:
            super().__init__(tensors)
            sizes.append(sum(tensor.nbytes for tensor in tensors))
            staged.extend(tensors)

    rank, root = dist.get_rank(), dist.get_world_size() - 1
    tensors, expected = _odd_tensors(rank), _odd_tensors(root)
    square = torch.full((30, 40), float(rank))
    tensors.append(square if rank else square.t().contiguous().t())  # in another order on one rank
    expected.append(torch.full((30, 40), float(root)))
    conjugated = torch.full((600,), complex(rank, rank))
    tensors.append(conjugated.conj() if rank else conjugated)  # a view on some ranks
    expected.append(torch.full((600,), complex(root, -root if root else root)))
    pointers = [tensor.data_ptr() for tensor in tensors]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(broadcast, "_ALONE_BYTES", LIMIT_BYTES)
        patched.setattr(broadcast, "_CHUNK_BYTES", LIMIT_BYTES)
        patched.setattr(broadcast, "_Package", Package)
        broadcast_tensors(present(dist.group.WORLD), tensors, root)
    assert max(sizes) <= LIMIT_BYTES
    assert sum(sizes) < sum(tensor.nbytes for tensor in tensors)
    in_place = [tensor for tensor in tensors if tensor.is_contiguous() and not tensor.is_conj()]
    whole = {tensor.data_ptr() for tensor in in_place if tensor.nbytes >= LIMIT_BYTES}
    assert whole.isdisjoint(tensor.data_ptr() for tensor in staged)
    for tensor, other in zip(tensors, expected, strict=True):
        assert torch.equal(tensor, other)
    assert pointers == [tensor.data_ptr() for tensor in tensors]


@world(3)
def test_large_buffers_travel_in_turn() -> None:
    """As small ones do: again and again, and a graph that has saved one is not disturbed."""
    module: Any = nn.Module()
    for number, tensor in enumerate(_odd_tensors(dist.get_rank())):
        module.register_buffer(f"buffer{number}", tensor.detach())
    waited: list[str] = []

    def wait(work: Pending, what: str, *, device: torch.device) -> None:
        assert device.type == "cpu"
        waited.append(what)
        work.wait()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(broadcast, "_ALONE_BYTES", LIMIT_BYTES)
        patched.setattr(broadcast, "_CHUNK_BYTES", LIMIT_BYTES)
        sync = BufferSync(present(dist.group.WORLD), module, ["buffer2"], wait)
        for round_ in range(3):
            factor = torch.ones((), requires_grad=True)
            loss = (module.buffer0 * factor).sum()
            sync.run()
            loss.backward()
            expected = _odd_tensors(0)
            for number, buffer in enumerate(module.buffers()):
                if number != 2:
                    assert torch.equal(buffer, (expected[number] * (round_ + 1)).to(buffer.dtype))
            for buffer, first in zip(module.buffers(), _odd_tensors(dist.get_rank()), strict=True):
                buffer.copy_(first * (round_ + 2))
    assert not sync._packages
    assert len(waited) > 30


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


@world(2)
def test_a_group_of_some_ranks_is_not_split_off() -> None:
    """Rank 0 alone makes one while the default group is bound to a device, and it stays bound, also after an error."""
    group: Any = dist.group.WORLD
    device = torch.device("cuda", 0)
    group.bound_device_id = device
    try:
        if dist.get_rank() == 0:
            with not_split_off():
                assert group.bound_device_id is None
                alone = dist.new_group([0], use_local_synchronization=True)
            dist.all_reduce(torch.ones(1), group=alone)
        with pytest.raises(ValueError, match="refused"), not_split_off():
            raise ValueError("refused")
        assert group.bound_device_id == device
    finally:
        group.bound_device_id = None
