"""Models beside each other: in groups, threads and one another's losses; and what is left of those that are gone."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.present import present
from testbed.processes import wait_until
from testbed.training import (
    WAYS,
    Mlp,
    assert_close,
    batch,
    build,
    compare_passes,
    loss_of,
    sgd,
    shard,
    whole,
)
from testbed.worlds import world
from torch import nn
from torch.torch_version import TorchVersion

import ddp
import ddp.comm.channel
from ddp.comm.objects import control_group, gather_values
from ddp.comm.sums import small_sum
from ddp.data_parallel import wrapper
from ddp.errors import ArgumentError, LayoutMismatchError
from ddp.horovod import DistributedOptimizer
from ddp.horovod import optimizer as horovod_optimizer
from ddp.torch_internals import timeout_of


@world(4)
def test_two_groups_train_side_by_side() -> None:
    """The even ranks train one model, the odd ones another, all of them a third; none is in the other group."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    with pytest.raises(ArgumentError, match="not a member"):
        ddp.DistributedDataParallel(build("mlp"), process_group=groups[1 - rank % 2])
    own, alone = build("mlp", seed=rank), build("mlp", seed=rank % 2)
    ours, beside = WAYS[1].wrap(own, process_group=groups[rank % 2]), WAYS[1].wrap(build("odd"))
    alone_too = build("odd")
    optimizers = [sgd(each) for each in (ours, alone, beside, alone_too)]
    for step in range(5):
        x, y = batch(step, 8)
        part = slice(rank // 2 * 4, rank // 2 * 4 + 4)  # of the group's ranks, the first has the first half
        for module, rows in ((ours, part), (alone, slice(8))):
            module.zero_grad(set_to_none=False)
            loss_of(module, x[rows], y[rows]).backward()
        compare_passes(beside, alone_too, step, set_to_none=False)
        assert_close(own, alone, f"step {step}")
        for optimizer in optimizers:
            optimizer.step()


def _adversaries_step(generate: nn.Module, judge: nn.Module, x: torch.Tensor, y: torch.Tensor, step: int) -> None:
    """The judge learns from both, then the generator through the judge, which is frozen for that in some steps."""
    fake = generate(y)
    judge.zero_grad()
    generate.zero_grad()
    (judge(x).square().mean() - judge(fake.detach()).square().mean()).backward()
    judge.requires_grad_(step % 2 == 0)
    judge(fake).square().mean().backward()
    judge.requires_grad_(True)


@pytest.mark.parametrize("way", WAYS[1::2])
@world(3)
def test_one_model_learns_through_another(way: Any) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 6), nn.Tanh())

    replicas, alone = (build(make), build("mlp")), (build(make), build("mlp"))
    models = [way.wrap(module) for module in replicas]
    optimizers = [torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.05) for one, two in (replicas, alone)]
    for step in range(5):
        x, y = batch(step, 2 * dist.get_world_size())
        for pair, mine in ((alone, whole), (models, shard)):
            _adversaries_step(pair[0], pair[1], mine(x), mine(y), step)
        for replica, other in zip(replicas, alone, strict=True):
            assert_close(replica, other, f"step {step}")
        for optimizer in optimizers:
            optimizer.step()


@world(2)
def test_two_threads_train_a_model_each() -> None:
    groups = [dist.new_group() for _ in range(2)]
    copied = [(build("mlp", seed=at), build("mlp", seed=at)) for at in range(2)]
    failures: list[BaseException] = []

    def work(at: int) -> None:
        try:
            alone, replica = copied[at]
            model = WAYS[at].wrap(replica, process_group=groups[at])
            for step in range(20):
                x, y = batch(step + 100 * at, 2 * dist.get_world_size())
                for module in (alone, replica):
                    module.zero_grad()
                with model.no_sync():
                    loss_of(model, shard(x), shard(y)).backward()
                (loss_of(model, shard(x), shard(y)) * 2).backward()
                (loss_of(alone, x, y) * 3).backward()
                assert_close(replica, alone, f"thread {at}, step {step}")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(at,), daemon=True) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads)


# Control groups


def _on_device_only() -> Any:
    """A group that knows only the memory of a device, as NCCL's do."""
    return dist.new_group([*range(dist.get_world_size())], timeout=timedelta(seconds=7), backend="cuda:gloo")


@world(2)
def test_a_control_group_has_the_timeout_of_its_group() -> None:
    group = _on_device_only()
    made = control_group(group, torch.device("cuda"))
    assert made is not group
    assert timeout_of(made, torch.device("cpu")) == timedelta(seconds=7)
    assert gather_values(dist.get_rank(), group=made) == [*range(dist.get_world_size())]


def _control_of(group: Callable[[], dist.ProcessGroup | None], *_: object) -> Any:
    return control_group(present(group()), torch.device("cuda"))


def _sockets() -> int:
    count = 0
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(entry.path).startswith("socket:")
    return count


def _refuse(*_: object) -> None:
    raise RuntimeError("refused")


@world(2, 3)
def test_control_groups_are_shared_and_end_with_their_group() -> None:
    """Also where the ranks have made other numbers of groups, and for wrapping that fails on every rank or on one."""
    if dist.get_rank() == 0 and torch.__version__ < TorchVersion("2.14"):  # which would count it in later names
        dist.new_group([0], use_local_synchronization=True)
    group = _on_device_only()
    sockets = _sockets()
    made = control_group(group, torch.device("cuda"))
    once = _sockets()
    assert once > sockets
    unlike = nn.Linear(3, 3 + dist.get_rank())

    def wrap() -> ddp.DistributedDataParallel:
        return ddp.DistributedDataParallel(build("mlp"))

    def distribute() -> None:
        DistributedOptimizer(torch.optim.SGD(build("mlp").parameters(), 0.1))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ddp.comm.channel, "control_group", partial(_control_of, weakref.ref(group)))
        patched.setattr(small_sum, "_LEAST_RANKS", 2)  # the step status takes the way of many ranks
        with pytest.raises(LayoutMismatchError):
            ddp.DistributedDataParallel(unlike)
        with pytest.raises(LayoutMismatchError):
            DistributedOptimizer(torch.optim.SGD(unlike.parameters(), 0.1))
        with pytest.MonkeyPatch.context() as patched_once:
            attempts: list[tuple[Any, Callable[[], object]]] = [(wrapper, wrap), (horovod_optimizer, distribute)]
            for module, attempt in attempts:
                patched_once.setattr(module, "describe", _refuse)
                with pytest.raises(RuntimeError, match=r"^refused$|^Gloo connectFullMesh"):  # who was refused has left
                    attempt()
        models = [wrap(), wrap()]
        assert all(present(model._reducer).channel.control is made for model in models)
        for step in range(3):
            compare_passes(models[step % 2], copy.deepcopy(models[step % 2].module), step)
    gc.collect()  # tracebacks of what failed may hold it in a cycle
    wait_until(lambda: _sockets() <= once, "gloo closes the sockets of attempts that failed")
    ended = weakref.ref(made)
    dist.destroy_process_group(group)
    del made, group, models
    gc.collect()
    assert ended() is None
    wait_until(lambda: _sockets() <= sockets, "gloo closes the sockets of the group")


@world(2)
def test_a_default_device_does_not_move_what_ranks_exchange() -> None:
    """A context for it, since torch leaves a default device in backward(), but not where a rank reduces alone."""
    x, y = batch(0, 4)
    model, alone = ddp.DistributedDataParallel(build("mlp")), build("mlp")
    loss_of(alone, x, y).backward()
    with torch.device("meta"), model.join():  # on this device nothing has a value
        model.backward(loss_of(model, x, y), weight=float(dist.get_rank() == 0))
        assert gather_values([1.5, x[:1]])[-1][0] == 1.5
    assert_close(model, alone, "default device")


# What is left


def _threads() -> list[str]:
    """Those that run, without those of groups."""
    return [thread.name for thread in threading.enumerate() if thread.name != "shm"]


class Words(nn.Module):
    """Has a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(7, 3, sparse=True), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.out(x) + self.words((x * 10).long().abs() % 7).sum(1)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {}, "views": {"gradient_as_bucket_view": True}, "unfrozen": {}, "compressed": {"compression": "bf16"},
    "checksum": {"weight_checksum": True}, "words": {}, "failed": {}, "no_sync": {}, "forward only": {},
    "measured": {"bucket_cap_mb": "auto"},
}  # fmt: skip


@world(2)
def test_nothing_is_left_of_a_wrapper() -> None:
    """After every kind of step: no hook on any parameter, no thread, and no object but the module."""
    x, y = batch(0, 2 * dist.get_world_size())
    before = len(_threads())
    for kind, settings in SETTINGS.items():
        replica = build(Words if kind == "words" else Mlp)
        first, *_ = replica.parameters()
        first.requires_grad_(kind != "unfrozen")
        model = ddp.DistributedDataParallel(replica, **settings)
        alive: list[Any] = [weakref.ref(model), weakref.ref(model._reducer), weakref.ref(present(model._reducer).sums)]
        if kind == "forward only":
            model(shard(x))
        else:
            loss_of(model, shard(x), shard(y)).backward()
            first.requires_grad_()
            loss = loss_of(model, shard(x), shard(y))
            if kind == "failed":
                loss.register_hook(_refuse)
            with pytest.raises(RuntimeError, match="refused") if kind == "failed" else contextlib.nullcontext():
                loss.backward()
            del loss
        if kind == "no_sync":
            with model.no_sync():
                loss_of(model, shard(x), shard(y)).backward()
        del model
        gc.collect()
        assert [ref() for ref in alive] == [None] * 3, kind
        assert all(not p._post_accumulate_grad_hooks for p in replica.parameters()), kind
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in replica.modules()), kind
        loss_of(replica, x, y).backward()  # local, and no warning
    wait_until(lambda: len(_threads()) <= before + 1, "threads of wrappers that are gone end")  # all share one
