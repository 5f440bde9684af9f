"""Communication hooks as torch's class takes them: they give what they give there, or an error of all ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.present import present
from testbed.slow import slow
from testbed.training import Normed, batch, build, follow_whole_batch, loss_of, shard
from testbed.worlds import world
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    register_ddp_comm_hook,
)
from torch.nn.parallel import DistributedDataParallel as Theirs
from torch.nn.parallel.distributed import _BufferCommHookLocation

import ddp

Hook = Callable[[Any, Any], Any]

# To say it to torch 2.13 is to be spared a warning of what it means; older ones do not know the word.
SYNCS_BUFFERS = {"forward_sync_buffers": True} if "forward_sync_buffers" in inspect.signature(Theirs).parameters else {}


# Communication hooks. torch's own batched PowerSGD and quantization fail on the CPU, with its class as well.


def _train_with(cls: type, register: Callable[[Any], None], steps: int) -> list[torch.Tensor]:
    """Parameters and gradients after some steps in float32 with a hook."""
    settings = SYNCS_BUFFERS if cls is Theirs else {}
    model = cls(build("mlp").float(), **settings)
    register(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        x, y = (tensor.float() for tensor in batch(step, 2 * dist.get_world_size()))
        optimizer.zero_grad()
        loss_of(model, shard(x), shard(y)).backward()
        optimizer.step()
    return [tensor.detach().clone() for p in model.parameters() for tensor in (p, p.grad)]


def _powersgd(hook: Hook, **settings: Any) -> Callable[[Any], None]:
    def register(model: Any) -> None:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5, **settings
        )
        model.register_comm_hook(state, hook)

    return register


def _local_sgd(model: Any) -> None:
    subgroup, _ = dist.new_subgroups(group_size=1)
    state = post_localSGD_hook.PostLocalSGDState(None, subgroup, start_localSGD_iter=3)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)


def _average_later(state: object, bucket: dist.GradBucket) -> Any:
    """A hook as users write them: with annotations, chained futures and a result in another tensor."""
    tensor = bucket.buffer().double() / dist.get_world_size()
    work = dist.all_reduce(tensor, async_op=True)
    return work.get_future().then(lambda future: future.value()[0].float())


def _average_now(state, bucket):  # type: ignore[no-untyped-def]  # as most scripts have them
    dist.all_reduce(bucket.buffer())
    bucket.set_buffer(bucket.buffer() / dist.get_world_size())
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


_average_later.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}  # no strings


HOOKS: dict[str, Callable[[Any], None]] = {
    "allreduce": lambda model: model.register_comm_hook(None, default_hooks.allreduce_hook),
    "fp16": lambda model: model.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook),
    "fp16 of allreduce": lambda model: model.register_comm_hook(
        None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    ),
    "noop": lambda model: model.register_comm_hook(None, debugging_hooks.noop_hook),
    "powerSGD": _powersgd(powerSGD_hook.powerSGD_hook),
    "powerSGD, cold, no feedback": _powersgd(
        powerSGD_hook.powerSGD_hook, warm_start=False, use_error_feedback=False, orthogonalization_epsilon=1e-6
    ),
    "fp16 of powerSGD": _powersgd(default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)),
    "post-local SGD": _local_sgd,
    "of the user, later": lambda model: model.register_comm_hook(None, _average_later),
    "of the user, now": lambda model: model.register_comm_hook(None, _average_now),
    "built-in allreduce": lambda model: model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
    "built-in fp16": lambda model: model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS),
    **{
        f"registered {kind.name}": partial(register_ddp_comm_hook, kind)
        for kind in (DDPCommHookType.ALLREDUCE, DDPCommHookType.FP16_COMPRESS, DDPCommHookType.NOOP)
    },
    "registered POWER_SGD": lambda model: register_ddp_comm_hook(DDPCommHookType.POWER_SGD, model, None),
}


@pytest.mark.parametrize("name", HOOKS)
@world(slow(1), 2)  # of more ranks, float16 sums depend on the order
def test_hooks_give_what_they_give_with_torchs_class(name: str) -> None:
    theirs, ours = (_train_with(each, HOOKS[name], steps=6) for each in (Theirs, ddp.DistributedDataParallel))
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=2e-5, atol=2e-6)


def _register(hook: Hook, model: Any) -> None:
    model.register_comm_hook(None, hook)


@world(2)
def test_bf16_hooks_work_on_the_cpu() -> None:
    """Which torch's class refuses. To the precision of 8 bits."""
    exact = _train_with(Theirs, HOOKS["allreduce"], steps=1)
    for hook in (default_hooks.bf16_compress_hook, default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)):
        ours = _train_with(ddp.DistributedDataParallel, partial(_register, hook), steps=1)
        for one, two in zip(ours, exact, strict=True):
            assert float((one - two).norm() / two.norm()) < 0.01


@pytest.mark.parametrize("name", ["odd", "complex", "conv"])
@world(2)
def test_buckets_have_torchs_interface(name: str) -> None:
    """Indices count up, one bucket is the last, `gradients()` are views of `buffer()`, each parameter is in one."""
    passes: list[list[Any]] = []

    def hook(state: object, bucket: dist.GradBucket) -> Any:
        if bucket.index() == 0:
            passes.append([])
        assert bucket.index() == len(passes[-1])
        passes[-1].append((bucket.is_last(), [id(parameter) for parameter in bucket.parameters()]))
        buffer = bucket.buffer()
        assert buffer.dim() == 1
        assert len(bucket.gradients()) == len(bucket.parameters())
        for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
            assert gradient.shape == parameter.shape
            assert gradient.dtype == parameter.dtype
            assert gradient.numel() == 0 or gradient.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        inner = dist.all_reduce(buffer.div_(dist.get_world_size()), async_op=True).get_future()
        return inner.then(lambda future: future.value()[0])

    for settings in ({}, {"bucket_cap_mb": 1e-4}, {"bucket_cap_mb": 1e-6, "gradient_as_bucket_view": True}):
        passes.clear()
        model = ddp.DistributedDataParallel(build(name), **settings)  # type: ignore[arg-type]
        model.register_comm_hook(None, hook)
        follow_whole_batch(model, what=str(settings), steps=3)
        expected = sorted(id(p) for p in model.parameters() if p.requires_grad)
        assert len(passes) == 3
        for buckets in passes:
            assert [is_last for is_last, _ in buckets] == [False] * (len(buckets) - 1) + [True]
            assert sorted(identity for _, parameters in buckets for identity in parameters) == expected


@world(2)
def test_wrong_hooks_are_errors() -> None:
    model = ddp.DistributedDataParallel(build("mlp"))
    x, y = batch(dist.get_rank(), 4)

    def with_annotation(state: object, bucket: int) -> torch.futures.Future[torch.Tensor]:
        raise AssertionError

    def with_return(state: object, bucket: dist.GradBucket) -> int:
        raise AssertionError

    with pytest.raises(TypeError, match="callable"):
        model.register_comm_hook(None, 1)  # type: ignore[arg-type]  # on purpose
    with_annotation.__annotations__["bucket"], with_return.__annotations__["return"] = int, int
    with pytest.raises(ValueError, match="bucket annotation"):
        model.register_comm_hook(None, with_annotation)
    with pytest.raises(ValueError, match="return annotation"):
        model.register_comm_hook(None, with_return)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ValueError, match="built-in"):
        model._register_builtin_comm_hook("allreduce")
    follow_whole_batch(model, what="after refused hooks", steps=2)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(RuntimeError, match="only be called once"):
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    follow_whole_batch(model, what="registered after steps", steps=3)

    def gives_tensor(state: object, bucket: dist.GradBucket) -> Any:
        return bucket.buffer()

    def gives_too_little(state: object, bucket: dist.GradBucket) -> Any:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(torch.zeros(3))
        return future

    def raises(state: object, bucket: dist.GradBucket) -> Any:
        raise ArithmeticError("of the hook")

    def raises_later(state: object, bucket: dist.GradBucket) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_exception(ArithmeticError("of the future"))
        return future

    wrong: Sequence[tuple[Hook, type[Exception] | tuple[type[Exception], ...], str]] = (
        (gives_tensor, ddp.errors.ArgumentError, r"must return a torch\.futures\.Future"),
        (gives_too_little, ddp.errors.ArgumentError, "3 numbers"),
        (raises, ArithmeticError, "of the hook"),
        (raises_later, (ArithmeticError, RuntimeError), "of the future"),
    )
    for hook, error, match in wrong:
        model = ddp.DistributedDataParallel(build("mlp"))
        model.register_comm_hook(None, hook)
        with pytest.raises(error, match=match):
            loss_of(model, x, y).backward()
        assert all(p.grad is None for p in model.parameters())
    follow_whole_batch(ddp.DistributedDataParallel(build("mlp")), what="after the errors", steps=2)


@world(2)
def test_a_hook_that_fails_on_one_rank_fails_everywhere() -> None:
    """Once: then the next step is exact."""
    failures = [1] if dist.get_rank() == 1 else []

    def hook(state: object, bucket: dist.GradBucket) -> Any:
        if failures and bucket.is_last():
            failures.pop()
            raise ArithmeticError("of the hook")
        return default_hooks.allreduce_hook(present(dist.group.WORLD), bucket)

    model = ddp.DistributedDataParallel(build("mlp"), bucket_cap_mb=1e-3)
    model.register_comm_hook(None, hook)
    x, y = batch(dist.get_rank(), 4)
    with pytest.raises((ArithmeticError, ddp.errors.PeerFailedError), match="of the hook"):
        loss_of(model, x, y).backward()
    follow_whole_batch(model, what="after the failure", steps=3)


@pytest.mark.parametrize("location", [_BufferCommHookLocation.PRE_FORWARD, _BufferCommHookLocation.POST_FORWARD])
@world(2)
def test_buffer_hooks_synchronise_buffers(location: _BufferCommHookLocation) -> None:
    """In the place of the broadcast; the futures that they return are waited for before backward returns."""
    with_futures, runs = location is _BufferCommHookLocation.POST_FORWARD, []

    def average(state: list[int], buffers: dict[str, torch.Tensor]) -> Any:
        state.append(1)
        works: list[Any] = [
            dist.all_reduce(buffers[name].data.div_(dist.get_world_size()), async_op=True)
            for name in ("norm.running_mean", "norm.running_var")
        ]
        if with_futures:
            return [work.get_future() for work in works]
        return [work.wait() for work in works] and None

    classes: list[tuple[Any, dict[str, bool]]] = [(Theirs, SYNCS_BUFFERS), (ddp.DistributedDataParallel, {})]
    for cls, settings in classes:
        module, state = build(Normed), list[int]()
        model = cls(module, **settings)
        model._register_buffer_comm_hook(state, average, location)
        for step in range(4):
            x, _ = batch(step, 4 * dist.get_world_size())
            model(shard(x)).square().sum().backward()
        runs.append([b.clone() for b in module.buffers()])
        assert len(state) == 4
    for theirs, ours in zip(*runs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
