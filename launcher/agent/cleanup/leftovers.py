"""An agent's identity for the next agent on its host, and how that one ends what is left of it.

An agent's identity travels with its Hello. If the agent is lost and the host is tried again, the next agent gets that
identity (Prepare.lost_agents). An agent also writes it into its folder: if dtrain, agent and guard were killed at once,
no process is left to end what workers have started in sessions of their own (a control group does not end its members
by itself either), and the agent of the user's next run reads the identities it finds.

Nothing in an identity is trusted: pid and start time, or the run tag, of every process are checked before it is
signalled. A run is not touched while its agent or guard lives: they end all of it. Boot and pid namespace are compared
too: folders of other users, machines and containers are left alone.
"""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import sys
import time
from collections.abc import Iterator, Sequence

from launcher.agent.cleanup.run_tag import IDENTITY, RunTag, folders_for_files
from launcher.decode import decode_json
from launcher.errors import ProtocolError
from launcher.frozen import dataclass
from launcher.machine import processes
from launcher.machine.cgroup import Cgroup
from launcher.machine.processes import Process, Sweep

GUARD_WAIT_S = 5.0  # as long as a guard takes if it cannot end a process
MAX_BYTES = 1 << 16
_AGENT, _COMMANDS = b"launcher.agent", (b"dtrain", b"dtrain-torchrun")
_NAME = re.compile("dtrain-[0-9a-f]{16}")


@dataclass(frozen=True)
class AgentIdentity:
    """Boot and pid namespace, run tag, and pid and start time of agent and guard."""

    boot: str
    run_tag: str
    agent: tuple[int, int]
    guard: tuple[int, int]
    cgroup: str  # empty: none

    @classmethod
    def ours(cls, run_tag: RunTag) -> AgentIdentity:
        """Return the identity of this agent."""
        cgroup = "" if run_tag.cgroup is None else run_tag.cgroup.path
        return cls(_boot(), run_tag.value, _pid_and_start(os.getpid()), _pid_and_start(os.getppid()), cgroup)

    @classmethod
    def read(cls, text: str) -> AgentIdentity:
        """Parse an identity. Raises ProtocolError if `text` is none."""
        identity = decode_json(cls, text)
        if "\0" in identity.cgroup:
            raise ProtocolError("a path has no NUL")
        return identity

    @property
    def is_from_here(self) -> bool:
        """Return whether its processes may still be here, under the same pids."""
        return bool(self.boot) and self.boot == _boot()

    def __str__(self) -> str:
        return json.dumps(vars(self))


class LeftoverSweep:
    """Ends what is left of lost agents: call `step` after each `pause_s` until it is done; then see `left`.

    An agent that still lives is killed, and its guard, the parent of all that is left, ends the rest. If the guard is
    gone as well, or takes too long, all processes with the run tag are swept.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        here = {os.getpid(), *processes.ancestors(os.getpid())}  # in a nested run, never our own ancestors
        self._spare = here
        self._run_tags: list[RunTag] = []
        self._waits: list[Process] = []
        self._sweep: Sweep | None = None
        self.pause_s = 0.0
        self.left: list[str] = []  # processes that cannot be ended
        for text in texts:
            self._add(text)
        self._guards_until = time.monotonic() + GUARD_WAIT_S

    def _add(self, text: str) -> None:
        try:
            identity = AgentIdentity.read(text)
            cgroup = Cgroup.named(identity.cgroup, f"dtrain-{identity.run_tag[:16]}") if identity.cgroup else None
            run_tag = RunTag(identity.run_tag, cgroup)
        except (ProtocolError, ValueError) as error:
            print(f"dtrain agent: not the identity of an agent: {error}", file=sys.stderr)
            return
        if not identity.is_from_here:
            return  # the machine was rebooted: nothing can be left
        self._run_tags.append(run_tag)
        agent, guard = (self._found(pair) for pair in (identity.agent, identity.guard))
        if agent is not None:
            processes.send(agent, signal.SIGKILL)
            self._waits.append(agent)
        if guard is not None:
            processes.send(guard, signal.SIGCONT)
            self._waits.append(guard)

    def _found(self, pair: tuple[int, int]) -> Process | None:
        pid, start = pair
        process = processes.find(pid) if pid > 1 and pid not in self._spare else None
        return process if process is not None and process.start == start else None

    @property
    def ended(self) -> int:
        """Number of processes that were ended, without agents and guards."""
        return 0 if self._sweep is None else self._sweep.ended

    def hurry(self) -> None:
        """Sweep at once: there is no time to wait for guards."""
        self._guards_until = min(self._guards_until, time.monotonic())
        self.pause_s = 0.0

    def step(self) -> bool:
        """Advance; return whether all is done. Never blocks."""
        if not self._run_tags:
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
        for run_tag in self._run_tags:
            run_tag.remove()
        return True

    def _members(self) -> list[Process]:
        found = {p.pid: p for run_tag in self._run_tags for p in run_tag.members(ancestor=None, spare=self._spare)}
        return [*found.values()]

    def _kill_groups(self) -> None:
        for run_tag in self._run_tags:
            run_tag.kill_group()


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _pid_and_start(pid: int) -> tuple[int, int]:
    process = processes.find(pid)
    return (pid, 0 if process is None else process.start)


def find_killed_runs() -> list[str]:
    """Return the identities of agents that are dead together with their guards, but whose folders are still there.

    Leaves out a run that started a living run, for example this one: its cleanup would end that run.
    """
    dead = [(identity, tag) for identity, tag in _identities() if not _lives(identity.agent, identity.guard)]
    living = [process for process in processes.everything() if _is_dtrain(process)] if dead else []
    return [str(identity) for identity, tag in dead if not any(map(tag.is_on, living))]


def _is_dtrain(process: Process) -> bool:
    """Return whether a process runs dtrain itself: a command of the user, an agent or a guard."""
    try:
        with open(f"/proc/{process.pid}/cmdline", "rb") as file:
            argv = file.read().split(b"\0")
    except OSError:  # ended meanwhile
        return False
    if b"-m" in argv:
        module = argv[argv.index(b"-m") + 1 :][:1]
        return module == [b"launcher"] or module == [_AGENT]
    programs = [argv[0], *[each for each in argv[1:] if not each.startswith(b"-")][:1]]
    return any(os.path.basename(program) in _COMMANDS for program in programs)


def _identities() -> Iterator[tuple[AgentIdentity, RunTag]]:
    for parent in folders_for_files():
        try:
            names = [name for name in os.listdir(parent) if _NAME.fullmatch(name)]
        except OSError:
            continue
        for name in names:
            try:
                if not (text := _read(f"{parent}/{name}")):
                    continue
                identity = AgentIdentity.read(text)
                tag = RunTag(identity.run_tag, None)
            except (ProtocolError, ValueError, OSError) as error:
                print(f"dtrain agent: {parent}/{name}/{IDENTITY}: {error}", file=sys.stderr)
                continue
            if identity.is_from_here and name == f"dtrain-{tag.value[:16]}":
                yield identity, tag


def _read(folder: str) -> str:
    """Return the identity in a folder that only this user can access; empty if there is none. Raises OSError."""
    try:
        found = os.lstat(folder)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            return ""
        descriptor = os.open(f"{folder}/{IDENTITY}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # removed meanwhile, or not written yet
        return ""
    try:
        return os.read(descriptor, MAX_BYTES).decode("utf-8", "surrogateescape")
    finally:
        os.close(descriptor)


def _lives(*pairs: tuple[int, int]) -> bool:
    found = (processes.find(pid) for pid, _ in pairs)
    return any(process is not None and (process.pid, process.start) in pairs for process in found)
