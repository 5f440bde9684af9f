"""All private names of torch that ddp uses: their purpose, the torch version that added them, and the fallback.

ddp needs torch 2.9 or newer, which has all of these. If a newer one drops a name, tests/ddp/test_torch_internals.py
fails, and only this file changes; the test also checks that no other file of ddp has a private name of torch.

A missing name never fails an import: its users raise UnsupportedError, which names it, or do without it as described
here. tests/ddp/test_hidden_names.py hides each in turn.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
import sys
import threading
import warnings
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
from ddp.monitoring.interrupts import is_interrupt

_END_S = 1.0  # for a group to end: more than enough if no collective is running
P = ParamSpec("P")
R = TypeVar("R")


def _lacking(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"torch {torch.__version__} has no {name}, which this needs: install a torch that was tested (there is a "
        "table in ddp/README.md of dtrain's repository), or a newer dtrain"
    )


def _find(path: str) -> Any:
    """Return torch's attribute with a dotted name, else None."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        outer = _find(module) if module else None
        return getattr(outer, name, None)


class _Lacking:
    """Replaces a function that torch does not have: calling it raises UnsupportedError."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, *_: object, **__: object) -> Any:
        raise _lacking(self.path)


def _needed(path: str) -> Any:
    """Return torch's attribute with a dotted name, else a function that raises UnsupportedError."""
    return _find(path) or _Lacking(path)


def _unless_lacking(function: Callable[P, R]) -> Callable[P, R]:
    """Raise UnsupportedError if `function` uses an attribute that does not exist."""

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

# Autograd's engine. Without these nothing can be averaged: there is no public hook at the end of a backward pass.

# Queue a function for the end of the current backward pass; dropped if the pass fails. 1.0.
call_after_backward: Callable[[Callable[[], None]], None] = _needed(
    "torch.autograd.Variable._execution_engine.queue_callback"
)

# The engine's id of this thread's current backward pass, else -1. Without it a pass that was interrupted, and a forward
# pass inside a backward pass (activation checkpoints), cannot be distinguished from others. 2.0.
current_backward: Callable[[], int] = _needed("torch._C._current_graph_task_id")

# Whether the current backward pass will reach a node; RuntimeError if it captures that leaf's gradient. Without it
# torch.autograd.grad() starts reductions, and buckets wait for unused parameters. 2.0.
will_be_reached: Callable[[Node], bool] = _needed("torch._C._will_engine_execute_node")

# The node whose hooks run. Without it, the nodes behind an output of a backward pass are unknown. 2.1.
current_node: Callable[[], Node | None] = _needed("torch._C._current_autograd_node")


def check_engine() -> None:
    """Raise UnsupportedError if a backward pass needs a missing name; warn if torch.compile does."""
    for each in (call_after_backward, current_backward, will_be_reached, current_node):
        if isinstance(each, _Lacking):
            each()
    if _not_skipped:
        warnings.warn(
            f"torch.compile also compiles ddp's own functions, which is slow: {_not_skipped[0]}", stacklevel=2
        )


@_unless_lacking
def gradient_hooks(parameter: Any) -> Any:
    """Return the ordered dict of post-accumulate-grad hooks, None if there never was one. 2.1.

    Without it, hooks that the user registers after wrapping run after those of the reducer.
    """
    return parameter._post_accumulate_grad_hooks


# Reference counts of tensors. Without these every gradient is copied into its bucket and out again.

_storage_owner_count = _find("torch._C._storage_Use_Count") if hasattr(torch.UntypedStorage, "_cdata") else None
_more_each_time = itertools.count()


def memory_owner_count(storage: torch.UntypedStorage) -> int:
    """Return the number of owners of a storage's memory, `storage` included; a new number each time if unknown. 2.1."""
    if _storage_owner_count is None:
        return next(_more_each_time)
    return int(_storage_owner_count(storage._cdata))


# The number of owners of a tensor besides its Python object; None if torch has no such count. 2.3.
tensor_owner_count = cast(
    "Callable[[torch.Tensor], int] | None", _storage_owner_count and getattr(torch.Tensor, "_use_count", None)
)


@_unless_lacking
def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place. Without it, changed buffers cannot be found. 0.4."""
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


def _add_each(to: Sequence[torch.Tensor], each: Sequence[torch.Tensor]) -> None:
    for tensor, other in zip(to, each, strict=True):
        tensor.add_(other)


# Adds many tensors to others with one call: (to, others). Without it each gradient costs a call. 2.0.
foreach_add: Callable[..., None] = _find("torch._foreach_add_") or _add_each


def _divide_each(tensors: Sequence[torch.Tensor], by: float) -> None:
    for tensor in tensors:
        tensor.div_(by)


# Divides many tensors, sparse ones too, with one call: (tensors, number). Without it each gradient costs a call. 1.6.
foreach_divide: Callable[..., None] = _find("torch._foreach_div_") or _divide_each


# The dicts that named_parameters() and the like walk: reading them costs a tenth of that. Without them the
# checks in each pass become slow. Since the first version.


@_unless_lacking
def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the parameters of a module itself, without its submodules'."""
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
    """Return the names that torch's DDP ignores. Without it, they would be averaged. 1.7."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def compiled_module(module: object) -> nn.Module | None:
    """Return the module inside a result of torch.compile, else None. 2.0."""
    inner = getattr(module, "_orig_mod", None)
    if inner is None and type(module).__name__ == "OptimizedModule":
        raise _lacking("OptimizedModule._orig_mod")
    return inner if isinstance(inner, nn.Module) else None


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside wrappers that prefix its keys: torch's, ddp's (one of these), torch.compile's."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif (inner := compiled_module(model)) is not None:
            model = inner
        else:
            return model


# torch.compile must skip this package's frames, as it skips torch's; the wrapped module is compiled. Without these it
# breaks its graphs elsewhere and traces this package, slowly.


_not_skipped: list[UnsupportedError] = []  # the reason, if skip_package failed


def skip_package(name: str) -> None:
    """Mark all functions of the imported modules of package `name`. Does not import torch._dynamo."""
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
    """Yield a function's code, and that of its inner functions."""
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
    """Run `call(optimizer)` after each `torch.amp.GradScaler.step`, which may skip the optimizer's own. 2.3.

    torch has no hook for this. It stays so for the rest of the process, so this must be called only once.
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


def device_of_scaler(scaler: torch.amp.GradScaler) -> str:
    """Return the kind of device on which a GradScaler keeps its scale. Without it, the CPU. 2.3."""
    return getattr(scaler, "_device", "cpu")


def in_compiled_autograd() -> bool:
    """Return whether compiled autograd runs or traces this backward pass. Without it, it would average nothing. 2.6."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(compiled, "in_compiled_autograd_region", False))


def swap_active_ddp_module(module: object) -> object:
    """Set the wrapper whose forward runs, for torch.compile to split graphs at buckets; return the last one. 1.13."""
    wrapper: Any = nn.parallel.DistributedDataParallel
    before, wrapper._active_ddp_module = getattr(wrapper, "_active_ddp_module", None), module
    return before


# Process groups.


@_unless_lacking
def default_store() -> Any:
    """Return the store of the default group. Without it a stall report has only this rank. 1.0."""
    return dist.distributed_c10d._get_default_store()


@_unless_lacking
def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return a group's backend for a device; raises RuntimeError without one. 2.0."""
    return group._get_backend(device)


def device_types_of(group: dist.ProcessGroup) -> Sequence[torch.device]:
    """Return the types of devices for which a group has backends. 2.0."""
    return getattr(group, "_device_types", ())


@_unless_lacking
def reset_group_numbers() -> None:
    """Give the next default group the name of the first one, as torch does when one is destroyed. 2.1.

    A group whose ranks failed to connect has used up a number. The name is part of the keys by which ranks find each
    other: without this, ranks that have tried before would wait at other keys for ever.
    """
    world: Any = dist.distributed_c10d._world
    if world.group_count:
        world.group_count = 0


def open_groups() -> list[Any]:
    """Return the groups of this process that torch has registered. 2.0."""
    return list(getattr(getattr(dist.distributed_c10d, "_world", None), "pg_map", ()))


def end_groups(groups: list[Any]) -> None:
    """Empty a list that has the last references to groups. Blocks for a second at most, if a thread can be started.

    The destructor of a gloo group waits for its threads. One of them may wait in a collective for a rank that is gone,
    though its connections are broken, until the group's timeout (gloo of torch 2.13). So a thread drops the references.
    """
    thread = threading.Thread(target=groups.clear, name="end of groups", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # at a process's limit, and in Python 3.12.0 to 3.12.2 at exit
        if is_interrupt(error):
            raise
        groups.clear()
    else:
        thread.join(_END_S)


def release_default_group() -> None:
    """Have torch's functions no longer keep the default group that was destroyed: its threads end with it. 1.8.

    Those of torch.distributed.nn.functional have as their default the group of the moment at which it was imported,
    which may be the first step of an optimizer.
    """
    module = sys.modules.get("torch.distributed.nn.functional")
    for function in vars(module).values() if module is not None else ():
        if isinstance(function, FunctionType) and function.__defaults__:
            function.__defaults__ = tuple(
                None if isinstance(each, dist.ProcessGroup) else each for each in function.__defaults__
            )


def abort_on_devices() -> None:
    """Abort the collectives of this process's groups on devices, from any thread; they are unusable then. Blocks. 2.6.

    All within one NCCL group call, as in torch: one communicator may wait for the kernels of another. Groups and calls
    unknown to torch are not aborted: the process then stays blocked, and is ended.
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
    """Return the timeout of a group's collectives on a device, None if unknown; then defaults apply. 2.0."""
    timeout: timedelta | None = _known(lambda: backend_of(group, device).options._timeout, None)
    return timeout


def is_message(work: Any) -> bool:
    """Return whether `work` is that of a send or a receive, and no collective; True if unknown. 2.0."""
    kind = _find("torch._C._distributed_c10d.OpType")
    return bool(_known(lambda: work._get_op_type() in map(int, (kind.SEND, kind.RECV, kind.RECVANYSOURCE)), True))


def timeouts_on_devices() -> dict[str, float]:
    """Return the timeouts, in seconds, of this process's groups that communicate on devices directly, by name. 2.1."""
    found: dict[str, float] = {}
    for group in list(getattr(getattr(dist.distributed_c10d, "_world", None), "pg_map", {})):
        for device in device_types_of(group):
            timeout = None if device.type == "cpu" or is_by_gloo(group, device) else timeout_of(group, device)
            if timeout is not None:
                found[group.group_name] = timeout.total_seconds()
    return found


def device_recorder() -> Callable[[bool, bool], bytes] | None:
    """Return the function that dumps NCCL's flight recorder as JSON: with each collective or not, all or those pending.

    None if it records nothing, or torch has no NCCL. 2.5.
    """
    size = next((os.environ[name] for name in _RECORDER_SIZES if name in os.environ), "")
    found: Callable[[bool, bool], bytes] | None = _find("torch._C._distributed_c10d._dump_nccl_trace_json")
    return None if size.strip() == "0" else found


_RECORDER_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


@contextlib.contextmanager
def not_split_off() -> Iterator[None]:
    """Allow some ranks to make a group by themselves, inside. 2.3.

    A default group that is bound to its device is split instead, which all of its ranks must do together.
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
    """Return whether a group uses gloo on a device, also under torch's wrapper that checks calls. 2.0.

    Without it, small sums use gloo's ring, and waits for gloo's collectives on a device have no timeout.
    """
    return str(_known(lambda: backend_of(group, device).name(), "")) == "gloo"


def adds_in_fixed_order(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether a backend declares that its sums do not depend on the sizes of tensors. 2.0."""
    return bool(_known(lambda: backend_of(group, device).adds_in_fixed_order, False))


def _known(ask: Callable[[], Any], otherwise: Any) -> Any:
    """Return what a backend answers, or `otherwise` if there is none for a device, or without this attribute."""
    try:
        return ask()
    except (AttributeError, RuntimeError) as error:
        if is_interrupt(error):
            raise
        return otherwise


def is_gloo_on_host(group: dist.ProcessGroup) -> bool:
    """Return whether a group uses gloo in host memory."""
    return is_by_gloo(group, torch.device("cpu"))


def is_in_stream_order(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether collectives of `group` run in the streams of `device`, in order: futures are complete at once.

    Gloo uses its own threads, for device memory as for host memory.
    """
    return device.type != "cpu" and not is_by_gloo(group, device)


@_unless_lacking
def host_group(group: dist.ProcessGroup, store: Any, timeout: timedelta) -> dist.ProcessGroup:
    """Connect a gloo group of the same ranks, in the same order, for host memory. Blocks. 2.6.

    torch does not register it: it ends with its last reference. Without this, the status of models on a device cannot
    be sent through the host if their group has NCCL alone.
    """
    made = dist.ProcessGroup(store, group.rank(), group.size())
    set_default, register = made._set_default_backend, made._register_backend  # both are there: now connect
    backend = dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout=timeout)
    set_default(dist.ProcessGroup.BackendType.GLOO)
    register(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return made


@_unless_lacking
def device_group(options: Any, device: str, backend: str, backend_options: Any) -> dist.ProcessGroup:
    """Make one of torch's groups for one type of device, in addition to a group of the same ranks written in Python.

    `options` are those that torch passed to the maker of that group. Does not wait for others, unless the backend does.
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
    """Start gathering flat tensors of equal size into one. Without it: a list of tensors, and one more copy. 1.8."""
    work: dist.Work = group._allgather_base(into, mine)
    return work


# The class of futures that collectives return, a base class of torch.futures.Future. Without it, their futures cannot
# be distinguished from a hook's mistake. 1.6.
AnyFuture = _find("torch._C.Future") or torch.futures.Future


@_unless_lacking
def device_index(device: int | torch.device) -> int:
    """Return the index of a device given in any form. 1.0."""
    return int(torch._utils._get_device_index(device, True))


def is_in_join(joinable: Any) -> bool:
    """Return whether a Joinable is inside an enabled Join context. 1.10."""
    return bool(getattr(getattr(joinable, "_join_config", None), "enable", False))


def check_join(joinable: Any) -> None:
    """Raise UnsupportedError if `is_in_join` cannot work: join() would hang."""
    if not hasattr(getattr(joinable, "_join_config", None), "enable"):
        raise _lacking("Joinable._join_config.enable")


class BoundedJoin(Join):
    """torch's Join context for one Joinable, with a timeout on its waits.

    A rank that has joined repeatedly counts those that have not. 1.10; else it waits as torch does.
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
    """Return those of torch's `_apply_optimizer_in_backward()`. Without it, they step before the average. 2.0."""
    return getattr(parameter, "_in_backward_optimizers", ())


def state_dict_hooks(optimizer: Any, when: str) -> list[Callable[..., Any]]:
    """Return an optimizer's hooks; `when` is "state_dict_pre", "load_state_dict_post" etc. Else not called. 2.3."""
    name = f"_optimizer_{when}_hooks"
    if not hasattr(optimizer, name):
        raise _lacking(f"Optimizer.{name}")
    return list(getattr(optimizer, name).values())


def torchs_comm_hooks(wrapper: Any) -> Sequence[object]:
    """Return the hooks that were registered with torch's own DistributedDataParallel; empty if unknown. 2.0."""
    return getattr(wrapper, "_comm_hooks", ())


def mark_as_stepped(optimizer: Any) -> None:
    """Mark `optimizer` as stepped for learning rate schedulers, which would warn otherwise. 2.4."""
    optimizer._opt_called = True


# The classes in the metadata of a distributed checkpoint. If a newer torch adds one, such folders are refused with its
# name. 2.0.
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
