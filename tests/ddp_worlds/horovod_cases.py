"""What the ranks of a test world do with `ddp.horovod.DistributedOptimizer`, collectives and broadcasts of states.

The oracle is the same training in one process on the whole batch, computed by every rank for itself.
"""

from __future__ import annotations

import copy
import functools
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
from testbed.training import F64, assert_close, assert_replicas_equal, batch, build, loss_of, shard
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import ddp
import ddp.horovod as hvd
from ddp.comm.broadcast_objects import broadcast_object, broadcast_optimizer_state
from ddp.comm.sums.tree_sum import prefer_trees
from ddp.horovod import collectives
from ddp.horovod.broadcast_state import allgather_object, broadcast_parameters
from ddp.horovod.optimizer import DistributedOptimizer

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.3, max_iter=3, line_search_fn="strong_wolfe"),
}


def _step(*optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def the_module_is_all_a_script_needs() -> None:
    assert hvd.init().world_size == hvd.size() == size()
    model, alone = build("mlp"), build("mlp")
    if hvd.rank():
        nn.init.zeros_(model.layers[0].weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression=hvd.Compression.none
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    x, y = batch(0, 4 * size())
    loss_of(model, shard(x), shard(y)).backward()
    loss_of(alone, x, y).backward()
    assert_close(model, alone)
    assert hvd.allreduce(torch.tensor(1.0), op=hvd.Sum).item() == size()
    assert hvd.broadcast_object({"rank": hvd.rank()}) == {"rank": 0}


def sharded_parameters_are_refused_alone() -> list[str]:
    """Rank 0 alone makes each call: it raises before anything would have to wait for the others."""
    mesh = dist.init_device_mesh("cpu", (size(),))
    tensor_parallel = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sharded = distribute_tensor(tensor_parallel[1].weight.detach(), mesh, [Shard(0)])
    tensor_parallel[1].weight = nn.Parameter(sharded)
    fully_sharded = fully_shard(nn.Linear(4, 4), mesh=mesh)
    reported = []
    if rank() == 0:
        modules: list[Any] = [tensor_parallel, fully_sharded]
        for module in modules:
            with pytest.raises(ddp.errors.UnsupportedError) as caught:
                ddp.DistributedDataParallel(module)
            reported.append(str(caught.value))
            with pytest.raises(ddp.errors.UnsupportedError) as caught:
                DistributedOptimizer(torch.optim.SGD(module.parameters(), 0.1), module.named_parameters())
            reported.append(str(caught.value))
    dist.barrier()
    return reported


# DistributedOptimizer: equal to one process


def equals_whole_batch(setups: list[tuple[str, str, int, bool]]) -> None:
    """(model, optimizer, backward passes a step, clip before the step)"""
    for name, kind, passes, clips in setups:
        model, alone = build(name), build(name)
        optimizer = OPTIMIZERS[kind](model.parameters())
        own = OPTIMIZERS[kind](alone.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)  # before wrapping: it replaces optimizer.step
        wrapped = DistributedOptimizer(optimizer, model.named_parameters(), backward_passes_per_step=passes)
        schedules = [schedule, torch.optim.lr_scheduler.StepLR(own, 2)]
        for step in range(5):
            x, y = batch(step, 6 * size() * passes)
            for rows in zip(shard(x).chunk(passes), shard(y).chunk(passes), strict=True):
                (loss_of(model, *rows) / passes).backward()
            loss_of(alone, x, y).backward()
            if clips:
                wrapped.synchronize()  # type: ignore[attr-defined]
                norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (model, alone)]
                torch.testing.assert_close(*norms, rtol=1e-12, atol=0)
            assert_close(model, alone, f"{name} {kind} {passes} step {step}")
            if clips:
                with wrapped.skip_synchronize():  # type: ignore[attr-defined]
                    wrapped.step()
            else:
                wrapped.step()
            own.step()
            for each in schedules:
                each.step()
            assert_close(model, alone, f"{name} {kind} {passes} after step {step}")
            assert_replicas_equal(model)
            wrapped.zero_grad()
            own.zero_grad()
        assert wrapped.state_dict().keys() == own.state_dict().keys()


def a_sum_equals_the_sum() -> None:
    model, alone = build("mlp"), build("mlp")
    optimizer = DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), op="sum", backward_passes_per_step=2)
    own = OPTIMIZERS["sgd"](alone.parameters())
    for step in range(4):
        x, y = batch(step, 12 * size())
        for rows in zip(shard(x).chunk(2), shard(y).chunk(2), strict=True):
            (loss_of(model, *rows) / 2 / size()).backward()
        loss_of(alone, x, y).backward()
        assert_close(model, alone, f"step {step}")
        _step(optimizer, own)
    if size() > 1:
        for _ in range(2):
            loss_of(model, x, y).backward()
        with pytest.raises(ddp.errors.BackwardError, match="backward_passes_per_step=2"):
            loss_of(model, x, y).backward()
        optimizer.zero_grad()


def more_passes_than_announced_are_exact() -> None:
    model, alone = build("mlp"), build("mlp")
    optimizer = DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()))
    own = OPTIMIZERS["sgd"](alone.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            for part in range(3):
                x, y = batch(10 * step + part, 4 * size())
                loss_of(model, shard(x), shard(y)).backward()
                loss_of(alone, x, y).backward()
            assert_close(model, alone)
            _step(optimizer, own)
    assert len([w for w in caught if "averaged several times" in str(w.message)]) == (size() > 1)
    # Fewer passes than announced: step() averages them.
    optimizer.set_backward_passes_per_step(4)  # type: ignore[attr-defined]
    for part in range(3):
        x, y = batch(50 + part, 4 * size())
        loss_of(model, shard(x), shard(y)).backward()
        loss_of(alone, x, y).backward()
    if size() > 1:
        with pytest.raises(ddp.errors.BackwardError, match="3 of 4 backward passes"):
            optimizer.zero_grad()
        with optimizer.skip_synchronize(), pytest.raises(ddp.errors.BackwardError, match="call synchronize"):  # type: ignore[attr-defined]
            optimizer.step()
    optimizer.step()
    own.step()
    assert_close(model, alone)
    for _ in range(2):  # without a backward pass: the same gradients again
        optimizer.step()
        own.step()
    assert_close(model, alone)
    assert_replicas_equal(model)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 3) for _ in range(4)])

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        return sum(self.layers[index](x) for index in used)


def parameters_without_gradients_are_exact() -> None:
    """Layer r + step is used by rank r alone, layer 3 by no one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Branches().to(F64)
    alone = copy.deepcopy(model)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    own = torch.optim.SGD(alone.parameters(), 0.1)
    for step in range(6):
        x, y = batch(step, 5 * size())
        used = [[(each + step) % 3] for each in range(size())]
        (model(shard(x), used[rank()]) - shard(y)).square().mean().backward()
        for xs, ys, layers in zip(x.chunk(size()), y.chunk(size()), used, strict=True):
            ((alone(xs, layers) - ys).square().mean() / size()).backward()
        assert_close(model, alone, f"step {step}")
        assert model.layers[3].weight.grad is None
        optimizer.step()
        own.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        own.zero_grad(set_to_none=step % 2 == 0)
    assert_replicas_equal(model)


def sums_are_by_the_tree() -> None:
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


def sparse_gradients_stay_sparse() -> None:
    for as_dense in (False, True):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.Sequential(nn.EmbeddingBag(50, 4, mode="sum", sparse=True), nn.Linear(4, 2)).to(F64)
        alone = copy.deepcopy(model)
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.5), model.named_parameters(), sparse_as_dense=as_dense
        )
        own = torch.optim.SGD(alone.parameters(), 0.5)
        for step in range(5):
            rows = torch.randint(0, 50, (4 * size(), 3), generator=torch.Generator().manual_seed(step))
            model(shard(rows)).square().mean().backward()
            alone(rows).square().mean().backward()
            assert model[0].weight.grad is not None
            if size() > 1:
                assert model[0].weight.grad.is_sparse is not as_dense
            for (name, a), (_, e) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
                torch.testing.assert_close(a.grad.to_dense(), e.grad.to_dense(), rtol=1e-12, atol=1e-13, msg=name)
            _step(optimizer, own)


def closures_see_the_average() -> None:
    for kind in ("lbfgs", "sgd"):
        model, alone = build("mlp"), build("mlp")
        optimizer = DistributedOptimizer(OPTIMIZERS[kind](model.parameters()))
        own = OPTIMIZERS[kind](alone.parameters())
        for step in range(3):
            x, y = batch(step, 4 * size())

            def closure(model: nn.Module, each: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> Any:
                each.zero_grad()
                loss = loss_of(model, x, y)
                loss.backward()
                return loss

            found = optimizer.step(lambda: closure(model, optimizer, shard(x), shard(y)))  # noqa: B023
            expected = own.step(lambda: closure(alone, own, x, y))  # noqa: B023
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
            for a, e in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-9)
            assert_replicas_equal(model)


def grad_scaler_needs_nothing_else() -> None:
    """A step that it skips because of one rank's inf is skipped everywhere."""
    model, alone = build("mlp"), build("mlp")
    optimizer = DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()))
    own = OPTIMIZERS["sgd"](alone.parameters())
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in range(2)]
    for step in range(4):
        x, y = batch(step, 4 * size())
        if step == 2:
            x[0, 0] = float("inf")  # of rank 0
        for m, each, scaler, xs, ys in (
            (model, optimizer, scalers[0], shard(x), shard(y)),
            (alone, own, scalers[1], x, y),
        ):
            scaler.scale(loss_of(m, xs, ys)).backward()
            if step == 1:
                scaler.unscale_(each)
                nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            scaler.step(each)
            scaler.update()
            each.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0 ** (10 - (step >= 2))
        assert_close(model, alone)
    assert_replicas_equal(model)


def two_optimizers_share_a_backward_pass() -> None:
    """Buckets of both are complete in another order on each rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        models = [Branches().to(F64) for _ in range(2)]
    alone = copy.deepcopy(models)
    optimizers = [
        DistributedOptimizer(torch.optim.SGD(m.parameters(), 0.1), m.named_parameters(), bucket_cap_mb=1e-5)
        for m in models
    ]
    owns = [torch.optim.SGD(m.parameters(), 0.1) for m in alone]
    order = [0, 1] if rank() % 2 else [1, 0]
    for step in range(4):
        x, y = batch(step, 5 * size())
        outputs = {at: models[at](shard(x), [0, 1, 2, 3]) for at in order}
        (outputs[0] + outputs[1] - shard(y)).square().mean().backward()
        (alone[0](x, [0, 1, 2, 3]) + alone[1](x, [0, 1, 2, 3]) - y).square().mean().backward()
        for at in range(2):
            assert_close(models[at], alone[at])
            _step(optimizers[at], owns[at])


def optimizers_that_are_gone_leave_their_groups_to_others() -> None:
    """Also where one rank keeps one of them for longer."""

    def train() -> list[torch.optim.SGD]:
        model, alone = build("mlp"), build("mlp")
        halves = [[*model.parameters()][::2], [*model.parameters()][1::2]]
        optimizers = [DistributedOptimizer(torch.optim.SGD(half, lr=0.1)) for half in halves]
        x, y = batch(1, 5 * size())
        loss_of(model, shard(x), shard(y)).backward()
        _step(*optimizers)
        loss_of(alone, x, y).backward()
        _step(torch.optim.SGD(alone.parameters(), lr=0.1))
        assert_close(model, alone)
        return optimizers

    def open_files() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    train()
    before = open_files()
    train()
    wait_until(lambda: open_files() == before, "a rank closes its ends when the others have closed theirs")
    kept = train()[: 2 * (rank() == 0)]
    train()
    del kept
    before = open_files()
    for _ in range(3):
        train()
    wait_until(lambda: open_files() == before, "a rank closes its ends when the others have closed theirs")


def checkpoints_and_second_derivatives_are_exact() -> None:
    model, alone = build("mlp"), build("mlp")
    optimizer = DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()))
    own = OPTIMIZERS["sgd"](alone.parameters())
    for step in range(6):
        x, y = batch(step, 4 * size())
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="more than backward_passes_per_step=1")
            warnings.filterwarnings("ignore", message="Using backward.. with create_graph=True")
            for m, xs, ys in ((model, shard(x), shard(y)), (alone, x, y)):
                if step < 4:
                    out = xs.requires_grad_()
                    for layer in m.layers:
                        out = checkpoint(layer, out, use_reentrant=step % 2 == 0)
                    (out - ys).square().mean().backward()
                else:
                    loss_of(m, xs, ys).backward(create_graph=True)
                    functools.reduce(torch.add, (p.grad.square().sum() for p in m.parameters())).backward()
                    for p in m.parameters():
                        p.grad = p.grad.detach()
        assert_close(model, alone, f"step {step}")
        _step(optimizer, own)


def unfrozen_and_added_parameters_are_averaged() -> None:
    model, alone = build("mlp"), build("mlp")
    pairs = []
    for m in (model, alone):
        m.layers[0].requires_grad_(False)
        optimizer: torch.optim.Optimizer = torch.optim.SGD([*m.layers[0].parameters(), *m.layers[2].parameters()], 0.1)
        pairs.append(optimizer)
    pairs[0] = DistributedOptimizer(pairs[0], model.named_parameters())
    for step in range(6):
        if step == 2:
            for m in (model, alone):
                m.layers[0].requires_grad_(True)
        if step == 4:
            for m, optimizer in zip((model, alone), pairs, strict=True):
                optimizer.add_param_group({"params": list(m.layers[4].parameters()), "lr": 0.05})
        x, y = batch(step, 4 * size())
        loss_of(model, shard(x), shard(y)).backward()
        loss_of(alone, x, y).backward()
        if step >= 4:
            assert_close(model, alone)
        for optimizer in pairs:
            optimizer.step()
        for m in (model, alone):
            m.zero_grad()
        for a, e in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-13)


def compressed_training_comes_close() -> None:
    for compression in ("bf16", "fp16", "int8", ddp.compression.PowerSGD(rank=1, start_step=2)):
        model, alone = build("mlp").float(), build("mlp").float()
        optimizer = DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), compression=compression)
        own = OPTIMIZERS["sgd"](alone.parameters())
        for step in range(8):
            x, y = (t.float() for t in batch(step, 4 * size()))
            loss_of(model, shard(x), shard(y)).backward()
            loss_of(alone, x, y).backward()
            _step(optimizer, own)
            assert_replicas_equal(model)
        for a, e in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(a, e, rtol=0.2, atol=0.1)
        del optimizer
        gc.collect()


# DistributedOptimizer: what it is


def it_is_the_users_optimizer() -> None:
    model = build("mlp")
    plain = torch.optim.Adam(model.parameters(), lr=0.01)
    loss_of(model, *batch(0, 3)).backward()
    plain.step()
    plain.zero_grad()
    broadcast_parameters(model.state_dict())
    state = copy.deepcopy(plain.state_dict())
    optimizer = DistributedOptimizer(plain, model.named_parameters())
    assert optimizer is plain
    assert isinstance(optimizer, torch.optim.Adam)
    assert type(optimizer).__name__ == "Adam"
    assert repr(optimizer).startswith("Adam (")
    assert str(state) == str(optimizer.state_dict())
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(copied) is torch.optim.Adam
        assert str(copied.state_dict()) == str(state)
    optimizer.load_state_dict(state)
    hooks = [p._post_accumulate_grad_hooks or {} for p in model.parameters()]
    assert all(hooks) == (size() > 1)
    with pytest.raises(ddp.errors.ArgumentError, match="distributed already"):
        DistributedOptimizer(optimizer)
    if size() > 1:
        with pytest.raises(ddp.errors.ArgumentError, match="averaged already"):
            DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    del optimizer, plain
    gc.collect()
    assert not any(hooks)


def bad_arguments_are_errors() -> None:
    model = build("mlp")
    named = list(model.named_parameters())

    def made(**given: Any) -> None:
        DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), **given)

    for given, says in (
        ({"backward_passes_per_step": 0}, "at least 1"),
        ({"op": "max"}, "'average' or 'sum'"),
        ({"gradient_predivide_factor": 0}, "more than 0"),
        ({"named_parameters": named[:-1]}, "is not in named_parameters"),
        ({"named_parameters": [*named, named[0]]}, "two parameters 'layers.0.weight'"),
        ({"named_parameters": model.parameters()}, "pairs of a name and a parameter"),
        ({"compression": "zip"}, "compression='zip'"),
    ):
        with pytest.raises(ddp.errors.ArgumentError, match=says):
            made(**given)
    with pytest.raises(ddp.errors.ArgumentError, match=r"must be a torch\.optim\.Optimizer"):
        DistributedOptimizer(model)


# DistributedOptimizer: ranks that differ


def different_parameters_are_errors() -> None:
    layers = [nn.Linear(4, 3), nn.Linear(3, 5 if rank() == 1 else 2)]
    parameters = [p for layer in layers for p in layer.parameters()]
    named = [
        (f"layer{number}.{name}", p) for number, layer in enumerate(layers) for name, p in layer.named_parameters()
    ]
    for names in (named, None):
        with pytest.raises(ddp.errors.LayoutMismatchError, match=r"shape \(5, 3\)") as found:
            DistributedOptimizer(torch.optim.SGD(parameters, 0.1), names)
        assert found.value.rank == 1
        assert found.value.entry == ("layer1.weight" if names else "param_groups[0]['params'][2]")
    with pytest.raises(ddp.errors.LayoutMismatchError, match="passes"):
        DistributedOptimizer(torch.optim.SGD(layers[0].parameters(), 0.1), backward_passes_per_step=1 + rank())
    kind = torch.optim.SGD if rank() else torch.optim.Adam
    with pytest.raises(ddp.errors.ArgumentError, match=r"ranks? 1.* called DistributedOptimizer \(SGD\)"):
        DistributedOptimizer(kind(layers[0].parameters(), 0.1))


def unequal_replicas_are_an_error() -> None:
    model = build("mlp", seed=rank())
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    x, y = batch(0, 4)
    with pytest.raises(ddp.errors.DriftError, match="broadcast_parameters") as found:
        loss_of(model, x, y).backward()
    assert found.value.parameter == "layers.0.weight"
    assert found.value.ranks == tuple(range(1, size()))
    assert all(p.grad is None for p in model.parameters())
    broadcast_parameters(model.state_dict())
    loss_of(model, x, y).backward()
    optimizer.step()
    assert_replicas_equal(model)


def different_numbers_are_errors() -> None:
    x, y = batch(rank(), 4)
    for passes in (1, 2):
        model = build("mlp")
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), backward_passes_per_step=passes)

        def train(count: int, model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            for _ in range(count):
                loss_of(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()

        train(passes)
        says = rf"rank 1 {passes - 1}, the others {passes}; a rank skipped a backward pass"
        with pytest.raises(ddp.errors.BackwardError, match=says if size() > 2 else "numbers of backward passes"):
            train(passes - (rank() == 1))
        assert all(p.grad is None for p in model.parameters())
        train(passes)
        for _ in range(passes):
            loss_of(model, x, y).backward()
        if rank() != 1:
            optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(ddp.errors.BackwardError, match=r"optimizer steps so far: .*rank . "):
            train(passes)
        del model, optimizer, train
        gc.collect()


class _Bomb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("bang")


def a_failed_backward_is_everybodys_error() -> None:
    for passes in (1, 2):
        model, alone = build("mlp"), build("mlp")
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), backward_passes_per_step=passes, bucket_cap_mb=1e-4
        )
        own = torch.optim.SGD(alone.parameters(), 0.1)
        for step in range(6):
            x, y = batch(step, 4 * size())
            fails = step in (0, 3)
            begun = time.monotonic()
            caught: Exception | None = None
            try:
                for _ in range(passes):
                    hidden = model.layers[:2](shard(x))
                    out = model.layers[2:](_Bomb.apply(hidden) if fails and rank() == 1 else hidden)
                    ((out - shard(y)).square().mean() / passes).backward()
            except (ValueError, ddp.errors.PeerFailedError) as error:
                caught = error
            if fails:
                assert type(caught) is (ValueError if rank() == 1 else ddp.errors.PeerFailedError)
                assert "rank 1" in str(caught) or rank() == 1
                assert time.monotonic() - begun < 20
                assert all(p.grad is None for p in model.parameters())
                continue
            assert caught is None
            loss_of(alone, x, y).backward()
            assert_close(model, alone, f"step {step}")
            _step(optimizer, own)
        assert_replicas_equal(model)


def a_rank_that_makes_no_backward_pass_is_named() -> None:
    group = dist.new_group(timeout=timedelta(seconds=2))
    model = build("mlp")
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), group=group)
    if rank() == 0:
        with pytest.raises(ddp.errors.CollectiveError, match="rank 1 is missing"):
            loss_of(model, *batch(0, 4)).backward()
    dist.barrier()
    assert isinstance(optimizer, torch.optim.SGD)


# Collectives


def _mine(shape: tuple[int, ...], dtype: torch.dtype, of: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + of)
    numbers = torch.randint(-5, 6, shape, generator=generator)
    if dtype.is_complex:
        numbers = numbers * (1 + 2j)
    return numbers % 2 == 0 if dtype is torch.bool else numbers.to(dtype)


_DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.uint8, torch.int16,
    torch.int64, torch.bool,
]  # fmt: skip


def reductions_equal_those_of_one_process() -> None:
    for dtype in _DTYPES:
        for shape in ((), (0, 2), (4, 3)):
            every = torch.stack([_mine(shape, dtype, of) for of in range(size())])
            mine = every[rank()].clone()
            expected = {"sum": every.sum(0, dtype=dtype)} if dtype is not torch.bool else {}
            if dtype.is_floating_point or dtype.is_complex:
                expected["average"] = every.sum(0, dtype=dtype) / size()
            if not dtype.is_complex:
                expected |= {"min": every.amin(0), "max": every.amax(0)}
                expected["product"] = every.all(0) if dtype is torch.bool else every.prod(0, dtype=dtype)
            # In 16 bits, each rank divides before the sum, which would overflow.
            close = {"rtol": 1e-2, "atol": 1e-2} if dtype.itemsize == 2 else {"rtol": 1e-6, "atol": 1e-6}
            for op, result in expected.items():
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
    tensors = [_mine((3, 2), dtype, rank()).t() for dtype in (torch.float32, torch.float64, torch.float32)]
    expected_sums = [
        functools.reduce(torch.add, [_mine((3, 2), t.dtype, of).t() for of in range(size())]) for t in tensors
    ]
    for found, result in zip(collectives.grouped_allreduce(tensors, op="sum"), expected_sums, strict=True):
        assert torch.equal(found, result)
    collectives.grouped_allreduce_(tensors, op="sum")
    assert all(map(torch.equal, tensors, expected_sums))
    handle = collectives.allreduce_async_(tensors[0], "again")
    collectives.synchronize(handle)
    assert torch.equal(tensors[0], expected_sums[0])
    for compression in ("fp16", "bf16", ddp.compression.Half()):
        found = collectives.allreduce(torch.tensor([1.0, 2.0]) * (1 + rank()), compression=compression)
        torch.testing.assert_close(found, torch.tensor([1.0, 2.0]) * (1 + size()) / 2, rtol=0.01, atol=0)
        assert found.dtype is torch.float32


def copies_arrive_unchanged() -> None:
    last = size() - 1
    for dtype in _DTYPES[::3]:
        for shape in ((), (0, 2), (2, 3)):
            mine = _mine(shape, dtype, rank())
            found = collectives.broadcast(mine, last, "x")
            assert torch.equal(found, _mine(shape, dtype, last))
            assert found.shape == mine.shape
            assert torch.equal(
                collectives.synchronize(collectives.broadcast_async(mine, root_rank=0)), _mine(shape, dtype, 0)
            )
            in_place = mine.clone()
            assert collectives.broadcast_(in_place, last) is in_place
            assert torch.equal(in_place, found)
            in_place = mine.clone()
            collectives.synchronize(collectives.broadcast_async_(in_place, last))
            assert torch.equal(in_place, found)
        for counts in ([2, 0, 3], [0, 0, 0], [1, 1, 1]):
            every = [_mine((counts[of], 2), dtype, of) for of in range(size())]
            for found in (
                collectives.allgather(every[rank()], "rows"),
                collectives.synchronize(collectives.allgather_async(every[rank()])),
            ):
                assert torch.equal(found, torch.cat(every))
        sends = [[1, 0, 2], [3, 1, 0], [0, 0, 0]]
        every = [_mine((sum(sends[of][: size()]), 2), dtype, of) for of in range(size())]
        found, came = collectives.alltoall(every[rank()], sends[rank()][: size()])
        parts = [rows.split(sends[of][: size()])[rank()] for of, rows in enumerate(every)]
        assert torch.equal(found, torch.cat(parts))
        assert came.tolist() == [len(part) for part in parts]
    assert collectives.allgather(torch.tensor(rank())).tolist() == list(range(size()))
    assert collectives.alltoall(torch.arange(size()) + 10 * rank()).tolist() == [
        10 * of + rank() for of in range(size())
    ]
    collectives.barrier("here")


def gradients_are_those_of_one_process() -> None:
    """The loss is the sum of the ranks' losses, each of which uses what came from all."""
    every = [torch.randn(2, 3, dtype=F64, generator=torch.Generator().manual_seed(of)) for of in range(size())]
    weights = [torch.randn(3, 3, dtype=F64, generator=torch.Generator().manual_seed(9 + of)) for of in range(size())]

    def parts(xs: list[torch.Tensor], kind: str) -> list[torch.Tensor]:
        if kind in ("average", "sum"):
            return [sum(xs) / (size() if kind == "average" else 1)] * size()  # type: ignore[list-item]
        if kind == "allgather":
            return [torch.cat(xs)] * size()
        if kind == "broadcast":
            return [xs[-1]] * size()
        if kind == "reducescatter":
            return list(sum(xs).tensor_split(size()))
        return [torch.cat([x[: 2 * (of == 0)] for x in xs]) for of in range(size())]  # all rows to rank 0

    calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "average": lambda x: collectives.allreduce(x, "x"),
        "sum": lambda x: collectives.allreduce(x, "x", op="sum"),
        "allgather": lambda x: collectives.allgather(x, "x"),
        "broadcast": lambda x: collectives.broadcast(x, size() - 1, "x"),
        "reducescatter": lambda x: collectives.reducescatter(x, "x", op="sum"),
        "alltoall": lambda x: collectives.alltoall(x, [2] + [0] * (size() - 1))[0],
    }
    for kind, call in calls.items():
        xs = [x.clone().requires_grad_() for x in every]
        sum((part @ w).tanh().square().sum() for part, w in zip(parts(xs, kind), weights, strict=True)).backward()
        mine = every[rank()].clone().requires_grad_()
        (call(mine) @ weights[rank()]).tanh().square().sum().backward()
        expected = torch.zeros_like(mine) if xs[rank()].grad is None else xs[rank()].grad
        torch.testing.assert_close(mine.grad, expected, rtol=1e-12, atol=1e-13, msg=kind)
    mine = every[rank()].clone().requires_grad_()
    with pytest.raises(ddp.errors.UnsupportedError, match="op='max' has no gradient"):
        collectives.allreduce(mine, "m", op="max").sum().backward()


def different_calls_are_errors_that_name_them() -> None:
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
        with pytest.raises(ddp.errors.ArgumentError, match=says):
            call()
        assert collectives.allreduce(one, op="sum").tolist() == [size()] * 3


def a_missing_rank_is_named() -> None:
    group = dist.new_group(timeout=timedelta(seconds=2))
    collectives.barrier(group=group)
    if rank() == 0:
        with pytest.raises(ddp.errors.CollectiveError, match=r"rank 1 is missing: .*allreduce 'loss'"):
            collectives.allreduce(torch.ones(1), "loss", group=group)
    dist.barrier()


def groups_and_places() -> None:
    world = ddp.init()
    assert (collectives.rank(), collectives.size()) == (rank(), size())
    assert (collectives.local_rank(), collectives.local_size()) == (world.local_rank, world.local_world_size)
    assert (collectives.cross_rank(), collectives.cross_size()) == (0, 1)
    assert hvd.is_initialized()
    pair = dist.new_group([0, 1])
    if rank() < 2:
        assert collectives.allreduce(torch.ones(2), op="sum", group=pair).tolist() == [2, 2]
    else:
        with pytest.raises(ddp.errors.ArgumentError, match="only its members"):
            collectives.allreduce(torch.ones(2), group=pair)
    collectives.barrier()


def without_a_group_calls_say_what_to_do() -> None:
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
        with pytest.raises(ddp.errors.NotInitializedError, match=r"call ddp\.init\(\) before ddp\."):
            call()
    loss_of(model, *batch(0, 4)).backward()
    optimizer.step()
    assert ddp.init().world_size == 1
    assert collectives.allreduce(torch.ones(1)).item() == 1
    assert collectives.allgather(torch.ones(2, 2)).shape == (2, 2)
    assert broadcast_object({"a": 1}) == {"a": 1}
    DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1)).step()


# States


def assert_same(actual: Any, expected: Any) -> None:
    """Of the same types and bits."""
    assert type(actual) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual.cpu(), expected.cpu())
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        for key, value in expected.items():
            assert_same(actual[key], value)
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for a, e in zip(actual, expected, strict=True):
            assert_same(a, e)
    else:
        assert actual == expected


def parameters_are_those_of_the_root() -> None:
    last = size() - 1
    for form in (
        lambda m: m.state_dict(),
        lambda m: m.named_parameters(),
        lambda m: list(m.parameters()),
        lambda m: dict(m.named_parameters()),
    ):
        model = nn.Sequential(build("odd", seed=rank()), nn.BatchNorm1d(3)).to(F64)
        expected = nn.Sequential(build("odd", seed=last), nn.BatchNorm1d(3)).to(F64)
        for m, of in ((model, rank()), (expected, last)):
            m[1].running_mean.fill_(of + 1)
        before = list(model.parameters())
        broadcast_parameters(form(model), root_rank=last)
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
        for a, e in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(a, e)
            assert a.requires_grad == e.requires_grad
        is_whole = "running_mean" in " ".join(form(model)) if isinstance(form(model), dict) else False
        assert model[1].running_mean[0] == (last if is_whole else rank()) + 1
    if size() > 1:
        with pytest.raises(ddp.errors.LayoutMismatchError, match=r"rank 1 .*shape \(3,\)") as found:
            broadcast_parameters({"same": torch.ones(2), "w": torch.ones(2 + (rank() == 1))})
        assert found.value.entry == "w"
        with pytest.raises(ddp.errors.ArgumentError, match="there is no rank -1"):
            broadcast_parameters({}, root_rank=-1)
    with pytest.raises(ddp.errors.ArgumentError, match="'extra' is a int, and only dense tensors"):
        broadcast_parameters({"extra": 3})


def optimizer_states_are_those_of_the_root() -> None:
    """The root has trained; the others have no state, or another one."""
    for kind in ("sgd", "adamw", "lbfgs", "amsgrad"):
        for others_train in (False, True):
            model = build("mlp")
            make = OPTIMIZERS.get(kind, lambda p: torch.optim.Adam(p, torch.tensor(0.01), amsgrad=True, foreach=False))
            optimizer = make(model.parameters())
            if rank() == 0 or others_train:
                x, y = batch(rank(), 4)
                for _ in range(2 + rank()):

                    def closure(model: nn.Module = model, x: torch.Tensor = x, y: torch.Tensor = y) -> Any:
                        model.zero_grad()
                        loss = loss_of(model, x, y)
                        loss.backward()
                        return loss

                    optimizer.step(closure)
                optimizer.param_groups[0]["lr"] = 0.5 / (1 + rank())
            broadcast_optimizer_state(optimizer, root_rank=0)
            broadcast_parameters(model.state_dict(), root_rank=0)
            reported = allgather_object(optimizer.state_dict())
            for other in reported[1:]:
                assert_same(other, reported[0])
            assert optimizer.param_groups[0]["lr"] == 0.5
            wrapped = DistributedOptimizer(optimizer, model.named_parameters())
            broadcast_optimizer_state(wrapped, root_rank=0)
            if kind != "lbfgs":
                loss_of(model, *batch(rank(), 4)).backward()
                wrapped.step()
                assert_replicas_equal(model)
            del optimizer, wrapped
    if size() > 1:
        kinds = [torch.optim.SGD, torch.optim.Adam]
        with pytest.raises(ddp.errors.ArgumentError, match=r"rank 1 called .*Adam with \[6\] parameters.*rank 0.*SGD"):
            broadcast_optimizer_state(kinds[rank() == 1](model.parameters(), 0.1))
    odd = torch.optim.SGD(model.parameters(), 0.1)
    odd.param_groups[0]["odd"] = lambda: None
    with pytest.raises(ddp.errors.ArgumentError, match="cannot be sent"):
        broadcast_optimizer_state(odd)


class Opaque:
    """Nothing that may be read back."""

    def __reduce__(self) -> Any:
        return print, ("this must not run",)


def objects_travel_without_pickle() -> None:
    sent = {"epoch": 3, "x": [1.5, None, True, "text", b"bytes", (1, 2)], "t": torch.arange(4), 5: {1, 2}}
    found = broadcast_object(sent if rank() == 0 else None, root_rank=0, name="state")
    assert_same(found, sent)
    assert found["x"][-1] == (1, 2)
    assert broadcast_object(rank(), root_rank=size() - 1) == size() - 1
    big = broadcast_object(torch.full((1 << 20,), float(rank())), root_rank=0)
    assert big.sum() == 0
    assert allgather_object({"rank": rank()}) == [{"rank": each} for each in range(size())]
    for odd in (Opaque(), lambda: None):
        with pytest.raises(
            ddp.errors.ArgumentError, match=r"rank 0's object cannot be sent: .*It may hold None, numbers"
        ):
            broadcast_object(odd if rank() == 0 else None)
        with pytest.raises(ddp.errors.ArgumentError, match=rf"allgather_object: rank {size() - 1}: "):
            allgather_object(odd if rank() == size() - 1 else 1)
    with pytest.raises(ddp.errors.ArgumentError, match="there is no rank 9"):
        broadcast_object(1, root_rank=9)
