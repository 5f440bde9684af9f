"""Replicas that would differ are reported on every rank, and what keeps them equal is left alone."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from testbed.present import present
from testbed.slow import slow
from testbed.training import assert_replicas_equal, batch, build, loss_of, shard
from testbed.worlds import world
from torch import nn
from torch.optim import Optimizer

import ddp
from ddp.comm.fingerprint import Digest
from ddp.errors import ArgumentError, BackwardError, DriftError, PeerFailedError


def _step(model: nn.Module, optimizer: Optimizer, step: int, **zeroing: Any) -> None:
    optimizer.zero_grad(**zeroing)
    x, y = batch(step, 2 * dist.get_world_size())
    loss_of(model, shard(x), shard(y)).backward()
    optimizer.step()


def _trained(**settings: Any) -> tuple[ddp.DistributedDataParallel, Optimizer]:
    """A model and its optimizer after two steps."""
    model = ddp.DistributedDataParallel(build("mlp"), **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        _step(model, optimizer, step)
    optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize(("kind", "parameter"), [("bit", "layers.2.weight"), ("step", "layers.0.weight")])
@world(3)
def test_a_checksum_names_parameter_step_and_rank(kind: str, parameter: str) -> None:
    """Rank 1 changes one bit of a parameter, or takes another step; the next backward names which."""
    model, optimizer = _trained(weight_checksum=True)
    _step(model, optimizer, 2)
    if dist.get_rank() == 1:
        if kind == "bit":
            model.module.layers[2].weight.data.view(torch.int64)[5, 5] ^= 1
        else:
            optimizer.step()
    with pytest.raises(DriftError, match=r"before step 4.*on rank 1 of 3|on rank 1 of 3.*before step 4") as caught:
        _step(model, optimizer, 3)
    assert (caught.value.parameter, caught.value.step, caught.value.ranks) == (parameter, 4, (1,))


@world(2)
def test_equal_replicas_have_equal_checksums() -> None:
    model = ddp.DistributedDataParallel(build("odd"), weight_checksum=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(20):
        _step(model, optimizer, step)
    assert_replicas_equal(model)


@pytest.mark.parametrize("who", [[0, 1], [1]])
@world(2)
def test_an_optimizer_that_steps_in_a_hook_is_an_error(who: list[int]) -> None:
    """The ranks `who` step single parameters before the average, and set their gradients to zero."""
    replica = build("mlp")
    model = ddp.DistributedDataParallel(replica)
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in replica.parameters()}

    def steps(parameter: Any) -> None:
        optimizers[parameter].step()
        parameter.grad.zero_()

    for parameter in replica.parameters() if dist.get_rank() in who else ():
        parameter.register_post_accumulate_grad_hook(steps)
    said = r"SGD stepped 'layers\..*within backward, before its gradient was averaged"
    with pytest.raises(BackwardError if dist.get_rank() in who else PeerFailedError, match=said):
        loss_of(model, *batch(dist.get_rank(), 4)).backward()
    assert all(parameter.grad is None for parameter in replica.parameters())


ALONE: dict[str, tuple[type[Exception], str]] = {
    "no_sync": (DriftError, "stepped 1 time on rank 0, 2 times on rank 1"),
    "twice": (BackwardError, "rank 0 began this backward pass with the averaged gradients of the last one"),
    "twice, by hand": (BackwardError, "rank 0 began this backward pass with the averaged gradients"),
    "empties": (BackwardError, "still in .grad, and rank 1 without"),
}


@pytest.mark.parametrize("how", ALONE)
@world(2)
def test_a_step_of_one_rank_is_an_error_of_all(how: str) -> None:
    """Rank 1 makes a step that the others do not: what the next pass says on each rank."""
    model, optimizer = _trained()
    error, said = ALONE[how]
    x, y = batch(dist.get_rank(), 4)
    is_late = dist.get_rank() == 1
    if how != "no_sync":
        loss_of(model, x, y).backward()  # reduces twice before a step, unlike rank 1
    elif is_late:
        with model.no_sync():
            loss_of(model, x, y).backward()
    if is_late and how == "twice, by hand":
        for parameter in model.parameters():
            parameter.data.sub_(0.1 * present(parameter.grad))
    elif is_late and how != "empties":
        optimizer.step()
    if is_late:
        model.zero_grad()
    with pytest.raises(error, match=said):
        loss_of(model, x, y).backward()
    assert all(parameter.grad is None for parameter in model.parameters())


class _Fails(torch.optim.SGD):
    def step(self, *_: Any) -> None:  # type: ignore[override]  # overloads
        raise ValueError("no step")


@world(2)
def test_an_optimizer_whose_step_has_raised_hides_no_other() -> None:
    """After the next pass."""
    model, optimizer = _trained()
    with pytest.raises(ValueError, match="no step"):
        _step(model, _Fails(model.parameters(), lr=0.1), 0)
    optimizer.zero_grad()
    x, y = batch(dist.get_rank(), 4)
    loss_of(model, x, y).backward()
    for _ in range(1 + dist.get_rank()):
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(DriftError, match="stepped 1 time on rank 0, 2 times on rank 1"):
        loss_of(model, x, y).backward()


# What is right


def accumulates(model: Any, optimizer: Optimizer) -> None:
    for step in range(3):
        optimizer.zero_grad()
        x, y = batch(step, 4)
        for synced in (False, True, True):  # inside and outside of no_sync()
            with contextlib.nullcontext() if synced else model.no_sync():
                loss_of(model, shard(x), shard(y)).backward()
        optimizer.step()


def accumulates_unevenly(model: Any, optimizer: Optimizer) -> None:
    for step in range(3):
        optimizer.zero_grad()
        x, y = batch(step, 4)
        for _ in range(dist.get_rank() + step):
            with model.no_sync():
                model.backward(loss_of(model, x, y), weight=4)
        model.backward(loss_of(model, x, y), weight=4)
        optimizer.step()


def skips_with_a_scaler(model: Any, optimizer: Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        optimizer.zero_grad()
        x, y = batch(step, 4)
        loss = loss_of(model, shard(x), shard(y)) * (float("inf") if step == 1 and dist.get_rank() == 0 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def several_optimizers(model: Any, optimizer: Optimizer) -> None:
    first, *rest = model.parameters()
    optimizers = [torch.optim.SGD([first], lr=0.1), torch.optim.Adam(rest[1:])]  # and one parameter in none
    for step in range(3):
        x, y = batch(step, 4)
        loss_of(model, shard(x), shard(y)).backward()
        for each in optimizers:
            each.step()
            each.zero_grad()


def goes_back_twice(model: Any, optimizer: Optimizer) -> None:
    for step in range(2):
        optimizer.zero_grad()
        x, y = batch(step, 4)
        loss = loss_of(model, shard(x), shard(y))
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()


def keeps_zeros(model: Any, optimizer: Optimizer) -> None:
    for step in range(3):  # one rank in another way than the rest
        _step(model, optimizer, step, set_to_none=dist.get_rank() == 0)


def joins(model: Any, optimizer: Optimizer) -> None:
    for _ in range(2):
        with model.join():
            for step in range(2 + dist.get_rank()):
                optimizer.zero_grad()
                x, y = batch(step, 4)
                loss_of(model, x, y).backward()
                optimizer.step()


def lbfgs(model: Any, optimizer: Optimizer) -> None:
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=3)
    for step in range(2):
        x, y = batch(step, 4)

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            lbfgs.zero_grad()
            loss = loss_of(model, shard(x), shard(y))
            loss.backward()
            return loss

        lbfgs.step(closure)


def rank_0_steps_for_all(model: Any, optimizer: Optimizer) -> None:
    for step in range(6):
        x, y = batch(step, 4)
        model.zero_grad()
        loss_of(model, shard(x), shard(y)).backward()
        if dist.get_rank() == 0:
            optimizer.step()
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), 0)


def steps_in_backward(model: Any, optimizer: Optimizer) -> None:
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # torch's own, about torch.jit
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(torch.optim.SGD, model.module.parameters(), {"lr": 0.1})
    for step in range(3):
        x, y = batch(step, 4)
        loss_of(model, shard(x), shard(y)).backward()


def steps_after_the_reduction(model: Any, optimizer: Optimizer) -> None:
    """A hook that only notes, and an optimizer that steps what was noted; evaluated between, on one rank."""
    noted: list[torch.Tensor] = []
    handles = [each.register_post_accumulate_grad_hook(noted.append) for each in model.module.parameters()]
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.module.parameters()}
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


def averages_rarely(model: Any, optimizer: Optimizer) -> None:
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


def writes_gradients_by_hand(model: Any, optimizer: Optimizer) -> None:
    for step in range(3):
        x, y = batch(step, 4)
        loss_of(model, shard(x), shard(y)).backward()
        for parameter in model.parameters():
            parameter.grad = parameter.grad.clone() * 0.5
        optimizer.step()
        model.zero_grad()


def shards_the_optimizer(model: Any, optimizer: Optimizer) -> None:
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # torch's own, about torch.jit
    from torch.distributed.optim import ZeroRedundancyOptimizer

    zero = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
    for step in range(3):
        _step(model, zero, step)


RIGHT: dict[str, Callable[[Any, Optimizer], None]] = {
    each.__name__: each
    for each in (
        accumulates, accumulates_unevenly, skips_with_a_scaler, several_optimizers, goes_back_twice,
        keeps_zeros, joins, lbfgs, rank_0_steps_for_all, steps_in_backward, steps_after_the_reduction,
        averages_rarely, writes_gradients_by_hand, shards_the_optimizer,
    )
}  # fmt: skip


@pytest.mark.parametrize("static_graph", [True, slow(False)])
@pytest.mark.parametrize("trains", RIGHT)
@world(2)
def test_what_keeps_replicas_equal_is_no_error(trains: str, static_graph: bool) -> None:
    model = ddp.DistributedDataParallel(build("mlp"), static_graph=static_graph, measure=False)
    RIGHT[trains](model, torch.optim.SGD(model.parameters(), lr=0.1))
    ddp.check_replicas(model)


# On demand


def _done(result: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(result)
    return future


@pytest.mark.parametrize("wraps", [ddp.DistributedDataParallel, nn.parallel.DistributedDataParallel])
@world(2)
def test_a_save_lets_replicas_differ_as_a_hook_does(wraps: Any, tmp_path: Path) -> None:
    """As torch's post_localSGD_hook does between two averages of the weights."""
    model = wraps(build("mlp"))
    model.register_comm_hook(None, lambda _, bucket: _done(bucket.buffer()))
    _step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)
    with pytest.raises(DriftError):
        ddp.check_replicas(model)
    ddp.Checkpoint(tmp_path, in_background=False).save(1, model=model)


@world(2)
def test_replicas_are_compared_on_demand_and_before_a_save(tmp_path: Path) -> None:
    """One thing is changed on rank 1 after another."""
    net: Any = nn.Sequential(build("mlp"), nn.BatchNorm1d(3)).double()
    model = ddp.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(2):
        _step(model, optimizer, step)
    checkpoint = ddp.Checkpoint(tmp_path, in_background=False)
    ddp.check_replicas(model, optimizer)  # the buffers differ by now
    ddp.check_replicas(net)
    checkpoint.save(1, model=model, optimizer=optimizer)
    layer = net[0].layers[2]
    is_late = dist.get_rank() == 1

    def reported(name: str, act: Callable[[], object], says: str = "") -> None:
        with pytest.raises(DriftError, match=says or None) as caught:
            act()
        assert (caught.value.parameter, caught.value.ranks) == (name, (1,))
        assert ("check_replicas=False" in str(caught.value)) == (says == "check_replicas=False")

    reported("buffer 1.running_mean", lambda: ddp.check_replicas(model, buffers=True))
    if is_late:
        optimizer.state[layer.weight]["exp_avg"][3, 3] += 1
    ddp.check_replicas(model)
    reported("exp_avg of 0.layers.2.weight", lambda: ddp.check_replicas(model, optimizer))
    if is_late:
        layer.weight.detach().view(torch.int64)[32, 5] ^= 1 << 63  # the sign of one number
    said = "first parameter that differs, on rank 1 of 2"
    reported("0.layers.2.weight", lambda: ddp.check_replicas(model), said)
    reported("0.0.layers.2.weight", lambda: ddp.check_replicas(nn.Sequential(net)))
    reported("0.layers.2.weight", lambda: checkpoint.save(2, model=model), "check_replicas=False")
    assert sorted(path.name for path in tmp_path.glob("step*")) == ["step-0000000001.pt"]
    ddp.Checkpoint(tmp_path / "unchecked", check_replicas=False).save(2, model=model)
    if is_late:
        layer.weight.detach().view(torch.int64)[32, 5] ^= 1 << 63
    ddp.check_replicas(model)
    checkpoint.save(3, model=model)
    with pytest.raises(ArgumentError, match=r"rank 1: .*'int' object"):
        ddp.check_replicas(model, 3 if is_late else optimizer)  # type: ignore[arg-type]


_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.bool, torch.complex64]


@given(st.lists(st.tuples(st.sampled_from(_DTYPES), st.integers(0, 40)), min_size=1, max_size=6), st.data())
def test_a_digest_changes_with_each_bit_and_with_the_order(
    forms: list[tuple[torch.dtype, int]], data: st.DataObject
) -> None:
    tensors = [torch.zeros(count, dtype=dtype) for dtype, count in forms]
    digest = Digest(tensors)
    before = digest.start()()
    assert before == Digest([tensor.clone() for tensor in tensors]).start()()
    flat = [tensor.view(torch.uint8) if tensor.numel() else tensor for tensor in tensors]
    if not any(tensor.numel() for tensor in tensors):
        return
    which = data.draw(st.sampled_from([index for index, tensor in enumerate(tensors) if tensor.numel()]))
    at = data.draw(st.integers(0, len(flat[which]) - 1))
    bit = 0 if tensors[which].dtype == torch.bool else data.draw(st.integers(0, 7))
    flat[which][at] ^= 1 << bit
    assert digest.start()() != before
    assert digest.start()() % ((1 << 48) - 59) != before % ((1 << 48) - 59)


@pytest.mark.parametrize("shape", [(3, 100_000), (20_000,), (130, 2, 9_001)])
def test_a_digest_of_large_tensors_sees_last_bits_and_order(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    views = [tensor, tensor.view(-1)[3:], tensor.transpose(0, -1), torch.randn(20_000)]
    before = Digest(views).start()()
    assert before != Digest(views[::-1]).start()()
    assert before == Digest([view.contiguous() for view in views]).start()()
    tensor.view(-1).view(torch.int32)[-1] ^= 1
    assert before != Digest(views).start()()
