"""Compressors never wait for a device: on tensors without values, where reading one raises, they do all they do.

Tensors are on the meta device, which goes the way of every device but the CPU (fake CUDA tensors need a torch with
CUDA), and the process group is torch's fake one of two ranks, which moves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ddp_worlds.compression_cases import Bucket
from testbed.present import present
from torch.testing._internal.distributed.fake_pg import FakeStore

from ddp.compression import Half, Int8, PowerSGD, row_compressor
from ddp.compression.compressor import Compressor
from ddp.compression.row_exchange import RowExchange

SHAPES = [(40, 30), (7,), (), (0, 3), (6, 5, 3, 3)]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    # Of a group of NCCL, the exchange connects nothing, and asks the ranks nothing.
    in_order = SimpleNamespace(_pipeline=None, leave=lambda: None)
    in_order.start = lambda group, rows: RowExchange.start(in_order, group, rows)  # type: ignore[arg-type]
    monkeypatch.setattr(row_compressor, "open_exchange", lambda _, **__: in_order)
    try:
        yield present(dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def reduce(made: Compressor, dtype: torch.dtype, *, step: int, owners: list[torch.Tensor]) -> None:
    """One bucket, of which the first two gradients change places after some steps."""
    shapes, owners = list(SHAPES), list(owners)
    if step >= 5:
        shapes[:2], owners[:2] = reversed(shapes[:2]), reversed(owners[:2])
    flat = torch.zeros(sum(torch.Size(shape).numel() for shape in shapes), dtype=dtype, device="meta")
    result = made.reduce(Bucket(0, flat, last=True, shapes=shapes, owners=owners)).wait()
    assert (result.device.type, result.dtype, result.shape) == ("meta", dtype, flat.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "method",
    [Half(), Half(torch.float16), Int8(), Int8(error_feedback=False), PowerSGD(1, 2), PowerSGD(2, 2), PowerSGD(3, 2)],
    ids=repr,
)
def test_a_compressor_reads_nothing_on_the_host(
    group: dist.ProcessGroup, method: Half | Int8 | PowerSGD, dtype: torch.dtype
) -> None:
    made = method.compressor(group, None)
    owners = [torch.empty(shape, device="meta") for shape in SHAPES]
    for step in range(8):
        reduce(made, dtype, step=step, owners=owners)
    made.close()


@pytest.mark.parametrize(
    "read",
    [float, bool, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.nonzero, lambda each: torch.equal(each, each)],
)
@pytest.mark.control
def test_a_read_would_be_seen(read: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        read(torch.zeros((), device="meta"))
