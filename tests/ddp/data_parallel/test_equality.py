"""Training with ddp equals training in one process on the whole batch, whatever the settings: float64, to 1e-12."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.present import present
from testbed.training import (
    F64,
    Program,
    Turn,
    Way,
    assert_replicas_equal,
    batch,
    build,
    compare_passes,
    follow_program,
    innermost,
    loss_of,
    shard,
)
from testbed.worlds import world
from torch import nn

import ddp
import ddp.data_parallel.buckets.bucket_plan
from ddp.comm.objects import gather_values

MODELS = ("mlp", "odd", "attention", "conv", "complex")
WAYS = (  # and the number of micro-batches of a step
    (Way(), 1),
    (Way(views=True, find_unused=True), 1),
    (Way(find_unused=True, large_bytes=1), 2),
    (Way(views=True, set_to_none=False, large_bytes=200), 1),
    (Way(1e-4, set_to_none=False, large_bytes=100), 1),
    (Way(1e-4, views=True, large_bytes=100), 3),
    (Way(2e-3, views=True, set_to_none=False, find_unused=True), 2),
    (Way(2e-3, large_bytes=500), 1),
    (Way(1e-6), 1),
    (Way(1e-6, views=True, set_to_none=False), 2),
)
SETUPS = [*itertools.product(MODELS, WAYS)]


def _train(setups: list[tuple[str, tuple[Way, int]]]) -> None:
    for model, (way, parts) in setups:
        program = Program(model, lambda model, x, y, turn: loss_of(model, x, y), parts=parts)
        follow_program(program, way)


@world(1, 3)
def test_training_equals_one_process() -> None:
    _train(SETUPS[dist.get_world_size() % 4 :: 4])


@pytest.mark.slow
@world(1, 2, 3, 4)
def test_training_equals_one_process_in_all_ways() -> None:
    _train(SETUPS)


USES: list[list[list[list[int]]]] = [  # [step][rank][microbatch]: branches; some are used by none
    [[[0, 1], [0]], [[1], [1]], [[0, 1, 2], []], [[2], [2]]],
    [[[0], []], [[0], []], [[0], []], [[0], []]],
    [[[], [3]], [[3], []], [[], [2]], [[3], [3]]],
    [[[], []], [[], []], [[1], []], [[], []]],
    [[[0, 1, 2, 3], []], [[0, 1, 2, 3], []], [[0, 1, 2, 3], []], [[0, 1, 2, 3], []]],
    [[[3, 0], [1]], [[], [2]], [[], []], [[1], [0]]],
]
UNUSED_WAYS: list[Any] = [
    (Way(cap_mb, views, set_to_none, large_bytes, finds), parts)
    for cap_mb, views, set_to_none, parts, finds, large_bytes in itertools.product(
        (None, 1e-4, 1e-6), (False, True), (True, False), (1, 2), (False, True), (32768, 50)
    )
    if cap_mb != 1e-6 or large_bytes != 50
]


def _uses_some(model: Any, x: torch.Tensor, y: torch.Tensor, turn: Turn) -> torch.Tensor:
    innermost(model).use = USES[turn.step][turn.rank][turn.part]
    return loss_of(model, x, y)


def _train_with_unused(ways: list[tuple[Way, int]]) -> None:
    for way, parts in ways:  # once, gradients pile up over two steps
        program = Program("branches", _uses_some, resets=lambda step: step != 2, parts=parts, steps=len(USES))
        follow_program(program, way)


@world(3)
def test_parameters_unused_on_some_or_all_ranks_are_exact() -> None:
    _train_with_unused(random.Random(3).sample(UNUSED_WAYS, 12))


@pytest.mark.slow
@world(2, 3, 4)
def test_unused_parameters_are_exact_in_all_ways() -> None:
    _train_with_unused(UNUSED_WAYS)


@pytest.mark.parametrize("large_bytes", [32768, 1])
@pytest.mark.parametrize("views", [False, True])
@world(3)
def test_a_gradient_that_no_rank_renews_stays_to_the_bit(views: bool, large_bytes: int) -> None:
    """Also at a world size where the mean of equal numbers is not always that number."""
    replica = build("branches")
    model = Way(views=views, large_bytes=large_bytes).wrap(replica)
    for step in range(3):
        replica.use = [0, 1]
        model.zero_grad()
        x, y = batch(step, 2 * dist.get_world_size())
        loss_of(model, shard(x), shard(y)).backward()
        before = copy.deepcopy(replica.branches[1].weight.grad)
        replica.use = [0]
        loss_of(model, shard(x), shard(y)).backward()
        assert torch.equal(replica.branches[1].weight.grad, before)
        assert replica.branches[2].weight.grad is None


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(*each, marks=[] if each == ("mlp", 4) else pytest.mark.slow)
        for each in itertools.product(["mlp", "odd", "conv"], [0, 4, 7])
    ],
)
@world(3)
def test_replicas_are_bitwise_equal_after_100_steps(name: str, way: int) -> None:
    """In float32, with an optimizer that does not forgive: AdamW, clipped."""
    how = WAYS[way][0]._replace(large_bytes=32 << 10, find_unused=False)
    model = how.wrap(build(name).float())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(100):
        optimizer.zero_grad(set_to_none=how.set_to_none)
        x, y = batch(step * 100 + dist.get_rank(), 5)
        loss_of(model, x.float(), y.float()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    assert_replicas_equal(model)


@pytest.mark.parametrize(
    "mode", ["weighted", "half", *(pytest.param(name, marks=pytest.mark.slow) for name in ("int8", "powersgd"))]
)
@world(2)
def test_so_they_are_with_weights_and_compression(mode: str) -> None:
    replica = build("mlp").to(torch.bfloat16 if mode == "half" else torch.float32)
    compression: Any = mode if mode in ("int8", "powersgd") else None
    cap_mb = 1e-3 if mode == "weighted" else None
    model = ddp.DistributedDataParallel(replica, compression=compression, bucket_cap_mb=cap_mb)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    for step in range(100):
        optimizer.zero_grad()
        x, y = (each.to(next(replica.parameters()).dtype) for each in batch(step * 100 + dist.get_rank(), 5))
        model.backward(loss_of(model, x, y), weight=1 / (dist.get_rank() + 3) if mode == "weighted" else None)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    assert_replicas_equal(model)


KEEP: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda grad: grad,
    "detached": lambda grad: grad.detach(),
    "part": lambda grad: grad.flatten()[1:],
    "numpy": lambda grad: grad.numpy(),
    "storage": lambda grad: grad.untyped_storage(),
    "graph": lambda grad: (torch.ones_like(grad, requires_grad=True) * grad).sum(),
    "nothing": lambda grad: None,
}


def _values(kept: Any) -> list[float]:
    if isinstance(kept, torch.UntypedStorage):
        kept = torch.tensor([], dtype=F64).set_(kept)
    elif isinstance(kept, torch.Tensor) and kept.requires_grad:
        product: Any = kept.grad_fn
        leaves = [node.variable for node, _ in product.next_functions[0][0].next_functions if node is not None]
        (kept,) = torch.autograd.grad(kept, leaves, retain_graph=True)
    return [] if kept is None else torch.as_tensor(kept).flatten().tolist()


@pytest.mark.parametrize(
    ("large_bytes", "keep", "counts"),
    [*itertools.product([32768, 1], KEEP, [True]), (32768, "detached", False)],
)
@world(2)
def test_what_is_kept_of_a_gradient_is_not_overwritten(large_bytes: int, keep: str, counts: bool) -> None:
    """Nor anything that shares its memory. Unless torch `counts` who owns a tensor, all that was given is in doubt."""
    if not counts:
        ddp.data_parallel.buckets.transfers.tensor_owner_count = None  # type: ignore[attr-defined]  # in this process
    model = Way(large_bytes=large_bytes).wrap(build("mlp"))
    kept, before = [], []
    for step in range(4):
        x, y = batch(step, 2 * dist.get_world_size())
        model.zero_grad()
        loss_of(model, shard(x), shard(y)).backward()
        grads = [p.grad for i, p in enumerate(model.parameters()) if p.grad is not None and i % 2 == step % 2]
        kept += [KEEP[keep](grad) for grad in grads]
        before += [_values(mine) for mine in kept[-len(grads) :]]
        del grads
        assert_replicas_equal(model)
    assert [_values(mine) for mine in kept] == before


@pytest.mark.parametrize("large_bytes", [32768, 1])
@world(2)
def test_a_failed_step_overwrites_no_gradient_that_is_kept(large_bytes: int) -> None:
    """The forward pass fails on one rank."""
    model = Way(large_bytes=large_bytes).wrap(build("mlp"))
    for step in range(3):
        x, y = batch(step, 2 * dist.get_world_size())
        loss_of(model, shard(x), shard(y)).backward()
        kept = [p.grad.detach() for p in model.parameters() if p.grad is not None]
        before = [grad.clone() for grad in kept]
        model.zero_grad()
        is_cause = dist.get_rank() == 0
        with pytest.raises(RuntimeError if is_cause else ddp.errors.PeerFailedError):
            loss_of(model, shard(x)[:, : 1 if is_cause else None], shard(y)).backward()
        assert all(map(torch.equal, kept, before)), step
    loss_of(model, shard(x), shard(y)).backward()  # waits for what the last failure left on its way


class Backwards(nn.Module):
    """Uses its layers in the order of registration reversed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = layer(x).tanh()
        return x[:, :3]


@world(2)
def test_the_plan_follows_the_order_of_use() -> None:
    alone, model = build(Backwards), Way(1e-4, views=True).wrap(build(Backwards))
    for step in range(3):
        compare_passes(model, alone, step)
    order = [*present(model._reducer).sums.order]
    assert [index // 2 for index in order] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert gather_values(order) == [order, order]


class _Nested(nn.Module):
    def __init__(self, wrap: Callable[[nn.Module], nn.Module], width: int) -> None:
        super().__init__()
        self.encoder = wrap(nn.Linear(width, width))
        self.out = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(torch.tanh(self.encoder(x)))
        return out


def _trained_by_two(wrap: Callable[[nn.Module], nn.Module], kind: str, width: int) -> torch.Tensor:
    """Return the parameters after three steps of two wrappers that share a layer: one beside or within the other."""
    torch.manual_seed(0)
    if kind == "nested":
        models = [wrap(_Nested(wrap, width))]
    else:
        encoder = nn.Linear(width, width)
        models = [wrap(nn.Sequential(encoder, nn.Tanh(), nn.Linear(width, 2))) for _ in range(2)]
    parameters = list({id(each): each for model in models for each in model.parameters()}.values())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(3):
        x = torch.randn(3, width)
        sum((model(x).square().mean() for model in models), torch.zeros(())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([each.detach().flatten() for each in parameters])


@world(2, backend=("gloo", "shm"))
@pytest.mark.parametrize("kind", ["beside", "nested"])
def test_wrappers_that_share_a_layer_equal_torch_s(kind: str) -> None:
    """Both reduce the local gradients; the layer is in a bucket, and has one of its own."""
    for width, views in itertools.product((4, 1100), (False, True)):
        ours = _trained_by_two(partial(ddp.DistributedDataParallel, gradient_as_bucket_view=views), kind, width)
        theirs = _trained_by_two(nn.parallel.DistributedDataParallel, kind, width)  # which refuses views here
        assert (ours - theirs).abs().max() < 1e-5, (width, views)


@world(2)
def test_a_gradient_may_be_detached_and_changed_in_place() -> None:
    """As zero_grad did before torch 1.7, and as penalties on weights do outside of no_grad."""
    model = ddp.DistributedDataParallel(nn.Linear(4, 2))
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad += 0.1 * parameter.sign()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.detach_()
            parameter.grad.zero_()
