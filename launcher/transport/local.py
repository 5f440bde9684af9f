"""Agents on this machine, connected by pipes."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO, Protocol

from launcher.errors import HostError
from launcher.machine.processes import file_limit_variables
from launcher.transport.stream import StderrTail, broken_by

READ_BYTES = 1 << 16


class AgentProcess(Protocol):
    """A process with pipes, as subprocess.Popen has it."""

    stdin: IO[bytes] | None
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


def start_process(
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    stdin: int = subprocess.PIPE,
    stdout: int = subprocess.PIPE,
) -> subprocess.Popen[bytes]:
    """Start a program on this machine whose stderr is a pipe. Raises HostError."""
    # In its own session: Ctrl-C at dtrain must reach it as a command, not as a signal. In the root folder: a `launcher`
    # package in the user's working directory must not be imported instead of ours.
    if variables := file_limit_variables():
        env = {**(os.environ if env is None else env), **variables}
    try:
        return subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.PIPE,
            cwd="/",
            env=env,
            start_new_session=True,
            bufsize=0,
        )
    except OSError as error:
        fix = "name the Python that has dtrain with --python, or with --agent-prefix a program that is installed"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            fix = "raise the limit of open files (ulimit -n), or name fewer hosts"
        elif error.errno in (errno.EAGAIN, errno.ENOMEM):
            fix = "raise the limit of processes (ulimit -u), or name fewer hosts"
        raise HostError("this machine", f"cannot run {command[0]} here: {error.strerror}; {fix}") from error


class LocalStream:
    """A `Stream` to an agent on this machine, connected by pipes: a started process, or what `command` starts.

    Raises HostError if it cannot be started.
    """

    our_address: str | None = None

    def __init__(self, command: Sequence[str] | AgentProcess, env: Mapping[str, str] | None = None) -> None:
        self._process = start_process(command, env) if isinstance(command, Sequence) else command
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._stdin = self._process.stdin
        self._stdout = self._process.stdout
        self._buffer = memoryview(mmap.mmap(-1, READ_BYTES))  # only pages that were read into use memory
        try:
            self._words = StderrTail(self._process.stderr)
        except RuntimeError:  # no thread left
            self._process.kill()
            self._process.wait()
            raise

    def read(self) -> bytes:
        # Not read(): it allocates the maximum each time, which fragments glibc's heap.
        with broken_by():
            read = 0 if self._stdout.closed else os.readv(self._stdout.fileno(), [self._buffer])
        if read == 0:
            self._stdout.close()
        return bytes(self._buffer[:read])

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        with broken_by():
            while view:
                view = view[self._stdin.write(view) or 0 :]

    def end(self) -> None:
        with broken_by():
            self._stdin.close()

    def finish(self, wait_s: float) -> tuple[int | None, str]:
        try:
            status: int | None = self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self.kill()  # given up: an agent whose guard is killed shuts down cleanly by itself
            self._process.wait()
            status = None
        return status, self._words.wait(1.0)

    def kill(self) -> None:
        self._process.kill()
