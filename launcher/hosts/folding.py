"""Shortens lists of hosts: to ranges as in SLURM, and to one line for all hosts with the same reason. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from launcher.errors import DtrainError, HostError

MOST = 4  # items in one line
RANGES = 12  # in one item
_LEAST = 3  # names to become a range
_WORD = re.compile(r"[\w.-]*\w")
_ADDRESS = re.compile(r"[0-9]+(?:\.[0-9]+){3}")


@dataclass
class _Group:
    """Names that differ only in one number, the last in them."""

    before: str
    after: str
    names: list[str] = field(default_factory=list)
    ranges: list[tuple[str, str]] = field(default_factory=list)  # each from the first number to the last

    def add(self, name: str, number: str) -> None:
        self.names.append(name)
        if self.ranges and int(number) == int(self.ranges[-1][1]) + 1:
            self.ranges[-1] = (self.ranges[-1][0], number)
        else:
            self.ranges.append((number, number))

    def written(self) -> list[str]:
        if len(self.names) < _LEAST:
            return self.names
        shown = [first if first == last else f"{first}-{last}" for first, last in self.ranges]
        more = f",... {len(shown) - RANGES + 1} more ranges" if len(shown) > RANGES else ""
        return [f"{self.before}[{','.join(shown[: RANGES - 1] if more else shown)}{more}]{self.after}"]


def fold(names: Sequence[str]) -> str:
    """Format a list of hosts in its order: three or more that differ in one number as ranges, with the rest counted.

    >>> fold(["node1", "node2", "node3", "node7", "node8"]), fold(["n1", "n2"]), fold(["a", "b", "c", "d", "e", "f"])
    ('node[1-3,7-8]', 'n1, n2', 'a, b, c and 3 others')
    """
    groups: dict[tuple[str, str, int] | str, _Group] = {}
    for name in names:
        found = re.fullmatch(r"(.*?)([0-9]{1,18})(\D*)", name)
        if found is None or _ADDRESS.fullmatch(name):
            groups[name] = _Group(name, "", [name])
            continue
        before, number, after = found.groups()
        width = len(number) if re.match("0[0-9]", number) else 0
        if (before, after, len(number)) in groups:  # node099 is followed by node100
            width = len(number)
        groups.setdefault((before, after, width), _Group(before, after)).add(name, number)
    counted: list[tuple[str, int]] = []
    for group in groups.values():
        written = group.written()
        counted += [(item, len(group.names) if len(written) == 1 else 1) for item in written]
    if len(counted) <= MOST:
        return ", ".join(item for item, _ in counted)
    rest = sum(count for _, count in counted[MOST - 1 :])
    return f"{', '.join(item for item, _ in counted[: MOST - 1])} and {rest} others"


def some(names: Iterable[str], count: int | None = None) -> str:
    """Format the first three of them, and how many more there are; `count`, where it is known, saves looking at all."""
    if count is None:
        names = list(names)
        count = len(names)
    first = list(islice(names, 3))
    return ", ".join(first) + (f" and {count - 3} more" if count > 3 else "")


def lines_by_reason(reasons: Mapping[str, str], between: str = ": ") -> list[str]:
    """Return `HOSTS: REASON` for the reasons by host, in their order; equal ones once.

    Reasons are equal if they differ only in the host's own name and in IPv4 addresses; the first one is shown.

    >>> lines_by_reason({f"n{k}": f"DNS lookup of n{k} timed out" for k in (1, 2, 3)})
    ['n[1-3]: DNS lookup timed out']
    """
    same: dict[tuple[str, ...], list[str]] = {}
    for host, reason in reasons.items():
        words = _WORD.findall(reason)
        rest = _WORD.sub("", reason)
        key = (rest, *("" if word == host or _ADDRESS.fullmatch(word) else word for word in words))
        same.setdefault(key, []).append(host)
    lines = []
    for hosts in same.values():
        reason = reasons[hosts[0]]
        if len(hosts) > 1:
            reason = reason.replace(f"DNS lookup of {hosts[0]} ", "DNS lookup ")
        lines.append(f"{fold(hosts)}{between}{reason}")
    return lines


class StartError(HostError):
    """Hosts that could not be made ready; no worker was started on any host."""

    def __init__(self, reasons: Mapping[str, str], total: int) -> None:
        self.reasons = dict(reasons)
        lines = "\n".join(f"  {line}" for line in lines_by_reason(self.reasons))
        which = f"{len(self.reasons)} of {total} hosts" if total > 1 else "the host"
        DtrainError.__init__(self, f"{which} cannot start; no worker was started.\n{lines}")
