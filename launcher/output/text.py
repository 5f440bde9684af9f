"""Formats values for people: counts, sizes, times, lists of numbers, tables, quoted text. Pure."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence

LINE_CHARACTERS = 300  # of a quoted line
TABLE_CHARACTERS = 110
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_UNITS = ("B", "KB", "MB", "GB", "TB")


def count(number: int, noun: str) -> str:
    """Format a count: `1 host`, `2 hosts`, `3 processes`."""
    plural = noun if number == 1 else noun + ("es" if noun.endswith("s") else "s")
    return f"{number} {plural}"


def size(bytes_: float) -> str:
    """Format a number of bytes: `1.5 GB`."""
    power = 0
    while bytes_ >= 1024 and power < len(_UNITS) - 1:
        bytes_, power = bytes_ / 1024, power + 1
    return f"{bytes_:.0f} {_UNITS[power]}" if bytes_ >= 10 or power == 0 else f"{bytes_:.1f} {_UNITS[power]}"


def local_time(at: float) -> str:
    """Format a local time, with the date if it is not today."""
    there = time.localtime(at)
    form = "%H:%M" if there[:3] == time.localtime()[:3] else "%Y-%m-%d %H:%M"
    return time.strftime(form, there)


def ranges(numbers: Iterable[int]) -> str:
    """Format numbers as ranges: `0-2,5` for 0, 1, 2, 5."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def rank_names(numbers: Collection[int]) -> str:
    """Format ranks: `rank 3`, `ranks 0-2,5`."""
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {ranges(numbers)}"


def printable(line: str) -> str:
    """Return a line without control sequences, cut to LINE_CHARACTERS."""
    plain = "".join(c if c.isprintable() or c == "\t" else f"\\x{ord(c):02x}" for c in _ESCAPES.sub("", line))
    return plain if len(plain) <= LINE_CHARACTERS else plain[:LINE_CHARACTERS] + "..."


def table(
    rows: Sequence[Mapping[str, str]], *, characters: int = TABLE_CHARACTERS, wrapped: Collection[str] | None = None
) -> list[str]:
    """Return the lines of a table, at most `characters` wide; at least one row, and each row has all columns.

    `wrapped` are the columns whose cells may span several lines, by default all except ids; if given, columns are
    closer together.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1) if wrapped is None else (0, 1, 0, 0))
    for column in rows[0]:
        is_whole = column == "run" if wrapped is None else column not in wrapped  # an id is copied whole
        drawn.add_column(column, overflow="fold", no_wrap=is_whole)
    for row in rows:
        drawn.add_row(*map(printable, row.values()))
    text = io.StringIO()
    Console(file=text, width=characters, highlight=False, markup=False).print(drawn)
    return [line.rstrip() for line in text.getvalue().splitlines() if line.strip()]
