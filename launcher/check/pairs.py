"""The ways between hosts: which there are to try, what is wrong with those that were tried, a summary. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.check.facts import Listening, Probe, Target
from launcher.check.finding import Examined, Finding, Severity, on_host
from launcher.hosts.folding import fold
from launcher.machine.network import is_loopback
from launcher.placement.job_spec import DEFAULT_PORT, JobSpec

__all__ = ["Summary", "pair_findings", "store_findings", "summary", "targets"]

SLOW_S = 0.010
PAIRS = 6  # that are named one by one
MOST = 64  # others that a host tries: at 1,000 hosts 64,000 ways of 999,000, which would carry 200 GB
_SAID = {
    "refused": "is refused",
    "no answer": "gets no answer",
    "no route": "has no route",
    "stranger": "meets something else than dtrain",
    "no large packets": "loses large packets: the MTU of the path is less than that of the interfaces",
}


@dataclass(frozen=True)
class Summary:
    """Times in seconds, and of the slowest way also between whom."""

    ways: int
    failed: int
    median_s: float | None
    most_s: float | None
    slowest: tuple[str, str] | None
    interfaces: tuple[str, ...]
    mtus: tuple[int, ...]


def targets(listening: Mapping[str, Listening], source: str) -> list[Target]:
    """Return what a host probes: where the first host listens, the store's port as well, and where others do.

    Of more than MOST others it tries MOST, at even distances from its place in the list. So every host is tried by as
    many, and who is cut off shows; a single closed way between two hosts of a large run may not.
    """
    names = list(listening)
    own, others = names.index(source), len(names) - 1
    steps = range(1, others + 1) if others <= MOST else (1 + place * others // MOST for place in range(MOST))
    chosen = dict.fromkeys([names[0], *(names[(own + step) % len(names)] for step in steps)])
    chosen.pop(source, None)
    return [
        Target(source, name, listening[name].address, port)
        for name in chosen
        for port in (listening[name].port, listening[name].store_port)
        if port
    ]


def summary(ways: Sequence[Probe]) -> Summary:
    well = [way for way in ways if not way.problem]
    slowest = max(well, key=lambda way: way.round_trip_s, default=None)
    return Summary(
        ways=len(ways),
        failed=len(ways) - len(well),
        median_s=statistics.median(way.round_trip_s for way in well) if well else None,
        most_s=slowest.round_trip_s if slowest else None,
        slowest=(slowest.source, slowest.to) if slowest else None,
        interfaces=tuple(sorted({way.interface for way in well if way.interface})),
        mtus=tuple(sorted({way.mtu for way in well if way.mtu})),
    )


# ---- what is wrong -------------------------------------------------------------------------------------------


def pair_findings(
    spec: JobSpec,
    examined: Sequence[Examined],
    listening: Mapping[str, Listening],
    ways: Sequence[Probe],
    gloo_interfaces: Mapping[str, str],
) -> Iterator[Finding]:
    """Yield what is to be said. `gloo_interfaces`: what a run would set for gloo on each host; empty: nothing."""
    by_name = {one.host.name: one for one in examined}
    cut_off = list(_cut_off(listening, ways))
    to = {name for name, way, _ in cut_off if way.to == name}
    away = {name for name, way, _ in cut_off if way.source == name}
    failed = [way for way in ways if way.problem and way.to not in to and way.source not in away]
    for name, way, message in cut_off:
        yield _blocked(spec, by_name, listening, way, (name,), message)
    for way in failed[:PAIRS]:
        port = "the store's port" if way.port == listening[way.to].store_port else "port"
        message = f"{way.source} does not reach {way.to} at {way.address}, {port} {way.port}"
        yield _blocked(spec, by_name, listening, way, (way.source, way.to), message)
    if rest := failed[PAIRS:]:
        hosts = tuple(dict.fromkeys(name for way in rest for name in (way.source, way.to)))
        yield Finding(Severity.ERROR, "no-way", hosts, f"{len(rest)} more ways do not work; --json names them all")
    yield from _slow(examined, ways)
    yield from _mtus(spec, examined, ways)
    yield from _names(examined, listening, gloo_interfaces)


def _cut_off(listening: Mapping[str, Listening], ways: Sequence[Probe]) -> Iterator[tuple[str, Probe, str]]:
    """Yield the hosts that none of several others reaches, or that reach none, each with one such way."""
    to: dict[str, list[Probe]] = {name: [] for name in listening}
    away: dict[str, list[Probe]] = {name: [] for name in listening}
    for way in ways:
        if way.port == listening[way.to].port:
            to[way.to].append(way)
            away[way.source].append(way)
    for name, where in listening.items():
        for all_of, message in (
            (to[name], f"no other host reaches it at {where.address}"),
            (away[name], "it reaches no other host"),
        ):
            if len(all_of) > 1 and all(way.problem for way in all_of):
                yield name, all_of[0], message


def _blocked(
    spec: JobSpec,
    by_name: Mapping[str, Examined],
    listening: Mapping[str, Listening],
    way: Probe,
    hosts: tuple[str, ...],
    message: str,
) -> Finding:
    name = way.to
    said = _SAID.get(way.problem, "fails")
    if way.problem == "other":
        said += f" ({way.reason})"
    if way.problem == "no large packets":
        fix = f"sudo ip link set dev {way.interface or 'eth0'} mtu 1500"
    elif way.problem == "no route":
        name, fix = way.source, f"ip route get {way.address}"
    elif way.problem == "stranger":
        fix = "ip -brief address"  # its address is somebody else's as well
    else:
        fix = f"sudo ufw allow proto tcp from {listening[way.source].address}"
        said += "; a firewall there or between?"
    fix = on_host(spec, by_name[name].host)(fix).replace("{host}", name)
    return Finding(Severity.ERROR, "no-way", hosts, f"{message}: it {said}", fix)


def _slow(examined: Sequence[Examined], ways: Sequence[Probe]) -> Iterator[Finding]:
    """Find slow ways, but for those of hosts whose own processors are the likely reason."""
    busy = {one.host.name for one in examined if one.facts is not None and one.facts.load > one.facts.cpu_count}
    usable = [way for way in ways if not way.problem and busy.isdisjoint((way.source, way.to))]
    slow = [way for way in usable if way.round_trip_s > SLOW_S]
    if slow:
        worst = max(slow, key=lambda way: way.round_trip_s)
        hosts = tuple(dict.fromkeys(name for way in slow for name in (way.source, way.to)))
        message = f"a round trip {worst.source} > {worst.to} takes {worst.round_trip_s * 1e3:.0f} ms"
        if len(slow) > 1:
            message += f", and {len(slow) - 1} others over {SLOW_S * 1e3:.0f} ms"
        yield Finding(Severity.NOTE, "slow-way", hosts, message)


def _mtus(spec: JobSpec, examined: Sequence[Examined], ways: Sequence[Probe]) -> Iterator[Finding]:
    """Compare the MTUs of the interfaces that the ways begin at."""
    used = {way.source: way.interface for way in ways if not way.problem}
    mtus: dict[str, int] = {}
    for one in examined:
        for interface in one.facts.interfaces if one.facts is not None else ():
            if interface.name == used.get(one.host.name) and interface.mtu is not None:
                mtus[one.host.name] = interface.mtu
    most = max(mtus.values(), default=0)
    others = fold([name for name, mtu in mtus.items() if mtu == most])
    for one in examined:
        if (own := mtus.get(one.name, most)) < most:
            message = f"the MTU of {used[one.name]} is {own}, but {most} on {others}"
            fix = f"sudo ip link set dev {used[one.name]} mtu {most}"
            yield one.says(spec)(Severity.WARNING, "mtu", message, fix)


def _names(
    examined: Sequence[Examined],
    listening: Mapping[str, Listening],
    gloo_interfaces: Mapping[str, str],
) -> Iterator[Finding]:
    """Find hosts whose own name leads gloo to an address that no other host reaches."""
    for one in examined:
        where, facts = listening.get(one.host.name), one.facts
        if where is None or facts is None or is_loopback(where.address):
            continue
        if gloo_interfaces.get(one.host.name) or facts.gloo_interface:
            continue
        found = facts.name_resolves_to
        if all(map(is_loopback, found)):
            means = f"means {found[0]}" if found else "is not known"
            interface = next((i.name for i in facts.interfaces if where.address in i.addresses), "eth0")
            message = f"its name {facts.hostname} {means} there, which gloo would tell the others as its address"
            fix = f"export GLOO_SOCKET_IFNAME={interface}"
            yield Finding(Severity.WARNING, "own-name", (one.host.name,), message, fix)


def store_findings(spec: JobSpec, name: str, where: Listening) -> Iterator[Finding]:
    """Say whether the store's port is free on the first host."""
    if not where.store_problem:
        return
    port = spec.master_port or DEFAULT_PORT
    message = f"the store cannot listen at {where.address}, port {port}: {where.store_problem}"
    if spec.master_port is None:
        yield Finding(Severity.NOTE, "store-port", (name,), f"{message}; a run takes another one")
    else:
        yield Finding(Severity.ERROR, "store-port", (name,), message, f"ss -ltnp 'sport = :{port}'")
