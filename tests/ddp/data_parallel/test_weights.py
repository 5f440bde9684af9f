"""Losses that are no means over equal shards: exact with the factor or the weight of each rank."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
from testbed.training import (
    F64,
    WAYS,
    Way,
    assert_close,
    assert_replicas_equal,
    batch,
    build,
    loss_of,
    sgd,
    shard,
    uneven_batch,
)
from testbed.worlds import world

import ddp
from ddp.errors import ArgumentError, BackwardError, DdpError


@world(3)
def test_sums_and_shares_are_exact_with_their_factor() -> None:
    """A sum over the batch is `world * sum of mine`; a mean over unequal shares `world * mine / all * mean of mine`."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for is_sum, way in ((True, WAYS[0]), (True, WAYS[1]), (False, WAYS[2]), (False, WAYS[3])):
        alone, model = build("mlp"), way.wrap(build("mlp"))
        for step in range(5):
            x, y, parts = uneven_batch(step)
            for module in (alone, model):
                module.zero_grad(set_to_none=way.set_to_none)
            numbers = 1 if is_sum else 3 * len(x)
            (alone(x) - y).square().sum().div(numbers).backward()
            mine = parts[rank]
            ((model(x[mine]) - y[mine]).square().sum() * size / numbers).backward()
            assert_close(model.module, alone, f"sum {is_sum}, {way}, step {step}")


@pytest.mark.parametrize(("micro_batches", "way"), [(1, WAYS[2]), (1, WAYS[3]), (3, WAYS[0]), (3, WAYS[1])])
@world(1, 2, 3)
def test_weighted_means_are_exact(micro_batches: int, way: Way) -> None:
    """Weights are rows, divided by 7; the loss of a rank without rows is not finite, and its weight 0."""
    alone, model = build("mlp"), way.wrap(build("mlp"))
    optimizers = [sgd(each) for each in (alone, model)]
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=way.set_to_none)
        everything = [uneven_batch(micro_batches * step + part) for part in range(micro_batches)]
        whole_x, whole_y = (torch.cat(each) for each in list(zip(*everything, strict=True))[:2])
        loss_of(alone, whole_x, whole_y).backward()
        for part, (x, y, slices) in enumerate(everything):
            mine = slices[dist.get_rank()]
            weight = torch.tensor(len(x[mine]) / 7, dtype=F64)
            with contextlib.nullcontext() if part == micro_batches - 1 else model.no_sync():
                loss = loss_of(model, x[mine], y[mine])
            model.backward(loss, weight=weight if step % 2 else float(weight))
        assert_close(model.module, alone, f"step {step}")
        for optimizer in optimizers:
            optimizer.step()
    assert_replicas_equal(model)


@world(1, 2)
def test_weights_that_do_not_fit_are_errors() -> None:
    """Of all ranks, also where one refuses its own; the next step goes on."""
    size, rank, nan = dist.get_world_size(), dist.get_rank(), float("nan")
    model = ddp.DistributedDataParallel(build("mlp"))
    x, y = batch(0, 2 * size)
    wrong: list[tuple[float | None, type[Exception], str]] = [
        (0, BackwardError, "add up to 0"),
        (-1, ArgumentError, "weight"),
        (None if rank == 1 else 2, BackwardError, "rank 1 gave no weight"),
        (nan if rank == 1 else 1, ArgumentError if rank == 1 else DdpError, ""),
    ]
    for set_to_none, (weight, error, said) in zip(itertools.cycle([False, True]), wrong[: 2 * size], strict=False):
        with pytest.raises(error, match=said or None):
            model.backward(loss_of(model, shard(x), shard(y)), weight=weight)
        alone = build("mlp")
        model.zero_grad(set_to_none=set_to_none)
        model.backward(loss_of(model, shard(x), shard(y)), weight=2)
        loss_of(alone, x, y).backward()
        assert_close(model.module, alone)
        model.zero_grad(set_to_none=set_to_none)
