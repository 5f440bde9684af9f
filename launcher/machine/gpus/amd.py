"""AMD's GPUs as ROCm numbers them, from the files of the kernel's driver (KFD) in sysfs.

ROCm's own runtime and tools read the same files. The tools are not used: they number the GPUs by PCI address, which
may differ from HIP's order, take a second to start, and may not be installed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.frozen import replace
from launcher.machine.gpus.card import DEV, Card, select
from launcher.machine.system_files import SYSFS, read_text

TOPOLOGY = "class/kfd/kfd/topology/nodes"


def is_present(dev: Path = DEV) -> bool:
    return (dev / "kfd").exists()


def list_cards(env: Mapping[str, str], sysfs: Path = SYSFS, dev: Path = DEV) -> list[Card]:
    """Return the GPUs that HIP can use: every GPU, or partition of one, in ROCR_VISIBLE_DEVICES.

    Raises UsageError if that list names a missing GPU.
    """
    cards: list[Card] = []
    if os.access(dev / "kfd", os.R_OK | os.W_OK):
        nodes = (sysfs / TOPOLOGY).glob("[0-9]*")
        for node in sorted(nodes, key=lambda folder: int(folder.name)):
            card = _card(len(cards), node, dev)
            if card is not None:
                cards.append(replace(card, model=_model(card, node, sysfs)))
    if (kept := env.get("ROCR_VISIBLE_DEVICES")) is not None:  # applied first: HIP numbers the remaining ones from 0
        cards = numbered((), select(kept, cards, "ROCR_VISIBLE_DEVICES"), again=True)
    return cards


def numbered(_: Sequence[str], cards: Sequence[Card], *, again: bool = False) -> list[Card]:
    """Name the cards by number, since HIP does not accept a prefix of a UUID; with `again`, renumber them from 0."""
    if again:
        cards = [replace(card, index=index) for index, card in enumerate(cards)]
    return [replace(card, name=str(card.index)) for card in cards]


def _read_properties(file: Path) -> dict[str, int]:
    """Parse lines of a name and a number."""
    pairs = [line.split() for line in read_text(file).splitlines()]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _card(index: int, node: Path, dev: Path) -> Card | None:
    """Return a node of the topology if it is a GPU that this process may use, else None.

    ROCm ignores nodes whose `gpu_id` is hidden by a container's device cgroup, and those without their render device.
    """
    gpu_id = read_text(node / "gpu_id")
    if not gpu_id.isdigit() or int(gpu_id) == 0:  # hidden, or a CPU
        return None
    known = _read_properties(node / "properties")
    if not os.access(dev / "dri" / f"renderD{known.get('drm_render_minor', 0)}", os.R_OK | os.W_OK):
        return None
    place = known.get("location_id", 0)  # bus, device, function; the partition in the highest bits
    bus_id = f"{known.get('domain', 0):04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"
    uuid = f"GPU-{known['unique_id']:016x}" if known.get("unique_id") else ""
    return Card(str(index), index, uuid, bus_id, node=gpu_id)


def _model(card: Card, node: Path, sysfs: Path) -> str:
    version = _read_properties(node / "properties").get("gfx_target_version", 0)  # 90402 is gfx942
    gfx = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}" if version else ""
    return read_text(sysfs / "bus/pci/devices" / card.bus_id / "product_name") or f"AMD {gfx}".strip()
