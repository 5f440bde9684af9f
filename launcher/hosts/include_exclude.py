"""DeepSpeed's filters `--include` and `--exclude` on the hosts of a list. Pure; for sources.py.

A filter is `NAME[:SLOT[,SLOT...]][@NAME...]`, as in `worker-0@worker-1:0,2`, with optional ranges in the names:
`gpu[01-16]:0,1`. A name without slots means the whole host, also if the same name is given with slots. Slots count
from 0, and stand for the GPUs at the same places of the host's list.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from launcher.errors import UsageError
from launcher.hosts.host import Host, HostKind, address_of, own_names
from launcher.hosts.ranges import MAX_HOSTS, HostListError, expand_item, quoted, split

_FORM = "write NAME or NAME:SLOT,SLOT, and '@' between hosts, as in worker-0@worker-1:0,2"
_SHOWN = 8  # hosts in an error


def filter_hosts(hosts: tuple[Host, ...], *, include: str | None, exclude: str | None) -> tuple[Host, ...]:
    """Return the hosts that pass the filter, in the order of the list; empty text is no filter, as for DeepSpeed.

    For a host with only some slots left, `chosen` has them, and `slots` is their number. Raises UsageError if both
    filters are given, one names an unknown host or slot, or no host is left.
    """
    include, exclude = (include or "").strip(), (exclude or "").strip()
    if include and exclude:
        raise UsageError("--include and --exclude cannot be used together; leave one out")
    if not include and not exclude:
        return hosts
    option, text = ("--include", include) if include else ("--exclude", exclude)
    try:
        wanted = _read(text, hosts, slots_known=bool(exclude))
    except HostListError as error:
        raise UsageError(f"{option}: {error}") from error
    left = tuple(
        kept
        for host in hosts
        if (kept := _kept(host, wanted.get(host.name, frozenset()), include=bool(include))) is not None
    )
    if not left:
        raise UsageError(f"{option} {quoted(text)} leaves none of the hosts; there are: {_names(hosts)}")
    return left


def _kept(host: Host, named: frozenset[int] | None, *, include: bool) -> Host | None:
    """Return what is left of a host if the filter names these slots; None stands for the whole host."""
    if named is None:
        return host if include else None
    if not named and not include:
        return host
    left = named if include else frozenset(_slots(host) or ()) - named
    return replace(host, slots=len(left), max_slots=None, chosen=tuple(sorted(left))) if left else None


def _slots(host: Host) -> Iterable[int] | None:
    if host.chosen is not None:
        return host.chosen
    return None if host.slots is None else range(host.slots)


def _read(text: str, hosts: tuple[Host, ...], *, slots_known: bool) -> dict[str, frozenset[int] | None]:
    """Return the named slots of each named host; None for the whole host."""
    by_name = {host.name: host for host in hosts}
    here = [host for host in hosts if host.kind is HostKind.LOCAL]
    by_name = {**{name: host for host in here for name in own_names()}, **by_name}  # `localhost` always means it
    wanted: dict[str, frozenset[int] | None] = {}
    for column, item in split(text, "@"):
        for name, slots in _parse(item, column):
            host = by_name.get(name)
            if host is None:
                hint = "; hosts are separated by '@', not by ','" if "," in name else ""
                raise HostListError(column, f"no host is named {quoted(name)}{hint}; there are: {_names(hosts)}")
            _check(host, slots, column, must_be_known=slots_known)
            before = wanted.get(host.name, frozenset())
            wanted[host.name] = None if slots is None or before is None else before | slots
    return wanted


def _parse(item: str, column: int) -> Iterator[tuple[str, frozenset[int] | None]]:
    match = re.fullmatch(r"(\[[^\[\]]*:[^\[\]]*\]|[^\s:]+)(?::([0-9]{1,6}(?:,[0-9]{1,6})*))?", item, re.ASCII)
    if match is None:
        raise HostListError(column, f"{quoted(item)} is not a host with slots; {_FORM}")
    slots = None if match[2] is None else frozenset(map(int, match[2].split(",")))
    address = address_of(match[1])
    names = (address,) if address is not None else expand_item(match[1], column=column, room=MAX_HOSTS)
    for name in names:
        yield name, slots


def _check(host: Host, slots: frozenset[int] | None, column: int, *, must_be_known: bool) -> None:
    there = _slots(host)
    if not slots or (there is None and not must_be_known):
        return
    if there is None:
        raise HostListError(
            column, f"the number of slots of {host.name} is not known; give it, as in {host.name}:8, to leave some out"
        )
    if missing := sorted(slots - frozenset(there)):
        has = ", ".join(map(str, there)) if len(list(there)) <= _SHOWN else f"0 to {max(there)}"
        raise HostListError(column, f"host {host.name} has no slot {missing[0]}; it has {has}")


def _names(hosts: tuple[Host, ...]) -> str:
    more = f" and {len(hosts) - _SHOWN} more" if len(hosts) > _SHOWN else ""
    return ", ".join(host.name for host in hosts[:_SHOWN]) + more
