"""Check the arguments of DistributedDataParallel before anything communicates."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from ddp.comm.objects import member_group
from ddp.data_parallel.buckets.bucket_plan import BucketLimits
from ddp.data_parallel.planning.bucket_planner import Replanning
from ddp.errors import ArgumentError, DdpError, UnsupportedError
from ddp.torch_internals import device_index

_MB = 1 << 20
_DEFAULT_CAP_MB = 25.0
# Compressors work on one bucket while others are in transit; measured: best at 2 to 4 MB on 1 Gbit/s.
_COMPRESSED_CAP_MB = 4.0
_FIRST_CAP_BYTES = 1 * _MB
# Measured with gloo over loopback: a collective takes about 0.6 ms of CPU time, as much as copying 4 MB.
_OWN_BYTES_ON_CPU = 4 * _MB

_MEANINGLESS: Mapping[str, tuple[object, str]] = {
    "dim": (0, "batches are not split among devices inside a process"),
    "check_reduction": (False, "reduction is always complete when backward returns"),
    "skip_all_reduce_unused_params": (False, "unused parameters are always handled exactly"),
    "delay_all_reduce_named_params": (None, "these parameters are reduced in buckets with all others"),
    "param_to_hook_all_reduce": (None, "every gradient is reduced as soon as its bucket is complete"),
    "batched_grad_copy": (False, "small gradients are always copied with one call a bucket"),
    "lazy_bucket_allocation": (False, "buckets keep their memory between steps"),
}


def check_torchs_arguments(given: Mapping[str, object]) -> None:
    """Warn about arguments that are accepted for compatibility with torch's class but have no effect.

    Also warn about `broadcast_buffers`, as torch 2.13 does. Raises UnsupportedError for `mixed_precision`.
    """
    if given["mixed_precision"] is not None:
        raise UnsupportedError(
            "DistributedDataParallel(mixed_precision=...) is not supported: use torch.autocast in forward, and "
            'compression="bf16" to send less'
        )
    for name, (default, reason) in _MEANINGLESS.items():
        if given[name] is not default and given[name] != default:
            warnings.warn(f"DistributedDataParallel({name}=...) has no effect: {reason}", stacklevel=3)
    if given["broadcast_buffers"] is not None:
        why = (
            "use forward_sync_buffers, which says the same of forward passes; broadcast_buffers=False also keeps "
            "buffers out of the first broadcast"
        )
        if given["forward_sync_buffers"] is not None:
            why = "its value is ignored where forward_sync_buffers is given"
        warnings.warn(f"`broadcast_buffers` is deprecated in torch: {why}", FutureWarning, stacklevel=3)


def check_initialized(parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Raise ArgumentError for parameters that have no values yet."""
    for name, parameter in parameters:
        if parameter.is_meta:
            raise ArgumentError(
                f"parameter {name!r} is on the meta device: materialise the module (to_empty(), load its weights) "
                "before it is wrapped"
            )
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ArgumentError(
                f"parameter {name!r} has no shape yet (uninitialized): run a dummy forward pass of the module "
                "before it is wrapped"
            )


def checked_device(parameters: Sequence[tuple[str, nn.Parameter]]) -> torch.device:
    """Return the device of the first parameter, after checking all: same device type, initialized, some trainable.

    Raises UnsupportedError for parameters that are split over the ranks (tensor parallel, FSDP2), ArgumentError or
    DdpError for others that cannot be averaged.
    """
    tensor = sys.modules.get("torch.distributed.tensor")  # imported already if there is a DTensor
    for name, parameter in parameters:
        if tensor is not None and isinstance(parameter, tensor.DTensor):
            raise UnsupportedError(
                f"parameter {name!r} is a DTensor: the ranks hold parts of it {parameter.placements}, and only whole "
                "parameters are averaged here. Wrap the module without fully_shard() or parallelize_module(), or leave "
                'this wrapper out: fully_shard(module, mesh=mesh["dp"]) averages by itself, after parallelize_module() '
                "as well, and with a two-dimensional mesh among replicas of shards"
            )
    if not any(parameter.requires_grad for _, parameter in parameters):
        raise DdpError(
            "no parameter of the module requires a gradient, so there is nothing to reduce and DistributedDataParallel "
            "is not needed: use the module as it is"
        )
    first_name, first = parameters[0]
    for name, parameter in parameters:
        if parameter.device.type != first.device.type:
            raise ArgumentError(
                f"parameter {name!r} is on {parameter.device}, but {first_name!r} on {first.device}: "
                "the module must be on the same type of devices"
            )
    check_initialized(parameters)
    return first.device


Deterministic = bool | Literal["device"] | None


def checked_deterministic(deterministic: Deterministic, device: torch.device, compression: object) -> bool | str | None:
    """Return the argument, after checking that it is possible: raises UnsupportedError or ArgumentError.

    With "device", prepare the process for a module on a device, and return the device's name, which must be the same on
    all ranks; on the CPU, return True.
    """
    if deterministic not in (True, False, None, "device"):
        raise ArgumentError(f"deterministic={deterministic!r}: give True, False or 'device'")
    if deterministic is True and device.type != "cpu":
        raise UnsupportedError(
            f"deterministic=True for a module on {device}: it is for modules on the CPU; deterministic='device' makes "
            "the operators deterministic, and not the order of NCCL's sums"
        )
    if deterministic and compression is not None:
        raise ArgumentError(
            f"deterministic={deterministic!r} and compression, which rounds on each rank: leave one of them out"
        )
    if deterministic != "device":
        return deterministic
    return True if device.type == "cpu" else _made_deterministic(device)


def _made_deterministic(device: torch.device) -> str:
    """Let this process use deterministic operators only; return the device's name."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # it picks algorithms by their time
    return f"on {torch.cuda.get_device_name(device) if device.type == 'cuda' else device.type}"


def checked_group(group: dist.ProcessGroup | None, device_mesh: Any) -> dist.ProcessGroup:
    """Return the group to average over. Raises NotInitializedError, or ArgumentError if this rank is not in it."""
    if device_mesh is not None:
        if group is not None:
            raise ArgumentError("Cannot specify both process_group and device_mesh arguments: give one of them")
        if device_mesh.ndim != 1:
            raise ArgumentError(
                f"Only 1D device mesh is supported, but got {device_mesh}: give the slice whose ranks are "
                'replicas of each other, such as mesh["dp"]'
            )
        group = device_mesh.get_group(mesh_dim=0)
    return member_group(group, "DistributedDataParallel")


def checked_device_ids(
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
    device: torch.device,
) -> list[int] | None:
    """Return the index of the one device that inputs are moved to, in a list, or None."""
    if not device_ids:
        if output_device is not None:
            raise ArgumentError(
                f"output_device={output_device} without device_ids: leave it out, outputs stay where they are made"
            )
        return None
    if device.type == "cpu" or len(device_ids) != 1:
        raise ArgumentError(
            f"device_ids={list(device_ids)} for a module on {device}: device_ids can only be None or contain a single "
            "element, that of the module's CUDA device (always None on the CPU and for several devices)"
        )
    index = device_index(device_ids[0])
    if output_device is not None and device_index(output_device) != index:
        raise ArgumentError(
            f"output_device={output_device}, but device_ids={list(device_ids)}: outputs stay on the module's device"
        )
    return [index]


def bucket_limits(
    cap_mb: float | Literal["auto"] | None,
    caps_mb: Sequence[float] | None,
    device: torch.device,
    *,
    is_compressed: bool,
) -> BucketLimits:
    """Return the sizes of buckets as in torch: a small first one by default, else one size, or the given ones first.

    "auto" starts from the default. Raises ArgumentError.
    """
    if cap_mb == "auto":
        if caps_mb:
            raise ArgumentError('bucket_cap_mb="auto" and bucket_cap_mb_list: leave one of them out')
        cap_mb = None
    elif isinstance(cap_mb, str):
        raise ArgumentError(f'bucket_cap_mb={cap_mb!r}; it is a number of MiB, or "auto"')
    for value in (*(caps_mb or ()), *(() if cap_mb is None else (cap_mb,))):
        if value <= 0:
            name = "bucket_cap_mb" if caps_mb is None else "bucket_cap_mb_list"
            raise ArgumentError(f"{name} has {value}; it must be more than 0 (default {_DEFAULT_CAP_MB:g})")
    first = tuple(max(1, int(value * _MB)) for value in caps_mb or ())
    if not first and cap_mb is None:
        first = (_FIRST_CAP_BYTES,)
    default_mb = _COMPRESSED_CAP_MB if is_compressed else _DEFAULT_CAP_MB
    largest_mb = max(caps_mb) if caps_mb else default_mb if cap_mb is None else cap_mb
    cap_bytes = max(1, int(largest_mb * _MB))
    own_bytes = _OWN_BYTES_ON_CPU if device.type == "cpu" else cap_bytes
    return BucketLimits(cap_bytes, first, min(own_bytes, cap_bytes))


def replanning(
    measure: bool | None,
    cap_mb: float | Literal["auto"] | None,
    caps_mb: Sequence[float] | None,
    compression: object,
    device: torch.device,
    *,
    init_sync: bool,
) -> Replanning | None:
    """Return whether measurement may change the buckets; None if nothing is measured, as by default on a device.

    Raises ArgumentError if arguments contradict each other, UnsupportedError if `device` does not allow "auto".
    """
    if cap_mb == "auto":
        if measure is False:
            raise ArgumentError('measure=False, but bucket_cap_mb="auto" decides by measurement: leave one of them out')
        if device.type != "cpu":
            raise UnsupportedError(
                f'bucket_cap_mb="auto" on {device}: buckets are chosen by measurement on the CPU alone. Give a size'
            )
        return "asked"
    is_wanted = device.type == "cpu" if measure is None else measure
    if not is_wanted or not init_sync or cap_mb is not None or caps_mb:
        return None
    return "exact" if compression is None and device.type == "cpu" else "no"
