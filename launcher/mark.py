"""How the processes of a run on this host are known from all others, wherever they went.

Every agent has a mark of its own, and each worker gets it in three ways before it starts: a variable of its
environment, a number among its resource limits, and a control group where one can be had. What it starts inherits all
of them, in a session of its own, as a daemon, with a cleared environment; the agent and the guard do not have them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

from launcher import processes, scratch
from launcher.cgroup import Cgroup
from launcher.processes import Process, Sweep

__all__ = ["NAME", "Mark"]

NAME = "DTRAIN_AGENT"


class Mark:
    """One agent's mark: 32 hexadecimal digits, and the group that goes with them."""

    def __init__(self, value: str, cgroup: Cgroup | None) -> None:
        if not re.fullmatch("[0-9a-f]{32}", value):
            raise ValueError(f"{value[:40]!r} is no mark")
        self.value = value
        self.cgroup = cgroup
        self._variable = f"{NAME}={value}".encode()
        self._number = int(value[:15], 16)  # what a resource limit can hold

    @classmethod
    def new(cls) -> Mark:
        value = os.urandom(16).hex()
        return cls(value, Cgroup.below_ours(f"dtrain-{value[:16]}"))

    @property
    def variables(self) -> Mapping[str, str]:
        """What a worker's environment gets."""
        return {NAME: self.value}

    def put_on(self) -> None:
        """Mark this process, between fork and exec, in the two other ways."""
        processes.brand(self._number)
        if self.cgroup is not None:
            self.cgroup.enter()

    def members(self, *, ancestor: int | None, spare: Iterable[int] = ()) -> list[Process]:
        """Return the run's living processes and all descendants of `ancestor`, without those in `spare`."""
        inside = set() if self.cgroup is None else self.cgroup.pids()
        return processes.related(ancestor=ancestor, ours=self._carried_by, spare=spare, also=inside)

    def sweep(
        self,
        *,
        ancestor: int,
        grace_s: float,
        spare: Iterable[int] = (),
        kill_wait_s: float = 5.0,
        adopted: bool = True,
    ) -> Sweep:
        """Return what ends all members; see Sweep."""
        spared = list(spare)
        return Sweep(
            lambda: self.members(ancestor=ancestor, spare=spared),
            grace_s=grace_s,
            kill_wait_s=kill_wait_s,
            adopted=adopted,
            kill_all=self.kill_group,
        )

    def kill_group(self) -> None:
        if self.cgroup is not None:
            self.cgroup.kill()

    def remove(self) -> None:
        """Remove what the mark has outside of processes: the folder for files, and the group."""
        scratch.remove_folder(self.value)
        if self.cgroup is not None:
            self.cgroup.remove()

    def _carried_by(self, process: Process) -> bool:
        return processes.branded(process.pid, self._number) or processes.has_variable(process, self._variable)
