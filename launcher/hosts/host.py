"""The hosts where workers run, as the user names them, and the lists of --hosts.

hostfile.py reads host files with the same entries. Pure, except that it asks for this machine's name; connects to no
host.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from enum import Enum

from launcher.errors import UsageError
from launcher.frozen import dataclass
from launcher.hosts.ranges import MAX_HOSTS, HostListError, expand_item, quoted, split

_LEAST_PORT = 1024  # a single number after a name is sshd's port from here on, and slots below
_FORMS = (
    "write NAME, NAME:SLOTS, USER@NAME:PORT, NAME:PORT:SLOTS or [IPV6]:SLOTS "
    f"(one number from {_LEAST_PORT} on is sshd's port)"
)
# Names that OpenSSH accepts as a user, without characters special in our lists: they go into the user's ProxyCommand.
_USER = re.compile(r"""(?!-)[^\s@:,=#/\[\]'"`;&<>|(){}$]+(?<!\\)""")


class HostKind(Enum):
    LOCAL = "local"  # this machine
    SIMULATED = "simulated"  # a part of this machine
    SSH = "ssh"
    SRUN = "srun"  # a node of our SLURM allocation
    JOINED = "joined"  # a node on which a user types the command


@dataclass(frozen=True)
class Host:
    """A host under the name that the user gave it, which is used in every message and prefix."""

    name: str
    kind: HostKind
    slots: int | None = None  # number of workers, if the list gives it
    max_slots: int | None = None  # most workers that may be requested; None: `slots`; 0: no limit
    chosen: tuple[int, ...] | None = None  # slots to use, and with them the GPUs at these places of its list
    user: str | None = None
    port: int | None = None  # sshd's port
    part: int = 0  # simulated: the part-th of `parts`
    parts: int = 1

    @property
    def remote(self) -> bool:
        """Return whether it is, or may be, another machine: its connection can break."""
        return self.kind in (HostKind.SSH, HostKind.SRUN, HostKind.JOINED)

    @property
    def has_own_connection(self) -> bool:
        """Return whether SSH_CONNECTION there is that of its agent; others inherit it, from the user's login."""
        return self.kind in (HostKind.SSH, HostKind.JOINED)


@dataclass(frozen=True)
class HostEntry:
    """An entry of a list as written, with several names if it has ranges. `slots` may be 0 here."""

    names: tuple[str, ...]
    slots: int | None = None
    user: str | None = None
    port: int | None = None

    def hosts(self) -> tuple[Host, ...]:
        """Return its hosts. An entry with a user or a port means SSH, even for this machine."""
        here = own_names() if self.user is None and self.port is None else frozenset()
        return tuple(
            Host(
                name,
                HostKind.LOCAL if name in here else HostKind.SSH,
                slots=self.slots,
                user=self.user,
                port=self.port,
            )
            for name in self.names
        )


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parse `alpha:4,user@beta:2222,node[01-16]:8,[fe80::1]:2`: each host once, MAX_HOSTS of them at most.

    Two numbers after a name are sshd's port and the slots. One number is the port from 1024 on, which is more workers
    than any host has, and the slots below. Each host of a range has all the slots of its entry. Raises UsageError with
    the column.

    >>> [(host.name, host.port, host.slots) for host in parse_hosts("n[1-2]:4, beta, gamma:2222, gamma2:22:8")]
    [('n1', None, 4), ('n2', None, 4), ('beta', None, None), ('gamma', 2222, None), ('gamma2', 22, 8)]
    """
    hosts: dict[str, Host] = {}
    try:
        for column, item in split(text):
            entry = parse_entry(item, column=column, room=MAX_HOSTS - len(hosts))
            if entry.slots == 0:
                raise HostListError(column, f"{quoted(item)} has no slots; write 1 or more, or leave the host out")
            for host in entry.hosts():
                if reason := clash(host, hosts):
                    raise HostListError(column, reason)
                hosts[host.name] = host
    except HostListError as error:
        raise UsageError(f"--hosts: {error}") from error
    return tuple(hosts.values())


def parse_entry(item: str, *, column: int = 1, room: int = MAX_HOSTS) -> HostEntry:
    """Parse one entry, with ranges in its name. `column` is its position in the text, for errors.

    Raises HostListError, also for more than `room` names.
    """
    user, at, rest = item.rpartition("@")
    match = re.fullmatch(r"(\[[^\[\]]*:[^\[\]]*\]|[^\s:]+)(?::([0-9]{1,6}))?(?::([0-9]{1,6}))?", rest, re.ASCII)
    if match is None or (at and not is_user(user)):
        raise HostListError(column, f"{quoted(item)} is not a host; {_FORMS}")
    names = _names(match[1], item, column=column + len(user) + len(at), room=room)
    numbers = [int(digits) for digits in match.groups()[1:] if digits is not None]
    port = numbers.pop(0) if numbers and (len(numbers) == 2 or numbers[0] >= _LEAST_PORT) else None
    slots = numbers[0] if numbers else None
    if port is not None and not 1 <= port <= 65535:
        raise HostListError(column, f"{quoted(item)}: {port} is no port of an sshd, which is 1 to 65535; {_FORMS}")
    if slots is not None and slots >= _LEAST_PORT:
        raise HostListError(column, f"{quoted(item)}: {slots} slots are more than a host can have; {_FORMS}")
    return HostEntry(names, slots, user or None, port)


def _names(name: str, item: str, *, column: int, room: int) -> tuple[str, ...]:
    address = address_of(name)
    if address is not None:
        return (address,)
    names = expand_item(name, column=column, room=room)
    if re.fullmatch(r"[A-Za-z0-9._-]+", names[0], re.ASCII) is None:  # they differ in digits only
        raise HostListError(column, f"{quoted(item)} is not a host; {_FORMS}")
    if names[0].startswith("-"):
        raise HostListError(column, f"{quoted(item)} begins with '-'; no host name does")
    return names


def is_user(text: str) -> bool:
    return _USER.fullmatch(text) is not None and text.isprintable()


def address_of(text: str) -> str | None:
    """Return the address in `[fe80::1%eth0]`; None for any other text."""
    match = re.fullmatch(r"\[([0-9A-Fa-f:.]+)(%[A-Za-z0-9._-]+)?\]", text, re.ASCII)
    if match is None or ":" not in match[1]:
        return None
    try:
        socket.inet_pton(socket.AF_INET6, match[1])
    except OSError:
        return None
    return match[1] + (match[2] or "")


def clash(host: Host, others: Mapping[str, Host]) -> str | None:
    """Return why a host cannot be in one list with the others, by their names; None if it can."""
    same = others.get(host.name)
    if same is not None and same.port != host.port:
        return f"host {host.name} is named twice, with two ports; give each a name of its own in ~/.ssh/config"
    if same is not None:
        return f"host {host.name} is named twice; give it more slots instead: {host.name}:2"
    if host.kind is HostKind.LOCAL:
        for other in others.values():
            if other.kind is HostKind.LOCAL:
                return (
                    f"hosts {other.name} and {host.name} are both this machine; "
                    "name it once, or divide it with --simulate"
                )
    return None


def own_names() -> frozenset[str]:
    """Return the names that mean this machine in a list."""
    return frozenset({"localhost", "127.0.0.1", "::1", own_name(), socket.gethostname()})


def own_name() -> str:
    return socket.gethostname().split(".")[0]
