"""What ranks do that would make replicas differ without a word, and what looks like it but is right."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.present import present
from testbed.training import batch, build, loss_of, shard
from torch import nn

import ddp
from ddp.errors import BackwardError, DdpError, DriftError, PeerFailedError

_SGD = torch.optim.SGD


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, **zeroing: Any) -> None:
    optimizer.zero_grad(**zeroing)
    x, y = batch(step, 2 * dist.get_world_size())
    loss_of(model, shard(x), shard(y)).backward()
    optimizer.step()


def _plain_step(model: nn.Module) -> None:
    """A step without torch's optimizers."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.1 * present(parameter.grad))
            parameter.grad = None


def optimizer_steps_in_a_hook(who: list[int]) -> tuple[str, str]:
    """The ranks `who` step single parameters in hooks, and set their gradients to zero."""
    replica = build("mlp")
    model = ddp.DistributedDataParallel(replica)
    optimizers = {parameter: _SGD([parameter], lr=0.1) for parameter in replica.parameters()}

    def steps(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        parameter.grad.zero_()

    if dist.get_rank() in who:
        for parameter in replica.parameters():
            parameter.register_post_accumulate_grad_hook(steps)
    x, y = batch(dist.get_rank(), 4)
    with pytest.raises((BackwardError, PeerFailedError)) as caught:
        loss_of(model, x, y).backward()
    assert all(parameter.grad is None for parameter in replica.parameters())
    return type(caught.value).__name__, str(caught.value)


def one_rank_steps_alone(how: str) -> tuple[str, str]:
    """Rank 1 makes a step that the others do not: what the next pass says on each rank."""
    replica = build("mlp")
    model = ddp.DistributedDataParallel(replica)
    optimizer = _SGD(model.parameters(), lr=0.1)
    for step in range(2):
        _step(model, optimizer, step)
    optimizer.zero_grad()
    x, y = batch(dist.get_rank(), 4)
    if how == "no_sync":
        if dist.get_rank() == 1:
            with model.no_sync():
                loss_of(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    else:  # reduces twice before a step, unlike rank 1
        loss_of(model, x, y).backward()
        if dist.get_rank() == 1:
            if how == "twice":
                optimizer.step()
                optimizer.zero_grad()
            elif how == "twice, by hand":
                _plain_step(replica)
            else:
                replica.zero_grad()
    with pytest.raises((DriftError, BackwardError)) as caught:
        loss_of(model, x, y).backward()
    assert all(parameter.grad is None for parameter in replica.parameters())
    return type(caught.value).__name__, str(caught.value)


class _Fails(_SGD):
    def step(self, *_: Any) -> None:  # type: ignore[override]  # overloads
        raise ValueError("no step")


def one_rank_steps_alone_after_a_step_that_raised() -> tuple[str, str]:
    model = ddp.DistributedDataParallel(build("mlp"))
    failing, optimizer = _Fails(model.parameters(), lr=0.1), _SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="no step"):
        _step(model, failing, 0)
    optimizer.zero_grad()
    x, y = batch(dist.get_rank(), 4)
    loss_of(model, x, y).backward()
    for _ in range(1 + dist.get_rank()):
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(DriftError) as caught:
        loss_of(model, x, y).backward()
    return type(caught.value).__name__, str(caught.value)


# What is right


def _accumulates(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        optimizer.zero_grad()
        x, y = batch(step, 4)
        for synced in (False, True, True):  # inside and outside of no_sync()
            with contextlib.nullcontext() if synced else model.no_sync():
                loss_of(model, shard(x), shard(y)).backward()
        optimizer.step()


def _accumulates_unevenly(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        optimizer.zero_grad()
        x, y = batch(step, 4)
        for _ in range(dist.get_rank() + step):
            with model.no_sync():
                model.backward(loss_of(model, x, y), weight=4)
        model.backward(loss_of(model, x, y), weight=4)
        optimizer.step()


def _skips_with_a_scaler(model: Any, optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        optimizer.zero_grad()
        x, y = batch(step, 4)
        loss = loss_of(model, shard(x), shard(y)) * (float("inf") if step == 1 and dist.get_rank() == 0 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def _several_optimizers(model: Any, optimizer: torch.optim.Optimizer) -> None:
    first, *rest = model.parameters()
    optimizers = [_SGD([first], lr=0.1), torch.optim.Adam(rest[1:])]  # and one parameter in none
    for step in range(3):
        x, y = batch(step, 4)
        loss_of(model, shard(x), shard(y)).backward()
        for each in optimizers:
            each.step()
            each.zero_grad()


def _goes_back_twice(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for step in range(2):
        optimizer.zero_grad()
        x, y = batch(step, 4)
        loss = loss_of(model, shard(x), shard(y))
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()


def _keeps_zeros(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):  # one rank in another way than the rest
        _step(model, optimizer, step, set_to_none=dist.get_rank() == 0)


def _joins(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        with model.join():
            for step in range(2 + dist.get_rank()):
                optimizer.zero_grad()
                x, y = batch(step, 4)
                loss_of(model, x, y).backward()
                optimizer.step()


def _lbfgs(model: Any, optimizer: torch.optim.Optimizer) -> None:
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=3)
    for step in range(2):
        x, y = batch(step, 4)

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            lbfgs.zero_grad()
            loss = loss_of(model, shard(x), shard(y))
            loss.backward()
            return loss

        lbfgs.step(closure)


def _rank_0_steps_for_all(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for step in range(6):
        x, y = batch(step, 4)
        model.zero_grad()
        loss_of(model, shard(x), shard(y)).backward()
        if dist.get_rank() == 0:
            optimizer.step()
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), 0)


def _steps_in_backward(model: Any, optimizer: torch.optim.Optimizer) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(_SGD, model.module.parameters(), {"lr": 0.1})
    for step in range(3):
        x, y = batch(step, 4)
        loss_of(model, shard(x), shard(y)).backward()


def _steps_after_the_reduction(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """A hook that only notes, and an optimizer that steps what was noted; evaluated between, on one rank."""
    noted: list[torch.Tensor] = []
    handles = [each.register_post_accumulate_grad_hook(noted.append) for each in model.module.parameters()]
    optimizers = {parameter: _SGD([parameter], lr=0.1) for parameter in model.module.parameters()}
    for step in range(3):
        x, y = batch(step, 4)
        loss_of(model, shard(x), shard(y)).backward()
        for parameter in noted:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()
        noted.clear()
        if dist.get_rank() == 0:
            model.module.eval()
            with torch.no_grad():
                model.module(x)
            model.module.train()
    for handle in handles:
        handle.remove()


def _averages_rarely(model: Any, optimizer: torch.optim.Optimizer) -> None:
    local = ddp.LocalSGD(model, optimizer, every=2, after=1)
    for step in range(6):
        optimizer.zero_grad()
        x, y = batch(step, 4)
        loss_of(model, shard(x), shard(y)).backward()
        if step != 3 or dist.get_rank():  # as GradScaler does where its rank's gradients are not finite
            optimizer.step()
    local.sync()
    local.close()
    for step in range(2):
        _step(model, optimizer, step)


def _writes_gradients_by_hand(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        x, y = batch(step, 4)
        loss_of(model, shard(x), shard(y)).backward()
        for parameter in model.parameters():
            parameter.grad = parameter.grad.clone() * 0.5
        optimizer.step()
        model.zero_grad()


def _shards_the_optimizer(model: Any, optimizer: torch.optim.Optimizer) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    zero = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=_SGD, lr=0.1)
    for step in range(3):
        _step(model, zero, step)


RIGHT: list[Callable[[Any, torch.optim.Optimizer], None]] = [
    _accumulates, _accumulates_unevenly, _skips_with_a_scaler, _several_optimizers, _goes_back_twice, _keeps_zeros,
    _joins, _lbfgs, _rank_0_steps_for_all, _steps_in_backward, _steps_after_the_reduction, _averages_rarely,
    _writes_gradients_by_hand, _shards_the_optimizer,
]  # fmt: skip


def what_is_right_goes_on(static_graph: bool) -> None:
    """No error, replicas equal, and steps are still compared afterwards."""
    for trains in RIGHT:
        model = ddp.DistributedDataParallel(build("mlp"), static_graph=static_graph, measure=False)
        optimizer = _SGD(model.parameters(), lr=0.1)
        try:
            trains(model, optimizer)
            ddp.check_replicas(model)
        except DdpError as error:
            raise AssertionError(trains.__name__) from error


# On demand


def _done(result: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(result)
    return future


def saved_with_a_hook_that_averages_nothing(folder: str) -> None:
    """As torch's post_localSGD_hook does between two averages of the weights."""
    for wraps in (ddp.DistributedDataParallel, nn.parallel.DistributedDataParallel):
        model = wraps(build("mlp"))
        model.register_comm_hook(None, lambda _, bucket: _done(bucket.buffer()))
        _step(model, _SGD(model.parameters(), lr=0.1), 0)
        with pytest.raises(DriftError):
            ddp.check_replicas(model)
        ddp.Checkpoint(f"{folder}/{wraps.__module__}", in_background=False).save(1, model=model)


def compared_on_demand(folder: str) -> list[str]:
    """Change one thing on rank 1 after another: what check_replicas and Checkpoint say on each rank."""
    said = []
    net = nn.Sequential(build("mlp"), nn.BatchNorm1d(3)).double()
    model = ddp.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(2):
        _step(model, optimizer, step)
    checkpoint = ddp.Checkpoint(folder, in_background=False)
    ddp.check_replicas(model, optimizer)  # the buffers differ by now
    ddp.check_replicas(net)
    checkpoint.save(1, model=model, optimizer=optimizer)
    layer = net[0].layers[2]
    is_late = dist.get_rank() == 1

    def reported(act: Callable[[], object]) -> None:
        with pytest.raises(DriftError) as caught:
            act()
        assert caught.value.ranks == (1,)
        said.append(f"{caught.value.parameter}: {caught.value}")

    reported(lambda: ddp.check_replicas(model, buffers=True))
    if is_late:
        optimizer.state[layer.weight]["exp_avg"][3, 3] += 1
    ddp.check_replicas(model)
    reported(lambda: ddp.check_replicas(model, optimizer))
    if is_late:
        layer.weight.detach().view(torch.int64)[32, 5] ^= 1 << 63  # the sign of one number
    reported(lambda: ddp.check_replicas(model))
    reported(lambda: ddp.check_replicas(torch.nn.Sequential(net)))
    reported(lambda: checkpoint.save(2, model=model))
    assert sorted(path.name for path in Path(folder).glob("step*")) == ["step-0000000001.pt"]
    ddp.Checkpoint(f"{folder}/unchecked", check_replicas=False).save(2, model=model)
    if is_late:
        layer.weight.detach().view(torch.int64)[32, 5] ^= 1 << 63
    ddp.check_replicas(model)
    checkpoint.save(3, model=model)
    with pytest.raises(ddp.errors.ArgumentError, match=r"rank 1: .*'int' object"):
        ddp.check_replicas(model, 3 if is_late else optimizer)  # type: ignore[arg-type]
    return said
