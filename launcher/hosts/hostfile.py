"""Parses host files in the forms of DeepSpeed, Open MPI, MPICH and PBS, and output of host discovery scripts.

For sources.py. It reads only one file, and starts no script.

A line is one entry as in --hosts (see host.py; also with ranges), then its settings, with or without blanks around `=`:

    node[01-16] slots=8                  # DeepSpeed, Open MPI; also count=, cpu=
    user@login:2222 slots=4 max_slots=8  # also max-slots=, and user= and port= instead of those around the name
    gpu1:4                               # MPICH
    gpu2

`slots` is the number of workers by default and, without `max_slots`, at most. `max_slots` alone sets both. A host with
slots=0 is not used. `#` and ` //` begin a comment.

A name alone on several lines has as many slots as lines, as PBS writes its $PBS_NODEFILE; names that are alone on one
line each then have one slot. If no name is repeated, a name alone sets no slots. Any other repetition is an error, as
in DeepSpeed and in Open MPI from 4 on, which rejects a second `slots=` for a host.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from launcher.errors import UsageError
from launcher.hosts.host import Host, HostEntry, clash, is_user, parse_entry
from launcher.hosts.ranges import MAX_HOSTS, HostListError, quoted

_MAX_BYTES = 8 * 2**20
_MAX_NAMED = 2**20  # names, including repeated ones: a PBS file of 8192 hosts with 128 processors each
_SHOWN = 5  # bad lines in an error
_ENOUGH = 1000  # bad lines after which reading stops: this is not a host file

_COUNTS = ("slots", "count", "cpu")
_KEYS = dict.fromkeys(_COUNTS, "slots")
_KEYS |= {f"{count}{dash}max": "max_slots" for count in _COUNTS for dash in "-_"}
_KEYS |= {f"max{dash}{count}": "max_slots" for count in _COUNTS for dash in "-_"}
_KEYS |= {"user": "user", "username": "user", "user-name": "user", "user_name": "user", "port": "port"}
_FORM = "write a line as in: node1 slots=4"
_Problems: TypeAlias = list[tuple[int, HostListError]]  # with the numbers of their lines


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Read a host file; return its hosts in the order in which they first appear, at least one.

    Blocks if `path` is a pipe without a writer. Raises UsageError with the first few bad lines as `hosts.txt:3:7:`,
    line and column counted from 1.
    """
    hosts, problems = _parse(_read(path))
    _raise_any(problems, lambda line, column: f"{path}:{line}:{column}")
    if not hosts:
        raise UsageError(f"the host file {path} names no host that has slots; {_FORM}")
    return hosts


def parse_discovered(text: str, *, command: str) -> tuple[Host, ...]:
    """Parse the output of a host discovery script: `NAME`, `NAME:SLOTS` or any line of a host file. May be empty.

    Raises UsageError with the command and the bad lines.
    """
    hosts, problems = _parse(text)
    _raise_any(problems, lambda line, column: f"output of {command}, line {line}, column {column}")
    return hosts


def _read(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise UsageError(f"the host file {path} does not exist; name a file with one host a line") from error
    except IsADirectoryError as error:
        raise UsageError(f"the host file {path} is a folder; name a file with one host a line") from error
    except (OSError, ValueError) as error:  # ValueError: an invalid file name
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"the host file {quoted(str(path))} cannot be read: {reason}") from error
    if len(content) > _MAX_BYTES:
        raise UsageError(f"the host file {path} is longer than {_MAX_BYTES // 2**20} MiB; that is no list of hosts")
    if b"\0" in content:
        raise UsageError(f"the host file {path} is not text in UTF-8: it contains zero bytes; {_FORM}")
    # A comment may have any encoding; anywhere else, non-ASCII text is reported as an error with its position.
    return content.decode("utf-8", "surrogateescape")


def _parse(text: str) -> tuple[tuple[Host, ...], _Problems]:
    table = _Table()
    problems: _Problems = []
    for number, line in enumerate(re.split(r"\r\n|\r|\n", text.removeprefix("\ufeff")), 1):
        try:
            if (parsed := _parse_line(line)) is not None:
                table.add(parsed, number)
        except HostListError as error:
            problems.append((number, error))
        if table.full:
            reason = f"here the list has more than {MAX_HOSTS} hosts, or names hosts more than {_MAX_NAMED} times"
            problems.append((number, HostListError(1, reason)))
        if table.full or len(problems) >= _ENOUGH:
            break
    return table.hosts(), problems


@dataclass(frozen=True)
class _Line:
    column: int  # of the host
    entry: HostEntry
    max_slots: int | None


@lru_cache(maxsize=1)  # a PBS file has the same line for each processor
def _parse_line(line: str) -> _Line | None:
    """Parse one line; return None if it contains only blanks and a comment. Raises HostListError."""
    code = re.split(r"#|(?:^|\s)//", line, maxsplit=1)[0]
    tokens = [(match.start() + 1, match[0]) for match in re.finditer(r"=|[^\s=]+", code)]
    if not tokens:
        return None
    column, host = tokens[0]
    entry = parse_entry(host, column=column)
    given = {"slots": entry.slots, "user": entry.user, "port": entry.port, "max_slots": None}
    settings: dict[str, str] = {}
    for place, key, value in _settings(tokens[1:]):
        if key in settings or given[key] is not None:
            hint = f"; after a name, {entry.slots} is slots" if key == "slots" and entry.slots is not None else ""
            raise HostListError(place, f"{key} is given twice for {quoted(host)}{hint}; {_FORM}")
        if key != "user" and re.fullmatch(r"[0-9]{1,6}", value, re.ASCII) is None:
            raise HostListError(place, f"{key} is {quoted(value)}, which is not a number of at most 6 digits; {_FORM}")
        settings[key] = value
    return _with_settings(column, entry, settings)


def _settings(tokens: list[tuple[int, str]]) -> Iterator[tuple[int, str, str]]:
    """Yield each `KEY = VALUE`: column of the value, canonical key, value."""
    for start in range(0, len(tokens), 3):
        (column, key), *rest = tokens[start : start + 3]
        if key not in _KEYS:
            raise HostListError(
                column, f"{quoted(key)} is not known after a host, only slots=, max_slots=, user= and port=; {_FORM}"
            )
        if len(rest) < 2 or rest[0][1] != "=" or rest[1][1] == "=":
            raise HostListError(column, f"{key} has no value; {_FORM}")
        yield rest[1][0], _KEYS[key], rest[1][1]


def _with_settings(column: int, entry: HostEntry, settings: dict[str, str]) -> _Line:
    most = int(settings["max_slots"]) if "max_slots" in settings else None
    slots = int(settings["slots"]) if "slots" in settings else entry.slots
    slots = most if slots is None else slots
    if most is not None and slots is not None and most < max(slots, 1):
        raise HostListError(column, f"max_slots is {most}, which is less than the slots of {max(slots, 1)}; {_FORM}")
    user = settings.get("user", entry.user)
    port = int(settings["port"]) if "port" in settings else entry.port
    if user is not None and not is_user(user):
        raise HostListError(column, f"{quoted(user)} is not a user name")
    if port is not None and not 1 <= port <= 65535:
        raise HostListError(column, f"port is {port}; sshd's is 1 to 65535")
    return _Line(column, replace(entry, slots=slots, user=user, port=port), most)


class _Table:
    """The hosts of the lines read so far."""

    def __init__(self) -> None:
        self._hosts: dict[str, Host] = {}
        self._lines: dict[str, int] = {}  # line where each was named first
        self._times: dict[str, int] = {}
        self._named = 0

    @property
    def full(self) -> bool:
        return len(self._hosts) > MAX_HOSTS or self._named > _MAX_NAMED

    def add(self, line: _Line, number: int) -> None:
        """Add the hosts of a line. Raises HostListError if one conflicts with earlier hosts."""
        self._named += len(line.entry.names)
        for host in line.entry.hosts():
            if line.max_slots is not None:
                host = replace(host, max_slots=line.max_slots)
            earlier = self._hosts.get(host.name)
            if earlier is None:
                if reason := clash(host, self._hosts):
                    raise HostListError(line.column, reason)
                self._hosts[host.name] = host
                self._lines[host.name] = number
            elif earlier != host or host.slots is not None:
                raise HostListError(
                    line.column,
                    f"host {host.name} is on line {self._lines[host.name]} already; name it once with all its slots "
                    f"({host.name} slots=8), or by its name alone on one line for each slot",
                )
            self._times[host.name] = self._times.get(host.name, 0) + 1

    def hosts(self) -> tuple[Host, ...]:
        by_lines = any(times > 1 for times in self._times.values())
        return tuple(
            replace(host, slots=self._times[host.name]) if by_lines and host.slots is None else host
            for host in self._hosts.values()
            if host.slots != 0
        )


def _raise_any(problems: _Problems, place: Callable[[int, int], str]) -> None:
    """Raise UsageError if there are problems; `place` formats a line and a column."""
    if not problems:
        return
    lines = [f"{place(line, error.column)}: {error.reason}" for line, error in problems[:_SHOWN]]
    if len(problems) > _SHOWN:
        lines.append(f"... and {len(problems) - _SHOWN} more bad lines up to line {problems[-1][0]}")
    raise UsageError("\n".join(lines)) from problems[0][1]
