"""Finds the packages of this interpreter, to be sent to hosts that lack them (`--sync env`). On the controller's side.

Packages are those with metadata in a folder of site-packages, with the files that their RECORD names. Packages that are
installed in editable mode are code: they are sent as they are now. An interpreter itself is not sent.
"""

from __future__ import annotations

import ast
import csv
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from launcher.frozen import dataclass
from launcher.sync.tree import File, hashed

_COMPILED = "__pycache__"
_MANYLINUX = re.compile(r"^Tag: .*-manylinux(?:_(\d+)_(\d+)|2014|2010|1)_", re.MULTILINE)


@dataclass(frozen=True)
class Environment:
    """What is sent of this interpreter. `site` are the folders of its module search path, in order; `listing` is what
    the receiver gets, `digest` its hash; `editable` are folders that are sent as code; `libc` is the version that the
    packages need, empty for one that is not glibc."""

    site: tuple[str, ...]
    editable: tuple[str, ...]
    files: tuple[File, ...]
    listing: bytes
    digest: str
    libc: tuple[int, ...]


def find_environment(cache: Path) -> Environment:
    """Return the packages of this interpreter. Raises UsageError for a file that cannot be read."""
    paths: dict[str, os.stat_result] = {}
    site, editable = [], []
    libc: tuple[int, ...] = (2, 17)
    for folder in _search_path():
        site.append(folder)
        if not _has_packages(folder):
            editable.append(folder)
            continue
        for path in _packaged(folder):
            try:
                paths[path] = os.stat(path)
            except OSError:  # removed by hand
                continue
            if path.endswith(".dist-info/WHEEL"):
                libc = max(libc, _libc_of(path))
        for source in _mapped(folder):
            site.append(os.path.dirname(source))
            editable.append(source)
    files = hashed(paths, cache / "environment.json")
    listing = json.dumps([file.as_list() for file in files], separators=(",", ":")).encode()
    digest = hashlib.sha256(listing).hexdigest()
    return Environment(tuple(dict.fromkeys(site)), tuple(dict.fromkeys(editable)), files, listing, digest, libc)


def _search_path() -> Iterator[str]:
    """Yield the folders of the module search path that are not the standard library's, in order."""
    first = next((at for at, path in enumerate(sys.path) if path.endswith("lib-dynload")), -1)
    for path in sys.path[first + 1 :]:
        if path and os.path.isdir(path):
            yield os.path.abspath(path)


def _has_packages(folder: str) -> bool:
    return os.path.basename(folder) in ("site-packages", "dist-packages")


def _packaged(folder: str) -> Iterator[str]:
    """Yield the files of the packages in a folder that lie in it: not programs, which have another folder."""
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if not name.endswith(".dist-info"):
            continue
        try:
            with open(os.path.join(path, "RECORD"), encoding="utf-8", errors="surrogateescape", newline="") as file:
                names = [row[0] for row in csv.reader(file) if row]
        except OSError:  # of a system's package manager, or damaged
            continue
        for each in names:
            if not each.startswith(("/", "../")) and not os.path.basename(each).startswith("__editable__"):
                yield os.path.join(folder, each)


def _mapped(folder: str) -> Iterator[str]:
    """Yield the folders of packages that setuptools has installed in editable mode by a finder in site-packages."""
    for name in sorted(os.listdir(folder)):
        if not (name.startswith("__editable__") and name.endswith("_finder.py")):
            continue
        found = re.search(r"^MAPPING[^=]*= (\{.*\})", Path(folder, name).read_text(encoding="utf-8"), re.MULTILINE)
        for package, source in (ast.literal_eval(found[1]) if found else {}).items():
            if os.path.basename(source) == package and os.path.isdir(source):
                yield source


def _libc_of(wheel: str) -> tuple[int, ...]:
    """Return the version of glibc that the tags of a wheel name."""
    text = Path(wheel).read_text(encoding="utf-8", errors="replace")
    found = [(int(tag[1]), int(tag[2])) for tag in _MANYLINUX.finditer(text) if tag[1]]
    return min(found, default=(2, 17))
