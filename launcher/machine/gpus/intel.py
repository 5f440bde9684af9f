"""Intel's GPUs as Level Zero numbers them, from what the kernel's drivers (i915, xe) say in sysfs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.frozen import dataclass, replace
from launcher.machine.gpus.card import DEV, Card, listed
from launcher.machine.system_files import SYSFS, read_text

__all__ = ["in_order", "is_present", "list_cards"]

VENDOR = "0x8086"
INTEGRATED = "0000:00:02.0"  # where processors have their own


@dataclass(frozen=True)
class _Device:
    """A card by its render device; `device` is the number of its kind."""

    name: str
    bus_id: str
    device: str
    tiles: int


def is_present(sysfs: Path = SYSFS) -> bool:
    return any(read_text(device / "device/vendor") == VENDOR for device in (sysfs / "class/drm").glob("renderD*"))


def list_cards(env: Mapping[str, str], sysfs: Path = SYSFS, dev: Path = DEV) -> list[Card]:
    """Return every tile of every card, in the order of PCI addresses, which is the driver's.

    With ZE_FLAT_DEVICE_HIERARCHY=COMPOSITE a card counts once, and ZE_AFFINITY_MASK may name its tiles as `0.1`.
    """
    composite = env.get("ZE_FLAT_DEVICE_HIERARCHY") == "COMPOSITE"
    entries = listed(env.get("ZE_AFFINITY_MASK", ""))
    cards: list[Card] = []
    index = 0
    for found in _list_devices(sysfs, dev):
        card = Card("", index, "", found.bus_id, f"Intel {found.device}", node=found.name)
        by_tile = any(entry.startswith(f"{index}.") for entry in entries) and str(index) not in entries
        if not composite:
            cards += [replace(card, name=str(index + tile), index=index + tile) for tile in range(found.tiles)]
        elif by_tile:
            cards += [replace(card, name=f"{index}.{tile}") for tile in range(found.tiles)]
        else:
            cards.append(replace(card, name=str(index)))
        index += 1 if composite else found.tiles
    return cards


def in_order(_: Sequence[str], cards: Sequence[Card]) -> list[Card]:
    """Return the cards as torch counts them: ascending, whatever the order of the list, and discrete ones alone.

    The GPU of a processor counts only where there is no other.
    """
    discrete = [card for card in cards if card.bus_id != INTEGRATED]
    return sorted(discrete or cards, key=lambda card: (card.index, card.name))


def _list_devices(sysfs: Path, dev: Path) -> list[_Device]:
    found = []
    for render in (sysfs / "class/drm").glob("renderD*"):
        device = render / "device"
        if read_text(device / "vendor") != VENDOR or not os.access(dev / "dri" / render.name, os.R_OK | os.W_OK):
            continue
        bus_id = device.resolve().name
        tiles = [*device.glob("tile[0-9]*")]  # xe; i915 has a graphics unit (gt) for each tile of a discrete card
        if not tiles and bus_id != INTEGRATED:
            tiles = [*device.glob("drm/card*/gt/gt[0-9]*")]
        found.append(_Device(render.name, bus_id, read_text(device / "device"), max(1, len(tiles))))
    return sorted(found, key=lambda each: each.bus_id)
