"""What this host has to hand out: GPUs by NVML, without ever starting CUDA, and processors.

Called by the agent on its own host. An inherited CUDA_VISIBLE_DEVICES (or HIP_VISIBLE_DEVICES) restricts the GPUs.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from launcher.errors import UsageError
from launcher.machine.cgroup import folders_of

__all__ = ["Gpus", "bus_ids", "cores", "cpu_limit", "divide", "find_gpus", "share"]


T = TypeVar("T")


@dataclass(frozen=True)
class Gpus:
    """GPU ids in the order in which workers get them: integers, `GPU-<uuid>`, `MIG-<uuid>`.

    `verified` is False where only the environment names them and no driver answered.
    """

    ids: tuple[str, ...] = ()
    variable: str = "CUDA_VISIBLE_DEVICES"
    verified: bool = False


def find_gpus(env: Mapping[str, str]) -> Gpus:
    """Return the GPUs that this process's children may use.

    Raises UsageError where the inherited list names a GPU that the driver does not know.
    """
    known = _ask_driver()
    variable = "CUDA_VISIBLE_DEVICES"
    if known is None and "HIP_VISIBLE_DEVICES" in env:
        variable = "HIP_VISIBLE_DEVICES"
    inherited = env.get(variable)
    if inherited is None:
        return Gpus(tuple(device.name for device in known or ()), variable, known is not None)
    wanted = tuple(name.strip() for name in inherited.split(",") if name.strip())
    if wanted in ((), ("-1",), ("NoDevFiles",)):
        return Gpus((), variable, known is not None)
    if known is None:
        return Gpus(wanted, variable, False)
    _check(wanted, known, f"{variable}={inherited}")
    return Gpus(wanted, variable, True)


def bus_ids(gpus: tuple[str, ...]) -> list[str]:
    """Return the PCI addresses of GPUs of `find_gpus`; empty where no driver tells."""
    known = _ask_driver() or []
    found = [_named(name, known) for name in gpus]
    return [devices[0].bus_id for devices in found if devices and devices[0].bus_id]


@dataclass(frozen=True)
class _Device:
    """A card, or a slice of one, as the driver lists it. `name` is handed out; the rest is the card's."""

    name: str
    index: int
    uuid: str
    bus_id: str = ""


def _check(wanted: tuple[str, ...], known: list[_Device], inherited: str) -> None:
    """Raise UsageError for what makes CUDA drop devices without a word: unknown, ambiguous and repeated names."""
    seen: set[str] = set()
    for name in wanted:
        found = [device.name for device in _named(name, known)]
        if not found:
            present = ", ".join(device.name for device in known) or "none"
            raise UsageError(f"{inherited} names GPU {name}, but this host has: {present}")
        if len(found) > 1:
            raise UsageError(f"{inherited}: {name} may be any of the GPUs {', '.join(found)}; write more of it")
        if found[0] in seen:
            raise UsageError(f"{inherited} names GPU {name} twice; CUDA would show none at all")
        seen.add(found[0])


def _named(name: str, known: list[_Device]) -> list[_Device]:
    """Return what an entry of the list may mean: a card by its number, a card or slice by the beginning of its UUID.

    A card that is cut into slices stands for its first slice, as in CUDA.
    """
    slices = [device for device in known if name.startswith("MIG-") and device.name.startswith(name)]
    cards: dict[int, _Device] = {}
    for device in known:
        if name == str(device.index) or device.uuid.startswith(name):
            cards.setdefault(device.index, device)
    return slices or list(cards.values())


def _ask_driver() -> list[_Device] | None:
    """Return every card or MIG slice, or None where there is no NVIDIA driver."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:  # no driver on this host; saves the import below, which costs 50 ms
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # a library without its driver
        return None
    try:
        return _list_devices()
    except pynvml.NVMLError:  # it cannot even count its cards
        return None
    finally:
        pynvml.nvmlShutdown()


def _list_devices() -> list[_Device]:
    import pynvml

    devices: list[_Device] = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            slices = _mig_slices(handle)
            uuid = _text(pynvml.nvmlDeviceGetUUID(handle))
        except pynvml.NVMLError:  # a card that fell off the bus: CUDA does not count it either
            continue
        try:
            bus_id = _text(pynvml.nvmlDeviceGetPciInfo(handle).busId)
        except pynvml.NVMLError:
            bus_id = ""
        devices += [_Device(name, index, uuid, bus_id) for name in slices or [str(index)]]
    return devices


def _mig_slices(handle: object) -> list[str]:
    import pynvml

    try:
        if not pynvml.nvmlDeviceGetMigMode(handle)[0]:
            return []
        count = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except (pynvml.NVMLError, AttributeError):  # a card or driver without MIG
        return []
    slices = []
    for index in range(count):
        try:
            mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            slices.append(_text(pynvml.nvmlDeviceGetUUID(mig)))
        except pynvml.NVMLError:  # no slice in this place
            continue
    return slices


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def cores() -> tuple[int, ...]:
    """Return the processors that this process may run on."""
    return tuple(sorted(os.sched_getaffinity(0)))


def cpu_limit(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Return how many processors may be busy at a time: the affinity, or the cgroups' quota if that is less."""
    limit = float(len(os.sched_getaffinity(0)))
    for folder in folders_of("cpu", root, membership):
        quota, period = _quota(folder)
        if quota > 0 and period > 0:
            limit = min(limit, quota / period)
    return max(1, math.floor(limit))


def _quota(folder: Path) -> tuple[float, float]:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
            return (0.0 if quota == "max" else float(quota)), float(period)
        if (folder / "cpu.cfs_quota_us").exists():
            return float((folder / "cpu.cfs_quota_us").read_text()), float((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):  # not readable from inside this container
        return 0.0, 0.0
    return 0.0, 0.0


def share(things: tuple[T, ...], part: int, parts: int) -> tuple[T, ...]:
    """Return the `part`-th of `parts` contiguous shares; the first ones are larger where it does not divide.

    >>> [share(("0", "1", "2"), part, 2) for part in range(2)]
    [('0', '1'), ('2',)]
    """
    size, more = divmod(len(things), parts)
    start = part * size + min(part, more)
    return things[start : start + size + (part < more)]


def divide(cores: tuple[int, ...], limit: int, part: int, parts: int) -> tuple[tuple[int, ...], int]:
    """Return the processors of the `part`-th of `parts` simulated hosts, and how many of them may be busy at a time.

    With fewer processors than hosts, all hosts share all of them.
    """
    own = share(cores, part, parts) or cores
    return own, min(max(1, limit // parts), len(own))
