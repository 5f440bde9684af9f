"""How the GPUs of a machine are connected: by links of their own, as their driver says, else by PCIe, as sysfs says."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, takewhile
from pathlib import Path

from launcher.machine.gpus.card import Card, pci_folder
from launcher.machine.gpus.vendors import Vendor
from launcher.machine.system_files import SYSFS, read_text

__all__ = ["find_links"]


def find_links(vendor: Vendor, cards: Sequence[Card], sysfs: Path = SYSFS) -> dict[str, list[tuple[int, int]]]:
    """Return which pairs of cards, by their numbers, are connected in which way; the quickest way first.

    Parts of one card count as that card. Cards whose address is not known are left out.
    """
    whole = list({card.bus_id: card for card in reversed(cards) if card.bus_id}.values())[::-1]
    linked = {frozenset(pair) for pair in vendor.linked(whole)}
    found: dict[str, list[tuple[int, int]]] = {
        name: []
        for name in (vendor.link, "same PCIe switch", "same PCIe root", "same NUMA node", "across NUMA nodes", "PCIe")
    }
    for one, other in combinations(whole, 2):
        pair = (one.index, other.index)
        found[vendor.link if frozenset(pair) in linked else _by_pci(one, other, sysfs)].append(pair)
    return {name: pairs for name, pairs in found.items() if pairs}


def _by_pci(one: Card, other: Card, sysfs: Path) -> str:
    """Say by what two devices are connected, from their places in the kernel's tree: root, root port, switches."""
    folders = [pci_folder(card.bus_id, sysfs) for card in (one, other)]
    if not all(folder.exists() for folder in folders):  # as in some containers
        return "PCIe"
    paths = [folder.resolve().relative_to(sysfs.resolve()).parts for folder in folders]
    shared = len([*takewhile(lambda pair: pair[0] == pair[1], zip(*paths, strict=False))]) - len(("devices",))
    if shared >= 2:
        return "same PCIe switch"
    if shared == 1:
        return "same PCIe root"
    nodes = {read_text(folder / "numa_node") for folder in folders}
    return "same NUMA node" if len(nodes) == 1 else "across NUMA nodes"
