"""What runs of this user have left on this host that were killed whole: dtrain, agent and guard, all at once.

Nobody is there then to end what their workers have started in sessions of their own. (A control group does not end its
members by itself, either.) So each agent writes its identity into its folder, and the next run's agent reads those that
it finds. A run that lives is not touched: where agent or guard live, they end all of it themselves. Pid, start time,
boot and pid namespace say whether they do; folders of other users, machines and containers are left alone.
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

__all__ = ["find_killed_runs", "leave_identity"]

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
    """Return the identities of agents that are dead, and their guards too, but whose folders are still there.

    Without those from which a living run has come, be it this one: to end what they left would end that one.
    """
    dead = [(identity, tag) for identity, tag in _identities() if not _lives(identity.agent, identity.guard)]
    living = [process for process in processes.everything() if _is_dtrain(process)] if dead else []
    return [str(identity) for identity, tag in dead if not any(map(tag.is_on, living))]


def _is_dtrain(process: Process) -> bool:
    """Say whether a process runs dtrain's own program: a command of the user's, or an agent or guard."""
    try:
        with open(f"/proc/{process.pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:  # ended meanwhile
        return False
    if b"-m" in words:
        module = words[words.index(b"-m") + 1 :][:1]
        return module == [b"launcher"] or module == [_AGENT]
    programs = [words[0], *[word for word in words[1:] if not word.startswith(b"-")][:1]]
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
            if identity.is_of_here and name == f"dtrain-{tag.value[:16]}":
                yield identity, tag


def _read(folder: str) -> str:
    """Return what is in the file of a folder that is this user's alone; empty where there is none. Raises OSError."""
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
