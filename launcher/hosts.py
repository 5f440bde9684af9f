"""Where the workers run: hosts as the user names them. Pure; nothing here connects to anything."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from enum import Enum

from launcher.errors import UsageError

__all__ = ["Host", "HostKind", "own_name", "parse_hosts"]


class HostKind(Enum):
    LOCAL = "local"  # this machine
    SIMULATED = "simulated"  # a part of this machine
    SSH = "ssh"
    SRUN = "srun"  # a node of our SLURM allocation
    JOINED = "joined"  # a node on which somebody types the command


@dataclass(frozen=True)
class Host:
    """A host by the name that the user gave it, which is also its name in every message and prefix."""

    name: str
    kind: HostKind
    slots: int | None = None  # how many workers it takes, where the list says so
    max_slots: int | None = None  # the most that may be asked of it; None: `slots`; 0: there is no such limit
    chosen: tuple[int, ...] | None = None  # the slots, and with them the GPUs by their places in its list, to be used
    user: str | None = None
    port: int | None = None  # of its sshd
    part: int = 0  # simulated: the part-th of `parts`
    parts: int = 1

    @property
    def remote(self) -> bool:
        """Whether it is, or may be, another machine: it is reached by a connection that can break."""
        return self.kind in (HostKind.SSH, HostKind.SRUN, HostKind.JOINED)


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Read `alpha:4,user@beta,[fe80::1]:2`: names with optional user and slots, each once.

    >>> [(host.name, host.slots) for host in parse_hosts("alpha:4, beta")]
    [('alpha', 4), ('beta', None)]
    """
    hosts = tuple(_parse_host(item.strip()) for item in text.split(","))
    seen: set[str] = set()
    for host in hosts:
        if host.name in seen:
            raise UsageError(f"host {host.name} is named twice; give it more slots instead: {host.name}:2")
        seen.add(host.name)
    here = [host.name for host in hosts if host.kind is HostKind.LOCAL]
    if len(here) > 1:
        raise UsageError(
            f"hosts {' and '.join(here)} are both this machine; name it once, or divide it with --simulate"
        )
    return hosts


def _parse_host(item: str) -> Host:
    match = re.fullmatch(
        r"(?:([^@\s]+)@)?(?:\[([0-9a-fA-F:.%\w]+)\]|([A-Za-z0-9._-]+))(?::([0-9]{1,6}))?", item, re.ASCII
    )
    if match is None:
        raise UsageError(f"--hosts: {item!r} is not a host; write NAME, NAME:SLOTS, USER@NAME or [IPV6]:SLOTS")
    user, ipv6, name, slots = match.groups()
    name = ipv6 or name
    if name.startswith("-"):
        raise UsageError(f"--hosts: {item!r} begins with '-'; no host name does")
    if slots is not None and int(slots) < 1:
        raise UsageError(f"--hosts: {item!r} has no slots; write 1 or more, or leave the host out")
    kind = HostKind.LOCAL if user is None and name in _own_names() else HostKind.SSH
    return Host(name, kind, slots=int(slots) if slots else None, user=user)


def _own_names() -> set[str]:
    return {"localhost", "127.0.0.1", "::1", own_name(), socket.gethostname()}


def own_name() -> str:
    return socket.gethostname().split(".")[0]
