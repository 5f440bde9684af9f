"""Processors near a worker's GPU, as in torchrun's --numa-binding. Reads sysfs; binds no process itself.

Called by the agent for each worker. The modes are those of torch/numa/binding.py; on a host without GPUs, which
torchrun does not bind, the NUMA nodes are given to the workers in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from launcher.errors import DtrainError
from launcher.frozen import dataclass
from launcher.machine.gpus.card import pci_folder
from launcher.machine.gpus.visible import Gpus
from launcher.machine.processors import share
from launcher.machine.system_files import SYSFS

MODES = ("node", "socket", "exclusive", "core-complex")


@dataclass(frozen=True)
class Topology:
    """Processors by NUMA node, and for each processor its socket, its physical core and its last-level cache.

    A core or cache is named by its first processor. Contains only processors that this process may use.
    """

    nodes: Mapping[int, tuple[int, ...]]
    socket: Mapping[int, int]
    core: Mapping[int, int]
    cache: Mapping[int, int]


def read_topology(allowed: Iterable[int], root: Path = SYSFS) -> Topology:
    """Read the topology of the processors. Raises DtrainError if the kernel does not report it."""
    usable = set(allowed)
    try:
        nodes = {
            int(folder.name.removeprefix("node")): tuple(sorted(usable & _numbers(folder / "cpulist")))
            for folder in (root / "devices/system/node").glob("node[0-9]*")
        }
        cpus = {cpu: root / f"devices/system/cpu/cpu{cpu}" for cpu in sorted(usable)}
        return Topology(
            nodes={node: cores for node, cores in sorted(nodes.items()) if cores},
            socket={cpu: int(_text(folder / "topology/physical_package_id")) for cpu, folder in cpus.items()},
            core={cpu: min(_numbers(folder / "topology/thread_siblings_list")) for cpu, folder in cpus.items()},
            cache={cpu: min(_last_cache(folder / "cache") or {cpu}) for cpu, folder in cpus.items()},
        )
    except (OSError, ValueError) as error:
        raise DtrainError(f"--numa-binding: this kernel reports no topology of the processors: {error}") from error


def nodes_of_gpus(gpus: Gpus, root: Path = SYSFS) -> list[int]:
    """Return the NUMA node of each GPU by its PCI address: -1 if there is only one node, empty without addresses.

    Raises DtrainError if the kernel does not know a GPU, or if GPU numbers are ambiguous.
    """
    nodes = []
    for bus_id in gpus.bus_ids:
        try:
            nodes.append(int(_text(pci_folder(bus_id, root) / "numa_node")))
        except (OSError, ValueError) as error:
            raise DtrainError(f"--numa-binding: the kernel does not know the GPU at {bus_id}: {error}") from error
    if not gpus.numbers_are_certain and len(set(nodes)) > 1:
        raise DtrainError(
            "--numa-binding: the GPUs are of different kinds, which CUDA numbers by speed, so their NUMA nodes are "
            "not certain; set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    return nodes


def choose_cores(mode: str, topology: Topology, gpu_nodes: Sequence[int], own: int, workers: int) -> tuple[int, ...]:
    """Return the processors for a worker: near the `own`-th of the host's GPUs, whose NUMA nodes are `gpu_nodes`.

    Without GPUs, `own` is its local rank among `workers`. Raises DtrainError if there are too few cores.
    """
    nodes = list(topology.nodes)
    if not nodes:
        raise DtrainError("--numa-binding: no processor that may be used here belongs to a NUMA node")
    places = [node if node in topology.nodes else nodes[0] for node in gpu_nodes]
    if not places:
        places = [nodes[rank * len(nodes) // workers] for rank in range(workers)]
    node = places[own % len(places)]
    cores = topology.nodes[node]
    if mode == "node":
        return cores
    if mode == "socket":
        socket = topology.socket[cores[0]]
        return tuple(cpu for found in topology.nodes.values() for cpu in found if topology.socket[cpu] == socket)
    beside = [place for place, other in enumerate(places) if other == node]
    index = beside.index(own % len(places))
    if mode == "exclusive":
        physical = tuple(sorted({topology.core[cpu] for cpu in cores}))
        mine = set(share(physical, index, len(beside)))
        if not mine:
            raise DtrainError(f"--numa-binding exclusive: node {node} has {len(physical)} cores for {len(beside)} GPUs")
        return tuple(cpu for cpu in cores if topology.core[cpu] in mine)
    caches: dict[int, list[int]] = {}
    for cpu in cores:
        caches.setdefault(topology.cache[cpu], []).append(cpu)
    largest_first = sorted(caches.items(), key=lambda item: (-len(item[1]), item[0]))
    return tuple(largest_first[index % len(largest_first)][1])


def _last_cache(folder: Path) -> set[int]:
    """Return the processors that share the last-level cache."""
    levels = {
        int(_text(cache / "level")): cache
        for cache in folder.glob("index[0-9]*")
        if _text(cache / "type") in ("Unified", "Data")
    }
    return _numbers(levels[max(levels)] / "shared_cpu_list") if levels else set()


def _text(file: Path) -> str:
    return file.read_text(encoding="ascii").strip()


def _numbers(file: Path) -> set[int]:
    """Parse a list such as `0-3,8`."""
    numbers: set[int] = set()
    for part in filter(None, _text(file).split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers
