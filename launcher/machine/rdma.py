"""InfiniBand and RoCE devices, as the kernel's files show them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launcher.machine.system_files import SYSFS, read_text

__all__ = ["RdmaPort", "list_rdma_ports"]


@dataclass(frozen=True)
class RdmaPort:
    """A port of a device; what the kernel does not say is empty."""

    device: str
    port: int
    state: str  # ACTIVE, INIT, DOWN, ...
    physical_state: str  # LinkUp, Polling, Disabled, ...
    rate: str  # "400 Gb/sec (4X NDR)"
    link_layer: str  # InfiniBand or Ethernet
    firmware: str
    numa_node: str


def list_rdma_ports(sysfs: Path = SYSFS) -> list[RdmaPort]:
    """Return the ports of all devices, by name and number."""
    return [
        RdmaPort(
            device=device.name,
            port=int(port.name),
            state=_word(port / "state"),
            physical_state=_word(port / "phys_state"),
            rate=read_text(port / "rate"),
            link_layer=read_text(port / "link_layer"),
            firmware=read_text(device / "fw_ver"),
            numa_node=read_text(device / "device/numa_node"),
        )
        for device in sorted((sysfs / "class/infiniband").glob("*"))
        for port in sorted((device / "ports").glob("[0-9]*"), key=lambda folder: int(folder.name))
    ]


def _word(file: Path) -> str:
    """Return the word of a state, which stands behind its number: `4: ACTIVE`."""
    return read_text(file).rpartition(":")[2].strip()
