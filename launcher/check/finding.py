"""The findings of `dtrain check`, each with the command that fixes it. Pure."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import TypeVar

from launcher.check.facts import Clock, HostFacts
from launcher.hosts.host import Host, HostKind
from launcher.placement.job_spec import SshOptions
from launcher.placement.placement import HostOffer
from launcher.protocol.reports import Hello
from launcher.transport.ssh.client import login_command

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


class Severity(Enum):
    ERROR = "error"  # a run would not start, or would be wrong
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """A finding. `kind` is an identifier for programs; `message` says what was found, without the hosts' names.

    `fix` is a command to type here, in which `{host}` stands for each of `hosts`; empty if there is none.
    """

    severity: Severity
    kind: str
    hosts: tuple[str, ...]
    message: str
    fix: str = ""

    @property
    def fixes(self) -> list[str]:
        """The commands to type."""
        if "{host}" not in self.fix:
            return [self.fix] if self.fix else []
        return [self.fix.replace("{host}", host) for host in self.hosts]


@dataclass(frozen=True)
class Examined:
    """An examined host. `problem` is the reason if there are no facts."""

    host: Host
    problem: str = ""
    greeting: Hello | None = None
    facts: HostFacts | None = None
    clock: Clock | None = None
    ssh: SshOptions = field(default_factory=SshOptions)

    @property
    def name(self) -> str:
        return self.host.name

    @property
    def known(self) -> HostFacts:
        """The facts of the host, which must be known."""
        assert self.facts is not None
        return self.facts

    @property
    def offer(self) -> HostOffer:
        """The resources of it that a run could use."""
        return HostOffer.of(self.host, self.known.offered)

    @property
    def gpus(self) -> str:
        """The number and kind of GPUs that a run could use; empty for none."""
        names = sorted({gpu.name for gpu in self.known.gpus if gpu.name})
        count = len(self.offer.gpus)
        return f"{count} {' and '.join(names)}".strip() if count else ""

    def finding(self, severity: Severity, kind: str, message: str, command: str = "", *, fix: str = "") -> Finding:
        """Return a finding on this host only; `command` fixes it when run there."""
        return Finding(severity, kind, (self.name,), message, self.on_host(command) if command else fix)

    def on_host(self, command: str) -> str:
        """Return the command to type here to run another one on the host."""
        if self.host.kind is HostKind.SSH and self.ssh.command:
            return f"{self._login} {shlex.quote(command)}"
        if self.host.kind is HostKind.SSH:
            return f"ssh {self._ssh_options('-p')}{self._ssh_name} {shlex.quote(command)}"
        if self.host.kind is HostKind.SRUN:
            return f"srun --overlap --nodes=1 --ntasks=1 --nodelist={{host}} sh -c {shlex.quote(command)}"
        return command

    def copy(self, file: Path) -> str:
        """Return the command that copies a file to the same path on the host; for this machine, one that lists it."""
        path = shlex.quote(str(file))
        if self.host.kind is HostKind.SSH and self.ssh.command:
            return f"{self._login} {shlex.quote(f'cat > {path}')} < {path}"
        return f"scp {self._ssh_options('-P')}{path} {self._ssh_name}:{path}" if self.host.remote else f"ls -l {path}"

    @property
    def _login(self) -> str:
        return shlex.join(login_command(replace(self.host, name="{host}"), self.ssh))

    def _ssh_options(self, port_option: str) -> str:
        config = "" if self.ssh.config is None else f"-F {shlex.quote(str(self.ssh.config))} "
        return config + (f"{port_option} {self.host.port} " if self.host.port else "")

    @property
    def _ssh_name(self) -> str:
        return f"{self.host.user}@{{host}}" if self.host.user else "{host}"


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Merge findings that are equal for several hosts; errors first."""
    same = grouped(findings, lambda finding: replace(finding, hosts=()))
    made = [
        replace(finding, hosts=tuple(dict.fromkeys(name for one in each for name in one.hosts)))
        for finding, each in same.items()
    ]
    return sorted(made, key=lambda finding: list(Severity).index(finding.severity))


def grouped(things: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Group things by key, in their order."""
    groups: dict[K, list[T]] = {}
    for thing in things:
        groups.setdefault(key(thing), []).append(thing)
    return groups


def most_common(values: Iterable[str]) -> str:
    """Return the most common value; at a tie, the first one."""
    return Counter(values).most_common(1)[0][0]


def fix_in(reason: str) -> tuple[str, str]:
    """Split a reason into its text and the command at its end.

    >>> fix_in("port 22: connection refused; is sshd running there? Try: ssh a true")
    ('port 22: connection refused; is sshd running there?', 'ssh a true')
    """
    found = re.search(r"\b(?:[Tt]ry|by|with|there|it): (\S.*)$", reason)
    if found is None:
        return reason, ""
    text = reason[: found.start(1)].rstrip(": ")
    return re.sub(r"[;,]? [Tt]ry$", "", text), re.sub(r" +\(or .*\)$", "", found[1])
