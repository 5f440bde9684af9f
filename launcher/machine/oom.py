"""Detects whether the kernel's out-of-memory killer ended a worker. Called by the agent after a death by SIGKILL.

It keeps errors of GPUs in the kernel log as well, for the report.

The kernel log has the pid, if this user may read it. Else the counter of the memory cgroup shows it, or that of the
whole host, if it has risen since the last look. Counters name no process, so each kill is attributed to one worker
only, and only to one that died soon after.
"""

from __future__ import annotations

import os
import re
import time
import weakref

from launcher.frozen import dataclass
from launcher.machine.cgroup import own_folders
from launcher.machine.gpus.kernel_log import KMSG, device_error
from launcher.machine.system_files import read_text

RECENT_S = 10.0  # a kill noticed earlier than this was not of this worker
DEVICE_ERRORS = 20  # that are kept
LOG_RECORDS = 20_000  # most records read at a time, which takes 50 ms
UNLIMITED_BYTES = 1 << 60
INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # the log has pids of this namespace


def memory_in_use() -> tuple[int, int]:
    """Return the bytes in use and the limit: those of this process's memory limit, else of the host."""
    group = _own_group()
    limit, used = (None, None) if group is None else group.lowest_limit("memory.current", "memory.usage_in_bytes")
    host = _host_bytes()
    if limit is not None and used is not None and limit < host:
        return used, limit
    available = re.search(r"MemAvailable:\s+(\d+) kB", read_text("/proc/meminfo"))
    return host - (int(available[1]) << 10 if available else 0), host


class OomWatch:
    """Observes kills from now on."""

    def __init__(self) -> None:
        self._log = _KernelLog()
        self._group = _own_group()
        self._in_group = _Counter("" if self._group is None else self._group.events)
        self._on_host = _Counter("/proc/vmstat")

    def look(self) -> None:
        """Record kills so far; call it regularly, so that an old kill is not taken for a new one."""
        now = time.monotonic()
        self._log.read()
        self._in_group.look(now)
        self._on_host.look(now)

    @property
    def device_errors(self) -> list[str]:
        """Errors of GPUs since the beginning, as far as the kernel log can be read."""
        return self._log.device_errors

    def killed(self, pid: int) -> str:
        """Return a text on the out-of-memory killer if it ended a worker that died just now; else an empty one."""
        self.look()
        kill = self._log.kills.pop(pid, None)
        if kill is not None:
            return f"the out-of-memory killer: it held {memory_size(kill.held_bytes)}, {self._why(kill.in_group)}"
        if self._log.is_complete:
            return ""
        if self._in_group.use_up():
            self._on_host.use_up()  # it is counted there as well
            return f"the out-of-memory killer: {self._why(in_group=True)}"
        if self._group is not None and self._group.counts_below:
            return ""
        return f"probably the out-of-memory killer: {self._why(in_group=False)}" if self._on_host.use_up() else ""

    def _why(self, in_group: bool) -> str:
        limit, used = (None, None) if self._group is None else self._group.lowest_limit()
        if not in_group or (limit is None and not self._log.is_complete):
            return f"the host has {memory_size(_host_bytes())} of memory"
        if used is None and limit is not None:  # Linux before 5.19
            return f"its memory limit is {memory_size(limit)}"
        if used is None or limit is None or used < 0.9 * limit:  # the limit was one of a group below ours
            return "its memory cgroup was full"
        return f"{memory_size(min(used, limit))} of {memory_size(limit)} of its memory limit were in use"


class _Counter:
    """The count `oom_kill` in a file of the kernel; without that file or line it stays 0."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._count = _kills(path)
        self._noticed: list[float] = []  # times of kills that are not attributed to a worker yet

    def look(self, now: float) -> None:
        count = _kills(self._path)
        self._noticed = [at for at in self._noticed if now - at <= RECENT_S]
        self._noticed += [now] * min(count - self._count, 1000)
        self._count = count

    def use_up(self) -> bool:
        """Attribute one kill to a worker; return whether there was one left."""
        return bool(self._noticed) and self._noticed.pop() > 0


@dataclass(frozen=True)
class _Group:
    """The memory cgroup of this process, by its folder and the mount point of the hierarchy."""

    folder: str
    mount: str
    counts_below: bool  # cgroup v2: the counter includes all groups below; v1: only this one

    @property
    def events(self) -> str:
        return f"{self.folder}/{'memory.events' if self.counts_below else 'memory.oom_control'}"

    def lowest_limit(
        self, v2: str = "memory.peak", v1: str = "memory.max_usage_in_bytes"
    ) -> tuple[int | None, int | None]:
        """Return the limit of the tightest group from here up, and the most that was ever in use in it.

        `v2` and `v1` are the names of the files with the use, in the two versions of control groups.
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


# Before Linux 4.20 the reason is in a record of its own.
_RECORD = re.compile(rb"(\d+),[^;]*;(Memory cgroup )?(?:[Oo]ut of memory[^:]*: )?Killed process (\d+) (.*)")
_HELD_KB = re.compile(rb"(?:anon|file|shmem)-rss:(\d+)kB")


@dataclass(frozen=True)
class _Kill:
    held_bytes: int
    in_group: bool  # a memory cgroup was full, not the host


class _KernelLog:
    """The kernel log from now on. `is_complete`: it contains every kill, so a kill that is not in it did not happen."""

    def __init__(self) -> None:
        self.kills: dict[int, _Kill] = {}
        self.device_errors: list[str] = []
        self.is_complete = self._has_pids = False
        self._file = -1
        try:
            self._file = os.open(KMSG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # readable by root only, or missing in a container
            return
        weakref.finalize(self, os.close, self._file)
        os.lseek(self._file, 0, os.SEEK_END)
        self._has_pids = self.is_complete = os.readlink("/proc/self/ns/pid") == INITIAL_PID_NAMESPACE

    def read(self) -> None:
        for _ in range(LOG_RECORDS if self._file >= 0 else 0):
            try:
                record = os.read(self._file, 8192)
            except BlockingIOError:
                return
            except BrokenPipeError:  # overwritten before it was read; the next read continues after the gap
                self.is_complete = False
                continue
            except OSError:  # longer than any record of a kill
                continue
            if (error := device_error(record)) and len(self.device_errors) < DEVICE_ERRORS:
                self.device_errors.append(error)
            found = _RECORD.match(record) if self._has_pids else None
            if found is not None and int(found[1]) < 8:  # from the kernel itself, not from a user who wrote to the log
                held = sum(int(number) for number in _HELD_KB.findall(found[4])) << 10
                self.kills[int(found[3])] = _Kill(held, found[2] is not None)
        self.is_complete = False


def _kills(path: str) -> int:
    """Return the number of killed processes from a file of `name number` lines; 0 if it is not there."""
    found = re.search(r"^oom_kill (\d+)$", read_text(path), re.MULTILINE)
    return 0 if found is None else int(found[1])


def _number(path: str) -> int | None:
    text = read_text(path)
    return int(text) if text.isdigit() else None


def _host_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def memory_size(number: int) -> str:
    """Format a number of bytes of memory: `61.4 GiB`."""
    return f"{number / (1 << 30):.1f} GiB" if number >= 1 << 30 else f"{number / (1 << 20):.0f} MiB"
