"""`dtrain` forked from a process that has imported it: its imports are half of the CPU time of a short run.

What is forked has a session, streams, variables and a folder of its own, as what `python -m launcher` starts. A test
that starts that itself, for the start is what it shows, and one that changes how Python starts, gets no fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

MARK = "DTRAIN_TEST_MARK"
NO_MARK = "0" * 32  # as long as all others
MAX_REQUEST_BYTES = 100_000
_AT_START = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC_", "TZ")  # what Python, libc and the linker read of variables


class DtrainServer:
    """The process from which they are forked. It ends with the one that made it."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._inherited = _inherited(os.environ)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "testbed.forked_dtrain", str(theirs.fileno())],
                cwd=Path(__file__).parents[1],
                env={**os.environ, MARK: NO_MARK},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.pid = self._process.pid

    def request(self, words: Sequence[str], env: Mapping[str, str], cwd: Path | None) -> bytes | None:
        """Return what is to be asked for; None if only a start by exec will do."""
        if _inherited(env) != self._inherited or len(env.get(MARK, "")) != len(NO_MARK):
            return None
        request = json.dumps({"words": words, "env": dict(env), "cwd": os.fspath(cwd or Path.cwd())}).encode()
        return request if len(request) <= MAX_REQUEST_BYTES else None

    def close(self) -> None:
        self.socket.close()
        self._process.wait()


class ForkedDtrain(subprocess.Popen[bytes]):
    """A `dtrain` that the server has forked. The server is its parent, and says how it has ended."""

    used_s: ClassVar = 0.0  # CPU time of all that have ended

    def __init__(self, server: DtrainServer, request: bytes, args: Sequence[str], stdin: int) -> None:
        self._server = server
        self._request = request
        self._lock = threading.Lock()
        super().__init__(args, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def _execute_child(self, *given: Any) -> None:
        """Do what Popen does by exec. The parameters that are used have had their places since Python 3.7."""
        child_stdin, _, _, child_stdout, _, child_stderr = given[10:16]
        self._status, theirs = os.pipe()
        descriptors = [child_stdin, child_stdout, child_stderr, theirs]
        try:
            socket.send_fds(self._server.socket, [self._request], descriptors)
        finally:
            self._closed_child_pipe_fds = True
            for descriptor in descriptors:
                os.close(descriptor)
        self.pid = int(self._line().removeprefix("pid "))
        self._child_created = True

    def _line(self) -> str:
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(self._status, 1)
            assert byte, "the server has ended"
            line += byte
        return line.decode().rstrip()

    def _internal_poll(self, *_: object, **__: object) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._wait(0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        with self._lock:
            if self.returncode is None:
                poll = select.poll()
                poll.register(self._status, select.POLLIN)
                if not poll.poll(None if timeout is None else 1000 * max(timeout, 0)):
                    assert timeout is not None
                    raise subprocess.TimeoutExpired(self.args, timeout)
                _, code, used_s = self._line().split()
                self.returncode = int(code)
                ForkedDtrain.used_s += float(used_s)
                os.close(self._status)
            return self.returncode


def _inherited(env: Mapping[str, str]) -> tuple[dict[str, str], set[int]]:
    """Return the variables and the ignored signals that make another process of what is started here."""
    ignored = {number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN}
    variables = {name: value for name, value in env.items() if name.startswith(_AT_START)}
    if not any(Path(folder, "sitecustomize.py").exists() for folder in _folders_of_modules(env)):
        variables.pop("PYTHONPATH", None)  # what is forked gets its folders
    return variables, ignored


def _folders_of_modules(env: Mapping[str, str]) -> list[str]:
    return [os.path.abspath(folder) for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder]


def _serve(requests: socket.socket) -> None:
    """Fork a `dtrain` for each request, and say how each has ended; return when nobody can ask any more."""
    waiting = selectors.DefaultSelector()
    waiting.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            if key.fileobj is not requests:
                pid, status = key.data
                _, exit_status, used = os.wait4(pid, 0)
                code = os.waitstatus_to_exitcode(exit_status)
                with contextlib.suppress(BrokenPipeError):  # a test that does not want to know
                    os.write(status, b"ended %d %.3f\n" % (code, used.ru_utime + used.ru_stime))
                waiting.unregister(key.fileobj)
                os.close(status)
                os.close(key.fd)
                continue
            request, descriptors, _, _ = socket.recv_fds(requests, 2 * MAX_REQUEST_BYTES, 4)
            if not request:
                return
            if not (pid := os.fork()):
                try:
                    _become(json.loads(request), descriptors)
                finally:
                    os._exit(1)
            *streams, status = descriptors
            for descriptor in streams:
                os.close(descriptor)
            waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, status))


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Go on as `dtrain`; does not return."""
    *streams, status = descriptors
    os.setsid()
    os.chdir(request["cwd"])
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    installed = sys.path[1 + len(_folders_of_modules(os.environ)) :]
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[:] = [request["cwd"], *_folders_of_modules(os.environ), *installed]
    _show_mark(request["env"][MARK])
    tempfile.tempdir = None  # it is asked for anew
    sys.argv = [str(Path(launcher.__file__).with_name("__main__.py")), *request["words"]]
    os.write(status, b"pid %d\n" % os.getpid())
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    launcher.cli.main.main()


def _show_mark(mark: str) -> None:
    """Write this process's mark to where /proc shows the variables that a process was started with."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    where = ctypes.string_at(start, end - start).index(f"{MARK}={NO_MARK}".encode())
    ctypes.memmove(start + where, f"{MARK}={mark}".encode(), len(f"{MARK}={mark}"))


if __name__ == "__main__":
    import paramiko  # noqa: F401  # for SSH hosts
    import rich.table  # noqa: F401

    import launcher.check.command
    import launcher.cli.main
    import launcher.cli.plan
    import launcher.cli.run
    import launcher.cli.run_node
    import launcher.cli.runs.follow
    import launcher.cli.runs.stacks
    import launcher.cli.runs.steer
    import launcher.cli.runs.table
    import launcher.controller.controller
    import launcher.output.report
    import launcher.runs.session
    import launcher.timeline.recording

    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))
