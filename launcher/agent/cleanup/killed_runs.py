"""Finds what killed runs of this user have left on this host: dtrain, agent and guard were killed at once.

No process is left then to end what their workers started in sessions of their own. (A control group does not end its
members by itself, either.) So each agent writes its identity into its folder, and the agent of the next run reads the
identities it finds. A run is not touched while its agent or guard lives: they end all of it themselves. Pid, start
time, boot and pid namespace show whether they live; folders of other users, machines and containers are left alone.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Iterator

from launcher.agent.cleanup.leftovers import AgentIdentity
from launcher.agent.cleanup.run_tag import RunTag, folders_for_files
from launcher.errors import ProtocolError
from launcher.machine import processes
from launcher.machine.processes import Process

IDENTITY = "agent.json"
MAX_BYTES = 1 << 16
_AGENT, _COMMANDS = b"launcher.agent", (b"dtrain", b"dtrain-torchrun")
_NAME = re.compile("dtrain-[0-9a-f]{16}")


def leave_identity(folder: str, identity: str) -> None:
    """Write an agent's identity into its folder. Raises OSError."""
    whole = f"{folder}/{IDENTITY}"
    with open(f"{whole}.part", "x", encoding="utf-8", errors="surrogateescape") as file:
        file.write(identity)
    os.rename(file.name, whole)


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
