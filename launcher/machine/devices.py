"""What this host has to hand out: GPUs, without ever starting their runtime, and processors.

Called by the agent on its own host. A list of GPUs that is inherited (CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES,
ROCR_VISIBLE_DEVICES, ZE_AFFINITY_MASK) restricts them. One table, VENDORS, has what differs between kinds of GPUs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from launcher.frozen import dataclass
from launcher.machine import amd, intel, nvidia
from launcher.machine.card import Card, listed, select
from launcher.machine.cgroup import folders_of
from launcher.machine.packages import torch_build

__all__ = [
    "VENDORS", "Gpus", "Vendor", "by_torch", "cores", "cpu_limit", "divide", "find_gpus", "share", "value_for",
    "vendor_named",
]  # fmt: skip


T = TypeVar("T")


@dataclass(frozen=True)
class Commands:
    """What to type: to list the GPUs, to see who uses one, for one whose memory has errors, to read what befell one.

    Where the tool counts as the runtime does, with an {index}.
    """

    list: str
    show: str
    memory: str
    log: str


@dataclass(frozen=True)
class Vendor:
    """A kind of GPU: how it is found, and how a process is told which of them to use.

    Torch is built for a `platform`, which its version.py calls `built`; `backend` is torch.distributed's. Its runtime
    reads the first of `variables` that is set; before that, some leave GPUs out by `filter`. `nothing` hides all GPUs,
    as an empty list does where `empty_hides`. `pick` says which cards a list stands for, and by which names;
    `is_certain` whether of these (of all) each number means the card that it has here. `linked` returns the pairs of
    whole cards, by number, that a `link` of their own connects.
    """

    name: str
    platform: str
    built: str
    backend: str
    variables: tuple[str, ...]
    is_present: Callable[[], bool]
    list_cards: Callable[[Mapping[str, str]], list[Card] | None]
    pick: Callable[[Sequence[str], Sequence[Card]], list[Card]]
    linked: Callable[[Sequence[Card]], list[tuple[int, int]]]
    link: str
    commands: Commands
    filter: str = ""
    nothing: str = ""
    empty_hides: bool = True
    is_certain: Callable[[Sequence[Card], Sequence[Card], Mapping[str, str]], bool] = lambda *_: True

    @property
    def lists(self) -> tuple[str, ...]:
        """Return all variables that restrict its GPUs."""
        return (*self.variables, self.filter) if self.filter else self.variables

    def inherited(self, env: Mapping[str, str]) -> tuple[str, str] | None:
        """Return the list that counts in this environment, with the name of its variable; None where there is none."""
        lists = [(name, env[name]) for name in self.variables if name in env and (self.empty_hides or env[name])]
        # SLURM may set the filter and another variable to the same list, though that would count in what is left.
        lists = [(name, value) for name, value in lists if name == self.variables[0] or value != env.get(self.filter)]
        return lists[0] if lists else None


VENDORS = (
    Vendor(
        name="NVIDIA",
        platform="CUDA",
        built="cuda",
        backend="nccl",
        variables=("CUDA_VISIBLE_DEVICES",),
        is_present=lambda: True,  # its own answer is as quick
        list_cards=nvidia.list_cards,
        pick=nvidia.as_written,
        linked=nvidia.linked,
        link="NVLink",
        commands=Commands(
            "nvidia-smi -L",
            "nvidia-smi -i {index}",
            "sudo nvidia-smi --gpu-reset -i {index}",
            "sudo dmesg | grep -i xid",
        ),
        is_certain=nvidia.numbers_are_certain,
    ),
    Vendor(
        name="AMD",
        platform="ROCm",
        built="hip",
        backend="nccl",  # RCCL under NCCL's name
        variables=("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
        is_present=amd.is_present,
        list_cards=amd.list_cards,
        pick=amd.numbered,
        linked=amd.linked,
        link="XGMI",
        commands=Commands("amd-smi list -e", "rocm-smi --showpids", "amd-smi bad-pages", "sudo dmesg | grep -i amdgpu"),
        filter="ROCR_VISIBLE_DEVICES",
        nothing="-1",  # HIP takes an empty list for none
    ),
    Vendor(
        name="Intel",
        platform="XPU",
        built="xpu",
        backend="xccl",
        variables=("ZE_AFFINITY_MASK",),
        is_present=intel.is_present,
        list_cards=intel.list_cards,
        pick=intel.in_order,
        linked=lambda _: [],  # no file of the kernel tells
        link="Xe Link",
        commands=Commands("xpu-smi discovery", "xpu-smi ps", "xpu-smi health -l", "sudo dmesg | grep -iE 'i915|xe'"),
        nothing="127",  # a number that no device has; torch counts to 127
        empty_hides=False,
    ),
)


@dataclass(frozen=True)
class Gpus:
    """GPU ids in the order in which workers get them: integers, `GPU-<uuid>`, `MIG-<uuid>`, `0.1`.

    `verified` is False where only the environment names them and no driver answered; then there are no `bus_ids`.
    `numbers_are_certain` is False where a number may mean another card than the one at that place in `bus_ids`.
    """

    ids: tuple[str, ...] = ()
    variable: str = "CUDA_VISIBLE_DEVICES"
    verified: bool = False
    bus_ids: tuple[str, ...] = ()  # PCI addresses, of all or of none
    numbers_are_certain: bool = True


def find_gpus(env: Mapping[str, str]) -> Gpus:
    """Return the GPUs that this process's children may use: those that torch was built for.

    NVIDIA's count for a torch without any. Raises UsageError where the environment names a GPU that is not there.
    """
    for vendor in by_torch([vendor for vendor in VENDORS if vendor.is_present()], alone=True):
        cards = vendor.list_cards(env)
        if cards is not None:
            return _visible(vendor, cards, env)
    for vendor in by_torch([vendor for vendor in VENDORS if vendor.inherited(env) or vendor.filter in env]):
        if (inherited := vendor.inherited(env)) is not None:
            ids = listed(inherited[1])
        else:
            ids = tuple(str(place) for place in range(len(listed(env[vendor.filter]))))
        return Gpus(ids, vendor.variables[0])
    return Gpus()


def vendor_named(name: str) -> Vendor:
    return next(vendor for vendor in VENDORS if vendor.name == name)


def by_torch(vendors: Sequence[Vendor], *, alone: bool = False) -> list[Vendor]:
    """Return the one first that torch was built for; with `alone`, of the others NVIDIA only."""
    if len(vendors) < 2:
        return [*vendors]
    built = torch_build()
    kept = [vendor for vendor in vendors if not alone or vendor.built in (built, "cuda")]
    return sorted(kept, key=lambda vendor: vendor.built != built)


def value_for(variable: str, visible: str) -> str:
    """Return what to set the variable to, so that a process sees these GPUs; none, if `visible` is empty."""
    return visible or next((vendor.nothing for vendor in VENDORS if vendor.variables[0] == variable), "")


def _visible(vendor: Vendor, cards: Sequence[Card], env: Mapping[str, str]) -> Gpus:
    if (inherited := vendor.inherited(env)) is None:
        chosen = vendor.pick([card.name for card in cards], cards)
    else:
        variable, value = inherited
        chosen = vendor.pick(listed(value), select(value, cards, variable))
    return Gpus(
        tuple(card.name for card in chosen),
        vendor.variables[0],
        True,
        tuple(card.bus_id for card in chosen) if all(card.bus_id for card in chosen) else (),
        vendor.is_certain(chosen, cards, env),
    )


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
