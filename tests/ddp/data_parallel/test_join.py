"""Ranks with unequal numbers of batches, inside join: exact over those that still have one."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.training import (
    WAYS,
    Branches,
    Mlp,
    Normed,
    Program,
    Turn,
    Way,
    assert_same_bits,
    assert_weights_close,
    batch,
    build,
    compare_passes,
    innermost,
    loss_of,
    shard,
    uneven_batch,
)
from testbed.worlds import world
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join

import ddp


def _inputs_of(rank: int, parts: int = 1) -> int:
    """How many batches a rank has: the last rank the fewest."""
    return parts * (3 + dist.get_world_size() - rank)


def _assert_equal(replica: nn.Module, alone: nn.Module) -> None:
    """Gradients of a rank that has joined are older ones, so weights alone are compared."""
    assert_weights_close(replica, alone)
    assert_same_bits([parameter.detach() for parameter in replica.parameters()])


class SparseWords(nn.Module):
    """Sparse gradients, of no row on some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(7, 3, sparse=True), nn.Linear(3, 3)
        self.use: list[int] = []

    def forward(self, x: torch.Tensor) -> Any:
        index = (x * 10).long().abs() % 7
        return self.out(x[:, :3]) + self.words(index[:, : 6 if self.use else 0]).sum(1)


def _uses_some(model: Any, x: torch.Tensor, y: torch.Tensor, turn: Turn) -> torch.Tensor:
    innermost(model).use = [(turn.rank + turn.step) % 4, turn.rank % 4][: (turn.rank + turn.step) % 3]
    return loss_of(model, x, y)


def _plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def _zero(model: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, about torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05)


PROGRAMS = {"mlp": Program(Mlp), "normed": Program(Normed), "routed": Program(Branches, _uses_some),
            "words": Program(SparseWords, _uses_some)}  # fmt: skip
SETUPS = [  # way, divided by all, micro-batches, program
    (WAYS[1], False, 1, "mlp"),
    (WAYS[2], False, 2, "mlp"),
    (WAYS[3], True, 2, "mlp"),
    (WAYS[0], True, 1, "normed"),
    (WAYS[2], True, 1, "routed"),
    (WAYS[1], False, 1, "words"),
]


def _joins(way: Way, by_all: bool, parts: int, name: str, with_zero: bool) -> None:
    size, rank, program = dist.get_world_size(), dist.get_rank(), PROGRAMS[name]
    alone, replica = build(program.make), build(program.make)
    model = way.wrap(replica)
    trained = _plain(alone)
    optimizer: Any = _zero(model) if with_zero else _plain(model)
    for epoch in range(2):
        with Join([model, optimizer] if with_zero else [model], divide_by_initial_world_size=by_all):
            for step in range(_inputs_of(rank, parts)):
                x, y = batch(epoch * 100 + step, 2 * size)
                is_last = step % parts == parts - 1
                with contextlib.nullcontext() if is_last else model.no_sync():
                    program.loss(model, shard(x), shard(y), Turn(rank, step)).backward()
                if is_last:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=way.set_to_none)
        for step in range(_inputs_of(0, parts)):
            active = [other for other in range(size) if step < _inputs_of(other, parts)]
            x, y = batch(epoch * 100 + step, 2 * size)
            for other in active:
                loss = program.loss(alone, x.chunk(size)[other], y.chunk(size)[other], Turn(other, step))
                (loss / (size if by_all else len(active))).backward()
            if step % parts == parts - 1:
                trained.step()
                trained.zero_grad(set_to_none=True)
        _assert_equal(replica, alone)
    if name == "mlp":  # and without join, as ever
        compare_passes(model, alone, 999)


@pytest.mark.parametrize("setup", SETUPS)
@world(3)
def test_uneven_inputs_are_exact(setup: tuple[Way, bool, int, str]) -> None:
    """Both divisors, with accumulation, parameters that some ranks never use, and gradients that are sparse."""
    _joins(*setup, with_zero=False)


@pytest.mark.slow
@pytest.mark.parametrize("setup", [SETUPS[0], SETUPS[3]])
@world(2)
def test_torchs_zero_optimizer_joins_too(setup: tuple[Way, bool, int, str]) -> None:
    """It steps with dense gradients, in every iteration."""
    _joins(*setup, with_zero=True)


@pytest.mark.parametrize("is_weighted", [True, False])
@world(3)
def test_weights_and_hooks_inside_join(is_weighted: bool) -> None:
    """With `weight=`, joined ranks weigh nothing; with a communication hook, the divisor is the hook's."""
    size, rank = dist.get_world_size(), dist.get_rank()
    alone, replica = build("mlp"), build("mlp")
    model = ddp.DistributedDataParallel(replica)
    if not is_weighted:
        model.register_comm_hook(None, allreduce_hook)
    trained, optimizer = (torch.optim.SGD(each.parameters(), lr=0.05) for each in (alone, model))

    def inputs(step: int) -> tuple[torch.Tensor, torch.Tensor, list[slice]]:
        even = [slice(2 * each, 2 * each + 2) for each in range(size)]
        return uneven_batch(step) if is_weighted else (*batch(step, 2 * size), even)

    with model.join():
        for step in range(_inputs_of(rank)):
            x, y, parts = inputs(step)
            mine = parts[rank]
            model.backward(loss_of(model, x[mine], y[mine]), weight=len(x[mine]) if is_weighted else None)
            optimizer.step()
            optimizer.zero_grad()
    for step in range(_inputs_of(0)):
        x, y, parts = inputs(step)
        active = [other for other in range(size) if step < _inputs_of(other)]
        rows = torch.cat([torch.arange(len(x))[parts[other]] for other in active])
        (loss_of(alone, x[rows], y[rows]) * (1 if is_weighted else len(active) / size)).backward()
        trained.step()
        trained.zero_grad()
    _assert_equal(replica, alone)


@world(2)
def test_join_may_raise_at_the_first_end() -> None:
    """With throw_on_early_termination, all ranks raise at the same step; afterwards the model still works."""
    replica, steps = build("mlp"), 0
    model = ddp.DistributedDataParallel(replica)

    def train() -> None:
        nonlocal steps
        with model.join(throw_on_early_termination=True):
            for step in range(_inputs_of(dist.get_rank())):
                x, y = batch(step, 2 * dist.get_world_size())
                loss_of(model, shard(x), shard(y)).backward()
                steps += 1

    with pytest.raises(RuntimeError, match="exhausted"):
        train()
    assert steps == _inputs_of(dist.get_world_size() - 1) == 4
    with model.join(enable=False):
        compare_passes(model, build("mlp"), 0)
