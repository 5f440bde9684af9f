"""Identifies the processes of a run on this host, wherever they went; owns the folder for their files.

Every agent has a run tag of its own, and marks each worker in three ways before it starts: an environment variable, a
number among its resource limits, and a control group if one can be created. All that a worker starts inherits them, in
a session of its own, as a daemon, or with a cleared environment; the agent and the guard do not have them. The number
also identifies the worker: leftovers of one are thus distinguished from those of others.

The agent makes the folder and removes it; if the agent was killed, its guard does, or else the next agent here, of the
same run or of the next one (leftovers.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import sys
from collections.abc import Iterable

from launcher.machine import processes
from launcher.machine.cgroup import Cgroup
from launcher.machine.processes import Process

NAME = "DTRAIN_AGENT"
IDENTITY = "agent.json"  # in the folder for files
_WORKER_BITS = 20  # bits of the number for the worker; the other 40 are the agent's


class RunTag:
    """The run tag of an agent: 32 hexadecimal digits, and the control group with that name."""

    def __init__(self, value: str, cgroup: Cgroup | None, began: int = 0) -> None:
        """`began` is the earliest time at which a process can have got it, in clock ticks since boot."""
        if not re.fullmatch("[0-9a-f]{32}", value):
            raise ValueError(f"{value[:40]!r} is no run tag")
        self.value = value
        self.cgroup = cgroup
        self.variables = {NAME: value}  # for a worker's environment
        self._variable = f"{NAME}={value}".encode()
        self._number = int(value[:10], 16)
        self._workers = 0
        self._began = began

    @classmethod
    def new(cls, value: str = "") -> RunTag:
        """Make an agent's own run tag; with a value, that of an agent whose processes may be older than this one."""
        ours = None if value else processes.find(os.getpid())
        value = value or os.urandom(16).hex()
        return cls(value, Cgroup.below_ours(f"dtrain-{value[:16]}"), 0 if ours is None else ours.start)

    def number_worker(self) -> int:
        """Return a number for a worker that no earlier worker had, or none for a long time."""
        self._workers = (self._workers + 1) % (1 << _WORKER_BITS)
        return self._workers

    def put_on(self, worker: int = 0, pid: int = 0) -> None:
        """Mark a process in the two other ways as the worker with that number.

        It is this process, between fork and exec, or a child that waits.
        """
        processes.set_tag_number(self._tag_number(worker), pid)
        if self.cgroup is not None:
            self.cgroup.add(pid)

    def _tag_number(self, worker: int) -> int:
        return self._number << _WORKER_BITS | worker  # 60 bits are what a resource limit can hold

    def members(self, *, ancestor: int | None, spare: Iterable[int] = ()) -> list[Process]:
        """Return the run's living processes and all descendants of `ancestor`, except those in `spare`."""
        inside = set() if self.cgroup is None else self.cgroup.pids()
        return processes.related(ancestor=ancestor, ours=self.is_on, spare=spare, also=inside, others=self._has_another)

    def left_by(self, worker: int, variable: str) -> list[Process]:
        """Return the living processes that a worker has left, and all their descendants.

        They are found by its number, or by a variable (NAME=value) that only it had.
        """
        tag_number, encoded = self._tag_number(worker), variable.encode()

        def is_its(process: Process) -> bool:
            return processes.tag_number_of(process.pid) == tag_number or processes.has_variable(process, encoded)

        return processes.related(ancestor=None, ours=is_its, spare=[os.getpid()])

    def kill_group(self) -> None:
        if self.cgroup is not None:
            self.cgroup.kill()

    def remove(self) -> None:
        """Remove the control group and the folder for files.

        The folder goes last: the next run finds leftovers of a killed one by it.
        """
        if self.cgroup is not None:
            self.cgroup.remove()
        remove_folder(self.value)

    def is_on(self, process: Process) -> bool:
        """Return whether a process has the tag, set directly or inherited."""
        if process.start < self._began:
            return False
        tag_number = processes.tag_number_of(process.pid)
        return tag_number >> _WORKER_BITS == self._number or processes.has_variable(process, self._variable)

    def _has_another(self, pid: int) -> bool:
        """Return whether a process has the number of another run tag, or is dtrain itself; it lacks this one then.

        A small number is a user's soft limit.
        """
        tag_number = processes.tag_number_of(pid)
        return tag_number != processes.NO_NUMBER and tag_number >> _WORKER_BITS not in (0, self._number)


def make_folder(run_tag: str, identity: str) -> str:
    """Make the folder for files of the agent with this run tag, and write its identity there.

    A full disk may have room for a folder, but not for a file: then the next candidate is taken. Raises OSError if
    there is none.
    """
    problem: OSError = FileNotFoundError("no folder for temporary files")
    for path in _candidates(run_tag):
        try:
            os.mkdir(path, 0o700)
        except OSError as error:
            problem = error
            continue
        part = f"{path}/{IDENTITY}.part"
        try:
            with open(part, "x", encoding="utf-8", errors="surrogateescape") as file:
                file.write(identity)
            os.rename(part, f"{path}/{IDENTITY}")
        except OSError as error:
            problem = error
            with contextlib.suppress(OSError):
                os.unlink(part)
            os.rmdir(path)
        else:
            return path
    raise problem


def lock_folder(folder: str) -> None:
    """Keep systemd-tmpfiles from removing old files in the folder, until this process ends.

    It skips folders that are locked (tmpfiles.d(5)); else it removes what was not used for ten days in /tmp.
    """
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), fcntl.LOCK_SH | fcntl.LOCK_NB)


def mark_unless_nested() -> None:
    """Mark this process as dtrain's own for other agents, unless it is part of another run."""
    if NAME not in os.environ:
        processes.mark_as_own()


def clear_folder(folder: str, attempt: int) -> None:
    """Remove the files of an attempt's workers: their names begin with its number."""
    try:
        for name in os.listdir(folder):
            if name.startswith(f"{attempt}-"):
                os.unlink(os.path.join(folder, name))
    except OSError as error:  # the disk failed, or a worker put a folder there: the end of the run deals with it
        print(f"dtrain agent: {folder}: {error}", file=sys.stderr)


def remove_folder(run_tag: str) -> None:
    """Remove the folder with this run tag and all files in it, if it is ours."""
    for path in _candidates(run_tag):
        try:
            found = os.lstat(path)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            names = os.listdir(path)
        except OSError:
            continue
        try:
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # another agent of this machine may do the same
                    _remove(os.path.join(path, name))
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(path)
        except OSError as error:
            print(f"dtrain agent: cannot remove {path}: {error}", file=sys.stderr)


def _remove(path: str) -> None:
    if stat.S_ISDIR(os.lstat(path).st_mode):
        from shutil import rmtree  # slow to import, and only needed for folders that workers made

        rmtree(path)
    else:
        os.unlink(path)


def _candidates(run_tag: str) -> list[str]:
    return [f"{folder}/dtrain-{run_tag[:16]}" for folder in folders_for_files()]


def folders_for_files() -> list[str]:
    """Return the folders for temporary files, the best first."""
    folders = [os.environ.get("TMPDIR", ""), "/tmp", "/var/tmp"]
    return [folder for folder in dict.fromkeys(folders) if os.path.isabs(folder)]
