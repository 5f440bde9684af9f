"""Whether the kernel's out-of-memory killer ended a worker. Called by the agent for one that died by SIGKILL.

The kernel log names the pid, where this user may read it. Else the counter of the memory cgroup tells, or that of the
whole host, by having risen since the last look; they name nobody, so each kill is put down to one worker only, and
only to one that died soon after.
"""

from __future__ import annotations

import os
import re
import time
import weakref

from launcher.frozen import dataclass
from launcher.machine.cgroup import own_folders
from launcher.machine.system_files import read_text

RECENT_S = 10.0  # a kill that was noticed longer ago was not of this worker
LOG_RECORDS = 20_000  # at most so many are read at a time, which takes 50 ms
UNLIMITED_BYTES = 1 << 60
INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # the only one whose pids the log has


def memory_in_use() -> tuple[int, int]:
    """Return how many bytes are in use, and of how many: of this process's memory limit, else of the host."""
    group = _own_group()
    limit, used = (None, None) if group is None else group.lowest_limit("memory.current", "memory.usage_in_bytes")
    host = _host_bytes()
    if limit is not None and used is not None and limit < host:
        return used, limit
    available = re.search(r"MemAvailable:\s+(\d+) kB", read_text("/proc/meminfo"))
    return host - (int(available[1]) << 10 if available else 0), host


class OomWatch:
    """Sees the kills from now on."""

    def __init__(self) -> None:
        self._log = _KernelLog()
        self._group = _own_group()
        self._in_group = _Counter("" if self._group is None else self._group.events)
        self._on_host = _Counter("/proc/vmstat")

    def look(self) -> None:
        """Take note of the kills so far; if called now and then, an old one is not taken for a new one."""
        now = time.monotonic()
        self._log.read()
        self._in_group.look(now)
        self._on_host.look(now)

    def killed(self, pid: int) -> str:
        """Return who killed a worker that died just now, in words, if that was the out-of-memory killer."""
        self.look()
        kill = self._log.kills.pop(pid, None)
        if kill is not None:
            return f"the out-of-memory killer: it held {memory_size(kill.held_bytes)}, {self._why(kill.in_group)}"
        if self._log.is_complete:
            return ""
        if self._in_group.take():
            self._on_host.take()  # counted there as well
            return f"the out-of-memory killer: {self._why(in_group=True)}"
        if self._group is not None and self._group.counts_below:
            return ""
        return f"probably the out-of-memory killer: {self._why(in_group=False)}" if self._on_host.take() else ""

    def _why(self, in_group: bool) -> str:
        limit, used = (None, None) if self._group is None else self._group.lowest_limit()
        if not in_group or (limit is None and not self._log.is_complete):
            return f"the host has {memory_size(_host_bytes())} of memory"
        if used is None and limit is not None:  # before Linux 5.19
            return f"its memory limit is {memory_size(limit)}"
        if used is None or limit is None or used < 0.9 * limit:  # the limit was that of a group below ours
            return "its memory cgroup was full"
        return f"{memory_size(min(used, limit))} of {memory_size(limit)} of its memory limit were in use"


class _Counter:
    """The count `oom_kill` in one of the kernel's files; with no such file or line nothing is ever counted."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._count = _kills(path)
        self._noticed: list[float] = []  # when, for each kill that was put down to nobody yet

    def look(self, now: float) -> None:
        count = _kills(self._path)
        self._noticed = [at for at in self._noticed if now - at <= RECENT_S]
        self._noticed += [now] * min(count - self._count, 1000)
        self._count = count

    def take(self) -> bool:
        """Put one kill down to somebody; return whether there was one left."""
        return bool(self._noticed) and self._noticed.pop() > 0


@dataclass(frozen=True)
class _Group:
    """The memory cgroup of this process, by its folder and the one where the hierarchy is mounted."""

    folder: str
    mount: str
    counts_below: bool  # cgroup v2: the counter has the kills in all groups below; v1: those in this one only

    @property
    def events(self) -> str:
        return f"{self.folder}/{'memory.events' if self.counts_below else 'memory.oom_control'}"

    def lowest_limit(
        self, v2: str = "memory.peak", v1: str = "memory.max_usage_in_bytes"
    ) -> tuple[int | None, int | None]:
        """Return the limit of the tightest group from here up, and the most that was ever in use in it.

        `v2` and `v1` name the file of what is in use, in the two versions of control groups.
        """
        names = ("memory.max", v2) if self.counts_below else ("memory.limit_in_bytes", v1)
        found: tuple[int | None, int | None] = (None, None)
        folder = self.folder
        while folder.startswith(self.mount):
            limit, peak = (_number(f"{folder}/{name}") for name in names)
            if limit is not None and limit < min(UNLIMITED_BYTES, found[0] or UNLIMITED_BYTES):
                found = (limit, peak)
            folder = os.path.dirname(folder)
        return found


def _own_group() -> _Group | None:
    """Return the nearest group of this process, itself or above, that counts kills."""
    try:
        groups = [(folder, mount, not name) for name in ("", "memory") for folder, mount in own_folders(name)]
    except (OSError, ValueError):
        return None
    return next((group for found in groups if (group := _nearest_group(*found)) is not None), None)


def _nearest_group(folder: str, mount: str, is_v2: bool) -> _Group | None:
    while folder.startswith(mount):
        group = _Group(folder, mount, is_v2)
        if os.path.exists(group.events):
            return group
        folder = os.path.dirname(folder)
    return None


# Before Linux 4.20 the reason stands in a record of its own.
_RECORD = re.compile(rb"(\d+),[^;]*;(Memory cgroup )?(?:[Oo]ut of memory[^:]*: )?Killed process (\d+) (.*)")
_HELD_KB = re.compile(rb"(?:anon|file|shmem)-rss:(\d+)kB")


@dataclass(frozen=True)
class _Kill:
    held_bytes: int
    in_group: bool  # a memory cgroup was full, not the host


class _KernelLog:
    """What the kernel says from now on. `is_complete`: every kill is in it, so that one that is not did not happen."""

    def __init__(self) -> None:
        self.kills: dict[int, _Kill] = {}
        self.is_complete = False
        self._file = -1
        try:
            if os.readlink("/proc/self/ns/pid") != INITIAL_PID_NAMESPACE:
                return
            self._file = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # for root only, or not in a container
            return
        weakref.finalize(self, os.close, self._file)
        os.lseek(self._file, 0, os.SEEK_END)
        self.is_complete = True

    def read(self) -> None:
        for _ in range(LOG_RECORDS if self._file >= 0 else 0):
            try:
                record = os.read(self._file, 8192)
            except BlockingIOError:
                return
            except BrokenPipeError:  # overwritten before it was read; the next read goes on after the gap
                self.is_complete = False
                continue
            except OSError:  # longer than any record of a kill
                continue
            found = _RECORD.match(record)
            if found is not None and int(found[1]) < 8:  # from the kernel itself, not from somebody who wrote there
                held = sum(int(number) for number in _HELD_KB.findall(found[4])) << 10
                self.kills[int(found[3])] = _Kill(held, found[2] is not None)
        self.is_complete = False


def _kills(path: str) -> int:
    """Return how many processes were killed, by a file of `name number` lines; 0 where it does not say."""
    found = re.search(r"^oom_kill (\d+)$", read_text(path), re.MULTILINE)
    return 0 if found is None else int(found[1])


def _number(path: str) -> int | None:
    text = read_text(path)
    return int(text) if text.isdigit() else None


def _host_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def memory_size(number: int) -> str:
    """Write a number of bytes of memory: `61.4 GiB`."""
    return f"{number / (1 << 30):.1f} GiB" if number >= 1 << 30 else f"{number / (1 << 20):.0f} MiB"
