"""What groups, broadcasts and sums of `ddp.comm` do between the ranks of a test world: each asserts on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp.comm import broadcast
from ddp.comm.broadcast import BufferSync, broadcast_tensors

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


def large_tensors_travel_in_pieces() -> None:
    """All arrive, into the same memory, and no staging tensor is larger than the limit."""
    sizes: list[int] = []

    class Package(broadcast._Package):
        def __init__(self, tensors: list[torch.Tensor]) -> None:
            super().__init__(tensors)
            sizes.append(sum(tensor.nbytes for tensor in tensors))

    root = dist.get_world_size() - 1
    tensors, expected = _odd_tensors(dist.get_rank()), _odd_tensors(root)
    pointers = [tensor.data_ptr() for tensor in tensors]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(broadcast, "_CHUNK_BYTES", LIMIT_BYTES)
        patched.setattr(broadcast, "_Package", Package)
        broadcast_tensors(dist.group.WORLD, tensors, root)
    assert max(sizes) <= LIMIT_BYTES
    assert sum(sizes) == sum(tensor.nbytes for tensor in tensors)
    for tensor, other in zip(tensors, expected, strict=True):
        assert torch.equal(tensor, other)
    assert pointers == [tensor.data_ptr() for tensor in tensors]


def large_buffers_travel_in_turn() -> None:
    """As small ones do: again and again, and a graph that has saved one is not disturbed."""
    module = nn.Module()
    for number, tensor in enumerate(_odd_tensors(dist.get_rank())):
        module.register_buffer(f"buffer{number}", tensor.detach())
    waited: list[str] = []

    def wait(work: dist.Work, what: str) -> None:
        waited.append(what)
        work.wait()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(broadcast, "_CHUNK_BYTES", LIMIT_BYTES)
        sync = BufferSync(dist.group.WORLD, module, ["buffer2"], wait)
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
