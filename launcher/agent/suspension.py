"""Stops every process of the run on this host where it is, and lets them go on: what Ctrl-Z and fg mean for a run."""

from __future__ import annotations

import signal
from collections.abc import Callable

from launcher.machine import processes
from launcher.machine.processes import Process

__all__ = ["Suspension"]

QUICK_LOOKS = 20
LOOK_S = 1.0


class Suspension:
    """Keeps stopped what a listing returns; one more `step` after `pause_s`, since a process may have forked before."""

    def __init__(self, listing: Callable[[], list[Process]]) -> None:
        self._listing = listing
        self._looks = 0
        self.pause_s = 0.0

    def step(self) -> None:
        moving = [process for process in self._listing() if process.state not in "Tt"]
        for process in moving:
            processes.send(process, signal.SIGSTOP)
        self._looks += 1
        self.pause_s = 0.005 if moving and self._looks < QUICK_LOOKS else LOOK_S

    def release(self) -> None:
        for process in self._listing():
            processes.send(process, signal.SIGCONT)
