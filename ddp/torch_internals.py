"""Every private name of torch that ddp uses, in one place: what for, since which version, and what happens without it.

ddp needs torch 2.9 or newer, which has all of these. Where a newer one drops a name, tests/ddp/test_torch_internals.py
fails, and only this file changes; the test also sees to it that no other file of ddp has a private name of torch.

A name that is not there never fails an import: what needs it raises UnsupportedError, which names it, or does without
it as said here. tests/ddp/test_hidden_names.py hides each in turn.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import CodeType, FunctionType, ModuleType
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node
from torch.distributed.algorithms.join import Join

from ddp.errors import UnsupportedError

P = ParamSpec("P")
R = TypeVar("R")


def _lacking(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"torch {torch.__version__} has no {name}, which this needs: install a torch that was tested (there is a "
        "table in ddp/README.md of dtrain's repository), or a newer dtrain"
    )


def _find(path: str) -> Any:
    """What torch has under a dotted name, else None."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        outer = _find(module) if module else None
        return getattr(outer, name, None)


class _Lacking:
    """Stands for a function that torch does not have: calling it raises UnsupportedError."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, *_: object, **__: object) -> Any:
        raise _lacking(self.path)


def _needed(path: str) -> Any:
    """What torch has under a dotted name, else what raises UnsupportedError when it is called."""
    return _find(path) or _Lacking(path)


def _unless_lacking(function: Callable[P, R]) -> Callable[P, R]:
    """Have an attribute that `function` uses, and that is not there, raise UnsupportedError."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except AttributeError as error:
            if error.name not in function.__code__.co_names:
                raise
            owner = getattr(error.obj, "__name__", type(error.obj).__name__)
            raise _lacking(f"{owner}.{error.name}") from error

    return call


# Nested values: inputs and outputs of modules. Without them nothing can be wrapped. 2.2.
tree_flatten: Callable[[Any], tuple[list[Any], Any]] = _needed("torch.utils._pytree.tree_flatten")
tree_leaves: Callable[[Any], list[Any]] = _needed("torch.utils._pytree.tree_leaves")
tree_map: Callable[..., Any] = _needed("torch.utils._pytree.tree_map")
tree_map_only: Callable[..., Any] = _needed("torch.utils._pytree.tree_map_only")

# Autograd's engine. Without these nothing can be averaged: there is no public word for the end of a backward pass.

# Have the engine call a function at the end of the backward pass that runs; dropped if the pass fails. 1.0.
call_after_backward: Callable[[Callable[[], None]], None] = _needed(
    "torch.autograd.Variable._execution_engine.queue_callback"
)

# The engine's number for the backward pass that runs in this thread, else -1. Without it a pass that was interrupted,
# and a forward pass inside a backward pass (activation checkpoints), cannot be told from others. 2.0.
current_backward: Callable[[], int] = _needed("torch._C._current_graph_task_id")

# Whether the backward pass that runs will reach a node; RuntimeError if it captures that leaf's gradient. Without it
# torch.autograd.grad() starts reductions, and buckets wait for parameters that are not used. 2.0.
will_be_reached: Callable[[Node], bool] = _needed("torch._C._will_engine_execute_node")

# The node whose hooks run. Without it, what a backward pass through an output leads to is not known. 2.1.
current_node: Callable[[], Node | None] = _needed("torch._C._current_autograd_node")


def check_engine() -> None:
    """Raise UnsupportedError if a backward pass would meet a name that is not there; warn if torch.compile would."""
    for each in (call_after_backward, current_backward, will_be_reached, current_node):
        if isinstance(each, _Lacking):
            each()
    if _not_skipped:
        warnings.warn(
            f"torch.compile also compiles ddp's own functions, which is slow: {_not_skipped[0]}", stacklevel=2
        )


@_unless_lacking
def gradient_hooks(parameter: Any) -> Any:
    """The ordered dict of post-accumulate-grad hooks, None if there never was one. 2.1.

    Without it, hooks that the user registers after wrapping run after those of the reducer.
    """
    return parameter._post_accumulate_grad_hooks


# Who holds a tensor. Without these every gradient is copied into its bucket and out again.

_storage_owner_count = _find("torch._C._storage_Use_Count") if hasattr(torch.UntypedStorage, "_cdata") else None
_more_each_time = itertools.count()


def memory_owner_count(storage: torch.UntypedStorage) -> int:
    """How many own the memory of a storage, `storage` itself included; never the same twice if not counted. 2.1."""
    if _storage_owner_count is None:
        return next(_more_each_time)
    return int(_storage_owner_count(storage._cdata))


# How many own a tensor besides its Python object; None where torch has no such count. 2.3.
tensor_owner_count = cast(
    "Callable[[torch.Tensor], int] | None", _storage_owner_count and getattr(torch.Tensor, "_use_count", None)
)


@_unless_lacking
def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place. Without it nobody knows which buffers parameter servers lack. 0.4."""
    return int(tensor._version)


def _copy_each(to: Sequence[torch.Tensor], each: Sequence[torch.Tensor]) -> None:
    for tensor, source in zip(to, each, strict=True):
        tensor.copy_(source)


# Copies many tensors with one call: (to, from). Without it each small gradient costs a call. 2.1.
foreach_copy: Callable[..., None] = _find("torch._foreach_copy_") or _copy_each


def _flatten_each(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


# Copies many tensors of one dtype into one (n,) with one call. Without it each small parameter costs a call. 1.0.
flatten_tensors: Callable[[Sequence[torch.Tensor]], torch.Tensor] = (
    _find("torch._utils._flatten_dense_tensors") or _flatten_each
)


def _divide_each(tensors: Sequence[torch.Tensor], by: float) -> None:
    for tensor in tensors:
        tensor.div_(by)


# Divides many tensors, sparse ones too, with one call: (tensors, number). Without it each gradient costs a call. 1.6.
foreach_divide: Callable[..., None] = _find("torch._foreach_div_") or _divide_each


# The dicts that named_parameters() and the like walk: reading them costs a tenth of that. Without them the
# checks in each pass become slow. Since the first version.


@_unless_lacking
def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters of a module itself, without its submodules'."""
    return module._parameters


@_unless_lacking
def submodules_of(module: nn.Module) -> dict[str, nn.Module | None]:
    return module._modules


@_unless_lacking
def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return module._buffers


@_unless_lacking
def apply_to_tensors(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace every parameter and buffer, as `module.double()` does. Without it, complex ones stay as they are."""
    module._apply(change)


def ignored_names(module: nn.Module) -> set[str]:
    """Names that torch's DDP is told to leave out. Without it, they would be averaged. 1.7."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def compiled_module(module: object) -> nn.Module | None:
    """The module inside what torch.compile returned, else None. 2.0."""
    inner = getattr(module, "_orig_mod", None)
    if inner is None and type(module).__name__ == "OptimizedModule":
        raise _lacking("OptimizedModule._orig_mod")
    return inner if isinstance(inner, nn.Module) else None


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside wrappers that put a prefix before its keys: torch's, ddp's (one of these), torch.compile's."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif (inner := compiled_module(model)) is not None:
            model = inner
        else:
            return model


# torch.compile, which is kept out of this package's frames, as it keeps out of torch's; the wrapped module is compiled.
# Without these it breaks its graphs elsewhere and traces this package, slowly.


_not_skipped: list[UnsupportedError] = []  # why, if skip_package could not do its work


def skip_package(name: str) -> None:
    """Mark all functions of the modules of package `name` that are imported now. Does not import torch._dynamo."""
    try:
        for module in [module for key, module in sys.modules.items() if key.startswith(f"{name}.")]:
            for code in _codes_of(module):
                _skip_when_compiling(code)
    except UnsupportedError as error:
        _not_skipped.append(error)


def _codes_of(module: ModuleType) -> Iterator[CodeType]:
    for value in vars(module).values():
        members = vars(value).values() if isinstance(value, type) else (value,)
        for member in members:
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            function = getattr(function, "__wrapped__", function)
            if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                yield from _with_inner(function.__code__)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions made in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


@_unless_lacking
def _skip_when_compiling(code: CodeType) -> None:
    """Keep torch.compile out of a function's own frame. Does not import torch._dynamo. 2.7."""
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(code, skip)


def not_traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a method that must not be inlined into a graph. 2.0."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def after_scaled_steps(call: Callable[[torch.optim.Optimizer], None]) -> None:
    """Call it with the optimizer after each `torch.amp.GradScaler.step`, which may skip the optimizer's own. 2.3.

    No hook tells so. It stays so as long as the process runs, so this is to be called once.
    """
    step = torch.amp.GradScaler.step

    @functools.wraps(step)
    def step_and_call(
        self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> float | None:
        result = step(self, optimizer, *args, **kwargs)
        call(optimizer)
        return result

    torch.amp.GradScaler.step = step_and_call  # type: ignore[method-assign]  # for what makes its own scaler, too


def in_compiled_autograd() -> bool:
    """Whether compiled autograd runs or traces this backward pass. Without it, that would average nothing. 2.6."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(compiled, "in_compiled_autograd_region", False))


def swap_active_ddp_module(module: object) -> object:
    """Set the wrapper whose forward runs, by which torch.compile splits graphs at buckets; return that before. 1.13."""
    wrapper: Any = nn.parallel.DistributedDataParallel
    before, wrapper._active_ddp_module = getattr(wrapper, "_active_ddp_module", None), module
    return before


@functools.cache
@_unless_lacking
def _tell_of_batches() -> dict[int, tuple[weakref.ref[Any], weakref.WeakMethod[Callable[[], None]]]]:
    """Have every DataLoader look into the result, by the id of its sampler, when it is asked for a batch. It stays so.

    The keys are no weak references: a sampler of somebody else may be a list, which has none and no hash.
    """
    calls: dict[int, tuple[weakref.ref[Any], weakref.WeakMethod[Callable[[], None]]]] = {}
    iterator = torch.utils.data.dataloader._BaseDataLoaderIter
    ask = iterator.__next__

    @functools.wraps(ask)
    def tell_and_ask(self: Any) -> Any:
        sampler = _sampler_of(self)
        known, method = calls.get(id(sampler), (None, None))
        if known is not None and method is not None and known() is sampler and (call := method()) is not None:
            call()
        return ask(self)

    iterator.__next__ = tell_and_ask  # type: ignore[method-assign]  # there is no hook
    return calls


@_unless_lacking
def _sampler_of(iterator: Any) -> Any:
    """What the DataLoader of an iterator draws from, by itself or through a BatchSampler. 1.2."""
    batches = iterator._index_sampler
    return getattr(batches, "sampler", batches)


def call_before_batches(sampler: torch.utils.data.Sampler[int], method: Callable[[], None]) -> None:
    """Call a bound method, which is not kept alive, whenever a DataLoader over `sampler` is asked for a batch. 1.2.

    The sampler does not know when that is: workers draw ahead.
    """
    _tell_of_batches()[id(sampler)] = weakref.ref(sampler), weakref.WeakMethod(method)


# Process groups.


@_unless_lacking
def default_store() -> Any:
    """The store of the default group. Without it a stall report knows only this rank. 1.0."""
    return dist.distributed_c10d._get_default_store()


@_unless_lacking
def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend of a group for a device; RuntimeError without one. 2.0."""
    return group._get_backend(device)


def device_types_of(group: dist.ProcessGroup) -> Sequence[torch.device]:
    """The types of devices that a group has backends for. 2.0."""
    return getattr(group, "_device_types", ())


@_unless_lacking
def number_groups_anew() -> None:
    """Have the next default group be called as the first one, as torch does when one is destroyed. 2.1.

    One that was not made, since its ranks could not connect, has taken a number all the same. The name is part of the
    keys by which ranks find each other: without this, those that have tried before would wait elsewhere, for ever.
    """
    world: Any = dist.distributed_c10d._world
    if world.group_count:
        world.group_count = 0


def open_groups() -> list[Any]:
    """The groups of this process that torch knows of. 2.0."""
    return list(getattr(getattr(dist.distributed_c10d, "_world", None), "pg_map", ()))


def abort_on_devices() -> None:
    """Abort what this process's groups do on devices, from any thread; they are of no use then. Blocks. 2.6.

    All within one of NCCL's group calls, as torch does it: one communicator may wait for the kernels of another. What
    torch does not know, of groups or of calls, is left out: then the process does not come back, and is ended.
    """
    groups = open_groups() or [dist.group.WORLD]
    backends = [
        backend_of(group, device)
        for group in groups
        if group is not None
        for device in device_types_of(group)
        if device.type != "cpu" and not is_by_gloo(group, device)
    ]
    together = len(backends) > 1 and hasattr(backends[0], "_group_start") and hasattr(backends[0], "_group_end")
    if together:
        backends[0]._group_start()
    try:
        for backend in backends:
            backend.abort()
    finally:
        if together:
            backends[0]._group_end()


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """The timeout of a group's collectives on a device, None if its backend does not tell; then defaults apply. 2.0."""
    try:
        timeout: timedelta = backend_of(group, device).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return timeout


def timeouts_on_devices() -> dict[str, float]:
    """The timeouts, in seconds, of the groups of this process that communicate on devices themselves, by name. 2.1."""
    found: dict[str, float] = {}
    for group in list(getattr(getattr(dist.distributed_c10d, "_world", None), "pg_map", {})):
        for device in device_types_of(group):
            timeout = None if device.type == "cpu" or is_by_gloo(group, device) else timeout_of(group, device)
            if timeout is not None:
                found[group.group_name] = timeout.total_seconds()
    return found


def device_recorder() -> Callable[[bool, bool], bytes] | None:
    """Return what dumps the flight recorder of NCCL as JSON: with each collective or not, all or those on their way.

    None where it records nothing, or torch has no NCCL. 2.5.
    """
    size = next((os.environ[name] for name in _RECORDER_SIZES if name in os.environ), "")
    found: Callable[[bool, bool], bytes] | None = _find("torch._C._distributed_c10d._dump_nccl_trace_json")
    return None if size.strip() == "0" else found


_RECORDER_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


@contextlib.contextmanager
def not_split_off() -> Iterator[None]:
    """Make a group of some ranks inside, by these alone. 2.3.

    A default group that is bound to its device is split, which all of its ranks must do at once.
    """
    world = dist.group.WORLD
    bound = getattr(world, "bound_device_id", None)
    if bound is None:
        yield
        return
    world.bound_device_id = None  # type: ignore[union-attr]
    try:
        yield
    finally:
        world.bound_device_id = bound  # type: ignore[union-attr]


def is_by_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether gloo moves a group's memory on a device, also under torch's wrapper that checks calls. 2.0.

    Without it, small sums take gloo's ring, and waits for what gloo moves on a device have no limit.
    """
    try:
        return str(backend_of(group, device).name()) == "gloo"
    except (AttributeError, RuntimeError):
        return False


def sums_in_rank_order(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether a backend says of itself that its sums do not depend on the sizes of tensors. 2.0."""
    try:
        return bool(getattr(backend_of(group, device), "sums_in_rank_order", False))
    except (AttributeError, RuntimeError):
        return False


def is_gloo_on_host(group: dist.ProcessGroup) -> bool:
    """Whether gloo moves a group's host memory."""
    return is_by_gloo(group, torch.device("cpu"))


def is_in_stream_order(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether collectives of `group` are done by the streams of `device`, in their order: futures are complete at once.

    Gloo moves the memory of a device by threads of its own, as that of the host.
    """
    return device.type != "cpu" and not is_by_gloo(group, device)


@_unless_lacking
def host_group(group: dist.ProcessGroup, store: Any, timeout: timedelta) -> dist.ProcessGroup:
    """Connect a group of the same ranks, in the same order, that moves host memory by gloo. Blocks. 2.6.

    torch does not know of it: it ends with its last reference. Without this, the status of models on a device cannot
    travel on the host where their group is of NCCL alone.
    """
    made = dist.ProcessGroup(store, group.rank(), group.size())
    set_default, register = made._set_default_backend, made._register_backend  # both are there: now connect
    backend = dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout=timeout)
    set_default(dist.ProcessGroup.BackendType.GLOO)
    register(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return made


@_unless_lacking
def device_group(options: Any, device: str, backend: str, backend_options: Any) -> dist.ProcessGroup:
    """Make a group of torch's own for one type of device, beside a group of the same ranks that is written in Python.

    `options` are those that torch gave the maker of that group. Does not wait for others, unless the backend does.
    Without it, "cpu:shm,cuda:nccl" has no NCCL. 2.6.
    """
    make: Any = dist.distributed_c10d._new_process_group_helper
    made, _ = make(
        options.group_size,
        options.group_rank,
        options.global_ranks_in_group,
        f"{device}:{backend}",
        options.store,
        f"{options.group_id}/{device}",
        backend_options=backend_options,
        timeout=options.timeout,
    )
    ranks = options.global_ranks_in_group or range(options.group_size)
    dist.distributed_c10d._world.pg_group_ranks[made] = {rank: index for index, rank in enumerate(ranks)}
    return cast("dist.ProcessGroup", made)


@_unless_lacking
def destroy_device_group(group: dist.ProcessGroup) -> None:
    """Destroy a group that `device_group` made, unless torch has destroyed it with all others."""
    if group in dist.distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)


@_unless_lacking
def allgather_flat(group: Any, into: torch.Tensor, mine: torch.Tensor) -> dist.Work:
    """Start gathering equal flat tensors into one. Without it: a list of tensors, and a copy more. 1.8."""
    work: dist.Work = group._allgather_base(into, mine)
    return work


# The class of futures that collectives return, of which torch.futures.Future is a subclass. Without it, their futures
# cannot be told from a hook's mistake. 1.6.
AnyFuture = _find("torch._C.Future") or torch.futures.Future


@_unless_lacking
def device_index(device: int | torch.device) -> int:
    """The index of a device, however it is given. 1.0."""
    return int(torch._utils._get_device_index(device, True))


def is_in_join(joinable: Any) -> bool:
    """Whether a Joinable is inside a Join context that is enabled. 1.10."""
    return bool(getattr(getattr(joinable, "_join_config", None), "enable", False))


def check_join(joinable: Any) -> None:
    """Raise UnsupportedError if `is_in_join` cannot know: join() would hang."""
    if not hasattr(getattr(joinable, "_join_config", None), "enable"):
        raise _lacking("Joinable._join_config.enable")


class BoundedJoin(Join):
    """torch's context for one Joinable, whose `wait` ends when time is up.

    A rank that has joined asks again and again how many have not. 1.10; else it waits as torch does.
    """

    def __init__(self, joinable: Any, wait: Callable[..., object], enable: bool, *args: Any, **options: Any) -> None:
        super().__init__([joinable], enable, *args, **options)
        self.joinable = joinable
        self.wait_for = wait

    def _get_num_nonjoined_procs(self) -> float:
        count = torch.zeros(1, device=self.joinable.join_device)
        work = dist.all_reduce(count, group=self.joinable.join_process_group, async_op=True)
        self.wait_for(work, "count of the ranks that have inputs", device=count.device)
        return count.item()


# Optimizers.


def in_backward_optimizers(parameter: torch.Tensor) -> Sequence[torch.optim.Optimizer]:
    """Those of torch's `_apply_optimizer_in_backward()`. Without it, they step before the average. 2.0."""
    return getattr(parameter, "_in_backward_optimizers", ())


def state_dict_hooks(optimizer: Any, when: str) -> list[Callable[..., Any]]:
    """The hooks of an optimizer: `when` is "state_dict_pre", "load_state_dict_post" and so on. Else not called. 2.3."""
    name = f"_optimizer_{when}_hooks"
    if not hasattr(optimizer, name):
        raise _lacking(f"Optimizer.{name}")
    return list(getattr(optimizer, name).values())


def torchs_comm_hooks(wrapper: Any) -> Sequence[object]:
    """The hooks that were registered with torch's own DistributedDataParallel; empty if it does not tell. 2.0."""
    return getattr(wrapper, "_comm_hooks", ())


def mark_as_stepped(optimizer: Any) -> None:
    """Tell learning rate schedulers that `optimizer` has stepped, or they warn that it has not. 2.4."""
    optimizer._opt_called = True


# The classes of which the description of a distributed checkpoint consists. Where a newer torch adds one, such folders
# are refused with its name. 2.0.
DCP_CLASSES = frozenset(
    {
        ("collections", "OrderedDict"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
    }
)
