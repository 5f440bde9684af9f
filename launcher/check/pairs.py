"""Connections between hosts: those to try, findings on those that were tried, a summary. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.check.facts import Listening, Probe, Target
from launcher.check.finding import Examined, Finding, Severity
from launcher.hosts.folding import fold
from launcher.machine.network import is_loopback
from launcher.placement.job_spec import DEFAULT_PORT, JobSpec

SLOW_S = 0.010
PAIRS = 6  # named individually
MOST = 64  # others that a host tries: at 1,000 hosts 64,000 connections of 999,000, which would carry 200 GB


@dataclass(frozen=True)
class _Problem:
    """The text for a failed connection, and the command, for its target host, that fixes or shows the problem."""

    text: str
    command: str = "sudo ufw allow proto tcp from {source}"
    at_source: bool = False  # the command is for the connecting host


_PROBLEMS = {
    "refused": _Problem("is refused; a firewall there or between?"),
    "no answer": _Problem("gets no answer; a firewall there or between?"),
    "no route": _Problem("has no route", "ip route get {address}", at_source=True),
    "stranger": _Problem("reaches something other than dtrain", "ip -brief address"),  # its address is used twice
    "no large packets": _Problem(
        "loses large packets: the MTU of the path is less than that of the interfaces",
        "sudo ip link set dev {interface} mtu 1500",
    ),
    "other": _Problem("fails ({reason}); a firewall there or between?"),
}


@dataclass(frozen=True)
class Summary:
    """A summary of the connections; `slowest` are the hosts of the slowest one."""

    ways: int
    failed: int
    median_s: float | None
    most_s: float | None
    slowest: tuple[str, str] | None
    interfaces: tuple[str, ...]
    mtus: tuple[int, ...]


def targets(listening: Mapping[str, Listening], source: str) -> list[Target]:
    """Return the targets of a host: the first host, including the store's port, and others.

    Of more than MOST others it tries MOST, at even distances from its place in the list. So every host is tried equally
    often, and one that is cut off is found; a single blocked pair in a large run may be missed.
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
    working = [way for way in ways if not way.problem]
    slowest = max(working, key=lambda way: way.round_trip_s, default=None)
    return Summary(
        ways=len(ways),
        failed=len(ways) - len(working),
        median_s=statistics.median(way.round_trip_s for way in working) if working else None,
        most_s=slowest.round_trip_s if slowest else None,
        slowest=(slowest.source, slowest.to) if slowest else None,
        interfaces=tuple(sorted({way.interface for way in working if way.interface})),
        mtus=tuple(sorted({way.mtu for way in working if way.mtu})),
    )


def pair_findings(
    examined: Sequence[Examined],
    listening: Mapping[str, Listening],
    ways: Sequence[Probe],
    gloo_interfaces: Mapping[str, str],
) -> Iterator[Finding]:
    """Yield the findings. `gloo_interfaces`: the interface that a run would set for gloo on each host; empty: none.

    `examined` are hosts with facts; those that listen have a probe for each of their targets.
    """
    hosts = {one.name: one for one in examined}
    reached_by: dict[str, list[Probe]] = {name: [] for name in listening}
    reaches: dict[str, list[Probe]] = {name: [] for name in listening}
    for way in ways:
        if way.port == listening[way.to].port:
            reached_by[way.to].append(way)
            reaches[way.source].append(way)
    unreached = {name for name, found in reached_by.items() if _all_fail(found)}
    cut_off = {name for name, found in reaches.items() if _all_fail(found)}
    for name in listening:
        if name in unreached:
            message = f"no other host reaches it at {listening[name].address}"
            yield _no_way(hosts, listening, reached_by[name][0], (name,), message)
        if name in cut_off:
            yield _no_way(hosts, listening, reaches[name][0], (name,), "it reaches no other host")
    single = [way for way in ways if way.problem and way.to not in unreached and way.source not in cut_off]
    for way in single[:PAIRS]:
        port = "the store's port" if way.port == listening[way.to].store_port else "port"
        message = f"{way.source} does not reach {way.to} at {way.address}, {port} {way.port}"
        yield _no_way(hosts, listening, way, (way.source, way.to), message)
    if rest := single[PAIRS:]:
        message = f"{len(rest)} more connections do not work; --json names them all"
        yield Finding(Severity.ERROR, "no-way", _ends(rest), message)
    yield from _slow(examined, ways)
    yield from _mtus(examined, ways)
    yield from _names(examined, listening, gloo_interfaces)


def _all_fail(ways: Sequence[Probe]) -> bool:
    """Return whether there are several, and all of them fail."""
    return len(ways) > 1 and all(way.problem for way in ways)


def _ends(ways: Sequence[Probe]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for way in ways for name in (way.source, way.to)))


def _no_way(
    examined: Mapping[str, Examined],
    listening: Mapping[str, Listening],
    way: Probe,
    hosts: tuple[str, ...],
    message: str,
) -> Finding:
    problem = _PROBLEMS.get(way.problem, _PROBLEMS["other"])
    reason = problem.text.format(reason=way.reason)
    command = problem.command.format(
        source=listening[way.source].address, address=way.address, interface=way.interface or "eth0"
    )
    there = way.source if problem.at_source else way.to
    fix = examined[there].on_host(command).replace("{host}", there)
    return Finding(Severity.ERROR, "no-way", hosts, f"{message}: it {reason}", fix)


def _slow(examined: Sequence[Examined], ways: Sequence[Probe]) -> Iterator[Finding]:
    """Find slow connections, except those of hosts whose busy processors are the likely cause."""
    busy = {one.name for one in examined if one.known.load > one.known.cpu_count}
    usable = [way for way in ways if not way.problem and busy.isdisjoint((way.source, way.to))]
    slow = [way for way in usable if way.round_trip_s > SLOW_S]
    if slow:
        worst = max(slow, key=lambda way: way.round_trip_s)
        message = f"a round trip {worst.source} > {worst.to} takes {worst.round_trip_s * 1e3:.0f} ms"
        if len(slow) > 1:
            message += f", and {len(slow) - 1} others over {SLOW_S * 1e3:.0f} ms"
        yield Finding(Severity.NOTE, "slow-way", _ends(slow), message)


def _mtus(examined: Sequence[Examined], ways: Sequence[Probe]) -> Iterator[Finding]:
    """Compare the MTUs of the interfaces used by the connecting hosts."""
    used = {way.source: way.interface for way in ways if not way.problem}
    mtus: dict[str, int] = {}
    for one in examined:
        for interface in one.known.interfaces:
            if interface.name == used.get(one.name) and interface.mtu is not None:
                mtus[one.name] = interface.mtu
    most = max(mtus.values(), default=0)
    others = fold([name for name, mtu in mtus.items() if mtu == most])
    for one in examined:
        if (own := mtus.get(one.name, most)) < most:
            message = f"the MTU of {used[one.name]} is {own}, but {most} on {others}"
            fix = f"sudo ip link set dev {used[one.name]} mtu {most}"
            yield one.finding(Severity.WARNING, "mtu", message, fix)


def _names(
    examined: Sequence[Examined],
    listening: Mapping[str, Listening],
    gloo_interfaces: Mapping[str, str],
) -> Iterator[Finding]:
    """Find hosts whose own name resolves, for gloo, to an address that no other host reaches."""
    for one in examined:
        where, facts = listening.get(one.name), one.known
        if where is None or is_loopback(where.address) or gloo_interfaces.get(one.name) or facts.gloo_interface:
            continue
        found = facts.name_resolves_to
        if all(map(is_loopback, found)):
            means = f"resolves to {found[0]}" if found else "is unknown"
            interface = next((i.name for i in facts.interfaces if where.address in i.addresses), "eth0")
            message = f"its name {facts.hostname} {means} there, which gloo would announce as its address"
            yield one.finding(Severity.WARNING, "own-name", message, fix=f"export GLOO_SOCKET_IFNAME={interface}")


def store_findings(spec: JobSpec, name: str, where: Listening) -> Iterator[Finding]:
    """Check whether the store's port is free on the first host."""
    if not where.store_problem:
        return
    port = spec.master_port or DEFAULT_PORT
    message = f"the store cannot listen on {where.address}, port {port}: {where.store_problem}"
    if spec.master_port is None:
        yield Finding(Severity.NOTE, "store-port", (name,), f"{message}; a run uses another one")
    else:
        yield Finding(Severity.ERROR, "store-port", (name,), message, f"ss -ltnp 'sport = :{port}'")
