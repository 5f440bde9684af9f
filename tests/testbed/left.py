"""What a program has left, looked for at the moment when its exit is collected.

A program that a test starts (processes.py) has a mark of its own, which all that it starts inherits: the first part is
the test's, the rest counts its starts. So its processes are known from those of other tests and of other starts. What
has no mark is distinguished by where and when it was made: each test has a folder of its own for temporary files and
one for the list of runs, and what there is of lab hosts, shared memory and control groups is looked at unless another
program of this test runs, or was killed or left something on purpose: that is for the end of the test to find gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import stat
import struct
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from launcher.agent.cleanup.run_tag import RunTag
from launcher.machine import processes
from testbed.forked_dtrain import MARK
from testbed.lab import Lab

TEST_CHARS = 24  # of a mark; as many more digits as make it as long as all others count the starts
SHARED_MEMORY = "/dev/shm"
# The processes of a lab's daemons for each command that they run. They end after the client has the exit code, and no
# client can wait for that.
SESSIONS_OF_DAEMONS = ("sshd", "slurmstepd")
# Folders of this user that all runs share: they stay, and what is in them does not.
KEPT = (f"dtrain-{os.geteuid()}", f"ddp-{os.geteuid()}")
KEPT_BY_TORCH = ("torchinductor_", "torchelastic_")  # with the user's name; by torchrun, one a run
_IN_CREATE = 0x100
_EVENT = struct.Struct("iIII")  # struct inotify_event
_LISTENS = {"tcp": (3, "0A"), "tcp6": (3, "0A"), "unix": (3, "00010000")}  # in /proc/net: a column, and what it says


class Watch:
    """Of one test: what its programs have left so far is in `found`."""

    current: Watch | None = None

    def __init__(self, mark: str, labs: Sequence[Lab]) -> None:
        self.mark = mark
        self.found: list[str] = []
        self.labs = labs  # those that are open, and those that are opened later
        self.running: set[Start] = set()
        self.is_sure = True  # that nothing but what runs may have left anything
        self.killed_whole = False  # something, guards and all: what that leaves is for the next run here to remove
        self._names = _names_made()
        self._names.forget()
        self._starts = 0

    def next_mark(self, of: str) -> str:
        """Return the mark of the next start, by a program of that mark."""
        self._starts += 1
        return f"{of[:TEST_CHARS]}{self._starts:0{len(of) - TEST_CHARS}x}"

    def agents(self, folders: Iterable[str] = ()) -> set[str]:
        """Return the names of all agents' folders that were made in these folders since they were first given here."""
        return self._names.made(folders)

    def left_now(self, before: set[str], variables: Mapping[str, str]) -> list[str]:
        """Return the paths that are there now and were not `before`, but for shared memory that is in use."""
        new = sorted(self.traces(variables) - before)
        return [path for path in new if not path.startswith(f"{SHARED_MEMORY}/") or _is_unused(path)]

    def traces(self, variables: Mapping[str, str]) -> set[str]:
        """Return the paths of what may be a run's: temporary files, sockets, shared memory, control groups."""
        temps = [variables.get("TMPDIR", ""), *(str(temp) for lab in self.labs for temp in lab.temps)]
        found = {entry.path for entry in _entries(SHARED_MEMORY) if _is_ours(entry)}
        for entry in (entry for temp in temps for entry in _entries(temp)):
            found |= {each.path for each in _entries(entry.path)} if entry.name in KEPT else {entry.path}
        for entry in _entries(f"{variables.get('XDG_STATE_HOME', '')}/dtrain"):
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
                    found.add(entry.path)
        groups = [group for group in (own_group(), *(g for lab in self.labs for g in lab.groups)) if group]
        possible = (f"{group}/{name}" for name in self.agents(temps) for group in groups)
        found |= set(filter(os.path.exists, possible))
        return {path for path in found if not os.path.basename(path).startswith(KEPT_BY_TORCH)}


class Start:
    """One start of a program by the test of `watch`; `mark` is what the program has to get as its own."""

    def __init__(self, watch: Watch, words: Sequence[str], variables: Mapping[str, str], *, outlived: bool) -> None:
        """`outlived`: what it leaves, it leaves on purpose, and is looked for at the end of the test."""
        self._watch = watch
        self._words = words
        self._variables = variables
        self._outlived = outlived
        self.mark = watch.next_mark(variables[MARK])
        self._pids = {*_pids()}
        self._before = watch.traces(variables)
        watch.running.add(self)

    def failed(self) -> None:
        """Note that there is no such program."""
        self._watch.running.discard(self)

    def ended(self, returncode: int) -> None:
        """Look for what is left; to be called when the program's exit is collected, and once."""
        watch = self._watch
        watch.running.discard(self)
        if self._outlived or returncode == -signal.SIGKILL:
            watch.is_sure = False
            return
        alone = watch.is_sure and not watch.running
        left = [*self._processes(alone=alone), *(watch.left_now(self._before, self._variables) if alone else ())]
        if left:
            what = "".join(f"\n  {each}" for each in left)
            watch.found.append(f"left when `{' '.join(self._words)}` had ended with {returncode}:{what}")

    def _processes(self, *, alone: bool) -> Iterator[str]:
        watch = self._watch
        marks = {lab.mark[:TEST_CHARS] for lab in watch.labs} if alone else set()
        tags = [RunTag(name[len("dtrain-") :].ljust(32, "0"), None) for name in (watch.agents() if alone else ())]
        for pid in _pids():
            if pid in self._pids or (process := processes.find(pid)) is None:
                continue
            mark = mark_of(pid)
            of_lab = mark[:TEST_CHARS] in marks or any(tag.is_on(process) for tag in tags)
            is_left = mark == self.mark or (of_lab and not self._belongs_to_lab(process))
            if is_left and processes.find(pid) is not None:  # on a host that was lost, it may be about to end
                yield describe(pid)

    def _belongs_to_lab(self, process: processes.Process) -> bool:
        return process.name.startswith(SESSIONS_OF_DAEMONS) or any(process.pid in lab.pids for lab in self._watch.labs)


@contextlib.contextmanager
def nothing_left(call: str) -> Iterator[None]:
    """Look for what is left at the end of the context, in which this process itself does what a program would do."""
    watch, before = Watch.current, {*_listening(os.getpid())}
    assert watch is not None
    start = Start(watch, [call], os.environ, outlived=False)
    start.mark = os.environ[MARK]
    try:
        yield
    finally:
        start.ended(0)
        watch.found += [f"left by {call}: it listens on {each}" for each in {*_listening(os.getpid())} - before]


class Program(subprocess.Popen[bytes]):
    """A program for which what is left is looked for as soon as its exit is collected, by whichever call."""

    stdout: IO[bytes]  # pipes, but on a terminal
    stderr: IO[bytes]
    watching: Start

    def poll(self) -> int | None:
        return None if (returncode := super().poll()) is None else self._ended(returncode)

    def wait(self, timeout: float | None = None) -> int:
        return self._ended(super().wait(timeout))

    def _ended(self, returncode: int) -> int:
        if (watching := vars(self).pop("watching", None)) is not None:
            watching.ended(returncode)
        return returncode


def mark_of(pid: int) -> str:
    """Return the mark in a process's environment; empty if it has none, has ended, or is another user's."""
    for _ in range(5):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                environment = b"\0" + file.read()
        except OSError:
            return ""
        if len(environment) > 1:
            return environment.partition(f"\0{MARK}=".encode())[2].partition(b"\0")[0].decode()
        time.sleep(0.002)  # in the middle of an exec it has none for a moment
    return ""


def describe(pid: int) -> str:
    """Return a process, with where it listens, as a line of a failure message."""
    process = processes.find(pid)
    if process is None:
        return f"pid {pid}: just ended"
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        where = "".join(f", listens on {each}" for each in _listening(pid))
        return f"pid {pid} (state {process.state}, parent {process.parent}): {words or process.name}{where}"
    return process.describe()


@functools.cache
def own_group() -> Path | None:
    """The control group (v2) of this process, if there is one in which groups can be made."""
    own = next((line[3:] for line in _lines("/proc/self/cgroup") if line.startswith("0::")), None)
    mounts = (line.split() for line in _lines("/proc/mounts"))
    point = next((fields[1] for fields in mounts if fields[2] == "cgroup2"), None)
    if own is None or point is None:
        return None
    group = Path(point + own)
    return group if os.access(group / "cgroup.procs", os.W_OK) else None


@functools.cache
def _names_made() -> _NamesMade:
    """The only one of this process: to close one takes 10 ms, in which the kernel waits."""
    return _NamesMade()


class _NamesMade:
    """The names of what was made in some folders, from when each of them was first named here (inotify)."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self._descriptor >= 0, os.strerror(ctypes.get_errno())
        self._names: set[str] = set()

    def forget(self) -> None:
        """Forget those made until now."""
        self.made(())
        self._names = set()

    def made(self, folders: Iterable[str]) -> set[str]:
        """Return those that began with `dtrain-` and a run tag."""
        for folder in filter(None, folders):  # one that is watched stays so
            self._libc.inotify_add_watch(self._descriptor, os.fsencode(folder), _IN_CREATE)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._descriptor, 1 << 16):
                while data:
                    *_, length = _EVENT.unpack_from(data)
                    name = data[_EVENT.size : _EVENT.size + length].rstrip(b"\0").decode(errors="replace")
                    if name.startswith("dtrain-") and len(name) == len("dtrain-") + 16:
                        self._names.add(name)
                    data = data[_EVENT.size + length :]
        return self._names


def _pids() -> Iterator[int]:
    return map(int, filter(str.isdigit, os.listdir("/proc")))


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [*entries]
    except OSError:  # there is none, or it is another user's
        return []


def _is_ours(entry: os.DirEntry[str]) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return entry.stat(follow_symlinks=False).st_uid == os.geteuid()
    return False


def _is_unused(path: str) -> bool:
    """Say whether a file is there that no process has open or mapped. By its inode: one of a semaphore was renamed."""
    with contextlib.suppress(FileNotFoundError):
        inode = os.stat(path).st_ino
        return not any(inode in _inodes_of(pid) for pid in _pids()) and os.path.lexists(path)
    return False


def _inodes_of(pid: int) -> Iterator[int]:
    """Yield the inodes, of whatever file system, that a process has mapped and open."""
    for line in _lines(f"/proc/{pid}/maps"):
        yield int(line.split(maxsplit=5)[4])
    for entry in _entries(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            yield entry.stat().st_ino


def _listening(pid: int) -> Iterator[str]:
    """Yield where a process listens: addresses and ports as /proc/net has them, and paths."""
    owned = set()
    for entry in _entries(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            owned.add(os.readlink(entry.path))
    for kind, (column, value) in _LISTENS.items():
        for line in _lines(f"/proc/{pid}/net/{kind}"):
            fields = line.split()
            inode = fields[6 if kind == "unix" else 9] if len(fields) > 6 else ""
            if f"socket:[{inode}]" in owned and fields[column] == value:
                yield _path(fields) if kind == "unix" else f"port {int(fields[1].rpartition(':')[2], 16)}"


def _path(fields: Sequence[str]) -> str:
    return fields[7] if len(fields) > 7 else "a socket without a name"


def _lines(path: str) -> Iterator[str]:
    with contextlib.suppress(OSError):
        yield from Path(path).read_text().splitlines()
