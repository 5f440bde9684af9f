"""A GPU as listed by its vendor's module, and the meaning of a list of GPUs in the environment.

Used by nvidia.py, amd.py and visible.py. Starts nothing and asks no driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launcher.errors import UsageError
from launcher.frozen import dataclass
from launcher.machine.system_files import SYSFS

DEV = Path("/dev")
HIDDEN = ((), ("-1",), ("NoDevFiles",))  # the last is set by SLURM for a job without GPUs


class DriverError(Exception):
    """A driver is there, but does not list its GPUs: the reason, in its words."""


@dataclass(frozen=True)
class Card:
    """A GPU, or a part of one. `name` is its name in the vendor's variable; the other fields are of the whole card."""

    name: str
    index: int  # in the order of the vendor's runtime
    uuid: str = ""
    bus_id: str = ""  # its PCI address
    model: str = ""
    alias: str = ""  # another name of the part
    node: str = ""  # its name in the kernel


def listed(value: str) -> tuple[str, ...]:
    """Return the entries of a list of GPUs; empty if it hides all of them."""
    entries = tuple(entry.strip() for entry in value.split(",") if entry.strip())
    return () if entries in HIDDEN else entries


def select(value: str, cards: Sequence[Card], variable: str) -> list[Card]:
    """Return the card for each entry of the list.

    Raises UsageError for entries for which a runtime silently drops devices: unknown, ambiguous or repeated names.
    """
    said = f"{variable}={value}"
    selected: list[Card] = []
    for entry in listed(value):
        found = _named(entry, cards)
        if not found:
            present = ", ".join(map(_label, cards)) or "none"
            raise UsageError(f"{said} names GPU {entry}, but this host has: {present}")
        if len(found) > 1:
            raise UsageError(
                f"{said}: {entry} may be any of the GPUs {', '.join(map(_label, found))}; write more of it"
            )
        if found[0] in selected:
            raise UsageError(f"{said} names GPU {entry} twice; a worker would see none at all")
        selected += found
    return selected


def _label(card: Card) -> str:
    return str(card.index) if card.name == card.uuid else card.name


def _named(entry: str, cards: Sequence[Card]) -> list[Card]:
    """Return the cards that an entry may mean: by number, by the name of a card or part, or by a prefix of a UUID.

    For a card that is divided into parts, this is its first part, as in CUDA.
    """
    parts = [card for card in cards if entry in (card.name, card.alias)]
    parts = parts or [card for card in cards if entry.startswith("MIG-") and card.name.startswith(entry)]
    whole: dict[int, Card] = {}
    for card in cards:
        if entry == str(card.index) or card.uuid.startswith(entry):
            whole.setdefault(card.index, card)
    return parts or list(whole.values())


def pci_folder(bus_id: str, sysfs: Path = SYSFS) -> Path:
    """Return the folder of a PCI device by its address; NVML writes the domain with eight digits."""
    domain, _, rest = bus_id.lower().partition(":")
    return sysfs / "bus/pci/devices" / f"{domain[-4:]}:{rest}"
