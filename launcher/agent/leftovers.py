"""What an agent leaves for the next one on its host, and how that one ends what is left of it.

An agent's trace travels with its Hello. If it is lost and the host is tried again, the next agent is given the trace
back (Prepare.clean). It says nothing of its reader's own: of every process, pid and start time or the mark are checked
before it is signalled, and folders and groups are found by the mark, not by what a trace claims.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.agent.run_tag import Mark
from launcher.decode import decode_json
from launcher.errors import ProtocolError
from launcher.machine import processes
from launcher.machine.cgroup import Cgroup
from launcher.machine.processes import Process, Sweep

__all__ = ["Cleaning", "Trace"]

GUARD_WAIT_S = 5.0  # as long as a guard takes that cannot end something


@dataclass(frozen=True)
class Trace:
    """Where to look: in which boot, for which mark, and the pid and start time of agent and guard."""

    boot: str
    mark: str
    agent: tuple[int, int]
    guard: tuple[int, int]
    cgroup: str  # empty: none

    @classmethod
    def ours(cls, mark: Mark) -> Trace:
        """Return this agent's own."""
        cgroup = "" if mark.cgroup is None else mark.cgroup.path
        return cls(_boot(), mark.value, _identity(os.getpid()), _identity(os.getppid()), cgroup)

    @classmethod
    def read(cls, text: str) -> Trace:
        """Return the trace that `text` says. Raises ProtocolError if it is none."""
        trace = decode_json(cls, text)
        if "\0" in trace.cgroup:
            raise ProtocolError("a path has no NUL")
        return trace

    def __str__(self) -> str:
        return json.dumps(vars(self))


class Cleaning:
    """Ends what is left of lost agents: `step` after each `pause_s` until it is done; then see `left`.

    An agent that still lives is killed, and its guard ends the rest, as the parent of all that are left. If the guard
    is gone as well, or does not get done, what carries the mark is swept.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        here = {os.getpid(), *processes.ancestors(os.getpid())}  # a run inside of a run: never our own
        self._spare = here
        self._marks: list[Mark] = []
        self._waits: list[Process] = []
        self._sweep: Sweep | None = None
        self.pause_s = 0.0
        self.left: list[str] = []  # what cannot be ended
        for text in texts:
            self._take(text)
        self._guards_until = time.monotonic() + GUARD_WAIT_S

    def _take(self, text: str) -> None:
        try:
            trace = Trace.read(text)
            cgroup = Cgroup.named(trace.cgroup, f"dtrain-{trace.mark[:16]}") if trace.cgroup else None
            mark = Mark(trace.mark, cgroup)
        except (ProtocolError, ValueError) as error:
            print(f"dtrain agent: no trace of an agent: {error}", file=sys.stderr)
            return
        if not trace.boot or trace.boot != _boot():
            return  # the machine was started anew: nothing can be left
        self._marks.append(mark)
        agent, guard = (self._found(identity) for identity in (trace.agent, trace.guard))
        if agent is not None:
            processes.send(agent, signal.SIGKILL)
            self._waits.append(agent)
        if guard is not None:
            processes.send(guard, signal.SIGCONT)
            self._waits.append(guard)

    def _found(self, identity: tuple[int, int]) -> Process | None:
        pid, start = identity
        process = processes.find(pid) if pid > 1 and pid not in self._spare else None
        return process if process is not None and process.start == start else None

    def hurry(self) -> None:
        """Do it at once: there is no time to wait for guards."""
        self._guards_until = min(self._guards_until, time.monotonic())
        self.pause_s = 0.0

    def step(self) -> bool:
        """Go on; return whether all is done. Never waits."""
        if not self._marks:
            return True
        if self._sweep is None:
            self._waits = [process for process in self._waits if processes.lives(process)]
            if self._waits and time.monotonic() < self._guards_until:
                self.pause_s = min(2 * self.pause_s + 0.002, 0.05)
                return False
            for process in self._waits:
                processes.send(process, signal.SIGKILL)
            self._sweep = Sweep(self._members, adopted=False, kill_all=self._kill_groups)
        if not self._sweep.step():
            self.pause_s = self._sweep.pause_s
            return False
        left = [*filter(processes.lives, self._waits), *self._sweep.left]
        self.left = [process.describe() for process in left]
        for mark in self._marks:
            mark.remove()
        return True

    def _members(self) -> list[Process]:
        found = {p.pid: p for mark in self._marks for p in mark.members(ancestor=None, spare=self._spare)}
        return [*found.values()]

    def _kill_groups(self) -> None:
        for mark in self._marks:
            mark.kill_group()


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _identity(pid: int) -> tuple[int, int]:
    process = processes.find(pid)
    return (pid, 0 if process is None else process.start)
