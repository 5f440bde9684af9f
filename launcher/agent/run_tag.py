"""How the processes of a run on this host are known from all others, wherever they went.

Every agent has a run tag of its own, and each worker gets it in three ways before it starts: a variable of its
environment, a number among its resource limits, and a control group where one can be had. What it starts inherits all
of them, in a session of its own, as a daemon, with a cleared environment; the agent and the guard do not have them.
The number also says which worker: what one has left can be told from what others have.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from launcher.agent import temp_folder
from launcher.machine import processes
from launcher.machine.cgroup import Cgroup
from launcher.machine.processes import Process

__all__ = ["NAME", "RunTag"]

NAME = "DTRAIN_AGENT"
_WORKER_BITS = 20  # of the number, for the worker; the other 40 are the agent's


class RunTag:
    """One agent's run tag: 32 hexadecimal digits, and the group that goes with them."""

    def __init__(self, value: str, cgroup: Cgroup | None) -> None:
        if not re.fullmatch("[0-9a-f]{32}", value):
            raise ValueError(f"{value[:40]!r} is no run tag")
        self.value = value
        self.cgroup = cgroup
        self.variables = {NAME: value}  # for a worker's environment
        self._variable = f"{NAME}={value}".encode()
        self._number = int(value[:10], 16)
        self._workers = 0

    @classmethod
    def new(cls) -> RunTag:
        value = os.urandom(16).hex()
        return cls(value, Cgroup.below_ours(f"dtrain-{value[:16]}"))

    def number_worker(self) -> int:
        """Return a number for a worker that none before it had, or none for long."""
        self._workers = (self._workers + 1) % (1 << _WORKER_BITS)
        return self._workers

    def put_on(self, worker: int = 0) -> None:
        """Mark this process, between fork and exec, in the two other ways, as the worker of that number."""
        processes.set_tag_number(self._tag_number(worker))
        if self.cgroup is not None:
            self.cgroup.enter()

    def _tag_number(self, worker: int) -> int:
        return self._number << _WORKER_BITS | worker  # 60 bits are what a resource limit can hold

    def members(self, *, ancestor: int | None, spare: Iterable[int] = ()) -> list[Process]:
        """Return the run's living processes and all descendants of `ancestor`, without those in `spare`."""
        inside = set() if self.cgroup is None else self.cgroup.pids()
        return processes.related(ancestor=ancestor, ours=self._has_tag, spare=spare, also=inside)

    def left_by(self, worker: int, variable: str) -> list[Process]:
        """Return the living processes that a worker has left: by its number, by a variable (NAME=value) that it alone
        had, and all that descend from those."""
        tag_number, encoded = self._tag_number(worker), variable.encode()

        def is_its(process: Process) -> bool:
            return processes.tag_number_of(process.pid) == tag_number or processes.has_variable(process, encoded)

        return processes.related(ancestor=None, ours=is_its, spare=[os.getpid()])

    def kill_group(self) -> None:
        if self.cgroup is not None:
            self.cgroup.kill()

    def remove(self) -> None:
        """Remove what the run tag has outside of processes: the folder for files, and the group."""
        temp_folder.remove_folder(self.value)
        if self.cgroup is not None:
            self.cgroup.remove()

    def _has_tag(self, process: Process) -> bool:
        tag_number = processes.tag_number_of(process.pid)
        return tag_number >> _WORKER_BITS == self._number or processes.has_variable(process, self._variable)
