"""Broadcasts between real ranks: what is large travels in pieces, through little memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.present import present
from testbed.worlds import world
from torch import nn

from ddp.comm import broadcast
from ddp.comm.broadcast import BufferSync, broadcast_tensors
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
