"""Lists of host names in the short form of SLURM and pdsh: `node[01-16,20],login`. Pure.

For --hosts, host files, filters and SLURM's variables. It knows nothing of users, ports and slots, and never resolves
a name.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from launcher.errors import UsageError

MAX_HOSTS = 65536  # in one list, as in SLURM: far beyond any run, and small enough for memory
_MAX_NAME = 255  # characters; DNS ends at 253
_MAX_DIGITS = 18
_FORM = "write numbers and ranges as in node[01-16,20]"


class HostListError(UsageError):
    """An error in a list of hosts: `reason`, at `column` of the text, counted from 1."""

    def __init__(self, column: int, reason: str) -> None:
        super().__init__(f"column {column}: {reason}")
        self.column = column
        self.reason = reason


def expand(text: str) -> tuple[str, ...]:
    """Return all names of the list, in the order of `scontrol show hostnames`.

    Numbers keep their leading zeros, a name may have several brackets and text after them, and `[fe80::1]` is kept: it
    is an address, not a range. A name that is listed twice is returned twice. Raises HostListError, also for more than
    MAX_HOSTS.

    >>> expand("node[08-10,20],login")
    ('node08', 'node09', 'node10', 'node20', 'login')
    """
    names: list[str] = []
    for column, item in split(text):
        names += expand_item(item, column=column, room=MAX_HOSTS - len(names))
    return tuple(names)


def split(text: str, separator: str = ",") -> tuple[tuple[int, str], ...]:
    """Split at separators outside of brackets; return each item without surrounding blanks, and its column.

    Never fails: after an unclosed bracket, the rest of the text belongs to its item.

    >>> split("a[1,3], b")
    ((1, 'a[1,3]'), (9, 'b'))
    """
    items: list[tuple[int, str]] = []
    start, inside = 0, False
    for place, character in enumerate(text + separator):
        if character in "[]":
            inside = character == "["
        elif character == separator and (place == len(text) or not inside):
            item = text[start:place]
            items.append((start + 1 + len(item) - len(item.lstrip()), item.strip()))
            start = place + 1
    return tuple(items)


def expand_item(item: str, *, column: int = 1, room: int = MAX_HOSTS) -> tuple[str, ...]:
    """Return the names of one item of a list. `column` is its position in the text, for errors.

    Raises HostListError for more than `room` names, before any is generated.
    """
    if not item:
        raise HostListError(column, "a host is missing here; write hosts as in node[01-16,20],login")
    if blank := re.search(r"\s", item):
        raise HostListError(
            column + blank.start(), f"{quoted(item)} contains a blank; write hosts as in node[1-3],login"
        )
    literals, brackets = _parse(item, column)
    count = 1
    for ranges in brackets:
        count = min(count * sum(last - first + 1 for first, last, _ in ranges), room + 1)
    if count > room:
        raise HostListError(column, f"with {quoted(item)} the list has more than {MAX_HOSTS} hosts, the limit")
    values = [[f"{n:0{width}}" for first, last, width in ranges for n in range(first, last + 1)] for ranges in brackets]
    if sum(map(len, literals)) + sum(max(map(len, numbers)) for numbers in values) > _MAX_NAME:
        raise HostListError(column, f"{quoted(item)} is longer than a host's name can be ({_MAX_NAME} characters)")
    return tuple(_names(literals, values))


def quoted(text: str) -> str:
    """Return the text for an error: quoted, with special characters escaped, and shortened."""
    return repr(text if len(text) <= 80 else text[:77] + "...")


def _names(literals: list[str], values: list[list[str]]) -> Iterator[str]:
    """Yield names in SLURM's order: the last bracket varies fastest, then from the first on: 2, 1, 3 for three."""
    order = [*range(len(values) - 2, -1, -1), *range(len(values))[-1:]]
    for chosen in itertools.product(*(values[place] for place in order)):
        numbers = dict(zip(order, chosen, strict=True))
        yield "".join(literal + numbers.get(place, "") for place, literal in enumerate(literals))


def _parse(item: str, column: int) -> tuple[list[str], list[list[tuple[int, int, int]]]]:
    """Split an item: the text before, between and after its brackets, and the ranges of each bracket."""
    literals: list[str] = [""]
    brackets: list[list[tuple[int, int, int]]] = []
    for match in re.finditer(r"\[([^\[\]]*)\]|[^\[\]]+|[\[\]]", item):
        inner, at = match[1], column + match.start()
        if inner is not None and ":" not in inner:
            brackets.append([_range(entry, item, at + place) for place, entry in _entries(inner)])
            literals.append("")
        elif match[0] in ("[", "]"):
            which = "is not closed" if match[0] == "[" else "was never opened"
            raise HostListError(at, f"in {quoted(item)} this {match[0]!r} {which}; {_FORM}")
        else:
            literals[-1] += match[0]
    return literals, brackets


def _entries(inner: str) -> Iterator[tuple[int, str]]:
    start = 1
    for entry in inner.split(","):
        yield start, entry
        start += len(entry) + 1


def _range(entry: str, item: str, column: int) -> tuple[int, int, int]:
    """Return the first and last number, and the least number of digits: SLURM uses that of the first."""
    match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", entry, re.ASCII)
    if match is None:
        raise HostListError(column, f"{quoted(entry)} in {quoted(item)} is not a number or range; {_FORM}")
    first, last = match[1], match[2] or match[1]
    if max(len(first), len(last)) > _MAX_DIGITS:
        raise HostListError(column, f"{quoted(entry)} in {quoted(item)} has more than {_MAX_DIGITS} digits")
    if int(first) > int(last):
        raise HostListError(column, f"{entry!r} in {quoted(item)} runs backwards; write {last}-{first}")
    return int(first), int(last), len(first)
