"""What `dtrain check` has to say: findings, each with the line that fixes it. Pure."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from launcher.check.facts import HostFacts
from launcher.check.link import Clock
from launcher.hosts.host import Host, HostKind
from launcher.placement.job_spec import JobSpec
from launcher.placement.placement import HostOffer
from launcher.protocol import Hello

__all__ = ["Examined", "Finding", "Severity", "fix_in", "merged", "most_common", "on_host", "size"]

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
    greeting: Hello | None = None
    facts: HostFacts | None = None
    clock: Clock | None = None

    @property
    def name(self) -> str:
        return self.host.name

    @property
    def known(self) -> HostFacts:
        """Return its facts, of which it is certain that they are there."""
        assert self.facts is not None
        return self.facts

    @property
    def offer(self) -> HostOffer:
        """Return what a run could use of it."""
        return HostOffer.of(self.host, self.known.offered)

    @property
    def gpus(self) -> str:
        """Return how many GPUs a run could use, and of which kind; empty for none."""
        names = sorted({gpu.name for gpu in self.known.gpus if gpu.name})
        count = len(self.offer.gpus)
        return f"{count} {' and '.join(names)}".strip() if count else ""

    def says(self, spec: JobSpec) -> Callable[..., Finding]:
        """Return what makes findings of this host alone; `command` is what mends it when it is run there."""

        def finding(severity: Severity, kind: str, message: str, command: str = "", *, fix: str = "") -> Finding:
            return Finding(severity, kind, (self.name,), message, on_host(spec, self.host)(command) if command else fix)

        return finding


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings with those that say the same of several hosts as one; errors first."""
    together: dict[tuple[Severity, str, str, str], list[str]] = {}
    for finding in findings:
        together.setdefault((finding.severity, finding.kind, finding.message, finding.fix), []).extend(finding.hosts)
    made = [
        Finding(severity, kind, tuple(dict.fromkeys(hosts)), message, fix)
        for (severity, kind, message, fix), hosts in together.items()
    ]
    order = list(Severity)
    return sorted(made, key=lambda finding: order.index(finding.severity))


def most_common(values: Mapping[str, T]) -> T:
    """Return the value that most have; of several such, the first one's."""
    return Counter(values.values()).most_common(1)[0][0]


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
