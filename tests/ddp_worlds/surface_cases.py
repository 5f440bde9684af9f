"""The interface of torch's class, tried on every rank of a test world: what scripts and libraries use of it.

Numbers are compared with one process on the whole batch, or with torch's own class on the same batches.
"""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from testbed.present import present
from testbed.training import (
    F64,
    Mlp,
    Normed,
    assert_close,
    assert_replicas_equal,
    batch,
    build,
    loss_of,
    shard,
)
from torch import nn
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

Hook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]


def follows_whole_batch(
    model: nn.Module, *, oracle: nn.Module | None = None, steps: int = 5, what: str = "", start: int = 0
) -> None:
    """Train `model`, a wrapper or what wraps one, beside the oracle; every step is exact."""
    replica = _innermost(model)
    oracle = copy.deepcopy(replica) if oracle is None else oracle
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (oracle, model)]
    for step in range(start, start + steps):
        x, y = batch(step, 2 * dist.get_world_size())
        for module, optimizer, mine in zip((oracle, model), optimizers, (lambda t: t, shard), strict=True):
            optimizer.zero_grad()
            loss_of(module, mine(x), mine(y)).backward()
        assert_close(replica, oracle, f"{what}, step {step}")
        for optimizer in optimizers:
            optimizer.step()
    assert_replicas_equal(replica)


def _innermost(model: nn.Module) -> nn.Module:
    """The user's module in wrappers by torch.compile and DistributedDataParallel."""
    while True:
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if inner is None:
            return model
        model = inner


# To say it to torch 2.13 is to be spared a warning of what it means; older ones do not know the word.
SYNCS_BUFFERS = {"forward_sync_buffers": True} if "forward_sync_buffers" in inspect.signature(Theirs).parameters else {}


# Construction


def signatures_are_torchs() -> None:
    """The constructor has every argument of torch's in the same place, with the same default; methods too."""
    theirs = [p for p in inspect.signature(Theirs).parameters.values() if p.name != "kwargs"]
    names = {p.name for p in theirs}
    ours = list(inspect.signature(ddp.DistributedDataParallel).parameters.values())
    assert [p.name for p in ours][: len(theirs)] == [p.name for p in theirs]
    differing = [mine.name for mine, p in zip(ours, theirs, strict=False) if mine.default != p.default]
    assert differing == ([] if "forward_sync_buffers" in names else ["broadcast_buffers"])  # True before torch 2.13
    newer = {"bucket_cap_mb_list", "batched_grad_copy", "forward_sync_buffers", "lazy_bucket_allocation"}  # than 2.9
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY or p.name in newer for p in ours[len(theirs) :])
    for name in ("forward", "no_sync", "join", "register_comm_hook", "_register_buffer_comm_hook"):
        expected = list(inspect.signature(getattr(Theirs, name)).parameters)
        assert list(inspect.signature(getattr(ddp.DistributedDataParallel, name)).parameters) == expected, name


def arguments_are_taken_as_torchs() -> None:
    """By name and by place; those without a meaning here warn and say why."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    group = dist.new_group()
    for settings in (
        {"device_ids": None, "output_device": None, "dim": 0},
        {"init_sync": False},
        {"device_mesh": mesh},
        {"bucket_cap_mb": 1, "find_unused_parameters": True},
        {"bucket_cap_mb_list": [1e-6, 25.0, 1e-6]},
        {"gradient_as_bucket_view": True, "static_graph": True},
        {"forward_sync_buffers": False},
        {"check_reduction": False, "mixed_precision": None, "batched_grad_copy": False},
        {"stall_timeout_s": 20.0, "weight_checksum": True},
    ):
        follows_whole_batch(ddp.DistributedDataParallel(build("mlp"), **settings), what=str(settings), steps=2)
    follows_whole_batch(ddp.DistributedDataParallel(build("mlp"), None, None, 0, None, True, group, 25, True), steps=2)
    unsynced: list[dict[str, Any]] = [
        {"broadcast_buffers": False},
        {"broadcast_buffers": True, "forward_sync_buffers": False},
    ]
    for settings in unsynced:
        with pytest.warns(FutureWarning, match="forward_sync_buffers"):
            model = ddp.DistributedDataParallel(build("mlp"), **settings)
        assert not model.forward_sync_buffers
        follows_whole_batch(model, what=str(settings), steps=2)
    for name, value in (
        ("dim", 1),
        ("check_reduction", True),
        ("skip_all_reduce_unused_params", True),
        ("delay_all_reduce_named_params", [("a", nn.Parameter(torch.ones(1)))]),
        ("param_to_hook_all_reduce", nn.Parameter(torch.ones(1))),
        ("batched_grad_copy", True),
        ("lazy_bucket_allocation", True),
    ):
        with pytest.warns(UserWarning, match=rf"{name}=\.\.\.\) has no effect: \w+"):
            model = ddp.DistributedDataParallel(build("mlp"), **cast(dict[str, Any], {name: value}))
        follows_whole_batch(model, what=name, steps=2)


def bad_arguments_are_errors() -> None:
    model: Any = ddp.DistributedDataParallel(build("mlp"))
    model.require_manual_backward_finalization = False
    with pytest.raises(ddp.errors.UnsupportedError, match="manual finalization"):
        model.require_manual_backward_finalization = True
    assert not model.require_manual_backward_finalization
    with pytest.raises(ddp.errors.UnsupportedError, match="manual finalization"):
        model.finalize_backward()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for settings, error, match in (
        ({"device_ids": [0]}, ddp.errors.ArgumentError, "device_ids"),
        ({"output_device": 0}, ddp.errors.ArgumentError, "output_device"),
        ({"bucket_cap_mb": 0}, ddp.errors.ArgumentError, "bucket_cap_mb"),
        ({"bucket_cap_mb_list": [1.0, 0.0]}, ddp.errors.ArgumentError, "bucket_cap_mb_list"),
        (
            {"process_group": dist.group.WORLD, "device_mesh": mesh},
            ddp.errors.ArgumentError,
            "process_group and device_mesh",
        ),
        ({"mixed_precision": object()}, ddp.errors.UnsupportedError, "autocast"),
        ({"compression": "zip"}, ddp.errors.ArgumentError, "zip"),
        ({"stall_timeout_s": 0.0}, ddp.errors.ArgumentError, "timeout"),
    ):
        with pytest.raises(error, match=match):
            ddp.DistributedDataParallel(build("mlp"), **settings)
    for module, error, match in (
        (nn.LazyLinear(3), ddp.errors.ArgumentError, "uninitialized"),
        (nn.BatchNorm1d(3, affine=False), ddp.errors.DdpError, "requires a gradient"),
        (nn.Linear(2, 2).requires_grad_(False), ddp.errors.DdpError, "requires a gradient"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")), ddp.errors.ArgumentError, "meta"),
    ):
        with pytest.raises(error, match=match):
            ddp.DistributedDataParallel(module)
    follows_whole_batch(ddp.DistributedDataParallel(build("mlp")), what="after the errors", steps=2)


def what_others_read_of_a_wrapper() -> None:
    """Attributes and methods of torch's class that libraries use."""
    model = ddp.DistributedDataParallel(build("mlp"))
    theirs = Theirs(build("mlp"))
    assert isinstance(model, Theirs)
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    for name in (
        "device", "device_type", "device_ids", "output_device", "dim", "is_multi_device_module", "static_graph",
        "find_unused_parameters", "gradient_as_bucket_view", "require_backward_grad_sync", "broadcast_buffers",
        "forward_sync_buffers", "require_forward_param_sync", "mixed_precision", "process_group",
        "parameters_to_ignore", "_distributed_rank", "join_device", "join_process_group", "training",
    ):  # fmt: skip
        old = {"forward_sync_buffers": "broadcast_buffers"}.get(name, name)  # before torch 2.13
        assert getattr(model, name) == getattr(theirs, name if hasattr(theirs, name) else old), name
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    assert model.train() is model
    assert model.eval().module.training is False
    assert model.train().module.training is True
    assert "Mlp" in repr(model)
    reported, torchs = model._get_ddp_logging_data(), theirs._get_ddp_logging_data()
    for name in ("world_size", "rank", "module_name", "find_unused_parameters", "gradient_as_bucket_view"):
        assert reported[name] == torchs[name], name
    hooked = ddp.DistributedDataParallel(build("mlp"))
    for wrapper in (hooked, theirs):
        wrapper._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    assert hooked._get_ddp_logging_data()["comm_hook"] == theirs._get_ddp_logging_data()["comm_hook"]
    model._set_ddp_runtime_logging_sample_rate(1)
    model._check_reducer_finalized()
    model._set_static_graph()
    for wrapper in (hooked, theirs):
        wrapper(batch(0, 2)[0]).sum().backward()
        with pytest.raises(RuntimeError, match="before"):
            wrapper._set_static_graph()
    assert model.will_sync_module_buffers() is False
    warnings.filterwarnings("ignore", message="Full backward hook is firing")  # inputs that need no gradient
    seen: list[str] = []
    model.register_forward_pre_hook(lambda module, args: seen.append("before"))
    model.register_forward_hook(lambda module, args, out: seen.append("after"))
    model.register_full_backward_hook(lambda module, ins, outs: seen.append("backward"))
    follows_whole_batch(model, what="with hooks on the wrapper", steps=2)
    assert seen == ["before", "after", "backward"] * 2
    model._remove_autograd_hooks()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def lightnings_manual_optimization() -> None:
    """Lightning lets forward run without synchronisation and then prepares the reducer itself."""
    model = ddp.DistributedDataParallel(build("mlp"))
    oracle = build("mlp")
    for step in range(3):
        x, y = batch(step, 2 * dist.get_world_size())
        for module in (oracle, model):
            module.zero_grad()
        loss_of(oracle, x, y).backward()
        model.require_backward_grad_sync = False
        loss = loss_of(model, shard(x), shard(y))
        model.require_backward_grad_sync = True
        model.require_forward_param_sync = True
        model.reducer._rebuild_buckets()
        model.reducer.prepare_for_backward([])
        loss.backward()
        assert_close(model.module, oracle, f"step {step}")


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


def _average_later(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
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
        f"registered {kind.name}": functools.partial(register_ddp_comm_hook, kind)
        for kind in (DDPCommHookType.ALLREDUCE, DDPCommHookType.FP16_COMPRESS, DDPCommHookType.NOOP)
    },
    "registered POWER_SGD": lambda model: register_ddp_comm_hook(DDPCommHookType.POWER_SGD, model, None),
}


def hooks_give_what_they_give_with_torchs_class() -> None:
    for name in list(HOOKS)[:: 1 if dist.get_world_size() > 1 else 4]:
        theirs = _train_with(Theirs, HOOKS[name], steps=6)
        ours = _train_with(ddp.DistributedDataParallel, HOOKS[name], steps=6)
        for one, two in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, two, rtol=2e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


def _registered(hook: Hook, model: Any) -> None:
    model.register_comm_hook(None, hook)


def bf16_hooks_work_on_the_cpu() -> None:
    """Which torch's class refuses. To the precision of 8 bits."""
    exact = _train_with(Theirs, HOOKS["allreduce"], steps=1)
    for hook in (default_hooks.bf16_compress_hook, default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)):
        ours = _train_with(ddp.DistributedDataParallel, functools.partial(_registered, hook), steps=1)
        for one, two in zip(ours, exact, strict=True):
            assert float((one - two).norm() / two.norm()) < 0.01


def buckets_have_torchs_interface() -> None:
    """Indices count up, one bucket is the last, `gradients()` are views of `buffer()`, each parameter is in one."""
    passes: list[list[Any]] = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
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

    for name in ("odd", "complex", "conv"):
        every: list[dict[str, Any]] = [
            {},
            {"bucket_cap_mb": 1e-4},
            {"bucket_cap_mb": 1e-6, "gradient_as_bucket_view": True},
        ]
        for settings in every:
            passes.clear()
            model = ddp.DistributedDataParallel(build(name), **settings)
            model.register_comm_hook(None, hook)
            follows_whole_batch(model, what=f"{name} {settings}", steps=3)
            expected = sorted(id(p) for p in model.parameters() if p.requires_grad)
            assert len(passes) == 3
            for buckets in passes:
                assert [is_last for is_last, _ in buckets] == [False] * (len(buckets) - 1) + [True]
                assert sorted(identity for _, parameters in buckets for identity in parameters) == expected


def wrong_hooks_are_errors() -> None:
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
    follows_whole_batch(model, what="after refused hooks", steps=2)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(RuntimeError, match="only be called once"):
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    follows_whole_batch(model, what="registered after steps", steps=3)

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
    follows_whole_batch(ddp.DistributedDataParallel(build("mlp")), what="after the errors", steps=2)


def a_hook_that_fails_on_one_rank_fails_everywhere() -> None:
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
    follows_whole_batch(model, what="after the failure", steps=3)


def buffer_hooks_synchronise_buffers() -> None:
    """In the place of the broadcast; the futures that they return are waited for before backward returns."""
    for location in (_BufferCommHookLocation.PRE_FORWARD, _BufferCommHookLocation.POST_FORWARD):
        with_futures = location is _BufferCommHookLocation.POST_FORWARD

        def average(state: dict[str, int], buffers: dict[str, torch.Tensor], with_futures: bool = with_futures) -> Any:
            state["calls"] += 1
            futures = []
            for name in ("norm.running_mean", "norm.running_var"):
                work = dist.all_reduce(buffers[name].data.div_(dist.get_world_size()), async_op=True)
                futures.append(work.get_future())
                if not with_futures:
                    work.wait()
            return futures if with_futures else None

        runs: list[list[torch.Tensor]] = []
        for cls in (Theirs, ddp.DistributedDataParallel):
            module = _built(Normed)
            own: dict[str, Any] = SYNCS_BUFFERS if cls is Theirs else {}
            model = cls(module, **own)
            state = {"calls": 0}
            model._register_buffer_comm_hook(state, average, location)
            for step in range(4):
                x, _ = batch(step, 4 * dist.get_world_size())
                model(shard(x)).square().sum().backward()
            runs.append([b.clone() for b in module.buffers()])
            assert state["calls"] == 4
        for theirs, ours in zip(*runs, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


# Parameters that others care for


def ignored_names_stay_out() -> None:
    """As torch's static method marks them: neither broadcast, nor compared, nor reduced."""
    rank = dist.get_rank()
    replica = Normed().to(F64)
    Theirs._set_params_and_buffers_to_ignore_for_model(replica, ["linear.bias", "norm.running_mean", "norm.weight"])
    with torch.no_grad():
        replica.linear.bias.fill_(rank)
        replica.norm.running_mean.fill_(rank)
    if rank == 1:
        replica.norm.weight = nn.Parameter(torch.ones(4, dtype=F64), requires_grad=False)
    model = ddp.DistributedDataParallel(replica)
    for step in range(3):
        x, _ = batch(step, 4 * dist.get_world_size())
        model.zero_grad()
        model(shard(x)).square().sum().backward()
    assert replica.linear.bias.tolist() == [rank] * 4
    every = [torch.empty_like(replica.linear.bias) for _ in range(dist.get_world_size())]
    dist.all_gather(every, replica.linear.bias.grad)
    assert not torch.equal(every[0], every[1])
    dist.all_gather(every, replica.norm.running_mean)
    assert not torch.equal(every[0], every[1])
    replica.linear.bias = replica.norm.weight = None
    assert_replicas_equal(replica)


def optimizers_in_backward_step_on_averages() -> None:
    """torch.distributed.optim._apply_optimizer_in_backward, before or after wrapping, for all or some."""
    warnings.filterwarnings("ignore", message=r".*torch\.jit\.", category=DeprecationWarning)  # torch's own
    from torch.distributed.optim import _apply_optimizer_in_backward

    for is_before in (True, False):
        oracle, replica = build("mlp"), build("mlp")
        mine = list(replica.parameters())
        if is_before:
            _apply_optimizer_in_backward(torch.optim.SGD, mine[:4], {"lr": 0.05})
        model = ddp.DistributedDataParallel(replica)
        if not is_before:
            _apply_optimizer_in_backward(torch.optim.SGD, mine[:4], {"lr": 0.05})
        rest = torch.optim.SGD(mine[4:], lr=0.05)
        optimizer = torch.optim.SGD(oracle.parameters(), lr=0.05)
        for step in range(5):
            x, y = batch(step, 2 * dist.get_world_size())
            optimizer.zero_grad()
            rest.zero_grad()
            loss_of(oracle, x, y).backward()
            optimizer.step()
            loss_of(model, shard(x), shard(y)).backward()
            assert all(parameter.grad is None for parameter in mine[:4])
            rest.step()
            for one, two in zip(mine, oracle.parameters(), strict=True):
                torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-13)


# State and copies


def states_load_both_ways() -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    ours, theirs = ddp.DistributedDataParallel(build("mlp")), Theirs(build("mlp", seed=1))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(name.startswith("module.") for name in ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert_close(ours.module, theirs.module)
    theirs = Theirs(build("mlp", seed=2))
    theirs.load_state_dict(ours.state_dict())
    plain = build("mlp", seed=3)
    plain.load_state_dict(ours.module.state_dict())
    state = ours.state_dict()
    nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
    plain.load_state_dict(state)
    assert list(get_model_state_dict(ours)) == list(plain.state_dict())
    set_model_state_dict(ours, build("mlp", seed=4).state_dict())
    follows_whole_batch(ours, oracle=build("mlp", seed=4), what="loaded")
    averaged = torch.optim.swa_utils.AveragedModel(ours)
    averaged.update_parameters(ours)
    follows_whole_batch(ours, what="beside an average", start=5)


def copies_train_like_the_original() -> None:
    """deepcopy, pickle and torch.save of the whole wrapper: copy and original each train, exactly, by themselves."""
    many: dict[str, Any] = {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-3, "weight_checksum": True}
    for kind, all_settings in (("deepcopy", ({}, many)), ("pickle", ({},)), ("save", (many,))):
        for settings in all_settings:
            model = ddp.DistributedDataParallel(build("mlp"), **settings)
            follows_whole_batch(model, what="original before", steps=2)
            before = copy.deepcopy(model.module)
            if kind == "deepcopy":
                copied = copy.deepcopy(model)
            elif kind == "pickle":
                copied = pickle.loads(pickle.dumps(model))
            else:
                file = io.BytesIO()
                torch.save(model, file)
                file.seek(0)
                copied = torch.load(file, weights_only=False)
            assert type(copied) is ddp.DistributedDataParallel
            assert copied.gradient_as_bucket_view == model.gradient_as_bucket_view
            follows_whole_batch(copied, oracle=copy.deepcopy(before), what=f"{kind} of {settings}", start=2, steps=3)
            for one, two in zip(model.module.parameters(), before.parameters(), strict=True):
                assert torch.equal(one, two)
            follows_whole_batch(model, oracle=before, what=f"original after {kind} of {settings}", start=2, steps=3)
            del model
            follows_whole_batch(copied, what=f"{kind} without the original", start=5, steps=2)
    with pytest.raises(RuntimeError, match="default process group"):
        pickle.dumps(ddp.DistributedDataParallel(build("mlp"), process_group=dist.new_group()))


# Functions and compilers


def functional_calls_are_exact() -> None:
    """With the module's own parameters, and with tensors computed from them."""
    model, oracle = ddp.DistributedDataParallel(build("mlp")), build("mlp")
    for step in range(5):
        x, y = batch(step, 2 * dist.get_world_size())
        for module, mine in ((oracle, lambda t: t), (model, shard)):
            module.zero_grad()
            named = {name: p * 2 if "bias" in name and step % 2 else p for name, p in module.named_parameters()}
            out = torch.func.functional_call(module, named, (mine(x),))
            (out - mine(y)).square().mean().backward()
        assert_close(model.module, oracle, f"step {step}")


def another_module_says_so() -> None:
    """Put into the wrapper after wrapping: no one reduces its gradients. The same one, compiled, is fine."""
    model = ddp.DistributedDataParallel(build("mlp"))
    follows_whole_batch(model, what="before", steps=2)
    model.module = torch.compile(model.module, backend="eager")
    follows_whole_batch(model, what="compiled", steps=2)
    model.module = build("mlp", seed=1)
    with pytest.raises((UserWarning, ddp.errors.BackwardError), match="wrap the new module"):
        model(batch(0, 2)[0]).sum().backward()


def functional_calls_with_other_parameters_say_so() -> None:
    """Their gradients are this rank's alone."""
    model = ddp.DistributedDataParallel(build("mlp"))
    x, _ = batch(0, 4)
    others = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    with pytest.warns(UserWarning, match="stay on this rank"):
        torch.func.functional_call(model, others, (x,)).sum().backward()
    follows_whole_batch(model, what="after a functional call", steps=2)


def compiled_autograd_is_refused() -> None:
    from torch._dynamo import compiled_autograd

    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")  # of dynamo
    model = ddp.DistributedDataParallel(build("mlp"))
    loss = model(batch(0, 2)[0]).sum()
    with (
        pytest.raises(ddp.errors.UnsupportedError, match="compiled"),
        compiled_autograd._enable(torch.compile(backend="eager")),
    ):
        loss.backward()


def compiled_models_are_exact() -> None:
    """torch.compile around the wrapper, and inside it with a break in the graph."""
    # Of dynamo itself, behind a break in the graph.
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
    wrapper = ddp.DistributedDataParallel(_built(Mlp))
    model: Any = torch.compile(wrapper, backend="aot_eager")
    follows_whole_batch(model, what="around")
    oracle = copy.deepcopy(wrapper.module)
    for step in range(3):  # no_sync and no_grad are not compiled away
        x, y = batch(step, 2 * dist.get_world_size())
        for module in (oracle, wrapper):
            module.zero_grad()
        (loss_of(oracle, x, y) * 3).backward()
        with wrapper.no_sync():
            loss_of(model, shard(x), shard(y)).backward()
        with torch.no_grad():
            model(shard(x))
        (loss_of(model, shard(x), shard(y)) * 2).backward()
        assert_close(wrapper.module, oracle, f"around, accumulating, step {step}")
    inside: Any = torch.compile(_built(Broken), backend="eager")
    wrapper = ddp.DistributedDataParallel(inside)
    follows_whole_batch(wrapper, what="inside")
    both: Any = torch.compile(wrapper, backend="eager")
    follows_whole_batch(both, what="both", start=5, steps=2)


class Broken(Mlp):
    """What dynamo compiles in two parts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layers[:2](x)
        torch._dynamo.graph_break()
        return self.layers[2:](hidden)


def _built(make: type[nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().to(F64)


# Beside torch's


def torchs_loader_and_class_beside_ours() -> None:
    """torch's DistributedSampler in a DataLoader feeds both classes, in one loop, over one group."""
    data = torch.utils.data.TensorDataset(*batch(0, 4 * dist.get_world_size()))
    sampler: torch.utils.data.DistributedSampler[Any] = torch.utils.data.DistributedSampler(data, shuffle=True, seed=5)
    loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)
    ours, theirs = ddp.DistributedDataParallel(build("mlp")), Theirs(build("mlp"))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (ours, theirs)]
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            for model, optimizer in zip((ours, theirs), optimizers, strict=True):
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
            assert_close(ours.module, theirs.module, f"epoch {epoch}")
            for optimizer in optimizers:
                optimizer.step()
