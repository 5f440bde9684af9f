"""Processes of this host, identified by pid and start time: finding descendants, stopping, ending.

Called by the agent and its guard. Reads /proc directly: the agent must start in milliseconds, and a sweep of all
processes is its last act in every run. Never signals a pid whose start time was not checked just before.
agent/cleanup/run_tag.py decides which processes belong to a run.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from launcher.frozen import dataclass, field

if TYPE_CHECKING:
    import subprocess

QUICK_LOOKS = 20  # of a Suspension in a row, then one every LOOK_S
LOOK_S = 1.0
KILLED_WITHIN_S = 1.0  # what a killed child has started
READ_BYTES = 1 << 14
FILE_LIMIT_VARIABLE = "DTRAIN_FILE_LIMIT"  # also named in agent/__main__.py
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_RLIMIT_LOCKS = 10  # unused by all kernels since 2.4
NO_NUMBER, _OWN = resource.RLIM_INFINITY, 1 << 60  # tag numbers that stand for none, and for dtrain's own processes


@dataclass(frozen=True)
class Process:
    """A process by its identity; `start` is its start time in clock ticks since boot."""

    pid: int
    start: int
    parent: int = field(compare=False)
    group: int = field(compare=False)
    state: str = field(compare=False)
    name: str = field(compare=False)

    def describe(self) -> str:
        return f"pid {self.pid} ({self.name}, state {self.state})"


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends (Linux subreaper)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Make the kernel signal this process when its parent ends; end it now if `parent` has already ended."""
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os._exit(1)


def raise_file_limit() -> None:
    """Raise the limit of open files to the maximum; `restore_file_limit` undoes that in a child.

    If no code may run between fork and exec, because of threads, the child gets `file_limit_variables` and calls
    `take_file_limit`.
    """
    global _file_limit
    _file_limit = _file_limit or resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_file_limit[1], _file_limit[1]))


def restore_file_limit() -> None:
    if _file_limit is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, _file_limit)


def file_limit_variables() -> dict[str, str]:
    """Return variables with which an agent undoes this process's `raise_file_limit`."""
    if _file_limit is None or _file_limit[0] == _file_limit[1]:
        return {}
    return {FILE_LIMIT_VARIABLE: f"{_file_limit[0]} {_file_limit[1]}"}


def take_file_limit() -> None:
    """Restore the limit of open files from the variable, unless it is no longer the raised one.

    srun may not pass the limit on: then the present one is the node's own.
    """
    own, _, raised = os.environ.pop(FILE_LIMIT_VARIABLE, "").partition(" ")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if own.isdecimal() and raised == str(soft) and int(own) < soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(own), hard))


_file_limit: tuple[int, int] | None = None


def set_tag_number(number: int, pid: int = 0) -> None:
    """Mark this process, or a child, and all its descendants with a number that they cannot lose by accident.

    It is the soft limit of a resource that no kernel counts any more. It survives every fork and exec, a cleared
    environment, a session of its own and another parent, and setting it needs no privilege.
    """
    try:
        _, hard = resource.prlimit(pid, _RLIMIT_LOCKS)
        if hard == resource.RLIM_INFINITY:
            resource.prlimit(pid, _RLIMIT_LOCKS, (number, hard))
    except (OSError, ValueError):  # not a genuine Linux kernel
        return


def tag_number_of(pid: int) -> int:
    """Return the number that a process has from `set_tag_number`, or NO_NUMBER."""
    try:
        number, hard = resource.prlimit(pid, _RLIMIT_LOCKS)
    except (OSError, ValueError):  # another user's, or ended meanwhile
        return NO_NUMBER
    return number if hard == resource.RLIM_INFINITY else NO_NUMBER  # else it is a real limit


def mark_as_own() -> None:
    """Mark this process and its children with a number of no run, so that searches for a run's processes skip them."""
    if tag_number_of(0) == NO_NUMBER:
        set_tag_number(_OWN)


def unmark() -> None:
    """Undo `mark_as_own`, in a child."""
    if tag_number_of(0) == _OWN:
        set_tag_number(NO_NUMBER)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl({option}, {value}): {os.strerror(errno)}")


def find(pid: int) -> Process | None:
    """Return the process with this pid; None if it does not exist or is a zombie.

    One whose main thread alone has ended is shown as a zombie and is none: it has memory and devices until the others
    end, which may be stuck in a driver.
    """
    try:
        text = _read(f"/proc/{pid}/stat").decode("utf-8", "replace")
    except OSError:  # ended meanwhile
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")  # a name may contain blanks and parentheses
    fields = rest.split()
    if fields[0] == "X" or (fields[0] == "Z" and int(fields[17]) <= 1):  # its number of threads
        return None
    return Process(
        pid=pid, start=int(fields[19]), parent=int(fields[1]), group=int(fields[2]), state=fields[0], name=name
    )


def terminal_of(pid: int) -> int | None:
    """Return the device number of a process's controlling terminal, 0 without one; None if that cannot be read."""
    try:
        text = _read(f"/proc/{pid}/stat")
    except OSError:  # hidden, or ended meanwhile
        return None
    return int(text.rpartition(b")")[2].split()[4])


def everything() -> Iterator[Process]:
    for pid in _pids():
        process = find(pid)
        if process is not None:
            yield process


def _pids() -> list[int]:
    return sorted(map(int, filter(str.isdigit, os.listdir("/proc"))), reverse=True)  # the youngest end soonest


def childless() -> bool:
    """Return whether this process has no child, not even a zombie; a subreaper then has no descendant at all."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def related(
    *,
    ancestor: int | None,
    ours: Callable[[Process], bool],
    spare: Iterable[int] = (),
    also: Iterable[int] = (),
    others: Callable[[int], bool] = lambda _: False,
) -> list[Process]:
    """Return the living descendants of `ancestor`, the processes that are `ours`, and the descendants of those.

    The pids in `also` are ours as well. Those in `spare` and the ancestor itself are left out, but not their
    descendants. `others` returns quickly, by pid, whether a process is certainly not ours.
    """
    spared, known = {ancestor, *spare}, {*also}
    if not known and (ancestor is None or (ancestor == os.getpid() and childless())):
        # It has no descendants. Usually no process is ours either, and then no parents need to be read.
        possible = (find(pid) for pid in _pids() if pid not in spared and not others(pid))
        if not any(process is not None and ours(process) for process in possible):
            return []
    processes = {process.pid: process for process in everything()}
    for pid in known:
        if pid not in processes and (process := find(pid)) is not None:  # started after the list was read
            processes[pid] = process
    roots = {pid for pid, process in processes.items() if pid not in spared and (pid in known or ours(process))}
    above = roots if ancestor is None else roots | {ancestor}
    return [
        process
        for pid, process in processes.items()
        if pid not in spared and (pid in roots or _descends(process, above, processes))
    ]


def _descends(process: Process, above: set[int], processes: dict[int, Process]) -> bool:
    seen = set()
    at: Process | None = process
    while at is not None and at.pid not in seen:
        if at.parent in above:
            return True
        seen.add(at.pid)
        at = processes.get(at.parent)
    return False


def arguments(pid: int) -> list[str]:
    """Return the command line of a process; empty if it has ended."""
    try:
        return _read(f"/proc/{pid}/cmdline").decode("utf-8", "surrogateescape").split("\0")[:-1]
    except OSError:
        return []


def descendants(pid: int) -> list[int]:
    """Return the pids of a process's children and all their descendants; empty if the kernel does not list them."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # ended meanwhile
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):  # this thread
                found += map(int, _read(f"/proc/{pid}/task/{thread}/children").split())
    return found + [other for child in found for other in descendants(child)]


def ancestors(pid: int) -> list[int]:
    """Return the pids of a process's parent, of that parent's parent, and so on."""
    found: list[int] = []
    at = find(pid)
    while at is not None and at.parent > 0 and at.parent not in found:
        found.append(at.parent)
        at = find(at.parent)
    return found


def has_variable(process: Process, variable: bytes) -> bool:
    """Return whether a process was started with `variable` (NAME=value) in its environment."""
    if process.state == "D":  # its memory may be locked, and reading it would block too
        return False
    try:
        environ = _read(f"/proc/{process.pid}/environ")
    except OSError:  # another user's, or ended meanwhile
        return False
    return variable in environ and variable in environ.split(b"\0")


def _read(path: str) -> bytes:
    """Read a file of the kernel, without a file object, which takes longer than the read itself."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.read(descriptor, READ_BYTES)
        while len(data) % READ_BYTES == 0 and (more := os.read(descriptor, READ_BYTES)):
            data += more
    finally:
        os.close(descriptor)
    return data


def lives(process: Process) -> bool:
    """Return whether a process is still alive, and its pid was not reused."""
    now = find(process.pid)
    return now is not None and now.start == process.start


def send(process: Process, signum: int) -> bool:
    """Signal a process if it is still the same one; return whether it was."""
    if not lives(process):
        return False
    try:
        os.kill(process.pid, signum)
    except ProcessLookupError:
        return False
    except PermissionError:  # it changed its user: it cannot be signalled, and will be reported as left
        return True
    return True


def kill_group(process: Process) -> None:
    """Kill the whole group of a process, for one that forks and exits faster than single pids can be found.

    Call it only for a process just seen that started in a session of ours: its group then holds nothing of others.
    """
    if process.group in (0, os.getpgrp()):
        return
    try:
        os.killpg(process.group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def kill_session(child: subprocess.Popen[bytes]) -> None:
    """Kill a child that was started in a session of its own, with its group, and reap it. Blocks a moment.

    It returns once the group is gone, after KILLED_WITHIN_S at most. Does nothing for a child that was reaped before.
    """
    if child.returncode is not None:  # the group's id may belong to others by now
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    limit = time.monotonic() + KILLED_WITHIN_S
    while any(each.group == child.pid for each in everything()) and time.monotonic() < limit:
        time.sleep(0.002)


class Suspension:
    """Keeps listed processes stopped; call `step` again after `pause_s`, since a process may have forked before."""

    def __init__(self, listing: Callable[[], list[Process]]) -> None:
        self._listing = listing
        self._looks = 0
        self.pause_s = 0.0

    def step(self) -> None:
        moving = [process for process in self._listing() if process.state not in "Tt"]
        for process in moving:
            send(process, signal.SIGSTOP)
        self._looks += 1
        self.pause_s = 0.005 if moving and self._looks < QUICK_LOOKS else LOOK_S

    def release(self) -> None:
        for process in self._listing():
            send(process, signal.SIGCONT)


class Sweep:
    """Ends every process that a listing returns: TERM, after the grace period KILL; call `step` until it returns True.

    The listing is repeated at each step, since a process may have forked meanwhile. It is no snapshot, so an empty one
    proves nothing: the sweep is done when this process, which must be a subreaper, has no children either; the caller
    reaps them. If it keeps a child, or the swept processes are not its descendants (`adopted` False), three empty
    listings must suffice. `kill_all` is called with every KILL, and ends at once what it can. Processes that are still
    there `kill_wait_s` after the first KILL (in state D, or another user's) stay in `left`.
    """

    def __init__(
        self,
        listing: Callable[[], list[Process]],
        *,
        grace_s: float = 0.0,
        kill_wait_s: float = 5.0,
        adopted: bool = True,
        kill_all: Callable[[], None] = lambda: None,
    ) -> None:
        self._listing = listing
        self._kill_at = time.monotonic() + grace_s
        self._kill_wait_s = kill_wait_s
        self._adopted = adopted
        self._kill_all = kill_all
        self._empty = 0
        self._signalled: set[Process] = set()
        self.left: list[Process] = []
        self.pause_s = 0.002  # until the next step

    @property
    def ended(self) -> int:
        return len(self._signalled.difference(self.left))

    def hurry(self) -> None:
        self._kill_at = min(self._kill_at, time.monotonic())
        self.pause_s = 0.002

    def step(self) -> bool:
        """List once, signal the processes found, and return whether there is nothing more to do."""
        self.left = self._listing()
        now = time.monotonic()
        self._empty = 0 if self.left else self._empty + 1
        if now > self._kill_at + self._kill_wait_s or self._nothing_left():
            return True
        if now >= self._kill_at and self.left:
            self._kill_all()
        for process in self.left:
            if now >= self._kill_at:
                send(process, signal.SIGKILL)
                kill_group(process)
            elif process not in self._signalled:
                send(process, signal.SIGTERM)
                send(process, signal.SIGCONT)
        self._signalled.update(self.left)
        self.pause_s = min(2 * self.pause_s, 0.05)
        return False

    def _nothing_left(self) -> bool:
        return childless() and not self.left if self._adopted else self._empty >= 3
