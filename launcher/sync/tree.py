"""Finds the code that is sent to the hosts: which files, and what they contain, by hash. On the controller's side.

The code is the git repository of the script, or its folder where there is none; without what git ignores or
`.dtrainignore` names, and without files that look like secrets, unless `.dtrainignore` names them as `!NAME`. Hashes of
files are remembered with size, time and inode, so that only changed files are read.
"""

from __future__ import annotations

import fnmatch
import hashlib
import itertools
import json
import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from launcher.errors import UsageError
from launcher.frozen import dataclass
from launcher.placement.job_spec import CommandKind, WorkerCommand

IGNORE_FILE = ".dtrainignore"
CODE_BYTES = 500 << 20
ASK_S = 60.0  # for git
_LARGEST = 5
_NAMED = 3
_NEVER = {".git", ".hg", ".svn", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", "node_modules"}
# Packages of the launcher that no agent imports; test_tree.py compares.
_ONLY_HERE = {"cli", "controller", "functions", "hangs", "output", "placement", "runs", "sync", "transport"}
_SECRET = re.compile(
    r"\.env(?:\.(?!example$|sample$|template$|dist$).*)?|id_(?:rsa|dsa|ecdsa|ed25519)|.*\.(?:pem|key|p12|pfx|keystore|token)"
    r"|\.(?:netrc|pypirc|npmrc|git-credentials|pgpass)|.*(?:credentials?|service[-_]account|secrets?)\.(?:json|ya?ml|toml)"
    r"|(?:.*[_-])?token(?:\.txt)?|kubeconfig",
    re.IGNORECASE,
)
_GIT = ("git", "-c", "core.fsmonitor=false", "-c", "core.quotepath=false")


@dataclass(frozen=True)
class File:
    """A file as the receiver takes it: its absolute path here, and what it has. `mode` is 0o644 or 0o755."""

    path: str
    size: int
    mode: int
    changed_ns: int
    digest: str

    def as_list(self) -> list[object]:
        return [self.path, self.size, self.mode, self.changed_ns, self.digest]


@dataclass(frozen=True)
class Code:
    """What is sent as code: files, symbolic links, and `notes` on what was left out, for the user."""

    root: str
    files: tuple[File, ...]
    links: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


def root_of(command: WorkerCommand, workdir: Path) -> str:
    """Return the folder that has the code of a command: the git repository around the script, else its folder."""
    folder = str(workdir)
    if command.kind is CommandKind.SCRIPT and not command.is_standard_input:
        script = os.path.normpath(os.path.join(workdir, command.target))
        folder = script if os.path.isdir(script) else os.path.dirname(script)
    above = [folder, *map(str, Path(folder).parents)]
    return next((path for path in above if os.path.lexists(os.path.join(path, ".git"))), folder)


def find_code(
    roots: Sequence[str], packages: Sequence[str], *, cache: Path, left_out: Collection[str] = (), named: str = ""
) -> Code:
    """Return the files below `roots`; the first is that of the script, `named`, which is always among them.

    `packages` are folders of Python packages, sent with what Python has compiled; `left_out` are folders that are not
    sent. Raises UsageError for too many bytes, or a file that cannot be read.
    """
    paths: dict[str, os.stat_result] = {}
    links: dict[str, str] = {}
    secrets: list[str] = []
    strange: list[str] = []
    for root in roots:
        ignored, real = Ignored.read(root), os.path.realpath(root)  # either may be named through a link
        names_left_out = {os.path.relpath(os.path.realpath(each), real) for each in left_out}
        for path in _listed(root, "", ignored, names_left_out):
            name = path[len(root) + 1 :]
            if _SECRET.fullmatch(os.path.basename(path)) and not ignored.names(name) and path != named:
                secrets.append(name)
                continue
            try:
                found = os.lstat(path)
            except FileNotFoundError:  # deleted, but still in git's index
                continue
            if stat.S_ISREG(found.st_mode):
                paths[path] = found
            elif stat.S_ISLNK(found.st_mode) and (target := _inner_target(path, root)) is not None:
                links[path] = target
            elif not stat.S_ISDIR(found.st_mode):
                strange.append(name)
    for package in packages:
        paths.update(_modules(package))
    if named and os.path.isfile(named):
        paths.setdefault(named, os.stat(named))
    root = roots[0] if roots else packages[0]
    _check_size(root, paths)
    notes = [f"not sent, for they look like secrets: {some(secrets)}; write !NAME in {IGNORE_FILE} to send one"]
    notes += [f"not sent: {some(strange)}: links that lead out of the folder, or no plain files"]
    kept = tuple(note for note, about in zip(notes, (secrets, strange), strict=True) if about)
    files = hashed(paths, cache / f"{hashlib.sha256(os.fsencode(root)).hexdigest()[:16]}.json")
    return Code(root, files, tuple(links.items()), kept)


@dataclass(frozen=True)
class Ignored:
    """The patterns of a `.dtrainignore`, as in a .gitignore: the last that matches a path decides."""

    patterns: tuple[str, ...] = ()

    @classmethod
    def read(cls, root: str) -> Ignored:
        try:
            text = Path(root, IGNORE_FILE).read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            return cls()
        lines = [line.strip() for line in text.splitlines()]
        return cls(tuple(line for line in lines if line and not line.startswith("#")))

    def has(self, name: str) -> bool:
        """Return whether a path, relative to the root, is left out; so is what lies in a folder that is."""
        return any(self._decides(part, exclude=True) for part in _parts(name)) and not self.names(name)

    def names(self, name: str) -> bool:
        """Return whether a pattern `!NAME` names a path."""
        return self._decides(name, exclude=False)

    def _decides(self, name: str, *, exclude: bool) -> bool:
        found = None
        for line in self.patterns:
            pattern = line.removeprefix("!").rstrip("/")
            anchored = pattern.lstrip("/")
            subject = name if "/" in pattern else name.rpartition("/")[2]
            if fnmatch.fnmatchcase(subject, anchored):
                found = not line.startswith("!")
        return found is exclude


def _parts(name: str) -> Iterator[str]:
    """Yield a path and the folders above it.

    >>> [*_parts("a/b/c")]
    ['a', 'a/b', 'a/b/c']
    """
    at = name.find("/")
    while at >= 0:
        yield name[:at]
        at = name.find("/", at + 1)
    yield name


def _listed(root: str, inner: str, ignored: Ignored, left_out: Collection[str]) -> Iterator[str]:
    """Yield the files and links that are not ignored below `root`, or below a folder in it, `inner`.

    All names are relative to `root`, those of `left_out` and of patterns too.
    """
    folder = os.path.join(root, inner) if inner else root
    names = _ask_git(folder) if os.path.lexists(os.path.join(folder, ".git")) or _in_repository(folder) else None
    if names is None:
        yield from _walked(root, folder, ignored, left_out)
        return
    folders: dict[str, bool] = {}  # whether it is sent
    for name in (os.path.join(inner, each) for each in names if each != "./"):  # of a submodule that is not there
        path = os.path.join(root, name)
        if name.endswith("/") or (os.path.isdir(path) and not os.path.islink(path)):  # another repository in this one
            name = name.rstrip("/")
            if all(_is_sent(root, part, left_out) for part in _parts(name)):
                yield from _listed(root, name, ignored, left_out)
            continue
        folder = name.rpartition("/")[0]
        if folder not in folders:
            folders[folder] = not folder or all(_is_sent(root, part, left_out) for part in _parts(folder))
        if folders[folder] and not (ignored.patterns and ignored.has(name)):
            yield path


def _walked(root: str, folder: str, ignored: Ignored, left_out: Collection[str]) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            name = entry.path[len(root) + 1 :]
            if ignored.has(name):
                continue
            if not entry.is_dir(follow_symlinks=False):
                yield entry.path
            elif _is_sent(root, name, left_out):
                yield from _walked(root, entry.path, ignored, left_out)


def _modules(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the modules below a folder, and what this Python has compiled from them."""
    compiled = f".{sys.implementation.cache_tag}.pyc"
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if entry.name not in _ONLY_HERE:
                    yield from _modules(entry.path)
            elif entry.name.endswith((".py", compiled)):
                yield entry.path, entry.stat()


def _is_sent(root: str, name: str, left_out: Collection[str]) -> bool:
    """Return whether a folder is sent: none of caches, logs of runs, and virtual environments."""
    path = os.path.join(root, name)
    is_left_out = name.rpartition("/")[2] in _NEVER or name in left_out
    return not is_left_out and not os.path.lexists(os.path.join(path, "pyvenv.cfg"))


def _in_repository(folder: str) -> bool:
    return any(os.path.lexists(os.path.join(above, ".git")) for above in map(str, Path(folder).parents))


def _ask_git(folder: str) -> list[str] | None:
    """Return the files below a folder that are tracked, or neither tracked nor ignored; None if git cannot say it."""
    try:
        done = subprocess.run(
            [*_GIT, "-C", folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=ASK_S,
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return [*dict.fromkeys(map(os.fsdecode, done.stdout.split(b"\0")[:-1]))] if done.returncode == 0 else None


def _inner_target(path: str, root: str) -> str | None:
    """Return the target of a symbolic link, relative to its folder; None if it leads out of the root."""
    folder = os.path.dirname(path)
    target = os.path.normpath(os.path.join(folder, os.readlink(path)))
    return os.path.relpath(target, folder) if target.startswith(root + "/") else None


def _check_size(root: str, paths: dict[str, os.stat_result]) -> None:
    total = sum(found.st_size for found in paths.values())
    if total <= CODE_BYTES:
        return
    largest = sorted(paths, key=lambda path: paths[path].st_size, reverse=True)[:_LARGEST]
    named = "".join(f"\n  {paths[path].st_size >> 20} MB  {os.path.relpath(path, root)}" for path in largest)
    raise UsageError(
        f"--sync: the code in {root} has {total >> 20} MB, more than {CODE_BYTES >> 20}; the largest files:{named}\n"
        f"name what the hosts do not need in {IGNORE_FILE} or .gitignore; put data into a folder that the hosts have"
    )


def some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(ascii(name)[1:-1] for name in names[:_NAMED]) + more


def hashed(paths: dict[str, os.stat_result], remembered: Path) -> tuple[File, ...]:
    """Return the files with their hashes; `remembered` is where those of unchanged files are from.

    Raises UsageError for one that cannot be read.
    """
    known = _remembered(remembered)
    marks = {path: [f.st_size, f.st_mtime_ns, f.st_ctime_ns, f.st_ino] for path, f in paths.items()}
    changed = [path for path, mark in marks.items() if known.get(path, (None,))[0] != mark]
    if changed:
        from concurrent.futures import ThreadPoolExecutor  # slow to import, and most runs do without

        left = iter(changed)
        with ThreadPoolExecutor(2) as threads:  # hashing releases the interpreter's lock; a call for each file is slow
            found = threads.map(lambda _: [(path, _digest(path)) for path in left], range(2))
            digests = dict(itertools.chain.from_iterable(found))
        known = {path: (mark, digests.get(path) or known[path][1]) for path, mark in marks.items()}
        _remember(remembered, known)
    return tuple(
        File(path, f.st_size, 0o755 if f.st_mode & 0o100 else 0o644, f.st_mtime_ns, known[path][1])
        for path, f in paths.items()
    )


def _digest(path: str) -> str:
    digest = hashlib.sha256()
    try:
        with open(path, "rb", 0) as file:
            for data in iter(lambda: file.read(1 << 20), b""):
                digest.update(data)
    except OSError as error:
        raise UsageError(
            f"--sync: {path} cannot be read: {error.strerror}; make it readable, or name it in {IGNORE_FILE}"
        ) from error
    return digest.hexdigest()


def _remembered(file: Path) -> dict[str, tuple[list[int], str]]:
    try:
        found = json.loads(file.read_bytes())
        return {path: (mark, digest) for path, (mark, digest) in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _remember(file: Path, known: dict[str, tuple[list[int], str]]) -> None:
    temporary = file.with_name(f".{file.name}-{os.getpid()}-{threading.get_ident()}")
    try:
        file.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # it may be a host's store, too
        file.parent.mkdir(mode=0o700, exist_ok=True)
        temporary.write_text(json.dumps(known))
        os.replace(temporary, file)
    except OSError:  # no room: the files are read again
        temporary.unlink(missing_ok=True)
