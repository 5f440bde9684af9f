"""The program that receives files on a host, and becomes the agent there. Needs only Python's standard library.

It is sent over standard input, ahead of what it reads there (transport/synced.py): nothing of it is installed. Each
message is 4 bytes of length and JSON, compressed by zlib if it comes from the controller. The exchange:

    controller                                           host
    what the run needs: its files, by hash            -> looks into its store
                                                      <- `need`: the files that it lacks, by number
    the contents of those, one after the other        -> verifies each by its hash, and stores it
                                                      <- `ready`, and becomes the agent

All lies in one folder of the user's cache, which only the user can enter, in trees with lists of what is in them:

    code/KEY/RUN+NUMBER/   the code of a run, from the folder KEY: `tree`, and `record.json`. A script may change it.
    env/HASH/, HASH.list   an environment, for all runs that have the same one. Files that it shares with another are
                           hard links.

The process that makes a tree, or runs its code, holds a lock on the file `lock` there. A name that begins with a dot is
a tree that is not complete; the next run goes on with it if no process holds the lock. A later run takes over the code
of one that has ended, and replaces what differs; if the script has left files in it, or changed some, it stays as it
is, and the rest is copied. What is not used for DAYS, or over STORE_BYTES, is removed at the start of a run, once a
day.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import stat
import struct
import sys
import time
import zlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import Any

BEGIN = b"\n\x01dtrain-sync-1\n"
MAX_BLOCK_BYTES = 1 << 26
COMPRESSED = 1 << 31  # bit of a block's length
LENGTH = struct.Struct(">I")  # before each block and message
QUIET_S = 600  # without a byte from the controller, or to it: SIGALRM then ends this process
DAYS = 30
STORE_BYTES = 20 << 30
SPARE_BYTES = 64 << 20  # of a disk that is left free
_DAY_S = 86400.0
_PIECE_BYTES = 1 << 20
_LOOKED_AT = 4  # trees of earlier runs
# Programs of packages. By sh, since a kernel limits the length of an interpreter's path, and allows no space in it.
_PROGRAM = """#!/bin/sh
'''exec' {} "$0" "$@"
' '''
import sys
from {} import {}
sys.exit({}())
"""
_SCRIPT = """#!/bin/sh
exec {} {} "$@"
"""
_LINE = 1024  # of bytes
_CACHED = "__pycache__"
_ENVIRONMENT = "environment"  # the name of a link to it
PACKAGES = ("site-packages", "dist-packages")  # names of folders with packages
PROGRAMS = "../../../bin/"  # from there


class SyncError(Exception):
    """The files cannot be taken. The text is for the user, and names the next step."""


def sha256(data: bytes = b"") -> Any:
    import hashlib  # slow to import, and where nothing has changed it is not needed

    return hashlib.sha256(data)


def remove_tree(path: str) -> None:
    import shutil  # the same

    shutil.rmtree(path, ignore_errors=True)


# --- the stream


def read_exactly(descriptor: int, count: int) -> bytes:
    """Read so many bytes and no more: what follows them is for the agent. Raises EOFError."""
    pieces = []
    while count:
        signal.alarm(QUIET_S)
        piece = os.read(descriptor, min(count, _PIECE_BYTES))
        signal.alarm(0)
        if not piece:
            raise EOFError("the controller is gone")
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


def read_block(descriptor: int) -> bytes:
    """Read a block: its length, with a bit that says whether it is compressed, and its bytes."""
    (length,) = LENGTH.unpack(read_exactly(descriptor, LENGTH.size))
    size = length & ~COMPRESSED
    if size > MAX_BLOCK_BYTES:
        raise SyncError(f"a block of {size} bytes is over the limit")
    data = read_exactly(descriptor, size)
    return zlib.decompress(data) if length & COMPRESSED else data


def send(descriptor: int, **message: Any) -> None:
    data = json.dumps(message).encode() + b"\n"  # srun passes on whole lines
    write_all(descriptor, LENGTH.pack(len(data)) + data)


def write_all(descriptor: int, data: bytes) -> None:
    while data:
        signal.alarm(QUIET_S)
        data = data[os.write(descriptor, data) :]
        signal.alarm(0)


# --- files

# A file is a list, as in JSON: its path, size, mode, time of its last change in ns, hash.


def pack(files: Iterable[Sequence[Any]]) -> bytes:
    """Return a list of many files; it takes less time to read than JSON."""
    return "\0".join(str(field) for file in files for field in file).encode("utf-8", "surrogateescape")


def unpack(data: bytes) -> list[list[Any]]:
    fields = data.decode("utf-8", "surrogateescape").split("\0") if data else []
    paths, sizes, modes, times, digests = (fields[at::5] for at in range(5))
    return [[*file] for file in zip(paths, map(int, sizes), map(int, modes), map(int, times), digests, strict=True)]


def check_path(path: str) -> str:
    """Return an absolute path that leads nowhere else than it says. Raises SyncError."""
    if not path.startswith("/") or "\0" in path or any(part in ("", ".", "..") for part in path[1:].split("/")):
        raise SyncError(f"the path {path!r} is not a plain absolute path")
    return path


def check_link(path: str, target: str) -> str:
    """Return the target of a symbolic link if it is relative and stays below the root. Raises SyncError."""
    depth = len(path.split("/")) - 2
    for part in target.split("/"):
        depth += -1 if part == ".." else part not in ("", ".")
        if depth < 0 or target.startswith("/"):
            raise SyncError(f"the link {path!r} leads out of the tree, to {target!r}")
    return target


def open_store() -> str:
    """Return the folder of everything, which is private to the user. Raises SyncError."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    root = os.path.join(os.path.realpath(cache), "dtrain")
    for folder in (root, os.path.join(root, "code"), os.path.join(root, "env")):
        os.makedirs(folder, mode=0o700, exist_ok=True)
    found = os.lstat(root)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise SyncError(f"{root} there is not private to its user; type there: rm -r {root}")
    return root


class Writer:
    """Writes files of a tree: each appears under its name, with its time, only once its hash is verified."""

    def __init__(self, tree: str, *, read_only: bool) -> None:
        self._tree = tree
        self._mask = 0o555 if read_only else 0o755
        self._folders: set[str] = set()

    def receive(self, files: Sequence[Sequence[Any]], read: Callable[[], bytes]) -> None:
        """Write files whose contents follow one another in the blocks that `read` returns. Raises SyncError."""
        wrong, data = "", memoryview(b"")

        def pieces(left: int) -> Iterator[memoryview]:
            nonlocal data
            while left:
                data = data or memoryview(read())
                yield (piece := data[:left])
                left, data = left - len(piece), data[len(piece) :]

        for file in files:
            if not self.write(file, pieces(file[1])):
                wrong = wrong or file[0]
        if wrong:
            raise SyncError(f"{wrong} changed while it was sent; start the run again")

    def copy(self, file: Sequence[Any], source: str) -> bool:
        """Copy a file of another tree; return False if that is not possible, or its content is not what it was."""
        try:
            with open(source, "rb", 0) as opened:
                return self.write(file, iter(lambda: opened.read(_PIECE_BYTES), b""))
        except OSError:
            return False

    def write(self, file: Sequence[Any], pieces: Iterator[bytes | memoryview]) -> bool:
        """Write a file; return False, and remove it, if its content does not have the hash."""
        path, digest = self.prepare(file), sha256()
        temporary = f"{path}.{unique()}~" if os.path.lexists(path) else path
        written: bool = False
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, file[2] & self._mask), "wb", 0) as out:
                for piece in pieces:
                    digest.update(piece)
                    while piece:
                        piece = piece[out.write(piece) :]
                written = digest.hexdigest() == file[4]
                if written:
                    os.utime(out.fileno(), ns=(file[3], file[3]))
            if written and temporary != path:
                os.replace(temporary, path)
        finally:
            if not written:
                os.unlink(temporary)
        return written

    def link(self, file: Sequence[Any], source: str) -> bool:
        """Make a file a hard link to that of another tree, if it is as it was written; return whether it is."""
        path = self.prepare(file)
        try:
            if not is_as(os.lstat(source), file):
                return False
            os.link(source, path)
        except OSError:
            return False
        return True

    def prepare(self, file: Sequence[Any]) -> str:
        """Return the path of a file in the tree, whose folder is there."""
        path = self._tree + check_path(file[0])
        folder = os.path.dirname(path)
        if folder not in self._folders:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            self._folders.add(folder)
        return path


def is_as(found: os.stat_result, file: Sequence[Any]) -> bool:
    """Return whether a file looks as `Writer` has left it."""
    is_as_announced: bool = found.st_size == file[1] and found.st_mtime_ns == file[3]
    return is_as_announced and stat.S_ISREG(found.st_mode)


def walk(folder: str, *, compiled: bool) -> Iterator[tuple[str, os.stat_result]]:
    """Yield all below a folder that is no folder; with `compiled`, what Python has compiled as well."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                yield entry.path, entry.stat(follow_symlinks=False)
            elif compiled or entry.name != _CACHED:
                yield from walk(entry.path, compiled=compiled)


# --- trees


def _newest(folder: str) -> list[str]:
    """Return the names in a folder, the newest first. Hosts that share it may take some away meanwhile."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                found.append((entry.stat().st_mtime, entry.name))
            except FileNotFoundError:
                continue
    return [name for _, name in sorted(found, reverse=True)]


class Code:
    """The code of one run: a tree of its own, which this process owns until it ends, also once it is the agent."""

    def __init__(self, root: str, run: str, key: str) -> None:
        if key.strip("0123456789abcdef"):
            raise SyncError(f"{key!r} is not a hash")
        self._root = root
        self._above = os.path.join(root, "code", key)
        os.makedirs(self._above, mode=0o700, exist_ok=True)
        self._run = run
        self._name = f"{run}+{unique()}"
        self._folder = os.path.join(self._above, "." + self._name)
        self._has: dict[str, Any] = {}  # by path: the rest of the file as a list, or the target of a link; and its mark
        self._others: list[tuple[str, dict[str, Any]]] = []  # trees of other runs, with what they had
        self._recorded = False
        self.tree = os.path.join(self._folder, "tree")

    @property
    def folder(self) -> str:
        return self._folder

    def take_over(self, files: Sequence[Sequence[Any]]) -> None:
        """Begin with the tree of an ended run that is as it was made, or an incomplete one; else with an empty one."""
        for name in _newest(self._above)[:_LOOKED_AT]:
            earlier = os.path.join(self._above, name)
            try:
                has = None
                if not name.startswith("."):
                    with open(os.path.join(earlier, "record.json"), encoding="utf-8") as file:
                        has = json.load(file)
                is_ours = name.partition("+")[0] == self._run  # whose agent was lost: the script's files stay
                marks = {} if has is None else _marks(os.path.join(earlier, "tree"), has)
                is_unchanged = marks == {path: mark for path, (_, mark) in (has or {}).items()}
                if (has is None or is_ours or is_unchanged) and own(earlier) is not None:
                    os.rename(earlier, self._folder)
                    if has is None:
                        self._has = self._valid(files)
                    else:
                        self._has = {path: each for path, each in has.items() if marks.get(path) == each[1]}
                        self._recorded = is_unchanged
                    return
                if has is not None:
                    self._others.append((os.path.join(earlier, "tree"), has))
            except (OSError, ValueError, TypeError, AttributeError):
                continue
        make_owned(self._root, self._folder)
        os.mkdir(self.tree, mode=0o700)

    def _valid(self, files: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """Remove all from an incomplete tree that is not as it should become, and return the rest."""
        os.makedirs(self.tree, mode=0o700, exist_ok=True)
        wanted = {file[0]: file for file in files}
        valid = {}
        for path, found in walk(self.tree, compiled=True):
            file = wanted.get(path[len(self.tree) :])
            if file is None or not is_as(found, file):
                os.unlink(path)
            else:
                valid[file[0]] = (file[1:], _mark(found))
        return valid

    def lacks(self, files: Sequence[Sequence[Any]]) -> list[int]:
        """Return the numbers of the files that the tree lacks in this state; copy those that other trees have."""
        lacking = []
        for number, file in enumerate(files):
            if self._is_there(file):
                continue
            self._remove({file[0]})
            for tree, has in self._others:
                if has.get(file[0], (None, None))[0] == file[1:] and self._copy(file, tree, has[file[0]][1]):
                    break
            else:
                lacking.append(number)
        return lacking

    def _is_there(self, file: Sequence[Any]) -> bool:
        return bool(self._has.get(file[0], (None, None))[0] == file[1:])

    def _copy(self, file: Sequence[Any], tree: str, mark: list[int]) -> bool:
        try:
            is_same = _mark(os.lstat(tree + file[0])) == mark
        except OSError:
            return False
        return is_same and Writer(self.tree, read_only=False).copy(file, tree + file[0])

    def complete(self, files: Sequence[Sequence[Any]], links: Sequence[Sequence[str]], folders: Sequence[str]) -> None:
        """Make the tree equal to what is named, whose files are all there, and record it for a later run."""
        self._remove(self._has.keys() - {file[0] for file in files} - {path for path, _ in links})
        for file in files:
            if not self._is_there(file):
                self._has[file[0]] = (file[1:], _mark(os.lstat(self.tree + file[0])))
                self._recorded = False
        for path, target in links:
            if self._has.get(path, (None, None))[0] != target:
                self._remove({path})
                os.makedirs(os.path.dirname(self.tree + check_path(path)), mode=0o700, exist_ok=True)
                os.symlink(check_link(path, target), self.tree + path)
                self._has[path] = (target, _mark(os.lstat(self.tree + path)))
                self._recorded = False
        for folder in folders:
            os.makedirs(self.tree + check_path(folder), mode=0o700, exist_ok=True)
        if not self._recorded:
            with open(os.path.join(self._folder, "record.json"), "w", encoding="utf-8") as record:
                record.write(json.dumps(self._has))  # dump() takes four times as long
        folder = os.path.join(self._above, self._name)
        os.rename(self._folder, folder)
        self._folder, self.tree = folder, os.path.join(folder, "tree")
        os.utime(folder)

    def _remove(self, paths: Iterable[str]) -> None:
        """Remove files with what Python has compiled from them, and the folders that have none left."""
        for path in paths:
            if self._has.pop(path, None) is None:
                continue
            self._recorded = False
            if os.path.lexists(self.tree + path):
                os.unlink(self.tree + path)
            folder, name = os.path.split(self.tree + path)
            cached = os.path.join(folder, _CACHED)
            for compiled in os.listdir(cached) if os.path.isdir(cached) else ():
                if compiled.startswith(name.rpartition(".")[0] + "."):
                    os.unlink(os.path.join(cached, compiled))
            while folder != self.tree and not {*os.listdir(folder)} - {_CACHED}:
                remove_tree(folder)
                folder = os.path.dirname(folder)


def _marks(tree: str, has: dict[str, Any]) -> dict[str, list[int]]:
    """Return the marks of all files in a tree, but of those that Python has compiled only if they are recorded."""
    found = ((path[len(tree) :], entry) for path, entry in walk(tree, compiled=True))
    return {path: _mark(entry) for path, entry in found if path in has or f"/{_CACHED}/" not in path}


def _mark(found: os.stat_result) -> list[int]:
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


class Environment:
    """An environment that runs share. Its folder is named by the hash of the list of its files."""

    def __init__(self, root: str, digest: str) -> None:
        if digest.strip("0123456789abcdef"):
            raise SyncError(f"{digest!r} is not a hash")
        self._root = root
        self._above = os.path.join(root, "env")
        self._digest = digest
        self.tree = os.path.join(self._above, digest)
        self._partial = os.path.join(self._above, f".{digest}+{unique()}")
        self.files: Sequence[Sequence[Any]] = ()
        self._list = b""

    def is_known(self) -> bool:
        """Return whether the list of its files is here, and note its use."""
        try:
            with open(self.tree + ".list", "rb") as file:
                self._list = file.read()
            os.utime(self.tree + ".list")
        except OSError:
            return False
        return bool(sha256(self._list).hexdigest() == self._digest)

    def learn(self, data: bytes) -> None:
        """Keep the list of its files."""
        if sha256(data).hexdigest() != self._digest:
            raise SyncError("the list of the environment's files is not what was announced; start the run again")
        self._list = data
        with open(self._partial + ".list", "wb") as file:
            file.write(data)
        os.replace(self._partial + ".list", self.tree + ".list")

    def is_complete(self) -> bool:
        """Return whether the tree has all files, as they were written."""
        fields = self._list.decode("utf-8", "surrogateescape").split("\0")
        lstat, tree = os.lstat, self.tree
        try:
            for path, size, changed_ns in zip(fields[::5], fields[1::5], fields[3::5], strict=True):
                found = lstat(tree + path)
                if found.st_size != int(size) or found.st_mtime_ns != int(changed_ns):
                    return False
        except OSError:
            return False
        return True

    def build(self, fetch: Callable[[Sequence[int], Sequence[Sequence[Any]], Writer], None]) -> None:
        """Make the tree complete, or mend it: a new one is made aside, so that no other run sees half of it."""
        if self.is_complete():
            return
        self.files = unpack(self._list)
        if os.path.isdir(self.tree):
            fetch(self._lacking(self.tree), self.files, Writer(self.tree, read_only=True))
            return
        for name in os.listdir(self._above):
            if name.startswith(f".{self._digest}+") and not name.endswith(".list"):
                try:
                    if own(os.path.join(self._above, name)) is not None:
                        os.rename(os.path.join(self._above, name), self._partial)
                        break
                except OSError:  # another run was faster
                    continue
        else:
            make_owned(self._root, self._partial)
        writer = Writer(self._partial, read_only=True)
        others = self._others()
        lacking = self._lacking(self._partial, remove=True)
        fetch([n for n in lacking if not self._link(self.files[n], others, writer)], self.files, writer)
        try:
            os.rename(self._partial, self.tree)
        except OSError:  # another run was faster
            remove_tree(self._partial)

    def _lacking(self, tree: str, *, remove: bool = False) -> list[int]:
        """Return the numbers of files that a tree lacks, or that were changed there; with `remove`, remove those."""
        found = {path[len(tree) :]: entry for path, entry in walk(tree, compiled=False)}
        lacking = [n for n, file in enumerate(self.files) if file[0] not in found or not is_as(found[file[0]], file)]
        for number in lacking if remove else ():
            if self.files[number][0] in found:
                os.unlink(tree + self.files[number][0])
        return lacking

    def _others(self) -> dict[tuple[Any, ...], str]:
        """Return where the files of other environments are, by what they are."""
        found: dict[tuple[Any, ...], str] = {}
        for name in os.listdir(self._above):
            tree = os.path.join(self._above, name[: -len(".list")])
            if name.endswith(".list") and not name.startswith(".") and os.path.isdir(tree):
                try:
                    with open(os.path.join(self._above, name), "rb") as file:
                        found.update((tuple(other[1:]), tree + other[0]) for other in unpack(file.read()))
                except (OSError, ValueError):
                    continue
        return found

    def _link(self, file: Sequence[Any], others: dict[tuple[Any, ...], str], writer: Writer) -> bool:
        source = others.get(tuple(file[1:]))
        return source is not None and writer.link(file, source)


# --- which trees are used


def own(folder: str, flags: int = 0) -> int | None:
    """Own a tree until this process, and those that it forks, have ended; return the lock, None if others own the tree.

    A process id would mean nothing in another container, or on another host with the same home folder.
    """
    lock = os.open(os.path.join(folder, "lock"), os.O_RDWR | flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def make_owned(root: str, folder: str) -> None:
    """Make the folder of a tree, which others see only once this process owns it."""
    aside = os.path.join(root, unique())
    os.mkdir(aside, mode=0o700)
    own(aside, os.O_CREAT)
    os.rename(aside, folder)


def is_used(folder: str) -> bool:
    """Return whether another process owns a tree."""
    try:
        lock = own(folder)
    except FileNotFoundError:  # removed by hand
        return False
    if lock is not None:
        os.close(lock)
    return lock is None


def unique() -> str:
    return os.urandom(8).hex()


def tidy(root: str, now: float) -> None:
    """Remove what was not used for DAYS, and then the oldest until STORE_BYTES are not exceeded; once a day."""
    stamp = os.path.join(root, "tidied")
    try:
        if abs(now - os.stat(stamp).st_mtime) < _DAY_S:
            return
    except OSError:
        pass
    with open(stamp, "w", encoding="ascii"):
        os.utime(stamp, (now, now))
    for path in removable(kept(root), now):
        _remove_kept(path)


def show_cache(*, clear: bool) -> None:
    """Send what is kept: its run, empty for an environment, its size and age; with `clear`, remove it."""
    found, root = [], open_store()
    env = os.path.join(root, "env")
    for used, size, path in sorted(kept(root)):
        name = os.path.basename(path)
        is_code = os.path.dirname(path) != env
        found.append([name.lstrip(".").partition("+")[0] if is_code else "", size, time.time() - used])
        if clear:
            _remove_kept(path)
    send(1, cache=found)


def _remove_kept(path: str) -> None:
    """Remove a tree, unless a run has taken it over meanwhile."""
    lock = None
    try:
        if (lock := own(path)) is None:
            return
    except (FileNotFoundError, NotADirectoryError):  # an environment: the code that uses it is owned
        pass
    remove_tree(path)
    if lock is not None:
        os.close(lock)
    if os.path.exists(path + ".list"):
        os.unlink(path + ".list")


def kept(root: str) -> list[tuple[float, int, str]]:
    """Return the trees that no process uses: when each was last used, its size, its path."""
    code, env = os.path.join(root, "code"), os.path.join(root, "env")
    keys = filter(os.path.isdir, (os.path.join(code, key) for key in os.listdir(code)))
    paths = [os.path.join(key, name) for key in keys for name in os.listdir(key)]
    paths += [os.path.join(env, name) for name in os.listdir(env) if not name.endswith(".list")]
    found, in_use = [], set()
    for path in paths:
        try:
            if is_used(path):
                in_use |= {path, os.path.realpath(os.path.join(path, "venv", _ENVIRONMENT))}
            used = path + ".list" if os.path.exists(path + ".list") else path
            size = sum(entry.st_size for _, entry in walk(path, compiled=True))
            found.append((os.stat(used).st_mtime, size, path))
        except OSError:  # another run has taken it, or removed it
            continue
    return [each for each in found if each[2] not in in_use]


def removable(trees: Sequence[tuple[float, int, str]], now: float) -> list[str]:
    """Return the trees to remove: those unused for DAYS, and the oldest of the others while all exceed STORE_BYTES."""
    total = sum(size for _, size, _ in trees)
    removed = []
    for used, size, path in sorted(trees):
        if used < now - DAYS * _DAY_S or total > STORE_BYTES:
            removed.append(path)
            total -= size
    return removed


# --- the exchange


def serve(offer: dict[str, Any], *, descriptors: tuple[int, int] = (0, 1)) -> tuple[str, list[str], list[str]]:
    """Take what the run needs; return for the agent its Python, folders of modules, and the trees, the code's first."""
    stdin, stdout = descriptors
    if offer["environment"]:
        _check_system(offer)
    root = open_store()
    tidy(root, time.time())

    def fetch(numbers: Sequence[int], files: Sequence[Sequence[Any]], writer: Writer) -> None:
        if numbers:
            _check_space(root, sum(files[number][1] for number in numbers))
            send(stdout, need=numbers, part="code" if files is offer["files"] else "environment")
            writer.receive([files[number] for number in numbers], lambda: read_block(stdin))

    environment = None
    if offer["environment"]:
        environment = Environment(root, offer["environment"])
        if not environment.is_known():
            send(stdout, need=None, part="environment")
            environment.learn(read_block(stdin))
        environment.build(fetch)
    code = Code(root, offer["run"], offer["key"])
    code.take_over(offer["files"])
    fetch(code.lacks(offer["files"]), offer["files"], Writer(code.tree, read_only=False))
    code.complete(offer["files"], offer["links"], offer["folders"])
    python, folders, trees = sys.executable, [code.tree + offer["dtrain"]], [code.tree]
    if environment is not None:
        python, folders = _make_venv(code, environment, offer["site"], offer["dtrain"]), []
        trees.append(environment.tree)
    send(stdout, ready=trees)
    return python, folders, trees


def become(python: str, folders: list[str], trees: list[str]) -> None:
    """Go on as `PYTHON -m MODULE ...`, in this process: to start another Python takes as long as all else here.

    The arguments are those of this program.
    """
    import runpy
    import site

    os.environ["DTRAIN_AGENT_TREES"] = os.pathsep.join(trees)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*folders, os.environ.get("PYTHONPATH", "")]))
    sys.path[:0] = folders
    if python != sys.executable:
        sys.executable, sys.prefix = python, os.path.dirname(os.path.dirname(python))
        sys.exec_prefix = sys.prefix
        os.environ["PATH"] = os.pathsep.join((os.path.dirname(python), os.environ.get("PATH", os.defpath)))
    site.main()
    module = sys.argv[2]
    del sys.argv[1:3]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def fetch(order: dict[str, Any]) -> None:
    """Send the files that match patterns: for each its path and size, and its content."""
    tree, folder = order["tree"], order["folder"]
    if tree and os.path.isdir(tree + folder):
        folder = tree + folder
    import glob

    found: dict[str, str] = {}  # by name: several patterns match a file, and ** matches a folder and what is in it
    for pattern in order["fetch"]:
        for name in glob.glob(pattern, root_dir=folder, recursive=True):
            path = os.path.join(folder, name.rstrip("/") or "/")
            for each in (each for each, _ in walk(path, compiled=True)) if os.path.isdir(path) else [path]:
                found[os.path.relpath(each, folder) if each.startswith(folder + "/") else each] = each
    for name, path in sorted(found.items()):
        _send_file(path, name)
    send(1, done=True)


def _send_file(path: str, name: str) -> None:
    try:
        with open(path, "rb", 0) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                return
            left = found.st_size
            send(1, file=name, size=left)
            while left:
                data = file.read(min(left, _PIECE_BYTES)) or bytes(min(left, _PIECE_BYTES))  # it became shorter
                left -= len(data)
                write_all(1, data)
    except OSError as error:
        send(1, skipped=name, why=error.strerror)


def _make_venv(code: Code, environment: Environment, site: Sequence[str], dtrain: str) -> str:
    """Make a virtual environment whose packages are those that were sent; return its Python."""
    base = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    venv = os.path.join(code.folder, "venv")
    packages = os.path.join(venv, "lib", "python{}.{}".format(*sys.version_info[:2]), "site-packages")
    remove_tree(venv)
    os.makedirs(packages)
    os.makedirs(os.path.join(venv, "bin"))
    os.symlink(environment.tree, os.path.join(venv, _ENVIRONMENT))  # which is thus in use, see kept()
    with open(os.path.join(venv, "pyvenv.cfg"), "w", encoding="utf-8") as file:
        file.write(f"home = {os.path.dirname(base)}\ninclude-system-site-packages = false\n")
    lines = []
    for path in (dtrain, *site):  # by name: a folder of code may have an environment in it, so that both trees have it
        is_shared = os.path.basename(path) in PACKAGES
        lines.append(f"import site; site.addsitedir({environment.tree + path!r})" if is_shared else code.tree + path)
    with open(os.path.join(packages, "dtrain.pth"), "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write("".join(f"{line}\n" for line in dict.fromkeys(lines)))
    python = os.path.join(venv, "bin", "python")
    for name in ("python", "python3"):
        os.symlink(base, os.path.join(venv, "bin", name))
    for path in site:
        if os.path.basename(path) in PACKAGES:
            _make_programs(environment.tree + path, python)
    return python


def _make_programs(packages: str, python: str) -> None:
    """Make the programs of packages beside a Python, as an installation does; their names are in what was sent."""
    import shlex

    def make(name: str, text: str) -> None:
        path = os.path.join(os.path.dirname(python), os.path.basename(name))
        if not os.path.lexists(path):
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700), "w", encoding="utf-8") as out:
                out.write(text)

    for each in sorted(os.listdir(packages)) if os.path.isdir(packages) else ():
        try:
            with open(os.path.join(packages, each, "entry_points.txt"), encoding="utf-8") as file:
                lines = file.read().partition("[console_scripts]")[2].partition("\n[")[0].splitlines()
        except OSError:  # it has none
            continue
        for line in lines:
            name, _, target = (part.strip() for part in line.partition("="))
            module, _, function = target.partition("[")[0].strip().partition(":")
            if function:
                make(name, _PROGRAM.format(shlex.quote(python), module, function.partition(".")[0], function))
    folder = os.path.normpath(os.path.join(packages, PROGRAMS))
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        path = os.path.join(folder, name)
        if not os.path.isfile(path):
            continue
        with open(path, "rb") as program:
            begin = program.readline(_LINE) + program.readline(_LINE)  # the second where the interpreter's path is long
        is_python = begin.startswith(b"#!") and b"python" in begin
        make(name, _SCRIPT.format(shlex.quote(python) if is_python else "", shlex.quote(path)))


def _check_system(offer: dict[str, Any]) -> None:
    """Raise SyncError if this system cannot run the packages that are sent."""
    import sysconfig

    advice = "install the packages there, and use --sync code"
    if (platform := sysconfig.get_platform()) != offer["platform"]:
        raise SyncError(f"the host is {platform}, and the packages here are for {offer['platform']}; {advice}")
    name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    found_libc = [int(part) for part in version.split(".")[:2] if part.isdigit()]
    if name == "glibc" and found_libc < offer["libc"]:
        needed = ".".join(map(str, offer["libc"]))
        raise SyncError(f"the host has glibc {version}, and the packages here need {needed}; {advice}")


def _check_space(root: str, size: int) -> None:
    found = os.statvfs(root)
    free = found.f_bavail * found.f_frsize
    if free < size + SPARE_BYTES:
        raise SyncError(
            f"{root} there has {free >> 20} MB free; {size >> 20} MB are to come, and {SPARE_BYTES >> 20} MB must stay "
            "free. Free some, or set XDG_CACHE_HOME there to a folder on another disk"
        )


def main() -> None:
    try:
        order = json.loads(read_block(0))
        if "fetch" in order:
            fetch(order)
            return
        if "clear" in order:
            show_cache(clear=order["clear"])
            return
        agent = serve(order)
    except EOFError as error:
        sys.exit(f"dtrain receiver: {error}")
    except SyncError as error:
        send(1, error=str(error))
        sys.exit(1)
    except OSError as error:
        advice = "free some space, or set XDG_CACHE_HOME there to a folder that can be written and locked"
        send(1, error=f"{error.filename or 'the store'} there: {error.strerror}; {advice}")
        sys.exit(1)
    del order  # a list of all files
    become(*agent)


if __name__ == "__main__":
    main()
