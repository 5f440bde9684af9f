"""Chooses the processors of this host that a worker is bound to."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from launcher.protocol.commands import StartWorker

if TYPE_CHECKING:
    from launcher.machine.numa import Topology

__all__ = ["CoreChooser"]


class CoreChooser:
    """Reads the topology once, when the first worker is bound: that asks drivers, and takes long."""

    def __init__(self) -> None:
        # With the ids of the GPUs and their NUMA nodes.
        self._topology: tuple[Topology, tuple[str, ...], list[int]] | None = None

    def choose(self, message: StartWorker) -> tuple[int, ...]:
        """Return the processors to bind a worker to; empty: no binding. Raises DtrainError."""
        if not message.numa_binding:
            return ()
        from launcher.machine import numa, processors
        from launcher.machine.gpus.visible import find_gpus

        if self._topology is None:
            gpus = find_gpus(os.environ)
            self._topology = numa.read_topology(processors.cores()), gpus.ids, numa.nodes_of_gpus(gpus)
        topology, ids, nodes = self._topology
        own = ids.index(message.gpu) if nodes and message.gpu in ids else message.local_rank
        return numa.choose_cores(message.numa_binding, topology, nodes, own, message.local_world_size)
