"""What differs between kinds of GPUs: one table, VENDORS."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from launcher.frozen import dataclass
from launcher.machine.gpus import amd, nvidia
from launcher.machine.gpus.card import Card
from launcher.machine.packages import torch_build


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

    Torch is built for a `platform`, which its version.py calls `built`. Its runtime reads the first of `variables` that
    is set; before that, some leave GPUs out by `filter`. `nothing` hides all GPUs from a process. `pick` says which
    cards a list stands for, and by which names; `is_certain` whether of these (of all) each number means the card that
    it has here.
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
        """Return all variables that restrict its GPUs."""
        return (*self.variables, self.filter) if self.filter else self.variables

    def inherited(self, env: Mapping[str, str]) -> tuple[str, str] | None:
        """Return the list that counts in this environment, with the name of its variable; None where there is none."""
        lists = [(name, env[name]) for name in self.variables if name in env]
        # SLURM may set the filter and another variable to the same list, though that would count in what is left.
        lists = [(name, value) for name, value in lists if name == self.variables[0] or value != env.get(self.filter)]
        return lists[0] if lists else None


VENDORS = (
    Vendor(
        name="NVIDIA",
        platform="CUDA",
        built="cuda",
        variables=("CUDA_VISIBLE_DEVICES",),
        is_present=lambda: True,  # its own answer is as quick
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
        nothing="-1",  # HIP takes an empty list for none
    ),
)


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
