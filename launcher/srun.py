"""Agents on the nodes of our SLURM allocation: one `srun` a node, whose pipes are the byte stream."""

from __future__ import annotations

from launcher.hosts import Host
from launcher.spec import JobSpec
from launcher.transport import LocalStream, Stream

__all__ = ["connect_srun"]


def connect_srun(host: Host, spec: JobSpec, command: list[str]) -> Stream:
    """Start the agent on a node in a job step of its own. Raises HostError."""
    return LocalStream(["srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host.name}", *command])
