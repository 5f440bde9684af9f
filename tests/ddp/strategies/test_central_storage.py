# mypy: disable-error-code="assignment, method-assign, no-any-return"
"""Central storage: equal to all-reduce, one copy of everything, and no silent difference between the ranks."""

from __future__ import annotations

import copy
import functools
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.central_training import F64, MAKERS, batch, build
from testbed.nursery import Nursery
from testbed.same import assert_same
from testbed.seeds import Seeds
from testbed.simulated_device import DEVICE, register
from testbed.simulated_device.training import world_with_device
from testbed.training import Mlp, assert_replicas_equal
from testbed.worlds import world
from torch import nn

import ddp
from ddp.comm.shared_memory import SharedSegment
from ddp.errors import ArgumentError, CollectiveError, DdpError, LayoutMismatchError, PeerFailedError, UnsupportedError
from ddp.strategies.central_storage import regions
from ddp.strategies.central_storage.strategy import CentralOptimizer, CentralStorage


def train(model: nn.Module, optimizer: Any, steps: range, *, parts: int = 1, clip: float = 0.0) -> None:
    module = model.module if isinstance(model, ddp.DistributedDataParallel) else model
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    dtype = next(model.parameters()).dtype
    for step in steps:
        module.step = step
        for part in range(parts):
            x, y = (each.to(next(model.parameters()).device) for each in batch(step * 10 + part, dtype))
            is_last = part == parts - 1
            if not is_last and isinstance(model, ddp.DistributedDataParallel):
                with model.no_sync():
                    (model(x) - y).square().mean().backward()
            else:
                (model(x) - y).square().mean().backward()
        if clip and isinstance(model, ddp.DistributedDataParallel):
            clip_all(model, clip)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def broadcast_all(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        dist.broadcast(tensor, 0)


def clip_all(model: nn.Module, most: float) -> None:
    """As clip_grad_norm_, which cannot do sparse gradients."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    values = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    norm = torch.stack([value.norm() for value in values]).norm()
    for p in model.parameters():
        if p.grad is not None:
            p.grad = p.grad * (most / (norm + 1e-6)).clamp(max=1.0)


def _opens_nothing(ticket: object) -> None:
    """Stand in for SharedSegment.open on another host."""


def prepared(name: str = "mlp", maker: str = "sgd", **options: Any) -> tuple[nn.Module, CentralOptimizer]:
    model = build(name)
    model, optimizer = CentralStorage(**options).prepare(model, MAKERS[maker](model.parameters()))
    assert isinstance(optimizer, CentralOptimizer)
    return model, optimizer


def step_of(model: nn.Module, optimizer: Any, step: int = 0) -> None:
    x, y = batch(step)
    (model(x) - y).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# model, optimizer, micro-batches, norm to clip the averaged gradient to (0: none)
SETTINGS = [
    ("mlp", "sgd", 1, 0.0),
    ("norm", "sgd", 3, 0.05),
    ("words", "adagrad", 2, 0.0),
    ("odd", "adagrad", 1, 0.3),
    ("norm", "adam fused", 1, 0.0),
    ("words", "sparse sgd", 1, 0.1),
    ("mlp", "adafactor", 1, 0.0),
    ("odd", "adamw", 2, 0.0),
    ("words", "plain sgd", 1, 0.0),
    ("conv", "rprop", 1, 0.0),
    ("words", "sparse adam", 1, 0.0),
]


def equals_all_reduce(settings: list[tuple[str, str, int, float]]) -> None:
    torch.sparse.check_sparse_tensor_invariants.disable()  # or torch's own optimizers warn
    for model_name, maker, parts, clip in settings:
        where = f"{model_name} {maker} {parts} {clip}"
        make = MAKERS[maker]
        theirs = ddp.DistributedDataParallel(build(model_name))
        their_optimizer = make(list(theirs.parameters()))
        train(theirs, their_optimizer, range(5), parts=parts, clip=clip)

        optimizer: Any
        model = build(model_name)
        users = make(list(model.parameters()))
        model, optimizer = CentralStorage(max_grad_norm=clip or None).prepare(model, users)
        train(model, optimizer, range(5), parts=parts)
        broadcast_all(list(theirs.module.buffers()))  # all-reduce does so when the next step begins
        assert_same(dict(model.state_dict()), dict(theirs.module.state_dict()), where)
        assert_replicas_equal(model)
        assert_same(optimizer.state_dict(), their_optimizer.state_dict(), where)
        optimizer.close()


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [(1, SETTINGS[:4]), pytest.param(2, SETTINGS, marks=pytest.mark.slow), (3, SETTINGS[:7])],
)
def test_training_equals_all_reduce(
    nursery: Nursery, world_size: int, settings: list[tuple[str, str, int, float]]
) -> None:
    nursery.run(world_size, equals_all_reduce, settings=settings)


@world(1, 3)
def test_copies_of_a_device_may_be_late(seeds: Seeds) -> None:
    """The same with parameters on the simulated device, in blocks of a few hundred bytes."""
    settings = [SETTINGS[at] for at in (0, 1, 3, 4)]
    (seed,) = seeds(1)
    register()
    for model_name, maker, parts, clip in settings:
        make = MAKERS[maker]
        theirs = ddp.DistributedDataParallel(build(model_name))
        train(theirs, make(list(theirs.parameters())), range(5), parts=parts, clip=clip)
        broadcast_all(list(theirs.module.buffers()))
        with pytest.MonkeyPatch.context() as patch, world_with_device(seed):
            patch.setattr(regions, "_BLOCK_BYTES", 600)
            optimizer: Any
            model = build(model_name)
            model, optimizer = CentralStorage(max_grad_norm=clip or None).prepare(model, make(list(model.parameters())))
            train(model, optimizer, range(5), parts=parts)
            found = {name: value.cpu() for name, value in model.state_dict().items()}
            assert next(model.parameters()).device == torch.device(DEVICE)
            torch.accelerator.synchronize()  # else this rank's part of the last collectives may never run
            optimizer.close()
        assert_same(found, dict(theirs.module.state_dict()), f"{model_name} {maker}, seed {seed}")


@world(2)
def test_there_is_one_copy_of_the_parameters() -> None:
    """What one rank writes, all ranks see; nothing is open to others; saved states are no larger than they must be."""
    rank = dist.get_rank()
    model, optimizer = prepared("norm", "adamw")
    assert isinstance(optimizer, torch.optim.Optimizer)
    first = next(model.parameters())
    if rank == 1:
        first.data.fill_(3.0)
    dist.barrier()
    assert first.eq(3.0).all()
    step_of(model, optimizer)
    held = len(os.listdir("/proc/self/fd"))
    for step in range(2, 5):
        step_of(model, optimizer, step)
    assert len(os.listdir("/proc/self/fd")) == held
    saved = io.BytesIO()
    torch.save(first, saved)
    assert len(saved.getvalue()) < first.nbytes + 2000
    average = copy.deepcopy(model)
    assert next(average.parameters()).data_ptr() != first.data_ptr()
    assert next(average.parameters()).grad is None
    dist.barrier()
    model.load_state_dict({name: tensor.clone().zero_() for name, tensor in model.state_dict().items()})
    step_of(model, optimizer, 1)
    optimizer.close()
    dist.barrier()
    first.data.fill_(rank)
    dist.barrier()
    assert first.eq(rank).all(), "after close() each rank has its own again"
    with pytest.raises(DdpError, match="closed"):
        optimizer.step()


def one_rank_saves(path: Path) -> None:
    """As scripts for all-reduce do: rank 0 alone asks for the state, which a plain optimizer and other worlds take."""
    torch.sparse.check_sparse_tensor_invariants.disable()
    for name, maker in (("norm", "adamw"), ("words", "sparse adam"), ("words", "sparse sgd"), ("mlp", "adafactor")):
        model, optimizer = prepared(name, maker)
        train(model, optimizer, range(3))
        if dist.get_rank() == 0:
            before = {"model": copy.deepcopy(model.state_dict()), "optimizer": optimizer.state_dict()}
            torch.save(before, path / f"{name}.{maker}")
        train(model, optimizer, range(3, 5))
        if dist.get_rank() == 0:
            after = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(after, path / f"{name}.{maker}.after")
        dist.barrier()
        loaded = torch.load(path / f"{name}.{maker}", weights_only=True)
        again, optimizer = prepared(name, maker)
        again.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        assert_same(optimizer.state_dict(), loaded["optimizer"], "at once, before any step")
        train(again, optimizer, range(3, 5))
        assert_same(dict(again.state_dict()), dict(model.state_dict()), f"resumed {name} {maker}")


def a_state_fits_all_reduce(path: Path) -> None:
    """In another world: go on from the saved state with all-reduce and with central storage."""
    for name, maker in (("norm", "adamw"), ("mlp", "adafactor")):
        loaded = torch.load(path / f"{name}.{maker}", weights_only=True)
        found = []
        for central in (True, False):
            model: nn.Module = build(name)
            model.load_state_dict(loaded["model"])
            optimizer: Any = MAKERS[maker](model.parameters())
            optimizer.load_state_dict(loaded["optimizer"])  # before prepare() this time
            if central:
                model, optimizer = CentralStorage().prepare(model, optimizer)
            else:
                model = ddp.DistributedDataParallel(model)
            train(model, optimizer, range(3, 5))
            module = model.module if isinstance(model, ddp.DistributedDataParallel) else model
            found.append([dict(module.named_parameters()), optimizer.state_dict()])
        assert_same(found[0], found[1], f"{name} {maker}")


def test_one_rank_saves_for_plain_torch_and_other_worlds(nursery: Nursery, tmp_path: Path) -> None:
    nursery.run(2, one_rank_saves, path=tmp_path)
    nursery.run(3, a_state_fits_all_reduce, path=tmp_path)


@world(2)
def test_changes_of_the_model_are_errors_on_all_ranks() -> None:
    """On all ranks; or on one, of which the others hear."""

    def add(model: Any) -> None:
        model.layers.append(nn.Linear(3, 3).double())

    def replace(model: Any) -> None:
        model.layers[0].weight = nn.Parameter(torch.ones(40, 6, dtype=F64))

    def cast(model: Any) -> None:
        model.float()

    def move(model: Any) -> None:
        model.layers[2].weight.data = model.layers[2].weight.data.clone()

    for change in (add, replace, cast, move):
        model, optimizer = prepared()
        step_of(model, optimizer)
        change(model)
        with pytest.raises(ArgumentError, match="after prepare"):
            optimizer.step()
    model, optimizer = prepared()
    if dist.get_rank() == 1:
        move(model)
        with pytest.raises(ArgumentError, match=r"layers\.2\.weight"):
            optimizer.step()
    else:
        with pytest.raises(PeerFailedError, match=r"rank 1: ArgumentError: parameter 'layers.2.weight'") as error:
            optimizer.step()
        assert [*error.value.failures] == [1]
        assert "load_state_dict" in str(error.value)
    # What fails in the step itself, on the rank that has that part of the model.
    torch.sparse.check_sparse_tensor_invariants.disable()
    model, optimizer = prepared("words", "sparse adam")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises((RuntimeError, PeerFailedError), match="SparseAdam does not support dense"):
        optimizer.step()
    with pytest.raises((RuntimeError, PeerFailedError), match="SparseAdam does not support dense"):
        optimizer.step()  # the ranks still meet


@world(2)
def test_what_differs_between_ranks_is_an_error() -> None:
    rank = dist.get_rank()
    other, model = Mlp(), Mlp()
    other.layers[4] = nn.Linear(33, 3 + rank)
    engine = CentralStorage()
    with pytest.raises(LayoutMismatchError, match=r"layers\.4\.weight"):
        engine.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(LayoutMismatchError, match="hyperparameters"):
        engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1 + rank))
    model, optimizer = prepared()
    optimizer.param_groups[0]["lr"] = 0.1 + rank
    with pytest.raises(ArgumentError, match="rank 1 steps with other hyperparameters than rank 0 in step 1"):
        optimizer.step()
    # Another host has none of this one's processes.
    if rank == 1:
        SharedSegment.open = _opens_nothing  # this process ends after the test
    with pytest.raises(ArgumentError, match=r"rank 1 \(on .*\) cannot open that of rank 0 .*parameter_server"):
        prepared()


@world(1, 2)
def test_the_users_optimizer_steps_no_more() -> None:
    model = build("mlp")
    users = MAKERS["adamw"](model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(users, 1, 0.5)
    frozen = next(model.parameters()).requires_grad_(False)
    values = frozen.detach().clone()
    broadcast_all([values])
    model, optimizer = CentralStorage().prepare(model, users)
    hooked: list[object] = []
    optimizer.register_step_post_hook(lambda *_: hooked.append(1))
    step_of(model, optimizer)
    schedule.step()  # made before prepare(), with what it warns of as errors
    assert optimizer.param_groups[0]["lr"] == 0.005
    assert torch.equal(frozen, values)
    assert hooked == [1]
    loss = optimizer.step(lambda: 2.5)
    assert loss == 2.5
    with pytest.raises(DdpError, match="the one that prepare"):
        users.step()
    with pytest.raises(ArgumentError, match="before"):
        optimizer.add_param_group({"params": [torch.zeros(1)]})
    with pytest.raises(ArgumentError, match="other param groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    with pytest.raises(UnsupportedError):
        CentralStorage().prepare(model, torch.optim.LBFGS(model.parameters()))
    x, y = batch(0)
    (model(x) - y).square().mean().backward()
    mine = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.step()
    kept = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(map(torch.equal, mine, kept)), ".grad is this rank's own, after the step as well"
    with pytest.raises(ArgumentError, match="max_grad_norm"):
        CentralStorage(max_grad_norm=0.0)


@world(3)
def test_half_precision_is_rounded_once() -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    model = nn.ParameterList([parameter])
    _, optimizer = CentralStorage().prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    every = torch.randn(dist.get_world_size(), 1000).bfloat16()
    parameter.grad = every[dist.get_rank()].clone()
    optimizer.step()
    total = functools.reduce(torch.add, every.float())
    assert torch.equal(parameter, -(total / dist.get_world_size()).bfloat16())


@world(2)
def test_the_name_in_strategy_is_enough() -> None:
    strategy = ddp.strategy("central_storage", max_grad_norm=1.0)
    model = build("norm")
    model, optimizer = strategy.prepare(model, MAKERS["adamw"](model.parameters()))
    train(model, optimizer, range(2))
    assert optimizer.grad_norm > 0  # type: ignore[attr-defined]
    assert_replicas_equal(model)


@world(2)
def test_a_rank_that_leaves_is_an_error_for_the_others() -> None:
    """Rank 1 ends in the middle; the other hears of it at its next step, and can use its own values still."""
    model, optimizer = prepared(stall_timeout_s=20.0)
    step_of(model, optimizer)
    if dist.get_rank() == 1:
        return
    with pytest.raises(CollectiveError) as error:
        optimizer.step()
    assert all(value.isfinite().all() for value in model.state_dict().values())
    optimizer.state_dict()
    assert "gradients of the others" in str(error.value)


@world(2)
def test_a_rank_that_is_late_is_an_error_for_the_others() -> None:
    other_group = dist.new_group()
    _, optimizer = prepared(stall_timeout_s=3.0)
    if dist.get_rank() == 0:
        with pytest.raises(CollectiveError, match="rank 1"):
            optimizer.step()
    dist.barrier(group=other_group)
