"""OpenSSH's known_hosts files: patterns, hashed names and markers, as `ssh` reads them.

Each file is parsed once until it changes, so that 32 hosts, or 5000 lines of hashed names, cost little.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

_MARKERS = ("", "@revoked", "@cert-authority")


@dataclass(frozen=True)
class KnownKey:
    """A host's key in a line: the name of its type, and the bytes that the host sends."""

    marker: str  # one of _MARKERS
    type: str
    blob: bytes
    file: Path
    line: int


def known_keys(files: Sequence[Path], name: str) -> list[KnownKey]:
    """Return the keys of a host in the files, in their order.

    `name` is `host`, or `[host]:port` for another port than 22. Lines of other kinds (damaged ones, unknown markers)
    and unreadable files are ignored, as by OpenSSH.
    """
    name = name.lower()
    return [key for file in files for key in _parsed(file).find(name)]


def add_key(file: Path, name: str, *, key_type: str, blob: bytes, hashed: bool = False) -> None:
    """Append a host's key, in one write, since several runs may do so at the same time. Raises OSError."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    line = f"{_hash(name.lower()) if hashed else name} {key_type} {base64.b64encode(blob).decode()}\n"
    descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":  # the last line has no line feed
            line = "\n" + line
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


@dataclass
class _File:
    """The keys of one file, by the form of the names in their lines."""

    exact: dict[str, list[KnownKey]] = field(default_factory=dict)
    hashed: list[tuple[bytes, bytes, KnownKey]] = field(default_factory=list)  # salt, digest
    patterns: list[tuple[list[str], KnownKey]] = field(default_factory=list)

    def add(self, names: list[str], key: KnownKey) -> None:
        if any(character in name for name in names for character in "*?!"):
            self.patterns.append((names, key))
            return
        for name in names:
            if not name.startswith("|"):
                self.exact.setdefault(name, []).append(key)
            elif (parts := _salt_and_digest(name)) is not None:
                self.hashed.append((*parts, key))

    def find(self, name: str) -> list[KnownKey]:
        encoded = name.encode()
        found = list(self.exact.get(name, ()))
        found += [key for names, key in self.patterns if _matches(names, name)]
        found += [key for salt, digest, key in self.hashed if hmac.digest(salt, encoded, "sha1") == digest]
        return sorted(set(found), key=lambda key: key.line)


_lock = threading.Lock()
_files: dict[Path, tuple[tuple[int, ...], _File]] = {}


def _parsed(path: Path) -> _File:
    with _lock:
        try:
            stat = path.stat()
            signature = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if (known := _files.get(path)) is not None and known[0] == signature:
                return known[1]
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:  # most users have only one of the default files
            return _File()
        parsed = _File()
        for number, line in enumerate(text.splitlines(), 1):
            words = line.split(None, 4)
            marker = words.pop(0) if words and words[0].startswith("@") else ""
            if len(words) < 3 or words[0].startswith("#") or marker not in _MARKERS:
                continue
            names = words[0] if words[0].startswith("|") else words[0].lower()
            if (blob := _blob(words[1], words[2])) is not None:
                parsed.add(names.split(","), KnownKey(marker, words[1], blob, path, number))
        _files[path] = (signature, parsed)
        return parsed


def _blob(key_type: str, text: str) -> bytes | None:
    """Return the bytes of a key; None for a damaged one."""
    try:
        blob = base64.b64decode(text, validate=True)
    except ValueError:
        return None
    return blob if blob[4 : 4 + len(key_type)] == key_type.encode() else None


def _matches(patterns: Sequence[str], name: str) -> bool:
    found = False
    for pattern in patterns:
        negated = pattern.startswith("!")
        # Brackets are part of `[host]:port` here, not a set of characters.
        if fnmatchcase(name, pattern.removeprefix("!").replace("[", "[[]")):
            if negated:
                return False
            found = True
    return found


def _salt_and_digest(name: str) -> tuple[bytes, bytes] | None:
    parts = name.split("|")
    if len(parts) != 4 or parts[1] != "1":
        return None
    try:
        return base64.b64decode(parts[2], validate=True), base64.b64decode(parts[3], validate=True)
    except binascii.Error:
        return None


def _hash(name: str) -> str:
    salt = os.urandom(hashlib.sha1().digest_size)
    digest = hmac.digest(salt, name.encode(), "sha1")
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"
