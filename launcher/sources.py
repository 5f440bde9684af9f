"""Which hosts a run has: from the one source that was given, never a silent localhost."""

from __future__ import annotations

from launcher.errors import UsageError
from launcher.hosts import Host, HostKind, own_name, parse_hosts

__all__ = ["choose_hosts"]

_SOURCES = "--hosts a,b (or DTRAIN_HOSTS, or `hosts` in dtrain.toml), or --simulate to divide this machine"


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
        return (Host(own_name(), HostKind.LOCAL),)
    hosts = parse_hosts(listed)
    if least is not None and least > len(hosts):
        names = ", ".join(host.name for host in hosts)
        raise UsageError(f"--nnodes {least}, but only {len(hosts)} hosts are named: {names}")
    return hosts if spares else hosts[:most]
