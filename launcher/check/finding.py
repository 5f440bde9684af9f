"""What `dtrain check` has to say: findings, each with the line that fixes it. Pure."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeVar

from launcher.check.facts import Greeting, HostFacts
from launcher.check.link import Clock
from launcher.hosts.host import Host, HostKind
from launcher.placement.job_spec import JobSpec

__all__ = ["Examined", "Finding", "Severity", "fix_in", "merged", "most_common", "named", "on_host", "size"]

NAMES = 4  # of hosts in one line

T = TypeVar("T")


class Severity(Enum):
    ERROR = "error"  # a run would not start, or would be wrong
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """`kind` is a word for programs; `message` says what was found without the hosts' names.

    `fix` is a command to type here; in it `{host}` stands for each of `hosts`. Empty where there is none.
    """

    severity: Severity
    kind: str
    hosts: tuple[str, ...]
    message: str
    fix: str = ""

    @property
    def fixes(self) -> list[str]:
        """Return the lines to type."""
        if "{host}" not in self.fix:
            return [self.fix] if self.fix else []
        return [self.fix.replace("{host}", host) for host in self.hosts]


@dataclass(frozen=True)
class Examined:
    """One host after its examination. `problem` says why there are no facts."""

    host: Host
    problem: str = ""
    greeting: Greeting | None = None
    facts: HostFacts | None = None
    clock: Clock | None = None


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings with those that say the same of several hosts as one; errors first."""
    together: dict[tuple[Severity, str, str, str], Finding] = {}
    for finding in findings:
        key = (finding.severity, finding.kind, finding.message, finding.fix)
        known = together.get(key)
        hosts = finding.hosts if known is None else tuple(dict.fromkeys((*known.hosts, *finding.hosts)))
        together[key] = replace(finding, hosts=hosts)
    order = list(Severity)
    return sorted(together.values(), key=lambda finding: order.index(finding.severity))


def most_common(values: Mapping[str, T]) -> T:
    """Return the value that most have; of several such, the first one's."""
    return Counter(values.values()).most_common(1)[0][0]


def named(hosts: Sequence[str]) -> str:
    """Write a list of hosts; ranges where their names differ in one number only, the first few where they do not.

    >>> named(["node1", "node2", "node3"]), named(["a"]), named(["a", "b", "c", "d", "e", "f"])
    ('node[1-3]', 'a', 'a, b, c and 3 others')
    """
    parts = [re.fullmatch(r"(.*?)([0-9]+)(\D*)", host) for host in hosts]
    if len(hosts) > 2 and all(parts):
        frames = {(part[1], part[3], len(part[2]) if re.match("0[0-9]", part[2]) else 0) for part in parts if part}
        numbers = [int(part[2]) for part in parts if part]
        if len(frames) == 1 and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
            first, last = parts[0], parts[-1]
            assert first is not None
            assert last is not None
            return f"{first[1]}[{first[2]}-{last[2]}]{first[3]}"
    if len(hosts) <= NAMES:
        return ", ".join(hosts)
    return f"{', '.join(hosts[: NAMES - 1])} and {len(hosts) - NAMES + 1} others"


def on_host(spec: JobSpec, host: Host) -> Callable[[str], str]:
    """Return what makes of a command one that does the same on that host, to be typed here."""
    config = "" if spec.ssh.config is None else f"-F {shlex.quote(str(spec.ssh.config))} "
    if host.kind is HostKind.SSH:
        where = f"{host.user}@{{host}}" if host.user else "{host}"
        port = f"-p {host.port} " if host.port else ""
        return lambda command: f"ssh {config}{port}{where} {shlex.quote(command)}"
    if host.kind is HostKind.SRUN:
        return lambda command: f"srun --overlap --nodes=1 --ntasks=1 --nodelist={{host}} sh -c {shlex.quote(command)}"
    return lambda command: command


def fix_in(reason: str) -> tuple[str, str]:
    """Return what a reason says without and with the command at its end.

    >>> fix_in("port 22: connection refused; is sshd running there? Try: ssh a true")
    ('port 22: connection refused; is sshd running there?', 'ssh a true')
    """
    found = re.search(r"\b(?:[Tt]ry|by|there|it): (\S.*)$", reason)
    if found is None:
        return reason, ""
    said = reason[: found.start(1)].rstrip(": ")
    return re.sub(r"[;,]? [Tt]ry$", "", said), re.sub(r" +\(or .*\)$", "", found[1])


def size(bytes_: float) -> str:
    """Write a number of bytes: `1.5 GB`."""
    power = 0
    while bytes_ >= 1024 and power < len(_UNITS) - 1:
        bytes_, power = bytes_ / 1024, power + 1
    return f"{bytes_:.0f} {_UNITS[power]}" if bytes_ >= 10 or power == 0 else f"{bytes_:.1f} {_UNITS[power]}"


_UNITS = ("B", "KB", "MB", "GB", "TB")
