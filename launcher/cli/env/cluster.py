"""For `dtrain env`: what connects the GPUs here, and this machine with others; SLURM's job; whether py-spy can work.

Shows names of devices only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from launcher.errors import UsageError
from launcher.hosts.slurm_allocation import find_allocation
from launcher.machine.gpus.card import pci_folder
from launcher.machine.gpus.links import find_links
from launcher.machine.gpus.vendors import VENDORS, by_torch
from launcher.machine.rdma import RdmaPort, list_rdma_ports
from launcher.machine.system_files import read_text
from launcher.output.text import count

__all__ = ["gpu_topology", "ptrace", "rdma_devices", "slurm_job"]

PTRACE_BIT = 19  # of a process's capabilities


def gpu_topology(env: Mapping[str, str]) -> dict[str, str]:
    """Return how the GPUs are connected, with the NUMA node of each; empty for less than two."""
    for vendor in by_torch([vendor for vendor in VENDORS if vendor.is_present()]):
        try:
            cards = vendor.list_cards(env)
        except UsageError:  # a wrong list, of which the variables tell
            continue
        if cards:
            break
    else:
        return {}
    links = find_links(vendor, cards)
    pairs = sum(map(len, links.values()))
    shown = {
        name: "every pair" if len(found) == pairs else ", ".join(f"{one}-{other}" for one, other in found)
        for name, found in links.items()
    }
    nodes = {str(card.index): _node(card.bus_id) for card in cards if card.bus_id}
    return {**shown, "NUMA nodes": ", ".join(f"{gpu} on {node}" for gpu, node in nodes.items())} if shown else {}


def rdma_devices() -> dict[str, str]:
    return {f"{port.device} port {port.port}": _port(port) for port in list_rdma_ports()}


def slurm_job(env: Mapping[str, str]) -> dict[str, str]:
    """Return what SLURM gave to this job; empty outside of one."""
    try:
        allocation = find_allocation(env)
    except UsageError as error:
        return {"allocation": f"cannot be read: {error}"}
    if allocation is None:
        return {}
    tasks = sum(node.tasks or 1 for node in allocation.nodes)
    where = "on one of its nodes" if allocation.here else "on none of its nodes"
    size = f"{count(len(allocation.nodes), 'node')}, {count(tasks, 'task')}"
    shown = {"allocation": f"job {allocation.job}, {size}; we are {where}"}
    if allocation.step:
        shown["step"] = f"of {count(allocation.step.tasks, 'task')}"
    return {**shown, "GPUs on this node": env.get("SLURM_GPUS_ON_NODE", "none")}


def ptrace(proc: Path = Path("/proc")) -> str:
    """Say whether py-spy can look into workers, which are not its own children."""
    try:
        scope = int((proc / "sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):  # a kernel without Yama
        scope = 0
    capable = _capabilities(proc) >> PTRACE_BIT & 1
    if scope == 0 or (scope < 3 and capable):
        return "permitted"
    return f"not permitted, so that py-spy cannot look into workers (kernel.yama.ptrace_scope is {scope})"


def _capabilities(proc: Path) -> int:
    try:
        lines = (proc / f"{os.getpid()}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)


def _node(bus_id: str) -> str:
    return read_text(pci_folder(bus_id) / "numa_node") or "?"


def _port(port: RdmaPort) -> str:
    state = port.state + (f" ({port.physical_state})" if port.state != "ACTIVE" and port.physical_state else "")
    node = f"NUMA node {port.numa_node}" if port.numa_node not in ("", "-1") else ""
    firmware = f"firmware {port.firmware}" if port.firmware else ""
    return ", ".join(filter(None, (port.link_layer, state, port.rate, firmware, node)))
