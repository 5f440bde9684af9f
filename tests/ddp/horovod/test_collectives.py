"""Collectives of Horovod's interface equal what one process computes; ranks that differ see who called what."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.interrupts import Died, Interrupt
from testbed.slow import slow
from testbed.training import F64, batch, build, loss_of
from testbed.worlds import world

import ddp
import ddp.horovod as hvd
from ddp.comm.broadcast_objects import broadcast_object
from ddp.comm.call_check import CallCheck
from ddp.errors import ArgumentError, CollectiveError, NotInitializedError, UnsupportedError
from ddp.horovod import collectives
from ddp.horovod.broadcast_state import broadcast_parameters
from ddp.horovod.optimizer import DistributedOptimizer

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.uint8, torch.int16,
    torch.int64, torch.bool,
]  # fmt: skip


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def _mine(shape: tuple[int, ...], dtype: torch.dtype, of: int) -> torch.Tensor:
    numbers = torch.randint(-5, 6, shape, generator=torch.Generator().manual_seed(100 + of))
    if dtype.is_complex:
        numbers = numbers * (1 + 2j)
    return numbers % 2 == 0 if dtype is torch.bool else numbers.to(dtype)


def _reduced(every: torch.Tensor) -> dict[str, torch.Tensor]:
    """What each operation makes of the tensors of all ranks."""
    dtype = every.dtype
    expected = {} if dtype is torch.bool else {"sum": every.sum(0, dtype=dtype)}
    if dtype.is_floating_point or dtype.is_complex:
        expected["average"] = every.sum(0, dtype=dtype) / size()
    if not dtype.is_complex:
        product = every.all(0) if dtype is torch.bool else every.prod(0, dtype=dtype)
        expected |= {"min": every.amin(0), "max": every.amax(0), "product": product}
    return expected


@world(1, slow(2), 3)
def test_reductions_equal_those_of_one_process() -> None:
    for dtype, shape in itertools.product(DTYPES, ((), (0, 2), (4, 3))):
        every = torch.stack([_mine(shape, dtype, of) for of in range(size())])
        mine = every[rank()].clone()
        # In 16 bits, each rank divides before the sum, which would overflow.
        close = {"rtol": 1e-2, "atol": 1e-2} if dtype.itemsize == 2 else {"rtol": 1e-6, "atol": 1e-6}
        for op, result in _reduced(every).items():
            found = collectives.allreduce(mine, f"{op} of {dtype}", op=op)
            torch.testing.assert_close(found, result, **close, msg=f"{op} of {dtype} {shape}")
            assert torch.equal(mine, every[rank()])
            if shape != (4, 3):
                continue
            handle = collectives.allreduce_async(mine, op=op)
            assert handle.what.startswith(f"allreduce ({op}, ")
            torch.testing.assert_close(collectives.synchronize(handle), result, **close)
            assert collectives.poll(handle)
            if dtype is not torch.bool:
                share = collectives.reducescatter(mine, op=op)
                torch.testing.assert_close(share, result.tensor_split(size())[rank()], **close)
            in_place = mine.clone()
            assert collectives.allreduce_(in_place, op=op) is in_place
            torch.testing.assert_close(in_place, result, **close)


@world(1, slow(2), 3)
def test_grouped_and_compressed_reductions() -> None:
    dtypes = (torch.float32, torch.float64, torch.float32)
    tensors = [_mine((3, 2), dtype, rank()).t() for dtype in dtypes]
    sums = [functools.reduce(torch.add, [_mine((3, 2), dtype, of).t() for of in range(size())]) for dtype in dtypes]
    assert all(map(torch.equal, collectives.grouped_allreduce(tensors, op="sum"), sums))
    collectives.grouped_allreduce_(tensors, op="sum")
    assert all(map(torch.equal, tensors, sums))
    collectives.synchronize(collectives.allreduce_async_(tensors[0], "again"))
    assert torch.equal(tensors[0], sums[0])
    for compression in ("fp16", "bf16", ddp.compression.Half()):
        found = collectives.allreduce(torch.tensor([1.0, 2.0]) * (1 + rank()), compression=compression)
        torch.testing.assert_close(found, torch.tensor([1.0, 2.0]) * (1 + size()) / 2, rtol=0.01, atol=0)
        assert found.dtype is torch.float32


@pytest.mark.parametrize("dtype", DTYPES[::3])
@world(1, slow(2), 3)
def test_copies_arrive_unchanged(dtype: torch.dtype) -> None:
    last = size() - 1
    for shape in ((), (0, 2), (2, 3)):
        mine, expected = _mine(shape, dtype, rank()), _mine(shape, dtype, last)
        found = collectives.broadcast(mine, last, "x")
        assert torch.equal(found, expected)
        assert found.shape == mine.shape
        assert torch.equal(collectives.synchronize(collectives.broadcast_async(mine, root_rank=last)), expected)
        in_place = mine.clone()
        assert collectives.broadcast_(in_place, last) is in_place
        assert torch.equal(in_place, expected)
        collectives.synchronize(collectives.broadcast_async_(in_place := mine.clone(), last))
        assert torch.equal(in_place, expected)
    for counts in ([2, 0, 3], [0, 0, 0], [1, 1, 1]):
        every = [_mine((counts[of], 2), dtype, of) for of in range(size())]
        assert torch.equal(collectives.allgather(every[rank()], "rows"), torch.cat(every))
        assert torch.equal(collectives.synchronize(collectives.allgather_async(every[rank()])), torch.cat(every))
    sends = [[1, 0, 2], [3, 1, 0], [0, 0, 0]]
    every = [_mine((sum(sends[of][: size()]), 2), dtype, of) for of in range(size())]
    found, came = collectives.alltoall(every[rank()], sends[rank()][: size()])
    parts = [rows.split(sends[of][: size()])[rank()] for of, rows in enumerate(every)]
    assert torch.equal(found, torch.cat(parts))
    assert came.tolist() == [len(part) for part in parts]
    assert collectives.allgather(torch.tensor(rank())).tolist() == [*range(size())]
    assert collectives.alltoall(torch.arange(size()) + 10 * rank()).tolist() == [
        of * 10 + rank() for of in range(size())
    ]
    collectives.barrier("here")


CALLS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[list[Any]], list[Any]]]] = {
    "average": (lambda x: collectives.allreduce(x, "x"), lambda xs: [sum(xs) / size()] * size()),
    "sum": (lambda x: collectives.allreduce(x, "x", op="sum"), lambda xs: [sum(xs)] * size()),
    "allgather": (lambda x: collectives.allgather(x, "x"), lambda xs: [torch.cat(xs)] * size()),
    "broadcast": (lambda x: collectives.broadcast(x, size() - 1, "x"), lambda xs: [xs[-1]] * size()),
    "reducescatter": (
        lambda x: collectives.reducescatter(x, "x", op="sum"),
        lambda xs: [*torch.stack(xs).sum(0).tensor_split(size())],
    ),
    "alltoall": (  # all rows to rank 0
        lambda x: collectives.alltoall(x, [2] + [0] * (size() - 1))[0],
        lambda xs: [torch.cat([x[: 2 * (of == 0)] for x in xs]) for of in range(size())],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", CALLS)
@world(1, slow(2), 3)
def test_gradients_are_those_of_one_process(kind: str) -> None:
    """The loss is the sum of the ranks' losses, each of which uses what came from all."""
    call, parts = CALLS[kind]
    xs = [torch.randn(2, 3, dtype=F64, generator=torch.Generator().manual_seed(of)) for of in range(size())]
    weights = [torch.randn(3, 3, dtype=F64, generator=torch.Generator().manual_seed(9 + of)) for of in range(size())]
    mine = xs[rank()].clone().requires_grad_()
    (call(mine) @ weights[rank()]).tanh().square().sum().backward()
    for x in xs:
        x.requires_grad_()
    torch.stack([(part @ w).tanh().square().sum() for part, w in zip(parts(xs), weights, strict=True)]).sum().backward()
    expected = torch.zeros_like(mine) if xs[rank()].grad is None else xs[rank()].grad
    torch.testing.assert_close(mine.grad, expected, rtol=1e-12, atol=1e-13)
    with pytest.raises(UnsupportedError, match="op='max' has no gradient"):
        collectives.allreduce(mine, "m", op="max").sum().backward()


@world(3)
def test_different_calls_are_errors_that_name_them() -> None:
    """On every rank, and the group stays usable."""
    one, two = torch.ones(3), torch.ones(2, 2)
    at = rank() == 1
    wrong: Any = False  # as Horovod's second argument could be
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: collectives.allreduce(two if at else one, "x"), r"rank 1 called allreduce 'x' \(average, .*\(2, 2\)"),
        (lambda: collectives.allreduce(one.double() if at else one, "x"), "rank 1 called .*float64"),
        (lambda: collectives.allreduce(one, "x", op="sum" if at else "max"), r"rank 1 called .*\(sum, .*\(max, "),
        (lambda: collectives.allreduce(one, "b" if at else "a"), "rank 1 called allreduce 'b'"),
        (lambda: collectives.broadcast(one, int(at)), "rank 1 called .*from rank 1.*from rank 0"),
        (lambda: collectives.allgather(two if at else one, "x"), r"rank 1 called allgather 'x' .*shape \(any, 2\)"),
        (lambda: collectives.barrier() if at else collectives.allreduce(one), "rank 1 called barrier"),
        (lambda: collectives.allreduce(one.int() if at else one), "rank 1 .*would be rounded"),
        (lambda: collectives.allreduce(one, op="mean" if at else "average"), "op='mean'; there are 'average'"),
        (lambda: collectives.allreduce(one, wrong if at else None), "rank 1 .*op='average' and 'sum' here"),
        (lambda: collectives.allreduce(one, compression="int8" if at else None), "is for DistributedOptimizer"),
        (lambda: collectives.allreduce(one.to_sparse() if at else one), "rank 1 .*to_dense"),
        (lambda: collectives.broadcast(one, 7), "there is no rank 7"),
        (lambda: collectives.alltoall(one, [5] * size()), "one number a rank, 3 in all"),
        (lambda: collectives.reducescatter(one.sum()), "without dimensions"),
        (lambda: collectives.allreduce_async(one, "b" if at else "a").wait(), "rank 1 called allreduce 'b'"),
        (lambda: broadcast_object({}, name="b" if at else "a"), "rank 1 called broadcast_object 'b'"),
    ]  # fmt: skip
    for call, says in cases:
        with pytest.raises(ArgumentError, match=says):
            call()
        assert collectives.allreduce(one, op="sum").tolist() == [size()] * 3


@world(2)
def test_a_rank_that_does_not_come_is_named() -> None:
    group = dist.new_group(timeout=timedelta(seconds=2))
    collectives.barrier(group=group)
    if rank() == 0:
        with pytest.raises(CollectiveError, match=r"rank 1 is missing: .*allreduce 'loss'"):
            collectives.allreduce(torch.ones(1), "loss", group=group)
    dist.barrier()


@world(3)
def test_places_and_groups_of_some_ranks() -> None:
    here = ddp.init()
    assert (hvd.rank(), hvd.size()) == (rank(), size())
    assert (hvd.local_rank(), hvd.local_size()) == (here.local_rank, here.local_world_size)
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.is_initialized()
    pair = dist.new_group([0, 1])
    if rank() < 2:
        assert collectives.allreduce(torch.ones(2), op="sum", group=pair).tolist() == [2, 2]
    else:
        with pytest.raises(ArgumentError, match="only its members"):
            collectives.allreduce(torch.ones(2), group=pair)
    collectives.barrier()


@world(1)
def test_without_a_group_calls_say_what_to_do() -> None:
    """And a group can be left and made again."""
    collectives.allreduce(torch.ones(1))
    model = build("mlp")
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    collectives.shutdown()
    collectives.shutdown()
    assert not hvd.is_initialized()
    calls: list[Callable[[], Any]] = [
        collectives.rank,
        collectives.cross_size,
        lambda: collectives.allreduce(torch.ones(1)),
        collectives.barrier,
        lambda: broadcast_object(1),
        lambda: broadcast_parameters({}),
        lambda: DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1)),
    ]
    for call in calls:
        with pytest.raises(NotInitializedError, match=r"call ddp\.init\(\) before ddp\."):
            call()
    loss_of(model, *batch(0, 4)).backward()
    optimizer.step()
    assert ddp.init().world_size == 1
    assert collectives.allreduce(torch.ones(1)).item() == 1
    assert collectives.allgather(torch.ones(2, 2)).shape == (2, 2)
    assert broadcast_object({"a": 1}) == {"a": 1}
    DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1)).step()


def _ends_a_call(frame: FrameType) -> bool:
    code = frame.f_code
    return code in (hvd.Handle.wait.__code__, CallCheck.settle.__code__) or (
        code.co_name == "finish" and code.co_filename.endswith("horovod/calls.py")
    )


@world(2)
def test_a_wait_that_a_signal_interrupts_can_be_repeated() -> None:
    """At each line of it: the average is divided once."""
    for line in itertools.count(1):
        handle, interrupt = hvd.allreduce_async(torch.full((3,), rank() + 1.0)), Interrupt(line, _ends_a_call)
        with contextlib.suppress(Died), interrupt:
            handle.wait()
        assert handle.wait().tolist() == [1.5] * 3, line
        if not interrupt.has_come:
            break
    assert line > 15
