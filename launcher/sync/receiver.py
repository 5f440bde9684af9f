"""The program that receives files on a host, and becomes the agent there. Needs only Python's standard library.

It is sent over standard input, ahead of what it reads there (transport/synced.py): nothing of it is installed. Each
message is 4 bytes of length and JSON, compressed by zlib if it comes from the controller. The exchange:

    controller                                           host
    what the run needs: its files, by hash            -> looks into its store
                                                      <- `need`: the files that it lacks, by number
    the contents of those, one after the other        -> verifies each by its hash, and stores it
                                                      <- `ready`, and becomes the agent by exec

All lies in one folder of the user's cache, which only the user can enter:

    objects/      files by content. A temporary name until their hash is verified.
    code/RUN/     the code of a run: `tree`, and `record.json`. Copies, since a script may change them.
    env/HASH/     an environment: hard links to objects, for all runs that have the same one

A later run takes over the code of one that has ended, and replaces what differs; not if the script has left files in
it. What is not used for DAYS, or over STORE_BYTES, is removed at the start of a run, once a day.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import struct
import sys
import time
import zlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

BEGIN = b"\n\x01dtrain-sync-1\n"
MAX_BLOCK_BYTES = 1 << 26
COMPRESSED = 1 << 31  # bit of a block's length
DAYS = 30
STORE_BYTES = 20 << 30
SPARE_BYTES = 64 << 20  # of a disk that is left free
_LENGTH = struct.Struct(">I")
_DAY_S = 86400.0
_PIECE_BYTES = 1 << 20
_TRIES = 3
_CACHED = "__pycache__"


class SyncError(Exception):
    """The files cannot be taken. The text is for the user, and names the next step."""


# --- the stream


def read_exactly(descriptor: int, count: int) -> bytes:
    """Read so many bytes and no more: what follows them is for the agent. Raises EOFError."""
    pieces = []
    while count:
        piece = os.read(descriptor, min(count, _PIECE_BYTES))
        if not piece:
            raise EOFError("the controller is gone")
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


def read_block(descriptor: int) -> bytes:
    """Read a block: its length, with a bit that says whether it is compressed, and its bytes."""
    (length,) = _LENGTH.unpack(read_exactly(descriptor, _LENGTH.size))
    size = length & ~COMPRESSED
    if size > MAX_BLOCK_BYTES:
        raise SyncError(f"a block of {size} bytes is over the limit")
    data = read_exactly(descriptor, size)
    return zlib.decompress(data) if length & COMPRESSED else data


def send(descriptor: int, **message: Any) -> None:
    data = json.dumps(message).encode()
    data = _LENGTH.pack(len(data)) + data
    while data:
        data = data[os.write(descriptor, data) :]


# --- files

# A file: path, size, mode (executable or not), time of its last change in ns, hash; as JSON, a list.


def check_path(path: str) -> str:
    """Return an absolute path that leads nowhere else than it says. Raises SyncError."""
    if not path.startswith("/") or "\0" in path or any(part in ("", ".", "..") for part in path[1:].split("/")):
        raise SyncError(f"the path {path!r} is not a plain absolute path")
    return path


def check_link(path: str, target: str) -> str:
    """Return the target of a symbolic link if it is relative and stays below the root. Raises SyncError."""
    there = os.path.join(os.path.dirname(path), target)
    depth = 0
    for part in there.split("/"):
        depth += (part == "..") * -1 + (part not in ("", ".", ".."))
        if depth < 0 or target.startswith("/"):
            raise SyncError(f"the link {path!r} leads out of the tree, to {target!r}")
    return target


class Store:
    """The files that this host has, by content. `root` is the folder of everything."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._objects = os.path.join(root, "objects")
        for folder in (root, self._objects, os.path.join(root, "code"), os.path.join(root, "env")):
            os.makedirs(folder, mode=0o700, exist_ok=True)
        found = os.lstat(root)
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise SyncError(f"{root} there is not private to its user: remove it, or type chmod 700 {root}")
        self._made = 0

    def temporary(self, folder: str) -> str:
        self._made += 1
        return os.path.join(self.root, folder, f".{os.getpid()}-{time.time_ns()}-{self._made}")

    def place(self, file: Sequence[Any], *, linked: bool) -> str:
        """Return where a file is stored. One for links also has the time and mode of the file itself."""
        _, _, mode, changed_ns, digest = file
        if len(digest) != 64 or digest.strip("0123456789abcdef"):
            raise SyncError(f"{digest!r} is not a hash")
        name = f"{digest}-{changed_ns}-{mode}" if linked else digest
        return os.path.join(self._objects, digest[:2], name)

    def has(self, file: Sequence[Any], *, linked: bool) -> bool:
        """Return whether a file is stored, and looks as it was stored; what does not is removed."""
        place = self.place(file, linked=linked)
        try:
            found = os.lstat(place)
        except OSError:
            return False
        if _is_as(found, file, linked=linked):
            return True
        os.unlink(place)
        return False

    def receive(self, files: Sequence[Sequence[Any]], read: Callable[[], bytes], *, linked: bool) -> None:
        """Store files whose contents follow one another in blocks. Raises SyncError for one that is another."""
        wrong, data = [], memoryview(b"")
        for file in files:
            place, left, digest = self.place(file, linked=linked), file[1], hashlib.sha256()
            os.makedirs(os.path.dirname(place), mode=0o700, exist_ok=True)
            temporary = self.temporary("objects")
            try:
                with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", 0) as out:
                    while left:
                        data = data or memoryview(read())
                        piece = data[:left]
                        digest.update(piece)
                        while piece:
                            piece = piece[out.write(piece) :]
                        taken = min(left, len(data))
                        left, data = left - taken, data[taken:]
                if digest.hexdigest() != file[4]:
                    wrong.append(file[0])
                    continue
                if linked:
                    os.chmod(temporary, file[2] & 0o555)
                    os.utime(temporary, ns=(file[3], file[3]))
                os.replace(temporary, place)
            finally:
                if os.path.lexists(temporary):
                    os.unlink(temporary)
        if wrong:
            raise SyncError(f"{wrong[0]} changed while it was sent; start the run again")

    def copy(self, file: Sequence[Any], path: str) -> bool:
        """Copy a file from the store; return False if its content is not what its name says, and remove it."""
        place, digest = self.place(file, linked=False), hashlib.sha256()
        created = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, file[2] | 0o600)
        with open(created, "wb", 0) as out, open(place, "rb", 0) as source:
            for data in iter(lambda: source.read(_PIECE_BYTES), b""):
                digest.update(data)
                out.write(data)
        if digest.hexdigest() != file[4]:
            os.unlink(place)
            os.unlink(path)
            return False
        os.utime(path, ns=(file[3], file[3]))
        return True

    def link(self, file: Sequence[Any], path: str) -> None:
        """Put a link to a stored file at a path, in place of what is there."""
        temporary = self.temporary("objects")
        os.link(self.place(file, linked=True), temporary)
        os.replace(temporary, path)


def _is_as(found: os.stat_result, file: Sequence[Any], *, linked: bool) -> bool:
    is_same = stat.S_ISREG(found.st_mode) and found.st_size == file[1]
    return is_same and (not linked or found.st_mtime_ns == file[3])


# --- trees


class Code:
    """The code of one run: a tree of copies, which one process owns. Its folder's name identifies that process."""

    def __init__(self, store: Store, run: str, key: str) -> None:
        self._store = store
        self._key = key  # the folder here that it is from
        self._above = os.path.join(store.root, "code")
        name = "+".join((run, *_this_host(), str(os.getpid()), _began(os.getpid())))
        self.folder = os.path.join(self._above, name)
        self.tree = os.path.join(self.folder, "tree")
        self._has: dict[str, Any] = {}  # what the tree has, as in record.json

    def take_over(self) -> None:
        """Take the newest tree of an ended run of the same code that is as it was made; else make an empty folder."""
        for name in _newest_first(self._above):
            earlier = os.path.join(self._above, name)
            try:
                with open(os.path.join(earlier, "record.json"), encoding="utf-8") as file:
                    record = json.load(file)
                if record["key"] != self._key or is_used(name) or not _is_unchanged(earlier, record["has"]):
                    continue
                os.rename(earlier, self.folder)  # of several that try, one succeeds
            except (OSError, ValueError, LookupError, TypeError):
                continue
            self._has = record["has"]
            os.unlink(os.path.join(self.folder, "record.json"))
            return
        os.makedirs(self.tree, mode=0o700)

    def lacks(self, file: Sequence[Any]) -> bool:
        """Return whether the tree lacks a file in this state."""
        return bool(self._has.get(file[0], (None, None))[0] != list(file[1:]))

    def build(
        self, files: Sequence[Sequence[Any]], links: Sequence[Sequence[str]], folders: Sequence[str]
    ) -> list[int]:
        """Make the tree equal to what is named, from the store. Return the numbers of files whose copy there is bad."""
        wanted = {*(path for path, *_ in files), *(path for path, _ in links)}
        self._remove({path for path in self._has if path not in wanted})
        for folder in sorted({os.path.dirname(path) for path in wanted} | {*folders}):
            os.makedirs(self.tree + folder, mode=0o700, exist_ok=True)
        bad = []
        for number, file in enumerate(files):
            if self.lacks(file):
                path = self.tree + file[0]
                self._remove({file[0]})
                if self._store.copy(file, path):
                    self._has[file[0]] = (list(file[1:]), _mark(os.lstat(path)))
                else:
                    bad.append(number)
        for path, target in links:
            if self._has.get(path, (None, None))[0] != target:
                self._remove({path})
                os.symlink(check_link(path, target), self.tree + path)
                self._has[path] = (target, _mark(os.lstat(self.tree + path)))
        return bad

    def record(self) -> None:
        """Write what the tree has, for a later run that takes it over."""
        with open(os.path.join(self.folder, "record.json"), "w", encoding="utf-8") as file:
            json.dump({"key": self._key, "has": self._has}, file)

    def _remove(self, paths: set[str]) -> None:
        """Remove files with what Python has compiled from them, and the folders that have none left."""
        for path in paths:
            if self._has.pop(path, None) is None:
                continue
            os.unlink(self.tree + path)
            folder, name = os.path.split(self.tree + path)
            cached = os.path.join(folder, _CACHED)
            for compiled in os.listdir(cached) if os.path.isdir(cached) else ():
                if compiled.startswith(name.rpartition(".")[0] + "."):
                    os.unlink(os.path.join(cached, compiled))
            while folder != self.tree and not {*os.listdir(folder)} - {_CACHED}:
                shutil.rmtree(folder)
                folder = os.path.dirname(folder)


def _is_unchanged(folder: str, has: dict[str, Any]) -> bool:
    """Return whether a tree has the recorded files as they were, and nothing else but compiled files of Python."""
    tree = os.path.join(folder, "tree")
    found = {path[len(tree) :]: _mark(entry) for path, entry in _walk(tree)}
    return found == {path: mark for path, (_, mark) in has.items()}


def _walk(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                yield entry.path, entry.stat(follow_symlinks=False)
            elif entry.name != _CACHED:
                yield from _walk(entry.path)


def _mark(found: os.stat_result) -> list[int]:
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


class Environment:
    """An environment that runs share: hard links to the store, below a folder that is named by the hash of its list."""

    def __init__(self, store: Store, digest: str) -> None:
        self._store = store
        self._folder = os.path.join(store.root, "env", digest)
        self._digest = digest
        self.tree = os.path.join(self._folder, "tree")
        self.files: Sequence[Sequence[Any]] = ()

    def is_known(self) -> bool:
        """Return whether the list of its files is here, and note its use."""
        try:
            with open(self._folder + ".json", "rb") as file:
                data = file.read()
            os.utime(self._folder + ".json")
        except OSError:
            return False
        if hashlib.sha256(data).hexdigest() != self._digest:
            return False
        self.files = json.loads(data)
        return True

    def learn(self, data: bytes) -> None:
        """Keep the list of its files."""
        if hashlib.sha256(data).hexdigest() != self._digest:
            raise SyncError("the list of the environment's files was damaged on the way; start the run again")
        self.files = json.loads(data)
        for file in self.files:
            check_path(file[0])
        temporary = self._store.temporary("env")
        with open(temporary, "wb") as out:
            out.write(data)
        os.replace(temporary, self._folder + ".json")

    def lacking(self) -> list[int]:
        """Return the numbers of the files that the tree lacks, or that were changed there."""
        if not os.path.isdir(self.tree):
            return [*range(len(self.files))]
        found = {path[len(self.tree) :]: entry for path, entry in _walk_all(self.tree)}
        return [
            number
            for number, file in enumerate(self.files)
            if file[0] not in found or not _is_as(found[file[0]], file, linked=True)
        ]

    def build(self, lacking: Sequence[int]) -> None:
        """Link what the tree lacks; a new tree is made aside, so that no other run sees half of it."""
        is_new = not os.path.isdir(self.tree)
        tree = self._store.temporary("env") if is_new else self.tree
        made = set()
        for number in lacking:
            file = self.files[number]
            folder = os.path.dirname(tree + file[0])
            if folder not in made:
                os.makedirs(folder, mode=0o700, exist_ok=True)
                made.add(folder)
            if is_new:
                os.link(self._store.place(file, linked=True), tree + file[0])
            else:
                self._store.link(file, tree + file[0])
        if is_new:
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
            try:
                os.rename(tree, self.tree)
            except OSError:  # another run was faster
                shutil.rmtree(tree)


def _walk_all(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _walk_all(entry.path)
            else:
                yield entry.path, entry.stat(follow_symlinks=False)


# --- which trees are used


def _this_host() -> tuple[str, str]:
    """Return this host's name and what identifies its boot: hosts may share the folder."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return os.uname().nodename.replace("+", "-").replace("/", "-"), file.read()[:8]


def _began(pid: int) -> str:
    """Return when a process began, in the kernel's ticks; empty if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        return ""


def is_used(name: str) -> bool:
    """Return whether the owner of a code folder of that name may live: also if it is another host's."""
    _, _, owner = name.partition("+")
    host, boot, pid, began = owner.split("+") if owner.count("+") == 3 else ("", "", "", "")
    here = _this_host()
    return host != here[0] or (boot == here[1] and pid.isdigit() and _began(int(pid)) == began)


def _newest_first(folder: str) -> list[str]:
    with os.scandir(folder) as entries:
        return [name for _, name in sorted(((entry.stat().st_mtime, entry.name) for entry in entries), reverse=True)]


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
    for removed in removable(root, now):
        if os.path.isdir(removed):
            shutil.rmtree(removed, ignore_errors=True)
        elif os.path.exists(removed):
            os.unlink(removed)


def removable(root: str, now: float) -> list[str]:
    """Return what `tidy` removes. An object in use by an environment goes with it."""
    found: list[tuple[float, int, str]] = []  # when it was last used, bytes, path
    code, env, objects = (os.path.join(root, name) for name in ("code", "env", "objects"))
    for name in os.listdir(code):
        folder = os.path.join(code, name)
        if not is_used(name) or (not name.startswith(".") and os.stat(folder).st_mtime < now - 10 * DAYS * _DAY_S):
            found.append((os.stat(folder).st_mtime, sum(entry.st_size for _, entry in _walk_all(folder)), folder))
    for name in os.listdir(env):
        path = os.path.join(env, name)
        if name.startswith("."):
            found.append((os.stat(path).st_mtime, 0, path))
        elif name.endswith(".json"):
            used = os.stat(path).st_mtime
            size = (
                sum(entry.st_size for _, entry in _walk_all(path[: -len(".json")])) if os.path.isdir(path[:-5]) else 0
            )
            found += [(used, size, path[: -len(".json")]), (used, 0, path)]
    for path, entry in _walk_all(objects):
        if entry.st_nlink == 1:
            found.append((entry.st_atime, entry.st_size, path))
    total = sum(size for _, size, _ in found)
    removed = []
    for used, size, path in sorted(found):
        days = 1 if os.path.basename(path).startswith(".") else DAYS
        if used < now - days * _DAY_S or total > STORE_BYTES:
            removed.append(path)
            total -= size
    return removed


# --- the exchange


def serve(offer: dict[str, Any], *, descriptors: tuple[int, int] = (0, 1)) -> tuple[list[str], dict[str, str]]:
    """Take what the run needs; return the command of the agent and the variables that it gets in addition."""
    stdin, stdout = descriptors
    _check_python(offer)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    store = Store(os.path.join(os.path.realpath(cache), "dtrain"))
    tidy(store.root, time.time())
    files, links, folders = offer["files"], offer["links"], offer["folders"]
    for path in (*(file[0] for file in files), *(path for path, _ in links), *folders):
        check_path(path)
    code = Code(store, offer["run"], offer["key"])
    code.take_over()

    def fetch(numbers: Sequence[int], of: Sequence[Sequence[Any]], part: str) -> None:
        linked = part == "environment"
        missing = [number for number in numbers if not store.has(of[number], linked=linked)]
        if missing:
            _check_space(store.root, sum(of[number][1] for number in missing))
            send(stdout, need=missing, part=part)
            store.receive([of[number] for number in missing], lambda: read_block(stdin), linked=linked)

    environment = None
    if offer["environment"]:
        environment = Environment(store, offer["environment"])
        if not environment.is_known():
            send(stdout, need=None, part="environment")
            environment.learn(read_block(stdin))
        if lacking := environment.lacking():
            fetch(lacking, environment.files, "environment")
            environment.build(lacking)
    lacking = [number for number, file in enumerate(files) if code.lacks(file)]
    for _ in range(_TRIES):
        fetch(lacking, files, "code")
        lacking = code.build(files, links, folders)
        if not lacking:
            break
    else:
        raise SyncError(f"{store.root} there gives back other bytes than were written; is its disk sound?")
    code.record()
    command = [sys.executable]
    if environment is not None:
        command = [_make_venv(code, environment, offer["site"], offer["dtrain"])]
    trees = [code.tree, *([environment.tree] if environment is not None else [])]
    send(stdout, ready=trees)
    return [*command, *offer["command"]], _variables(offer, code, environment)


def _variables(offer: dict[str, Any], code: Code, environment: Environment | None) -> dict[str, str]:
    variables = {"DTRAIN_AGENT_TREE": code.tree}
    if environment is None:
        variables["PYTHONPATH"] = os.pathsep.join(
            filter(None, (code.tree + offer["dtrain"], os.environ.get("PYTHONPATH", "")))
        )
    return variables


def _make_venv(code: Code, environment: Environment, site: Sequence[str], dtrain: str) -> str:
    """Make a virtual environment whose packages are those that were sent; return its Python."""
    base = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    venv = os.path.join(code.folder, "venv")
    packages = os.path.join(venv, "lib", f"python{_minor(sys.version_info)}", "site-packages")
    shutil.rmtree(venv, ignore_errors=True)
    os.makedirs(packages)
    os.makedirs(os.path.join(venv, "bin"))
    with open(os.path.join(venv, "pyvenv.cfg"), "w", encoding="utf-8") as file:
        file.write(f"home = {os.path.dirname(base)}\ninclude-system-site-packages = false\n")
    lines = []
    for path in (dtrain, *site):
        shared = environment.tree + path
        lines.append(f"import site; site.addsitedir({shared!r})" if os.path.isdir(shared) else code.tree + path)
    with open(os.path.join(packages, "dtrain.pth"), "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write("".join(f"{line}\n" for line in dict.fromkeys(lines)))
    python = os.path.join(venv, "bin", "python")
    for name in ("python", "python3"):
        os.symlink(base, os.path.join(venv, "bin", name))
    return python


def _minor(version: Sequence[Any]) -> str:
    return f"{version[0]}.{version[1]}"


def _check_python(offer: dict[str, Any]) -> None:
    """Raise SyncError if this Python, or this system, cannot run what is sent."""
    if _minor(sys.version_info) != (wanted := _minor(offer["python"])):
        found = f"{sys.executable} there is Python {_minor(sys.version_info)}, here it is {wanted}"
        raise SyncError(f"{found}; install Python {wanted} there, or name one with --python")
    if not offer["environment"]:
        return
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
            f"{root} there has {free >> 20} MB free, and {size >> 20} MB are to come; free some, or set XDG_CACHE_HOME "
            "there to a folder on another disk"
        )


def main() -> None:
    try:
        command, variables = serve(json.loads(read_block(0)))
    except EOFError as error:
        sys.exit(f"dtrain receiver: {error}")
    except SyncError as error:
        send(1, error=str(error))
        sys.exit(1)
    except OSError as error:
        advice = "free some space, or set XDG_CACHE_HOME there to a folder that can be written"
        send(1, error=f"{error.filename or 'the store'} there: {error.strerror}; {advice}")
        sys.exit(1)
    os.execve(command[0], command, {**os.environ, **variables})


if __name__ == "__main__":
    main()
