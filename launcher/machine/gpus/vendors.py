"""The differences between kinds of GPUs, in one table: VENDORS."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from launcher.frozen import dataclass
from launcher.machine.gpus import amd, nvidia
from launcher.machine.gpus.card import Card
from launcher.machine.packages import torch_build


@dataclass(frozen=True)
class Commands:
    """Shell commands: to list the GPUs, show who uses one, repair memory errors of one, and read its errors in the log.

    They contain {index} if the tool numbers GPUs as the runtime does.
    """

    list: str
    show: str
    memory: str
    log: str


@dataclass(frozen=True)
class Vendor:
    """A kind of GPU: how it is found, and how a process is given some of them.

    Torch is built for a `platform`, called `built` in its version.py. Its runtime reads the first of `variables` that
    is set; before that, some exclude GPUs by `filter`. `nothing` hides all GPUs from a process. `list_cards` returns
    None without a driver, and raises DriverError if that does not list them. `pick` returns the cards that a list
    stands for, with their names; `is_certain`, given these and all cards, whether each number means the same card as
    here.
    """

    name: str
    platform: str
    built: str
    variables: tuple[str, ...]
    is_present: Callable[[], bool]
    list_cards: Callable[[Mapping[str, str]], list[Card] | None]
    pick: Callable[[Sequence[str], Sequence[Card]], list[Card]]
    commands: Commands
    filter: str = ""
    nothing: str = ""
    is_certain: Callable[[Sequence[Card], Sequence[Card], Mapping[str, str]], bool] = lambda *_: True

    @property
    def lists(self) -> tuple[str, ...]:
        """All variables that restrict its GPUs."""
        return (*self.variables, self.filter) if self.filter else self.variables

    def inherited(self, env: Mapping[str, str]) -> tuple[str, str] | None:
        """Return the list in effect in this environment, with the name of its variable; None if there is none."""
        lists = [(name, env[name]) for name in self.variables if name in env]
        # SLURM may set the filter and another variable to the same list, though the latter would count in what remains.
        lists = [(name, value) for name, value in lists if name == self.variables[0] or value != env.get(self.filter)]
        return lists[0] if lists else None


VENDORS = (
    Vendor(
        name="NVIDIA",
        platform="CUDA",
        built="cuda",
        variables=("CUDA_VISIBLE_DEVICES",),
        is_present=lambda: True,  # list_cards checks that as quickly
        list_cards=nvidia.list_cards,
        pick=nvidia.as_written,
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
        variables=("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
        is_present=amd.is_present,
        list_cards=amd.list_cards,
        pick=amd.numbered,
        commands=Commands("amd-smi list -e", "rocm-smi --showpids", "amd-smi bad-pages", "sudo dmesg | grep -i amdgpu"),
        filter="ROCR_VISIBLE_DEVICES",
        nothing="-1",  # HIP treats an empty list as unset
    ),
)


def vendor_named(name: str) -> Vendor:
    return next(vendor for vendor in VENDORS if vendor.name == name)


def by_torch(vendors: Sequence[Vendor], *, alone: bool = False) -> list[Vendor]:
    """Sort the vendor that torch was built for first; with `alone`, keep only NVIDIA of the others."""
    if len(vendors) < 2:
        return [*vendors]
    built = torch_build()
    kept = [vendor for vendor in vendors if not alone or vendor.built in (built, "cuda")]
    return sorted(kept, key=lambda vendor: vendor.built != built)


def value_for(variable: str, visible: str) -> str:
    """Return the value of the variable that makes a process see these GPUs, or none if `visible` is empty."""
    return visible or next((vendor.nothing for vendor in VENDORS if vendor.variables[0] == variable), "")
