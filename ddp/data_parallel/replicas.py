"""Compare the replicas of a model between the ranks, on request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from ddp.comm.fingerprint import Digest, fingerprints
from ddp.comm.objects import gather_values
from ddp.data_parallel.checksum import drift_among
from ddp.errors import ArgumentError
from ddp.monitoring.interrupts import is_interrupt
from ddp.monitoring.stall_report import waiting_for_peers
from ddp.torch_internals import compiled_module


def check_replicas(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, buffers: bool = False) -> None:
    """Raise DriftError on every rank unless all ranks hold the same bits in every parameter of `model`.

    With `optimizer`, its states and settings are compared too; with `buffers`, also the model's buffers, which may
    legitimately differ between two forward passes. For a model in DistributedDataParallel, ours or torch's, the ranks
    of its group compare everything that it does not ignore; for another module, all ranks of the world do.

    Every rank must call it at the same place; blocks. It reads everything once and sends a few bytes; one number per
    tensor follows only if replicas differ. The error names the first tensor that differs and the ranks whose value is
    not that of most. Raises ArgumentError on every rank if one cannot read its own, CollectiveError if a rank is gone.
    Without a process group nothing happens.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    wrapper = replica_of(model)
    group = dist.group.WORLD if wrapper is None else wrapper.process_group
    assert group is not None
    if group.size() == 1:
        return
    problem: Exception | None = None
    tensors: dict[str, torch.Tensor] = {}
    mine, reason = 0, ""
    try:
        tensors = dict(_tensors_of(model, optimizer, buffers=buffers))
        mine = Digest(tensors.values()).start()()
    except Exception as error:  # the other ranks must not wait for this one
        if is_interrupt(error):
            raise
        problem, reason = error, f"{type(error).__name__}: {error}"
    with waiting_for_peers("comparison of the replicas", group):
        every = gather_values((mine, len(tensors), reason), group=group)
        reasons = [f"rank {rank}: {text}" for rank, (_, _, text) in enumerate(every) if text]
        if reasons:
            raise ArgumentError(f"check_replicas: {'; '.join(reasons)}") from problem
        if len({(digest, count) for digest, count, _ in every}) == 1:
            return
        every = gather_values(fingerprints(tensors), group=group)
    if (drift := drift_among(every)) is not None:
        raise drift


def replica_of(model: nn.Module | None) -> Any:
    """Return the wrapper that `model` is, or that torch.compile has wrapped, ours or torch's; None without one."""
    while model is not None and not isinstance(model, TorchDistributedDataParallel):
        model = compiled_module(model)
    return model


def weights_of(wrapper: Any) -> dict[str, nn.Parameter]:
    """Return the parameters that the ranks of a wrapper's group have in common, by name."""
    ignored = wrapper.parameters_to_ignore
    return {name: each for name, each in wrapper.module.named_parameters() if name not in ignored}


def _tensors_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, *, buffers: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    wrapper = replica_of(model)
    module: nn.Module = model if wrapper is None else wrapper.module
    ignored = () if wrapper is None else wrapper.parameters_to_ignore
    for name, tensor in module.named_parameters() if wrapper is None else weights_of(wrapper).items():
        if type(tensor).__name__ == "DTensor" or type(tensor.data).__name__ == "DTensor":
            raise ArgumentError(f"{name!r} is a DTensor, split over the ranks: there is nothing to compare")
        yield name, tensor
    if buffers:
        yield from ((f"buffer {name}", buffer) for name, buffer in module.named_buffers() if name not in ignored)
    if optimizer is None:
        return
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for number, settings in enumerate(optimizer.param_groups):
        for key, value in settings.items():
            if key != "params":
                yield from _numbers(f"{key} of the optimizer's group {number}", value)
        for at, parameter in enumerate(settings["params"]):
            of = names.get(id(parameter), f"parameter {at} of the optimizer's group {number}")
            for key, value in optimizer.state.get(parameter, {}).items():
                yield from _numbers(f"{key} of {of}", value)


def _numbers(name: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the comparable values of a state or setting: tensors and numbers."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, int | float):
        yield name, torch.tensor(value, dtype=torch.float64, device="cpu")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _numbers(f"{name}[{index}]", item)
