"""Finds the packages of this interpreter, to be sent to hosts that lack them (`--sync env`). On the controller's side.

Packages are those with metadata in a folder of site-packages, with the files there and programs in bin that their
RECORD names; not those that Python has compiled, since it does that again. Packages that are installed in editable mode
are code: they are sent as they are now. An interpreter itself is not sent.
"""

from __future__ import annotations

import ast
import contextlib
import csv
import hashlib
import json
import os
import re
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.frozen import dataclass
from launcher.sync.receiver import PACKAGES, PROGRAMS, pack, unpack
from launcher.sync.tree import File, hashed

_MANYLINUX = re.compile(r"^Tag: .*-manylinux(?:_(\d+)_(\d+)|2014|2010|1)_", re.MULTILINE)


@dataclass(frozen=True)
class Environment:
    """What is sent of this interpreter. `site` are the folders of its module search path, in order.

    `listing` is the list of files as the receiver takes it, `digest` its hash; `editable` are folders that are sent as
    code; `libc` is the version of glibc that the packages need.
    """

    site: tuple[str, ...]
    editable: tuple[str, ...]
    libc: tuple[int, ...]
    unrecorded: tuple[str, ...]  # packages that are not sent: nothing says which files they have
    listing: bytes
    digest: str

    @property
    def files(self) -> tuple[File, ...]:
        return tuple(File(*fields) for fields in unpack(self.listing))


@dataclass(frozen=True)
class _Installed:
    """The packages of this interpreter, as their metadata says; `key` changes with it."""

    key: str
    site: tuple[str, ...]
    editable: tuple[str, ...]
    libc: tuple[int, ...]
    unrecorded: tuple[str, ...]
    paths: tuple[str, ...]


def find_environment(cache: Path) -> Environment:
    """Return the packages of this interpreter. Raises UsageError for a file that cannot be read.

    There are ten thousands of files: what was found last time is taken again if nothing has changed.
    """
    known, listing = _known(cache / "environment.json"), cache / "environment.list"
    key = _key()
    installed = known[0] if known is not None and known[0].key == key else _installed(key)
    found = _stat_all(installed.paths)
    mark = _mark_of(found)
    if known is not None and known[0] is installed and known[1] == mark:
        with contextlib.suppress(OSError):
            data = listing.read_bytes()
            if (digest := hashlib.sha256(data).hexdigest()) == known[2]:
                return Environment(
                    installed.site, installed.editable, installed.libc, installed.unrecorded, data, digest
                )
    data = pack(file.as_list() for file in hashed(found, cache / "environment.hashes"))
    digest = hashlib.sha256(data).hexdigest()
    with contextlib.suppress(OSError):  # no room: all is found again
        listing.write_bytes(data)
        text = json.dumps([vars(installed), mark, digest])
        (cache / "environment.json").write_text(text)
    return Environment(installed.site, installed.editable, installed.libc, installed.unrecorded, data, digest)


def _known(file: Path) -> tuple[_Installed, str, str] | None:
    """Return what was found last time: the packages, what their files looked like, and the hash of the list."""
    try:
        found, mark, digest = json.loads(file.read_bytes())
        names = ("site", "editable", "libc", "unrecorded", "paths")
        return _Installed(found["key"], *(tuple(found[name]) for name in names)), mark, digest
    except (OSError, ValueError, TypeError, LookupError):
        return None


def _key() -> str:
    """Return a hash of the metadata of all packages, by the times of its files, and of this module's."""
    seen = [str(os.stat(__file__).st_mtime_ns)]
    for folder in _search_path():
        seen.append(folder)
        if _has_packages(folder):
            for name in sorted(os.listdir(folder)):
                file = os.path.join(folder, name, "RECORD") if name.endswith(".dist-info") else ""
                if name.startswith("__editable__"):
                    file = os.path.join(folder, name)
                with contextlib.suppress(OSError):
                    seen += [file, str(os.stat(file).st_mtime_ns)] if file else []
    return hashlib.sha256(os.fsencode("\0".join(seen))).hexdigest()


def _stat_all(paths: Sequence[str]) -> dict[str, os.stat_result]:
    found = {}
    stat = os.stat
    for path in paths:
        try:
            found[path] = stat(path)
        except OSError:  # removed by hand
            continue
    return found


def _mark_of(found: dict[str, os.stat_result]) -> str:
    mark = hashlib.sha256()
    pack_marks = struct.Struct("<qqqQ").pack
    for each in found.values():
        mark.update(pack_marks(each.st_size, each.st_mtime_ns, each.st_ctime_ns, each.st_ino))
    return mark.hexdigest()


def _installed(key: str) -> _Installed:
    """Return the packages, by reading their metadata."""
    site, editable, paths, unrecorded = [], [], [], []
    libc: tuple[int, ...] = (2, 17)
    for folder in _search_path():
        site.append(folder)
        if not _has_packages(folder):
            editable.append(folder)
            continue
        unrecorded += _unrecorded(folder)
        for path in _packaged(folder):
            paths.append(path)
            if path.endswith(".dist-info/WHEEL"):
                libc = max(libc, _libc_of(path))
        for source in _mapped(folder):
            site.append(os.path.dirname(source))
            editable.append(source)
    site, editable = [*dict.fromkeys(site)], [*dict.fromkeys(editable)]
    return _Installed(key, tuple(site), tuple(editable), libc, tuple(unrecorded), tuple(dict.fromkeys(paths)))


def _search_path() -> Iterator[str]:
    """Yield the folders of the module search path that are not the standard library's, in order."""
    first = next((at for at, path in enumerate(sys.path) if path.endswith("lib-dynload")), -1)
    for path in sys.path[first + 1 :]:
        if path and os.path.isdir(path):
            yield os.path.abspath(path)


def _has_packages(folder: str) -> bool:
    return os.path.basename(folder) in PACKAGES


def _packaged(folder: str) -> Iterator[str]:
    """Yield the files of the packages in a folder that lie in it, and their programs."""
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
            if each.endswith(".pyc"):
                continue
            if each.startswith(PROGRAMS):
                yield os.path.normpath(os.path.join(folder, each))
            elif not each.startswith(("/", "../", "__editable__")):
                yield os.path.join(folder, each)


def _unrecorded(folder: str) -> list[str]:
    """Return the packages in a folder whose files are not recorded: those of a system's package manager."""
    return [
        name.partition("-")[0].removesuffix(".egg-info")
        for name in sorted(os.listdir(folder))
        if name.endswith((".dist-info", ".egg-info")) and not os.path.exists(os.path.join(folder, name, "RECORD"))
    ]


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
