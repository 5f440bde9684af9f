"""A distributed optimizer trains as one process does on the whole batch: float64, to 1e-12; or it says who differs."""
# mypy: allow-untyped-calls

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.present import present
from testbed.processes import wait_until
from testbed.slow import slow
from testbed.training import (
    F64,
    Loss,
    assert_close,
    assert_replicas_equal,
    assert_weights_close,
    batch,
    build,
    loss_of,
    shard,
    whole,
)
from testbed.worlds import world
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import ddp
from ddp.comm.sums.tree_sum import prefer_trees
from ddp.errors import ArgumentError, BackwardError, DriftError, LayoutMismatchError, PeerFailedError, UnsupportedError
from ddp.horovod.broadcast_state import broadcast_parameters
from ddp.horovod.optimizer import DistributedOptimizer

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.3, max_iter=3, line_search_fn="strong_wolfe"),
}


class Both:
    """A model with a distributed optimizer, and the same model alone on the whole batch."""

    def __init__(
        self,
        model: Any = "mlp",
        kind: str = "sgd",
        *,
        dtype: torch.dtype = F64,
        scheduled: bool = False,
        **settings: Any,
    ) -> None:
        self.model, self.alone = build(model), build(model)
        if dtype is not F64:
            self.model, self.alone = self.model.to(dtype), self.alone.to(dtype)
        self.optimizer: Any = OPTIMIZERS[kind](self.model.parameters())
        self.own = OPTIMIZERS[kind](self.alone.parameters())
        # Before it is wrapped: a schedule replaces optimizer.step.
        self.schedules = [torch.optim.lr_scheduler.StepLR(each, 2) for each in (self.optimizer, self.own) if scheduled]
        DistributedOptimizer(self.optimizer, self.model.named_parameters(), **settings)

    def backward(self, step: int, passes: int = 1, loss: Loss = loss_of, factor: float = 1.0) -> None:
        """Go backward on the whole batch, in so many passes."""
        x, y = batch(step, 6 * dist.get_world_size() * passes)
        for rows in zip(shard(x).chunk(passes), shard(y).chunk(passes), strict=True):
            (loss(self.model, *rows) * factor / passes).backward()
        loss(self.alone, x, y).backward()

    def compare(self, what: str = "") -> None:
        assert_close(self.model, self.alone, what)

    def step(self, **zeroing: Any) -> None:
        for optimizer in (self.optimizer, self.own):
            optimizer.step()
            optimizer.zero_grad(**zeroing)


@pytest.mark.parametrize(
    ("name", "kind", "passes", "clips"),
    [
        ("mlp", "sgd", 1, False), ("odd", "adamw", 2, True), ("conv", "sgd", 3, True), ("attention", "sgd", 1, True),
        ("complex", "sgd", 2, False),
    ],
)  # fmt: skip
@world(1, slow(2), 3)
def test_training_equals_one_process(name: str, kind: str, passes: int, clips: bool) -> None:
    """With several backward passes a step, synchronize() and clip before step(), and a schedule."""
    both = Both(name, kind, scheduled=True, backward_passes_per_step=passes)
    for step in range(5):
        both.backward(step, passes)
        if clips:
            both.optimizer.synchronize()
            norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (both.model, both.alone)]
            torch.testing.assert_close(*norms, rtol=1e-12, atol=0)
        both.compare(f"step {step}")
        with both.optimizer.skip_synchronize() if clips else contextlib.nullcontext():
            both.step()
        for schedule in both.schedules:
            schedule.step()
        assert_weights_close(both.model, both.alone, f"after step {step}")
        assert_replicas_equal(both.model)
    assert both.optimizer.state_dict().keys() == both.own.state_dict().keys()


@world(1, slow(2), 3)
def test_a_sum_equals_the_sum() -> None:
    both = Both(op="sum", backward_passes_per_step=2)
    for step in range(4):
        both.backward(step, 2, factor=1 / dist.get_world_size())
        both.compare(f"step {step}")
        both.step()
    if dist.get_world_size() > 1:
        both.backward(0, 2)
        with pytest.raises(BackwardError, match="backward_passes_per_step=2"):
            both.backward(1)
        both.optimizer.zero_grad()


@world(1, slow(2), 3)
def test_more_or_fewer_passes_than_announced_are_exact() -> None:
    both, has_peers = Both(), dist.get_world_size() > 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            for part in range(3):
                both.backward(10 * step + part)
            both.compare()
            both.step()
    assert len([each for each in caught if "averaged several times" in str(each.message)]) == has_peers
    both.optimizer.set_backward_passes_per_step(4)
    for part in range(3):
        both.backward(50 + part)
    if has_peers:
        with pytest.raises(BackwardError, match="3 of 4 backward passes"):
            both.optimizer.zero_grad()
        with both.optimizer.skip_synchronize(), pytest.raises(BackwardError, match="call synchronize"):
            both.optimizer.step()
    for _ in range(3):  # averages them; then, without a backward pass, the same gradients again
        both.optimizer.step()
        both.own.step()
        both.compare()
    assert_replicas_equal(both.model)


@world(1, slow(2), 3)
def test_parameters_without_gradients_are_exact() -> None:
    """Layer r + step is used by rank r alone, layer 3 by no rank."""
    both, size = Both("branches"), dist.get_world_size()
    for step in range(6):
        x, y = batch(step, 5 * size)
        for rank in range(size):
            both.alone.use = both.model.use = [(rank + step) % 3]
            rows, targets = x.chunk(size)[rank], y.chunk(size)[rank]
            (loss_of(both.alone, rows, targets) / size).backward()
            if rank == dist.get_rank():
                loss_of(both.model, rows, targets).backward()
        both.compare(f"step {step}")
        assert both.model.branches[3].weight.grad is None
        both.step(set_to_none=step % 2 == 0)
    assert_replicas_equal(both.model)


@world(3, backend="gloo")
def test_sums_are_by_the_tree_if_the_group_prefers_that() -> None:
    """Also after the first pass, which finds that a gradient is sparse."""
    every = [torch.randn(999, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    torch.manual_seed(0)
    bag, weight = nn.EmbeddingBag(5, 2, sparse=True), nn.Parameter(torch.ones(999))
    optimizer = DistributedOptimizer(torch.optim.SGD([*bag.parameters(), weight], 0.5))
    prefer_trees(present(dist.group.WORLD))
    for _ in range(3):
        ((weight * every[dist.get_rank()]).sum() + bag(torch.tensor([[1, 2]])).sum()).backward()
        one, two, three = (each / 3 for each in every)
        assert torch.equal(present(weight.grad), one + two + three)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("as_dense", [False, True])
@world(1, slow(2), 3)
def test_sparse_gradients_stay_sparse(as_dense: bool) -> None:
    both = Both(
        lambda: nn.Sequential(nn.EmbeddingBag(50, 4, mode="sum", sparse=True), nn.Linear(4, 2)), "sgd",
        sparse_as_dense=as_dense,
    )  # fmt: skip
    for optimizer in (both.optimizer, both.own):
        optimizer.param_groups[0] |= {"momentum": 0, "nesterov": False}
    for step in range(5):
        rows = torch.randint(0, 50, (4 * dist.get_world_size(), 3), generator=torch.Generator().manual_seed(step))
        both.model(shard(rows)).square().mean().backward()
        both.alone(rows).square().mean().backward()
        if dist.get_world_size() > 1:
            assert both.model[0].weight.grad.is_sparse is not as_dense
        for a, e in zip(both.model.parameters(), both.alone.parameters(), strict=True):
            torch.testing.assert_close(a.grad.to_dense(), e.grad.to_dense(), rtol=1e-12, atol=1e-13)
        both.step()


@pytest.mark.parametrize("kind", ["lbfgs", "sgd"])
@world(1, slow(2), 3)
def test_closures_see_the_average(kind: str) -> None:
    both = Both(kind=kind)
    for step in range(3):
        x, y = batch(step, 4 * dist.get_world_size())

        def closure(model: Any, optimizer: Any, mine: Any, x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, mine(x), mine(y))
            loss.backward()
            return loss

        found = both.optimizer.step(lambda: closure(both.model, both.optimizer, shard))
        expected = both.own.step(lambda: closure(both.alone, both.own, whole))  # type: ignore[arg-type, return-value]
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        for a, e in zip(both.model.parameters(), both.alone.parameters(), strict=True):
            torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-9)
        assert_replicas_equal(both.model)


@world(1, slow(2), 3)
def test_a_grad_scaler_needs_nothing_else() -> None:
    """A step that it skips because of one rank's inf is skipped everywhere."""
    both = Both()
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in range(2)]
    for step in range(4):
        x, y = batch(step, 4 * dist.get_world_size())
        if step == 2:
            x[0, 0] = float("inf")  # of rank 0
        sides = ((both.model, both.optimizer, shard), (both.alone, both.own, whole))
        for scaler, (model, optimizer, mine) in zip(scalers, sides, strict=True):
            scaler.scale(loss_of(model, mine(x), mine(y))).backward()
            if step == 1:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0 ** (10 - (step >= 2))
        both.compare()
    assert_replicas_equal(both.model)


@world(1, slow(2), 3)
def test_two_optimizers_share_a_backward_pass() -> None:
    """Buckets of both are complete in another order on each rank."""
    pairs = [Both("branches", bucket_cap_mb=1e-5) for _ in range(2)]
    for both in pairs:
        both.model.use = both.alone.use = [0, 1, 2, 3]
    order = [0, 1] if dist.get_rank() % 2 else [1, 0]
    for step in range(4):
        x, y = batch(step, 5 * dist.get_world_size())
        outputs = [pairs[at].model(shard(x)) for at in order]
        (outputs[0] + outputs[1] - shard(y)).square().mean().backward()
        (pairs[0].alone(x) + pairs[1].alone(x) - y).square().mean().backward()
        for both in pairs:
            both.compare()
            both.step()


def _train_by_halves() -> list[torch.optim.SGD]:
    model, alone = build("mlp"), build("mlp")
    halves = [[*model.parameters()][::2], [*model.parameters()][1::2]]
    optimizers = [DistributedOptimizer(torch.optim.SGD(half, lr=0.1)) for half in halves]
    x, y = batch(1, 5 * dist.get_world_size())
    loss_of(model, shard(x), shard(y)).backward()
    loss_of(alone, x, y).backward()
    assert_close(model, alone)
    for optimizer in optimizers:
        optimizer.step()
    return optimizers


def _open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@world(3, backend=("gloo", "shm"))
def test_optimizers_that_are_gone_leave_their_groups_to_others() -> None:
    """Also where one rank keeps one of them for longer."""
    _train_by_halves()
    for keeps in (False, True):
        kept = _train_by_halves()[: 2 * (keeps and dist.get_rank() == 0)]
        _train_by_halves()
        del kept
        before = _open_files()
        for _ in range(3):
            _train_by_halves()
        wait_until(lambda: _open_files() == before, "a rank closes its ends when the others have closed theirs")  # noqa: B023


def _recomputed(use_reentrant: bool, model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = x.clone().requires_grad_()
    for layer in model.layers:
        out = checkpoint(layer, out, use_reentrant=use_reentrant)
    return (out - y).square().mean()


@world(1, slow(2), 3)
def test_checkpoints_and_second_derivatives_are_exact() -> None:
    warnings.filterwarnings("ignore", message="more than backward_passes_per_step=1")
    warnings.filterwarnings("ignore", message="Using backward.. with create_graph=True")
    both = Both()
    for step in range(6):
        if step < 4:
            both.backward(step, loss=lambda *given: _recomputed(step % 2 == 0, *given))  # noqa: B023
        else:
            x, y = batch(step, 4 * dist.get_world_size())
            for model, mine in ((both.model, shard), (both.alone, whole)):
                loss_of(model, mine(x), mine(y)).backward(create_graph=True)
                torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().backward()
                for p in model.parameters():
                    p.grad = p.grad.detach()
        both.compare(f"step {step}")
        both.step()


@world(1, slow(2), 3)
def test_unfrozen_and_added_parameters_are_averaged() -> None:
    models = [build("mlp"), build("mlp")]
    optimizers = []
    for model in models:
        model.layers[0].requires_grad_(False)
        parameters = [*model.layers[0].parameters(), *model.layers[2].parameters()]
        optimizers.append(torch.optim.SGD(parameters, 0.1))
    DistributedOptimizer(optimizers[0], models[0].named_parameters())
    for step in range(6):
        x, y = batch(step, 4 * dist.get_world_size())
        for model, optimizer, mine in zip(models, optimizers, (shard, whole), strict=True):
            model.layers[0].requires_grad_(step >= 2)
            if step == 4:
                optimizer.add_param_group({"params": [*model.layers[4].parameters()], "lr": 0.05})
            loss_of(model, mine(x), mine(y)).backward()
        if step >= 4:
            assert_close(*models)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.step()
            model.zero_grad()
        assert_weights_close(*models)


@pytest.mark.parametrize(
    "compression", ["bf16", "fp16", "int8", ddp.compression.PowerSGD(rank=1, start_step=2)], ids=str
)
@world(2)
def test_compressed_training_comes_close(compression: Any) -> None:
    both = Both(dtype=torch.float32, compression=compression)
    for step in range(8):
        x, y = (each.float() for each in batch(step, 4 * dist.get_world_size()))
        loss_of(both.model, shard(x), shard(y)).backward()
        loss_of(both.alone, x, y).backward()
        both.step()
        assert_replicas_equal(both.model)
    for a, e in zip(both.model.parameters(), both.alone.parameters(), strict=True):
        torch.testing.assert_close(a, e, rtol=0.2, atol=0.1)


# What it is


@world(1, slow(2))
def test_it_is_the_users_optimizer() -> None:
    has_peers, model = dist.get_world_size() > 1, build("mlp")
    plain = torch.optim.Adam(model.parameters(), lr=0.01)
    loss_of(model, *batch(0, 3)).backward()
    plain.step()
    plain.zero_grad()
    broadcast_parameters(model.state_dict())
    state = copy.deepcopy(plain.state_dict())
    optimizer = DistributedOptimizer(plain, model.named_parameters())
    assert optimizer is plain
    assert isinstance(optimizer, torch.optim.Adam)
    assert repr(optimizer).startswith("Adam (")
    assert str(state) == str(optimizer.state_dict())
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(copied) is torch.optim.Adam
        assert str(copied.state_dict()) == str(state)
    optimizer.load_state_dict(state)
    hooks = [p._post_accumulate_grad_hooks or {} for p in model.parameters()]
    assert all(hooks) == has_peers
    with pytest.raises(ArgumentError, match="distributed already"):
        DistributedOptimizer(optimizer)
    with pytest.raises(ArgumentError, match="averaged already") if has_peers else contextlib.nullcontext():
        DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    del optimizer, plain
    gc.collect()
    assert not any(hooks)


@world(1)
def test_bad_arguments_are_errors() -> None:
    model = build("mlp")
    named = [*model.named_parameters()]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"backward_passes_per_step": 0}, "at least 1"),
        ({"op": "max"}, "'average' or 'sum'"),
        ({"gradient_predivide_factor": 0}, "more than 0"),
        ({"named_parameters": named[:-1]}, "is not in named_parameters"),
        ({"named_parameters": [*named, named[0]]}, "two parameters 'layers.0.weight'"),
        ({"named_parameters": model.parameters()}, "pairs of a name and a parameter"),
        ({"compression": "zip"}, "compression='zip'"),
    ]
    for given, said in wrong:
        with pytest.raises(ArgumentError, match=said):
            DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), **given)
    with pytest.raises(ArgumentError, match=r"must be a torch\.optim\.Optimizer"):
        DistributedOptimizer(model)


# Ranks that differ


@world(slow(2), 3)
def test_different_parameters_are_errors() -> None:
    late = dist.get_rank() == 1
    layers = [nn.Linear(4, 3), nn.Linear(3, 5 if late else 2)]
    parameters = [p for layer in layers for p in layer.parameters()]
    named = [(f"layer{number}.{name}", p) for number, each in enumerate(layers) for name, p in each.named_parameters()]
    for names in (named, None):
        with pytest.raises(LayoutMismatchError, match=r"shape \(5, 3\)") as found:
            DistributedOptimizer(torch.optim.SGD(parameters, 0.1), names)
        assert found.value.rank == 1
        assert found.value.entry == ("layer1.weight" if names else "param_groups[0]['params'][2]")
    first = [*layers[0].parameters()]
    with pytest.raises(LayoutMismatchError, match="passes"):
        DistributedOptimizer(torch.optim.SGD(first, 0.1), backward_passes_per_step=1 + dist.get_rank())
    kind: Any = torch.optim.SGD if dist.get_rank() else torch.optim.Adam
    with pytest.raises(ArgumentError, match=r"ranks? 1.* called DistributedOptimizer \(SGD\)"):
        DistributedOptimizer(kind(first, 0.1))


@world(slow(2), 3)
def test_unequal_replicas_are_an_error() -> None:
    model = build("mlp", seed=dist.get_rank())
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    x, y = batch(0, 4)
    with pytest.raises(DriftError, match="broadcast_parameters") as found:
        loss_of(model, x, y).backward()
    assert found.value.parameter == "layers.0.weight"
    assert found.value.ranks == tuple(range(1, dist.get_world_size()))
    assert all(p.grad is None for p in model.parameters())
    broadcast_parameters(model.state_dict())
    loss_of(model, x, y).backward()
    optimizer.step()
    assert_replicas_equal(model)


@pytest.mark.parametrize("passes", [1, 2])
@world(slow(2), 3)
def test_different_numbers_of_passes_and_steps_are_errors(passes: int) -> None:
    x, y = batch(dist.get_rank(), 4)
    model, late = build("mlp"), dist.get_rank() == 1
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), backward_passes_per_step=passes)

    def train(count: int, *, steps: bool = True) -> None:
        for _ in range(count):
            loss_of(model, x, y).backward()
        if steps:
            optimizer.step()
        optimizer.zero_grad()

    train(passes)
    says = rf"rank 1 {passes - 1}, the others {passes}; a rank skipped a backward pass"
    with pytest.raises(BackwardError, match=says if dist.get_world_size() > 2 else "numbers of backward passes"):
        train(passes - late)
    assert all(p.grad is None for p in model.parameters())
    train(passes)
    train(passes, steps=not late)
    with pytest.raises(BackwardError, match=r"optimizer steps so far: .*rank . "):
        train(passes)


class _Bomb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("bang")


@pytest.mark.parametrize("passes", [1, 2])
@world(slow(2), 3)
def test_a_failed_backward_is_an_error_of_all(passes: int) -> None:
    both, late = Both(backward_passes_per_step=passes, bucket_cap_mb=1e-4), dist.get_rank() == 1

    def failing(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = model.layers[:2](x)
        loss: torch.Tensor = (model.layers[2:](_Bomb.apply(hidden) if late else hidden) - y).square().mean()
        return loss

    for step in range(6):
        if step not in (0, 3):
            both.backward(step, passes)
            both.compare(f"step {step}")
            both.step()
            continue
        begun = time.monotonic()
        with pytest.raises(ValueError if late else PeerFailedError, match="bang" if late else "rank 1"):
            both.backward(step, passes, failing)
        assert time.monotonic() - begun < 20
        assert all(p.grad is None for p in both.model.parameters())
    assert_replicas_equal(both.model)


@world(2)
def test_a_rank_that_makes_no_backward_pass_is_named() -> None:
    group, model = dist.new_group(timeout=timedelta(seconds=2)), build("mlp")
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), group=group)
    if dist.get_rank() == 0:
        with pytest.raises(ddp.errors.CollectiveError, match="rank 1 is missing"):
            loss_of(model, *batch(0, 4)).backward()
    dist.barrier()
    del optimizer


@world(2)
def test_sharded_parameters_are_refused_by_one_rank_alone() -> None:
    """Rank 0 alone makes each call: it raises before anything would have to wait for the others."""
    mesh = dist.init_device_mesh("cpu", (2,))
    split: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    split[1].weight = nn.Parameter(distribute_tensor(split[1].weight.detach(), mesh, [Shard(0)]))
    modules: list[tuple[Any, str]] = [(split, "1.weight"), (fully_shard(nn.Linear(4, 4), mesh=mesh), "weight")]
    for module, name in modules if dist.get_rank() == 0 else ():
        said = rf"^parameter '{name}'.* is a DTensor.*without fully_shard\(\) or parallelize_module\(\)"
        with pytest.raises(UnsupportedError, match=said):
            ddp.DistributedDataParallel(module)
        with pytest.raises(UnsupportedError, match=said):
            DistributedOptimizer(torch.optim.SGD(module.parameters(), 0.1), module.named_parameters())
    dist.barrier()
