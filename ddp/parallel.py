"""The wrapper that a user sees: checks its arguments, equalises the replicas, runs forward and tells the reducer."""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from ddp.broadcast import BufferSync, broadcast_tensors, buffer_collector
from ddp.buckets import BucketLimits
from ddp.errors import ArgumentError, DdpError, NotInitializedError, UnsupportedError
from ddp.layout import check_same_layout, describe
from ddp.progress import count_step_after
from ddp.reducer import Reducer
from ddp.world import before_leaving

__all__ = ["DistributedDataParallel"]

_MB = 1 << 20
_DEFAULT_CAP_MB = 25.0
_FIRST_CAP_BYTES = 1 * _MB
# Measured with gloo over loopback: a collective takes some 0.6 ms of CPU time, as much as copying 4 MB.
_OWN_BYTES_ON_CPU = 4 * _MB


class DistributedDataParallel(nn.Module):
    """Wrap `module` so that its gradients are the averages over the ranks of the group.

    Every rank of the group must construct it, with a module of the same layout; construction blocks until
    all do, compares the layouts (LayoutMismatchError names the first difference and the rank) and copies
    parameters and buffers of the group's rank 0 to the others. After that, the forward and backward passes
    that every rank makes leave the same averaged gradients in `.grad` on each, and an unmodified optimizer
    keeps the replicas equal. The gradient of a mean loss over equal shards is that of the mean loss over
    the whole batch.

    The arguments are those of `torch.nn.parallel.DistributedDataParallel`:

    - `device_ids`: at most one device, to which tensors among the inputs are moved. None: they are there
      already.
    - `broadcast_buffers` (`forward_sync_buffers` in newer torch): every forward after a reduction starts
      with rank 0's buffers.
    - `init_sync=False`: skip the comparison and the first broadcast; the caller vouches for equality.
    - `process_group`: the ranks that average with each other; default: all.
    - `bucket_cap_mb`: size in MiB at which a bucket is closed; the first is closed at 1 MiB so that
      communication starts early.
    - `gradient_as_bucket_view`: let `.grad` always be a view of its bucket, even where it was another tensor
      before, and use the bucket again although an older gradient may have been kept elsewhere. By default
      `.grad` is a view only where that cannot be noticed, and what is kept of a gradient does not change.
    - `find_unused_parameters`, `static_graph`: accepted, not needed. Parameters that a rank does not use
      are always handled exactly: one that some rank used is averaged with zeros for the others, one that
      none used keeps its old gradient.

    A world of one communicates nothing. What torch's class can do and this one cannot raises
    UnsupportedError.

    The method is that of Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel
    Training", VLDB 13(12).
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: list[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: object = None,
        param_to_hook_all_reduce: object = None,
        mixed_precision: object = None,
        device_mesh: object = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: object = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        super().__init__()
        _refuse(
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
            mixed_precision=mixed_precision,
            device_mesh=device_mesh,
            bucket_cap_mb_list=bucket_cap_mb_list,
        )
        _warn_of_meaningless(dim, check_reduction, skip_all_reduce_unused_params)
        _check_module(module)
        self.module = module
        self.process_group = _member_group(process_group)
        self.parameters_to_ignore = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        parameters = [(n, p) for n, p in module.named_parameters() if n not in self.parameters_to_ignore]
        self.device = _single_device_type(parameters)
        self.device_ids = _checked_device_ids(device_ids, output_device, self.device)
        self.broadcast_buffers = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self._reducer: Reducer | None = None
        self._buffer_sync: BufferSync | None = None
        limits = _limits(bucket_cap_mb, self.device)
        if self.process_group.size() > 1:
            if init_sync:
                # As in torch, broadcast_buffers=False keeps buffers out of the first broadcast too,
                # forward_sync_buffers=False does not.
                self._equalise(parameters, limits, with_buffers=broadcast_buffers or forward_sync_buffers is not None)
            self._attach(parameters, limits)

    def _equalise(
        self, parameters: Sequence[tuple[str, nn.Parameter]], limits: BucketLimits, *, with_buffers: bool
    ) -> None:
        """Compare this rank's module with those of the others, then make its values those of rank 0."""
        buffers = [(n, b) for n, b in self.module.named_buffers() if n not in self.parameters_to_ignore]
        settings = {
            "bucket sizes": dataclasses.astuple(limits),
            "broadcast_buffers": self.broadcast_buffers,
            "ignored names": sorted(self.parameters_to_ignore),
        }
        check_same_layout(self.process_group, describe(settings, parameters, buffers), self.device)
        shared = [tensor for _, tensor in (*parameters, *(buffers if with_buffers else ()))]
        broadcast_tensors(self.process_group, shared)

    def _attach(self, parameters: Sequence[tuple[str, nn.Parameter]], limits: BucketLimits) -> None:
        self._reducer = Reducer(
            self.process_group,
            parameters,
            limits,
            as_views=self.gradient_as_bucket_view,
        )
        if self.broadcast_buffers:
            self._buffer_sync = BufferSync(self.process_group, buffer_collector(self.module, self.parameters_to_ignore))
        # The hooks keep the reducer alive as long as the parameters live, which may outlive this wrapper.
        weakref.finalize(self, _remove, self._reducer.handles)
        before_leaving(self, DistributedDataParallel._let_go)

    def _let_go(self) -> None:
        """Drop the process group and everything that communicates; the module itself stays usable."""
        if self._reducer is not None:
            _remove(self._reducer.handles)
        self._reducer = self._buffer_sync = None
        del self.process_group

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the wrapped module. Every rank must call it equally often: the first after a reduction copies buffers."""
        if self.device_ids:
            inputs, kwargs = _moved((inputs, kwargs), torch.device(self.device.type, self.device_ids[0]))
        reducer = self._reducer
        if reducer is None:
            output = self.module(*inputs, **kwargs)
            if self.require_backward_grad_sync:
                count_step_after(_tensors_in(output))
            return output
        if self._buffer_sync is not None and self.require_forward_param_sync:
            self._buffer_sync.run()
        output = self.module(*inputs, **kwargs)
        has_grad = torch.is_grad_enabled()
        is_syncing = has_grad and self.require_backward_grad_sync
        if has_grad:
            reducer.prepare(_tensors_in(output), is_syncing=is_syncing)
        self.require_forward_param_sync = is_syncing
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes of forwards made inside only accumulate gradients on this rank.

        The first backward pass of a forward made outside reduces the accumulated sum. Every rank must use
        it in the same steps.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def join(self, *_: object, **__: object) -> NoReturn:
        """Not supported yet: give every rank the same number of batches, as DistributedSampler does."""
        raise UnsupportedError(
            "join() is not supported yet: give every rank the same number of batches (ddp.DistributedSampler does)"
        )

    def register_comm_hook(self, *_: object, **__: object) -> NoReturn:
        """Not supported yet."""
        raise UnsupportedError("register_comm_hook() is not supported yet: gradients travel in their own dtype")

    def __getstate__(self) -> NoReturn:
        raise UnsupportedError(
            "DistributedDataParallel cannot be pickled or copied yet: copy or save its .module, and wrap that again"
        )


def _refuse(**arguments: object) -> None:
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise UnsupportedError(f"DistributedDataParallel({', '.join(given)}=...) is not supported yet; leave it out")


def _warn_of_meaningless(dim: int, check_reduction: bool, skip_all_reduce_unused_params: bool) -> None:
    reasons = {
        "dim": dim != 0 and "batches are not split among devices inside a process",
        "check_reduction": check_reduction and "reduction is always complete when backward returns",
        "skip_all_reduce_unused_params": skip_all_reduce_unused_params
        and "unused parameters are always handled exactly",
    }
    for name, reason in reasons.items():
        if reason:
            warnings.warn(f"DistributedDataParallel({name}=...) has no effect: {reason}", stacklevel=3)


def _check_module(module: nn.Module) -> None:
    for name, submodule in module.named_modules():
        if getattr(submodule, "sparse", False) is True and isinstance(submodule, nn.Embedding | nn.EmbeddingBag):
            raise UnsupportedError(
                f"{name!r} is an embedding with sparse gradients, which are not supported yet: use sparse=False"
            )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ArgumentError(
                f"parameter {name!r} has no shape yet: run a forward pass of the module before it is wrapped"
            )
        if hasattr(parameter, "_in_backward_optimizers"):
            raise UnsupportedError(
                f"parameter {name!r} has an optimizer that steps in backward, which is not supported yet"
            )


def _member_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise NotInitializedError("there is no process group yet: call ddp.init() before DistributedDataParallel()")
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise ArgumentError(
            f"this rank ({dist.get_rank()}) is not a member of process_group: wrap the module only on its members"
        )
    return group


def _single_device_type(parameters: Sequence[tuple[str, nn.Parameter]]) -> torch.device:
    """The device of the first parameter; all must be of its type, and something must train."""
    if not any(parameter.requires_grad for _, parameter in parameters):
        raise DdpError(
            "no parameter of the module requires a gradient, so there is nothing to reduce: use the module as it is"
        )
    first_name, first = parameters[0]
    for name, parameter in parameters:
        if parameter.device.type != first.device.type:
            raise ArgumentError(
                f"parameter {name!r} is on {parameter.device}, but {first_name!r} on {first.device}: "
                "the module must be on devices of one type"
            )
    return first.device


def _checked_device_ids(
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
    device: torch.device,
) -> list[int] | None:
    if not device_ids:
        if output_device is not None:
            raise ArgumentError(
                f"output_device={output_device} without device_ids: leave it out, outputs stay where they are made"
            )
        return None
    if device.type == "cpu" or len(device_ids) != 1:
        raise ArgumentError(
            f"device_ids={list(device_ids)} for a module on {device}: "
            "one CUDA device, that of the module, or None (always None on the CPU and for several devices)"
        )
    index = torch._utils._get_device_index(device_ids[0], True)
    if output_device is not None and torch._utils._get_device_index(output_device, True) != index:
        raise ArgumentError(
            f"output_device={output_device}, but device_ids={list(device_ids)}: outputs stay on the module's device"
        )
    return [index]


def _limits(cap_mb: float | None, device: torch.device) -> BucketLimits:
    if cap_mb is not None and cap_mb <= 0:
        raise ArgumentError(f"bucket_cap_mb={cap_mb}; it must be more than 0 (default {_DEFAULT_CAP_MB:g})")
    cap_bytes = max(1, int((_DEFAULT_CAP_MB if cap_mb is None else cap_mb) * _MB))
    own_bytes = _OWN_BYTES_ON_CPU if device.type == "cpu" else cap_bytes
    return BucketLimits(cap_bytes, min(_FIRST_CAP_BYTES, cap_bytes), min(own_bytes, cap_bytes))


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in what a module returned, however nested."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _tensors_in(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors_in(getattr(value, field.name))


def _moved(value: Any, device: torch.device) -> Any:
    """`value` with its tensors on `device`."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), value)


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
