"""Where the workers run: hosts as the user names them. Pure; nothing here connects to anything."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from enum import Enum

from launcher.errors import UsageError

__all__ = ["Host", "HostKind", "choose_hosts", "parse_hosts"]

_SOURCES = "--hosts a,b (or DTRAIN_HOSTS, or `hosts` in dtrain.toml), or --simulate to divide this machine"


class HostKind(Enum):
    LOCAL = "local"  # this machine
    SIMULATED = "simulated"  # a part of this machine
    SSH = "ssh"


@dataclass(frozen=True)
class Host:
    """A host by the name that the user gave it, which is also its name in every message and prefix."""

    name: str
    kind: HostKind
    slots: int | None = None  # how many workers it takes, where the list says so
    user: str | None = None
    part: int = 0  # simulated: the part-th of `parts`
    parts: int = 1


def choose_hosts(
    listed: str | None, *, nnodes: tuple[int, int] | None, simulate: bool, spares: bool = False
) -> tuple[Host, ...]:
    """Return the hosts of a run from what was given; `nnodes` is the least and the most that are wanted.

    With `spares`, hosts that are named beyond the most are kept, to step in for others.
    Raises UsageError where more hosts are wanted than any source names: never a silent localhost.
    """
    least, most = nnodes or (None, None)
    if simulate:
        if listed is not None:
            raise UsageError(
                "--simulate divides this machine; it cannot be used together with hosts, which are: " + listed
            )
        if most is None:
            raise UsageError("--simulate needs to know between how many hosts to divide this machine: --nnodes N")
        return tuple(Host(f"sim{part}", HostKind.SIMULATED, part=part, parts=most) for part in range(most))
    if listed is not None and not listed.strip():
        raise UsageError("--hosts is empty; name hosts as in --hosts a,b, or leave it out")
    if listed is None:
        if least is not None and least > 1:
            raise UsageError(f"--nnodes {least}, but no hosts are known. Name them: {_SOURCES}")
        return (Host(_own_name(), HostKind.LOCAL),)
    hosts = parse_hosts(listed)
    if least is not None and least > len(hosts):
        names = ", ".join(host.name for host in hosts)
        raise UsageError(f"--nnodes {least}, but only {len(hosts)} hosts are named: {names}")
    return hosts if spares else hosts[:most]


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
    return {"localhost", "127.0.0.1", "::1", _own_name(), socket.gethostname()}


def _own_name() -> str:
    return socket.gethostname().split(".")[0]
