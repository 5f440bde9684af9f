"""Memory on this host for a copy of a worker's checkpoint, and the program that saves it when the worker is gone.

Owned by agent.py, from the first attempt to the last. The worker that uses the memory keeps a note beside it while its
copy is complete: a JSON object in which this module reads `pid`, the worker's, and `argv`, the command that saves the
copy with the memory as its standard input. The note is empty once that is done; if the worker ends before, the agent
runs the command.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import signal
import sys

from launcher.agent.workers.worker import spawn

_WRITE_S = 10.0  # for the program at the end of the run, within what the controller waits for (job/ending.py)


class KeptCopy:
    """Memory that is freed when this process ends, however that happens. Without it, workers get no variables."""

    def __init__(self) -> None:
        self.variables: dict[str, str] = {}  # for the workers
        self.pid: int | None = None  # pid of the program while it runs
        self._descriptor = -1
        self._note = ""
        self._until: float | None = None
        self._closed = False

    def open(self, folder: str) -> None:
        """Make the memory; the note goes into `folder`."""
        if self.variables:
            return
        with contextlib.suppress(OSError):  # forbidden there, as by sysctl vm.memfd_noexec
            self._descriptor = os.memfd_create("dtrain-copy", os.MFD_CLOEXEC)
            os.fchmod(self._descriptor, 0o600)
            self._note = f"{folder}/copy.json"
            path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
            self.variables = {"DTRAIN_COPY_FILE": path, "DTRAIN_COPY_NOTE": self._note}

    def worker_ended(self, pid: int) -> None:
        """Start saving the copy of a worker that has ended, unless it was saved."""
        if not self.variables or self.pid is not None or self._closed:
            return
        argv = self._command_of(pid)
        if not argv:
            return
        try:
            memory = os.open(self.variables["DTRAIN_COPY_FILE"], os.O_RDWR | os.O_CLOEXEC)
            try:
                with contextlib.suppress(OSError):  # a leftover child of the worker holds the lock
                    fcntl.flock(memory, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the next worker waits for it
                self.pid = spawn(argv, os.environ, cwd="/", stdin=memory, stdout=2, stderr=2)
            finally:
                os.close(memory)
        except OSError as error:
            print(f"dtrain agent: the checkpoint of a worker cannot be written: {argv[0]}: {error}", file=sys.stderr)

    def _command_of(self, pid: int) -> list[str]:
        """Return the command in the note if it belongs to this worker, else an empty list."""
        try:
            with open(self._note, encoding="utf-8", errors="surrogateescape") as file:
                note = json.load(file)
            return [str(each) for each in note["argv"]] if note["pid"] == pid else []
        except (OSError, ValueError, KeyError, TypeError):  # no note, or not written by a worker
            return []

    def ended(self) -> None:
        """Record that the program was reaped."""
        self.pid = None

    def finished(self, now: float) -> bool:
        """Return whether nothing is being written, at the end of the run; kill a program that takes too long."""
        if self.pid is None:
            return True
        if self._until is None:
            self._until = now + _WRITE_S
        elif now >= self._until:
            print(f"dtrain agent: the checkpoint of a worker was not written within {_WRITE_S:g} s", file=sys.stderr)
            self.kill()
            self._until = math.inf  # once: a program that waits for a disk ends later
        return False

    def pause_s(self, now: float) -> float:
        return max(0.0, self._until - now) if self._until is not None and self.pid is not None else float("inf")

    def kill(self) -> None:
        """Kill the program, which the caller reaps, and start no other."""
        self._closed = True
        if self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)
