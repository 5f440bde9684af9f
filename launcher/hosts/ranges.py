"""Lists of host names in the short form of SLURM and pdsh: `node[01-16,20],login`. Pure.

For --hosts, host files, filters and SLURM's variables. It knows nothing of users, ports and slots,
and never asks whether a name exists.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from launcher.errors import UsageError

MAX_HOSTS = 65536  # of one list, as in SLURM: far beyond any run, and small enough for the memory
_MAX_NAME = 255  # characters; DNS ends at 253
_MAX_DIGITS = 18
_FORM = "write numbers and ranges as in node[01-16,20]"


class HostListError(UsageError):
    """Something in a list of hosts is wrong: `reason`, at `column` of the text, counted from 1."""

    def __init__(self, column: int, reason: str) -> None:
        super().__init__(f"column {column}: {reason}")
        self.column = column
        self.reason = reason


def expand(text: str) -> tuple[str, ...]:
    """Return every name of the list, in the order in which `scontrol show hostnames` writes them.

    Numbers keep their zeros, a name may have several brackets and more behind them, and `[fe80::1]` stays as it is: an
    address, no range. A name that is listed twice comes twice. Raises HostListError, for more than MAX_HOSTS too.

    >>> expand("node[08-10,20],login")
    ('node08', 'node09', 'node10', 'node20', 'login')
    """
    names: list[str] = []
    for column, item in split(text):
        names += expand_item(item, column=column, room=MAX_HOSTS - len(names))
    return tuple(names)


def split(text: str, separator: str = ",") -> tuple[tuple[int, str], ...]:
    """Split at the separators that are outside of brackets: each item without the blanks around it, and its column.

    Never fails: a bracket that is not closed takes the rest of the text into its item.

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
    """Return the names of one item of a list. `column` is where it begins in the text, for the errors.

    Raises HostListError, before anything is written out, where there are more than `room`.
    """
    if not item:
        raise HostListError(column, "a host is missing here; write hosts as in node[01-16,20],login")
    if blank := re.search(r"\s", item):
        raise HostListError(
            column + blank.start(), f"{quoted(item)} has a blank in it; write hosts as in node[1-3],login"
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
    """Return the text as an error shows it: quoted, with its odd characters escaped, and not too long."""
    return repr(text if len(text) <= 80 else text[:77] + "...")


def _names(literals: list[str], values: list[list[str]]) -> Iterator[str]:
    """SLURM counts up the last bracket first, and of those before it the first one first: 2, 1, 3 for three of them."""
    order = [*range(len(values) - 2, -1, -1), *range(len(values))[-1:]]
    for chosen in itertools.product(*(values[place] for place in order)):
        numbers = dict(zip(order, chosen, strict=True))
        yield "".join(literal + numbers.get(place, "") for place, literal in enumerate(literals))


def _parse(item: str, column: int) -> tuple[list[str], list[list[tuple[int, int, int]]]]:
    """Take an item apart: the text before, between and after its brackets, and of each bracket the ranges."""
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
    """Return the first and the last number, and how many digits they have at least: SLURM takes those of the first."""
    match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", entry, re.ASCII)
    if match is None:
        raise HostListError(column, f"{quoted(entry)} in {quoted(item)} is no number or range; {_FORM}")
    first, last = match[1], match[2] or match[1]
    if max(len(first), len(last)) > _MAX_DIGITS:
        raise HostListError(column, f"{quoted(entry)} in {quoted(item)} has more than {_MAX_DIGITS} digits")
    if int(first) > int(last):
        raise HostListError(column, f"{entry!r} in {quoted(item)} runs backwards; write {last}-{first}")
    return int(first), int(last), len(first)
