"""`dtrain` forked from a process that has imported it: its imports are half of the CPU time of a short run.

What is forked has a session, streams, variables and a folder of its own, as what `python -m launcher` starts. No fork:
a test that runs `python -m launcher` itself, one that sets what changes how Python starts (`_AT_START`, sitecustomize,
limits), one whose folders have a module that would be imported instead of one that is imported here, and in CI a
fifth of the tests in turn (slow.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from testbed.fork_memory import share_memory

MARK = "DTRAIN_TEST_MARK"
NO_MARK = "0" * 32  # as long as all others
MAX_MESSAGE_BYTES = 100_000
_AT_START = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC_", "TZ")  # what Python, libc and the linker read of variables
_BY_SITE = ("sitecustomize", "usercustomize")  # imported at the start of Python if they are there


class DtrainServer:
    """The process from which they are forked, started again if it has ended. It ends with the one that made it."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = {**variables, MARK: NO_MARK}
        self._start()

    def _start(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._inherited = _inherited(self._variables)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "testbed.forked_dtrain", str(theirs.fileno())],
                cwd=Path(__file__).parents[1],
                env=self._variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._imported: dict[str, str] = json.loads(self.socket.recv(MAX_MESSAGE_BYTES))

    def request(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path | None) -> bytes | None:
        """Return what is to be asked for; None if only a start by exec will do."""
        if len(env.get(MARK, "")) != len(NO_MARK):
            return None
        if self._process.poll() is not None:
            self.socket.close()
            self._start()
        folder = (cwd or Path.cwd()).absolute()
        if _inherited(env) != self._inherited or any(
            self._is_hidden_by(Path(folder, each)) for each in ("", *_folders_of_modules(env))
        ):
            return None
        request = json.dumps({"argv": argv, "env": dict(env), "cwd": os.fspath(folder)}).encode()
        return request if len(request) <= MAX_MESSAGE_BYTES else None

    def _is_hidden_by(self, folder: Path) -> bool:
        """Return whether Python would import a module of this folder instead of one that the server has imported."""
        modules = {path.stem: path for path in folder.glob("*.py")}
        modules |= {path.parent.name: path for path in folder.glob("*/__init__.py")}
        return any(
            self._imported.get(name) != os.path.realpath(path)
            for name, path in modules.items()
            if name in self._imported or name in _BY_SITE
        )

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
        weakref.finalize(self, os.close, self._status)  # not sooner: another thread may wait for it
        descriptors = [child_stdin, child_stdout, child_stderr, theirs]
        try:
            socket.send_fds(self._server.socket, [self._request], descriptors)
        finally:
            self._closed_child_pipe_fds = True
            for descriptor in descriptors:
                os.close(descriptor)
        word, number = self._line().split(maxsplit=1)
        if word == "failed":
            raise OSError(int(number), os.strerror(int(number)), json.loads(self._request)["cwd"])
        assert word == "pid", "it has ended before it began"
        self.pid = int(number)
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
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._status, select.POLLIN)
            if not poll.poll(None if timeout is None else 1000 * max(timeout, 0)):
                assert timeout is not None
                raise subprocess.TimeoutExpired(self.args, timeout)
        with self._lock:
            if self.returncode is None:
                _, code, used_s = self._line().split()
                self.returncode = int(code)
                ForkedDtrain.used_s += float(used_s)
            return self.returncode


def _inherited(env: Mapping[str, str]) -> tuple[object, ...]:
    """Return the variables, ignored signals, limits and cores that make another process of what is started here."""
    ignored = {number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN}
    variables = {name: value for name, value in env.items() if name.startswith(_AT_START)}
    variables.pop("PYTHONPATH", None)  # what is forked gets its folders
    return variables, ignored, resource.getrlimit(resource.RLIMIT_NOFILE), os.sched_getaffinity(0)


def _folders_of_modules(env: Mapping[str, str]) -> list[str]:
    return [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder]


def _serve(requests: socket.socket) -> None:
    """Fork a `dtrain` for each request, and say how each has ended; return when no one can ask any more."""
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
            request, descriptors, _, _ = socket.recv_fds(requests, 2 * MAX_MESSAGE_BYTES, 4)
            if not request:
                return
            *streams, status = descriptors
            try:
                pid = os.fork()
            except OSError as error:
                os.write(status, b"failed %d\n" % (error.errno or 0))
                for descriptor in descriptors:
                    os.close(descriptor)
                continue
            if not pid:
                try:
                    _become(json.loads(request), streams, status)
                finally:
                    os._exit(1)
            for descriptor in streams:
                os.close(descriptor)
            waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, status))


def _become(request: dict[str, Any], streams: Sequence[int], status: int) -> None:
    """Go on as `dtrain`; returns only after an error that it does not catch."""
    try:
        os.chdir(request["cwd"])
    except OSError as error:
        os.write(status, b"failed %d\n" % (error.errno or 0))
        return
    os.setsid()
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  # the present one takes it for /dev/null, which can seek
    try:
        _set_up(request)
        os.write(status, b"pid %d\n" % os.getpid())
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        launcher.cli.main.main()
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()


def _set_up(request: dict[str, Any]) -> None:
    env = request["env"]
    os.environ.clear()
    os.environ.update(env)
    sys.path[:] = [os.getcwd(), *map(os.path.abspath, _folders_of_modules(env)), *INSTALLED]
    tempfile.tempdir = None  # it is asked for again
    sys.argv = [str(Path(launcher.__file__).with_name("__main__.py")), *request["argv"][3:]]
    sys.orig_argv[:] = request["argv"]
    _show_mark(env[MARK])  # where _show_as can do nothing
    launcher.agent.workers.fork_server._show_as(request["argv"], env)


def _imported_from() -> dict[str, str]:
    """Return the top-level modules that are imported, each with its file, or nothing where it has none."""
    files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items() if "." not in name}
    return {name: os.path.realpath(file) if file else "" for name, file in files.items() if name != "__main__"}


def _show_mark(mark: str) -> None:
    """Write this process's mark to where /proc shows the variables that a process was started with."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    where = ctypes.string_at(start, end - start).index(f"{MARK}={NO_MARK}".encode())
    ctypes.memmove(start + where, f"{MARK}={mark}".encode(), len(f"{MARK}={mark}"))


if __name__ == "__main__":
    FOLDERS = [os.path.abspath(folder) for folder in _folders_of_modules(os.environ)]
    INSTALLED = [folder for folder in sys.path[1:] if folder not in FOLDERS]

    import paramiko  # noqa: F401  # for SSH hosts
    import rich.table  # noqa: F401

    import launcher.agent.workers.fork_server
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

    share_memory()
    requests = socket.socket(fileno=int(sys.argv[1]))
    requests.send(json.dumps(_imported_from()).encode())
    _serve(requests)
