"""Chooses the device of a rank, and the backend that all ranks agree on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, Store

from ddp.comm.shm.agreement import agree
from ddp.comm.shm.backend import NAME as SHM
from ddp.comm.shm.backend import sharing
from ddp.environment import Placement
from ddp.errors import ArgumentError, LaunchEnvironmentError
from ddp.generation.device_collectives import HANDLING, leaves_errors
from ddp.monitoring.stall_text import ranks_text

_DEVICE_BACKENDS = {"cuda": "nccl", "xpu": "xccl"}
_CHOOSERS = {
    "cuda": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK",),
}


def find_accelerator() -> str | None:
    """Return the type of usable device that has its own collectives, else None; ROCm's is cuda."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found is not None and found.type in _DEVICE_BACKENDS else None


def choose_device(placement: Placement, backend: str | None, *, may_share: bool = False) -> torch.device:
    """Choose this rank's device and make it current; with `may_share`, ranks beyond the devices get the first.

    Raises ArgumentError if the backend needs a device and there is none, LaunchEnvironmentError if devices are too few.
    """
    accelerator = find_accelerator()
    for kind, its_backend in _DEVICE_BACKENDS.items():
        if backend is not None and its_backend in backend and kind != accelerator:
            raise ArgumentError(
                f"backend={backend!r} needs {kind.upper()}, but torch finds no usable device; "
                "use backend='gloo' on the CPU"
            )
    if accelerator is None or not (backend is None or {accelerator, _DEVICE_BACKENDS[accelerator]} & words_of(backend)):
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    # If a launcher shows each worker only its own devices, the first one has index 0.
    is_first = count == 1 or owns_devices() or (may_share and placement.local_rank >= count)
    index = 0 if is_first else placement.local_rank
    if index >= count:
        given = _chosen_devices(accelerator) or [f"{_CHOOSERS[accelerator][0]}=not set"]
        raise LaunchEnvironmentError(
            f"rank {placement.rank} has local rank {placement.local_rank}, but {count} {accelerator.upper()} devices "
            f"are visible here ({', '.join(given)}): start at most {count} "
            "workers on this host, set LOCAL_RANK if RANK was set by hand, or train on the CPU with ddp.init('gloo')"
        )
    torch.accelerator.set_device_index(index)
    return torch.device(accelerator, index)


def owns_devices() -> bool:
    """Return whether dtrain shows this worker its own devices alone (`--gpus-per-proc`).

    DTRAIN_OWN_GPUS is the run's id, since another launcher that this worker starts passes the variable on.
    """
    run = os.environ.get("DTRAIN_OWN_GPUS")
    return run is not None and run == os.environ.get("TORCHELASTIC_RUN_ID")


def words_of(backend: str) -> set[str]:
    return set(backend.replace(",", ":").split(":"))


def _chosen_devices(accelerator: str) -> list[str]:
    """Return the set variables that restrict a worker to some of the devices, with their values."""
    return [f"{name}={os.environ[name]}" for name in _CHOOSERS[accelerator] if os.environ.get(name)]


def agree_on_backend(
    placement: Placement, backend: str | None, device: torch.device, store: Store, timeout: timedelta
) -> tuple[str, bool]:
    """Return `backend`, or choose it for `device`: on the CPU shm, if ranks share memory, else gloo. Blocks.

    Also return whether all ranks connect their devices at once. Raises LaunchEnvironmentError on all ranks if one
    without a given backend would choose another than the rest.
    """
    rank, size = placement.rank, placement.world_size
    at_once = True
    if size > 1:
        mine = [backend, device.type, device.type == "cuda" and leaves_errors(), _has_one_device(placement, device)]
        problem, at_once = agree(
            PrefixStore("ddp/devices", store),
            rank,
            size,
            mine,
            lambda all_: [[difference([each[:3] for each in all_]), all(each[3] for each in all_)]] * size,
            timeout.total_seconds(),
        )
        if problem:
            raise LaunchEnvironmentError(problem)
    if backend is None and device.type != "cpu":
        backend = f"cpu:gloo,{device.type}:{_DEVICE_BACKENDS[device.type]}"
    elif backend is None:
        hosts = sharing(PrefixStore("ddp/sharing", store), rank, size, timeout) if size > 1 else []
        backend = SHM if sum(map(len, hosts)) == size and len(hosts) < size else "gloo"
    has_its_own = device.type != "cpu" and _DEVICE_BACKENDS[device.type] in words_of(backend)
    return backend, at_once and size > 1 and has_its_own


def _has_one_device(placement: Placement, device: torch.device) -> bool:
    """Return whether this rank uses one device, which no other uses; else the group may not be bound to it.

    NCCL refuses ranks that share a device. If several ranks of a host see one device each, they may share it, whatever
    chose it: such ranks may still use the group for host memory. A rank with several devices of its own may have a
    model on all of them.
    """
    if device.type == "cpu":
        return True
    count = torch.accelerator.device_count()
    return not (count == 1 and placement.local_world_size > 1) and not (count > 1 and owns_devices())


def difference(asked: Sequence[tuple[str | None, str, bool]]) -> str | None:
    """Return a message if the ranks' backends do not fit together, else None.

    `asked` has the ranks' requested backends, devices, and whether a failed collective is left to ddp.
    """
    ranks: dict[str, list[int]] = {}
    for rank, (backend, device, _) in enumerate(asked):
        ranks.setdefault(f"no backend and found {device}" if backend is None else f"{backend!r}", []).append(rank)
    if len(ranks) == 1 or all(backend is not None for backend, *_ in asked):
        leaving = [rank for rank, (_, device, leaves) in enumerate(asked) if leaves]
        others = [rank for rank, (_, device, leaves) in enumerate(asked) if device == "cuda" and not leaves]
        if not leaving or not others:
            return None
        return (
            f"{HANDLING} is 0 on rank {leaving[0]} and not on rank {others[0]}: set it to the same value on all "
            "hosts, since a failed collective would end some ranks only"
        )
    found = "; ".join(f"{what} ({ranks_text(those)})" for what, those in ranks.items())
    return (
        f"ranks would use different backends: they were given {found}. Give all the same backend (ddp.init, "
        "DTRAIN_BACKEND), and see that torch finds the same kind of device on all hosts "
        "(torch.accelerator.is_available())"
    )
