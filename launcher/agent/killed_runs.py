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

from launcher.agent.leftovers import AgentIdentity
from launcher.agent.run_tag import RunTag, folders_for_files
from launcher.errors import ProtocolError
from launcher.machine import processes
from launcher.machine.processes import Process

__all__ = ["find_killed_runs", "leave_identity"]

IDENTITY = "agent.json"
MAX_BYTES = 1 << 16
_NAME = re.compile("dtrain-[0-9a-f]{16}")


def leave_identity(folder: str, identity: str) -> None:
    """Write an agent's identity into its folder. Raises OSError."""
    with open(f"{folder}/{IDENTITY}", "x", encoding="utf-8", errors="surrogateescape") as file:
        file.write(identity)


def find_killed_runs() -> list[str]:
    """Return the identities of agents that are dead, and their guards too, but whose folders are still there.

    Without those from which a living run has come: to end what they left would end that one.
    """
    dead: list[AgentIdentity] = []
    living = [found for found in [processes.find(os.getpid())] if found is not None]
    for identity in _identities():
        alive = [process for pair in (identity.agent, identity.guard) if (process := _found(pair)) is not None]
        living += alive
        dead += [] if alive else [identity]
    return [str(identity) for identity in dead if not any(map(RunTag(identity.run_tag, None).is_on, living))]


def _identities() -> Iterator[AgentIdentity]:
    for parent in folders_for_files():
        try:
            names = [name for name in os.listdir(parent) if _NAME.fullmatch(name)]
        except OSError:
            continue
        for name in names:
            text = _read(f"{parent}/{name}")
            try:
                identity = AgentIdentity.read(text) if text else None
            except ProtocolError as error:
                print(f"dtrain agent: {parent}/{name}/{IDENTITY}: {error}", file=sys.stderr)
                continue
            if identity is not None and identity.is_of_here and name == f"dtrain-{identity.run_tag[:16]}":
                yield identity


def _read(folder: str) -> str:
    """Return what is in the file of a folder that is this user's alone; empty where there is none."""
    try:
        found = os.lstat(folder)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            return ""
        descriptor = os.open(f"{folder}/{IDENTITY}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # removed meanwhile, or not written yet
        return ""
    with os.fdopen(descriptor, "rb") as file:
        return file.read(MAX_BYTES).decode("utf-8", "surrogateescape")


def _found(pair: tuple[int, int]) -> Process | None:
    process = processes.find(pair[0])
    return process if process is not None and process.start == pair[1] else None
