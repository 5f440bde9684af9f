"""The interface is that of torch's DistributedDataParallel, with the same numbers behind it."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.training import (
    F64,
    Mlp,
    Normed,
    assert_close,
    assert_replicas_equal,
    assert_same_bits,
    assert_weights_close,
    batch,
    build,
    follow_whole_batch,
    loss_of,
    sgd,
    shard,
    whole,
)
from testbed.worlds import world
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Theirs

import ddp
from ddp.errors import ArgumentError, BackwardError, DdpError, UnsupportedError

# Construction


@world(1)
def test_signatures_are_torchs() -> None:
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


SETTINGS: list[dict[str, Any]] = [
    {"device_ids": None, "output_device": None, "dim": 0},
    {"init_sync": False},
    {"bucket_cap_mb": 1, "find_unused_parameters": True},
    {"bucket_cap_mb_list": [1e-6, 25.0, 1e-6]},
    {"gradient_as_bucket_view": True, "static_graph": True},
    {"forward_sync_buffers": False},
    {"check_reduction": False, "mixed_precision": None, "batched_grad_copy": False},
    {"stall_timeout_s": 20.0, "weight_checksum": True},
]
WITHOUT_EFFECT: dict[str, Any] = {
    "dim": 1,
    "check_reduction": True,
    "skip_all_reduce_unused_params": True,
    "delay_all_reduce_named_params": [("a", nn.Parameter(torch.ones(1)))],
    "param_to_hook_all_reduce": nn.Parameter(torch.ones(1)),
    "batched_grad_copy": True,
    "lazy_bucket_allocation": True,
}


@world(2)
def test_arguments_are_taken_as_torchs() -> None:
    """By name and by place; those without a meaning here warn and say why."""
    mesh, group = dist.init_device_mesh("cpu", (dist.get_world_size(),)), dist.new_group()
    for settings in (*SETTINGS, {"device_mesh": mesh}):
        follow_whole_batch(ddp.DistributedDataParallel(build("mlp"), **settings), what=str(settings), steps=2)
    follow_whole_batch(ddp.DistributedDataParallel(build("mlp"), None, None, 0, None, True, group, 25, True), steps=2)
    for broadcasts in (False, True):
        syncs: dict[str, Any] = {"forward_sync_buffers": False} if broadcasts else {}
        with pytest.warns(FutureWarning, match="forward_sync_buffers"):
            model = ddp.DistributedDataParallel(build("mlp"), broadcast_buffers=broadcasts, **syncs)
        assert not model.forward_sync_buffers
        follow_whole_batch(model, steps=2)
    for name, value in WITHOUT_EFFECT.items():
        with pytest.warns(UserWarning, match=rf"{name}=\.\.\.\) has no effect: \w+"):
            model = ddp.DistributedDataParallel(build("mlp"), **{name: value})
        follow_whole_batch(model, what=name, steps=2)


@world(2)
def test_bad_arguments_are_errors() -> None:
    model: Any = ddp.DistributedDataParallel(build("mlp"))
    model.require_manual_backward_finalization = False
    with pytest.raises(UnsupportedError, match="manual finalization"):
        model.require_manual_backward_finalization = True
    assert not model.require_manual_backward_finalization
    with pytest.raises(UnsupportedError, match="manual finalization"):
        model.finalize_backward()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"device_ids": [0]}, ArgumentError, "device_ids"),
        ({"output_device": 0}, ArgumentError, "output_device"),
        ({"bucket_cap_mb": 0}, ArgumentError, "bucket_cap_mb"),
        ({"bucket_cap_mb_list": [1.0, 0.0]}, ArgumentError, "bucket_cap_mb_list"),
        ({"process_group": dist.group.WORLD, "device_mesh": mesh}, ArgumentError, "process_group and device_mesh"),
        ({"mixed_precision": object()}, UnsupportedError, "autocast"),
        ({"compression": "zip"}, ArgumentError, "zip"),
        ({"stall_timeout_s": 0.0}, ArgumentError, "timeout"),
        ({"module": nn.LazyLinear(3)}, ArgumentError, "uninitialized"),
        ({"module": nn.BatchNorm1d(3, affine=False)}, DdpError, "requires a gradient"),
        ({"module": nn.Linear(2, 2).requires_grad_(False)}, DdpError, "requires a gradient"),
        ({"module": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))}, ArgumentError, "meta"),
    ]
    for settings, error, said in wrong:
        with pytest.raises(error, match=said):
            ddp.DistributedDataParallel(**{"module": build("mlp"), **settings})
    follow_whole_batch(ddp.DistributedDataParallel(build("mlp")), what="after the errors", steps=2)


@world(2)
def test_what_others_read_of_a_wrapper() -> None:
    """Attributes and methods of torch's class that libraries use."""
    model: Any = ddp.DistributedDataParallel(build("mlp"))
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
    follow_whole_batch(model, what="with hooks on the wrapper", steps=2)
    assert seen == ["before", "after", "backward"] * 2
    model._remove_autograd_hooks()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


@world(1, 2)
def test_lightnings_manual_optimization() -> None:
    """Lightning lets forward run without synchronisation and then prepares the reducer itself."""

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        model.require_backward_grad_sync = False
        found = loss_of(model, x, y)
        if isinstance(model, ddp.DistributedDataParallel):
            model.require_backward_grad_sync = model.require_forward_param_sync = True
            model.reducer._rebuild_buckets()
            model.reducer.prepare_for_backward([])
        return found

    follow_whole_batch(ddp.DistributedDataParallel(build("mlp")), loss=loss)


# Parameters that others care for


@world(2)
def test_ignored_names_stay_out() -> None:
    """As torch's static method marks them: neither broadcast, nor compared, nor reduced."""
    rank, replica = dist.get_rank(), build(Normed)
    Theirs._set_params_and_buffers_to_ignore_for_model(replica, ["linear.bias", "norm.running_mean", "norm.weight"])
    replica.linear.bias.data.fill_(rank)
    replica.norm.running_mean.fill_(rank)
    if rank == 1:
        replica.norm.weight = nn.Parameter(torch.ones(4, dtype=F64), requires_grad=False)
    model = ddp.DistributedDataParallel(replica)
    for step in range(3):
        x, _ = batch(step, 4 * dist.get_world_size())
        model.zero_grad()
        model(shard(x)).square().sum().backward()
    assert replica.linear.bias.tolist() == [rank] * 4
    for ignored in (replica.linear.bias.grad, replica.norm.running_mean):
        with pytest.raises(AssertionError, match="differs"):
            assert_same_bits([ignored])
    replica.linear.bias = replica.norm.weight = None
    assert_replicas_equal(replica)


@world(2)
def test_optimizers_in_backward_step_on_averages() -> None:
    """torch.distributed.optim._apply_optimizer_in_backward, before or after wrapping, for all or some."""
    warnings.filterwarnings("ignore", message=r".*torch\.jit\.", category=DeprecationWarning)  # torch's own
    from torch.distributed.optim import _apply_optimizer_in_backward

    for is_before in (True, False):
        alone, replica = build("mlp"), build("mlp")
        mine = [*replica.parameters()]
        if is_before:
            _apply_optimizer_in_backward(torch.optim.SGD, mine[:4], {"lr": 0.05})
        model = ddp.DistributedDataParallel(replica)
        if not is_before:
            _apply_optimizer_in_backward(torch.optim.SGD, mine[:4], {"lr": 0.05})
        rest, optimizer = (torch.optim.SGD(each, lr=0.05) for each in (mine[4:], alone.parameters()))
        for step in range(5):
            x, y = batch(step, 2 * dist.get_world_size())
            for each, module, rows in ((optimizer, alone, whole), (rest, model, shard)):
                each.zero_grad()
                loss_of(module, rows(x), rows(y)).backward()
                each.step()
            assert all(parameter.grad is None for parameter in mine[:4])
            assert_weights_close(replica, alone, f"step {step}")


# State and copies


@world(2)
def test_states_load_both_ways() -> None:
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
    follow_whole_batch(ours, alone=build("mlp", seed=4), what="loaded")
    averaged = torch.optim.swa_utils.AveragedModel(ours)
    averaged.update_parameters(ours)
    follow_whole_batch(ours, what="beside an average", start=5)


@world(2)
def test_copies_train_like_the_original() -> None:
    """deepcopy, pickle and torch.save of the whole wrapper: copy and original each train, exactly, by themselves."""
    many: dict[str, Any] = {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-3, "weight_checksum": True}
    for kind, all_settings in (("deepcopy", ({}, many)), ("pickle", ({},)), ("save", (many,))):
        for settings in all_settings:
            model = ddp.DistributedDataParallel(build("mlp"), **settings)
            follow_whole_batch(model, what="original before", steps=2)
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
            follow_whole_batch(copied, alone=copy.deepcopy(before), what=f"{kind} of {settings}", start=2, steps=3)
            assert all(map(torch.equal, model.module.parameters(), before.parameters()))
            follow_whole_batch(model, alone=before, what=f"original after {kind} of {settings}", start=2, steps=3)
            del model
            follow_whole_batch(copied, what=f"{kind} without the original", start=5, steps=2)
    with pytest.raises(RuntimeError, match="default process group"):
        pickle.dumps(ddp.DistributedDataParallel(build("mlp"), process_group=dist.new_group()))


# Functions and compilers


@world(2)
def test_functional_calls_are_exact() -> None:
    """With tensors computed from the module's own parameters."""

    def loss(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        named = {name: p * 2 if "bias" in name else p for name, p in module.named_parameters()}
        found: torch.Tensor = (torch.func.functional_call(module, named, (x,)) - y).square().mean()
        return found

    follow_whole_batch(ddp.DistributedDataParallel(build("mlp")), loss=loss)


@world(2)
def test_another_module_says_so() -> None:
    """Put into the wrapper after wrapping: no one reduces its gradients. The same one, compiled, is fine."""
    model = ddp.DistributedDataParallel(build("mlp"))
    follow_whole_batch(model, what="before", steps=2)
    model.module = torch.compile(model.module, backend="eager")
    follow_whole_batch(model, what="compiled", steps=2)
    model.module = build("mlp", seed=1)
    with pytest.raises((UserWarning, BackwardError), match="wrap the new module"):
        model(batch(0, 2)[0]).sum().backward()


@world(2)
def test_functional_calls_with_other_parameters_say_so() -> None:
    """Their gradients are this rank's alone."""
    model = ddp.DistributedDataParallel(build("mlp"))
    x, _ = batch(0, 4)
    others = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    with pytest.warns(UserWarning, match="stay on this rank"):
        torch.func.functional_call(model, others, (x,)).sum().backward()
    follow_whole_batch(model, what="after a functional call", steps=2)


@world(2)
def test_compiled_autograd_is_refused() -> None:
    from torch._dynamo import compiled_autograd

    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")  # of dynamo
    model = ddp.DistributedDataParallel(build("mlp"))
    loss = model(batch(0, 2)[0]).sum()
    with (
        pytest.raises(UnsupportedError, match="compiled"),
        compiled_autograd._enable(torch.compile(backend="eager")),
    ):
        loss.backward()


@world(2)
def test_compiled_models_are_exact() -> None:
    """torch.compile around the wrapper, and inside it with a break in the graph."""
    # Of dynamo itself, behind a break in the graph.
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
    wrapper = ddp.DistributedDataParallel(build(Mlp))
    model: Any = torch.compile(wrapper, backend="aot_eager")
    follow_whole_batch(model, what="around")
    alone = copy.deepcopy(wrapper.module)
    for step in range(3):  # no_sync and no_grad are not compiled away
        x, y = batch(step, 2 * dist.get_world_size())
        for module in (alone, wrapper):
            module.zero_grad()
        (loss_of(alone, x, y) * 3).backward()
        with wrapper.no_sync():
            loss_of(model, shard(x), shard(y)).backward()
        with torch.no_grad():
            model(shard(x))
        (loss_of(model, shard(x), shard(y)) * 2).backward()
        assert_close(wrapper.module, alone, f"around, accumulating, step {step}")
    inside: Any = torch.compile(build(Broken), backend="eager")
    wrapper = ddp.DistributedDataParallel(inside)
    follow_whole_batch(wrapper, what="inside")
    both: Any = torch.compile(wrapper, backend="eager")
    follow_whole_batch(both, what="both", start=5, steps=2)


class Broken(Mlp):
    """What dynamo compiles in two parts."""

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.layers[:2](x)
        torch._dynamo.graph_break()
        return self.layers[2:](hidden)


# Beside torch's


@world(2)
def test_torchs_loader_and_class_beside_ours() -> None:
    """torch's DistributedSampler in a DataLoader feeds both classes, in one loop, over one group."""
    data = torch.utils.data.TensorDataset(*batch(0, 4 * dist.get_world_size()))
    sampler: torch.utils.data.DistributedSampler[Any] = torch.utils.data.DistributedSampler(data, shuffle=True, seed=5)
    loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)
    ours, theirs = ddp.DistributedDataParallel(build("mlp")), Theirs(build("mlp"))
    optimizers = [sgd(each) for each in (ours, theirs)]
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            for model, optimizer in zip((ours, theirs), optimizers, strict=True):
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
            assert_close(ours.module, theirs.module, f"epoch {epoch}")
            for optimizer in optimizers:
                optimizer.step()
