"""OpenSSH's known_hosts files, line by line: patterns, hashed names and markers, where paramiko's reader gives up."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import paramiko
from paramiko.hostkeys import HostKeyEntry, HostKeys, InvalidHostKey

__all__ = ["add_key", "known_keys"]


def known_keys(files: Sequence[Path], name: str) -> tuple[list[paramiko.PKey], list[paramiko.PKey]]:
    """Return the keys that the files give for a host, and those that they call revoked for it.

    `name` is `host`, or `[host]:port` for another port than 22. Lines of other kinds (certificate authorities, key
    types that nobody here speaks, damaged ones) say nothing about a key and are passed over, as by OpenSSH.
    """
    known: list[paramiko.PKey] = []
    revoked: list[paramiko.PKey] = []
    for line in _lines(files):
        marker, _, rest = line.partition(" ") if line.startswith("@") else ("", "", line)
        if marker not in ("", "@revoked"):
            continue
        try:
            entry = HostKeyEntry.from_line(rest)
        except (InvalidHostKey, paramiko.SSHException, ValueError):
            continue
        if entry is not None and entry.key is not None and _names(entry.hostnames or [], name):
            (revoked if marker else known).append(entry.key)
    return known, revoked


def add_key(file: Path, name: str, key: paramiko.PKey) -> None:
    """Append a host's key, in one write, so that several runs may do so at once."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, f"{name} {key.get_name()} {key.get_base64()}\n".encode())
    finally:
        os.close(descriptor)


def _lines(files: Sequence[Path]) -> Iterator[str]:
    for file in files:
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError:  # most people have only one of the usual files
            continue
        for line in text.splitlines():
            if line.strip() and not line.startswith("#"):
                yield line.strip()


def _names(patterns: Sequence[str], name: str) -> bool:
    found = False
    for pattern in patterns:
        if pattern.startswith("|1|"):
            found = found or HostKeys.hash_host(name, pattern) == pattern
        elif pattern.startswith("!"):
            if _matches(pattern[1:], name):
                return False
        else:
            found = found or _matches(pattern, name)
    return found


def _matches(pattern: str, name: str) -> bool:
    # Brackets are part of `[host]:port` here, not a set of characters.
    return fnmatchcase(name, pattern.replace("[", "[[]"))
