"""The fork server after its run, if it stays warm: waits for runs, and serves them.

Loaded by fork_server.py alone, into its process. For a later run it forks a new guard, a new agent and a new fork
server: the first two then execute dtrain's own program, the third is as this process was when its imports were done.
No process of a later run keeps anything of an earlier one.

Requests are JSON, each with its answer, on connections whose other end must belong to the same user.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

_PEER = struct.Struct("3i")  # pid, uid, gid
_LIMITS = struct.pack("3d", math.nan, 0.0, 0.0)  # initial values of Limits in cleanup/lease.py
_MESSAGE_BYTES = 1 << 16
_PROMISE_S = 2.0  # how long this process stays for a client after it answered that it fits
_LOOK_S = 5.0  # a poll does not count the machine's sleep, and does not report a removed socket
_PR_SET_PDEATHSIG = 1
_METADATA = (".dist-info", ".egg-info", ".egg-link", ".pth")


class Packages:
    """The state of the installed packages; create it before they are imported."""

    def __init__(self) -> None:
        self._metadata = _metadata()
        self._files: dict[str, tuple[int, int]] = {}

    def imported(self) -> None:
        """Record the files of all modules imported by now."""
        self._files = {path: state for path in _files() if (state := _state(path)) is not None}

    def changed(self) -> str:
        """Return what has changed since then; empty: nothing."""
        for path, state in self._files.items():
            if _state(path) != state:
                return f"changed since then: {path}"
        now = _metadata()
        if differing := sorted(name for name, _ in now.items() ^ self._metadata.items()):
            return f"changed since then: {differing[0]}"
        return ""


def _metadata() -> dict[str, int]:
    found = {}
    for folder in sys.path:
        with contextlib.suppress(OSError), os.scandir(folder or ".") as entries:
            for entry in entries:
                if entry.name.endswith(_METADATA):
                    found[entry.path] = entry.stat().st_mtime_ns
    return found


def _files() -> list[str]:
    modules = [*sys.modules.values()]
    return [path for module in modules if isinstance(path := getattr(module, "__file__", None), str)]


def _state(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


class Keeper:
    """A process that stays warm.

    `open_files` are descriptors that its imports need; `why_not_script` returns why those differ from a script's.
    """

    def __init__(
        self,
        order: dict[str, Any],
        listening: socket.socket,
        packages: Packages,
        imported: Sequence[str],
        open_files: Sequence[int],
        why_not_script: Callable[[dict[str, str]], str],
    ) -> None:
        self._path: str = order["path"]
        self._surroundings: dict[str, str] = order["surroundings"]
        self._described: dict[str, Any] = {**order["described"], "packages": imported}
        self._listening: socket.socket | None = listening
        self._packages = packages
        self._open_files = open_files
        self._why_not_script = why_not_script
        self._since = time.time()
        self._until = _now() + order["keep_s"]
        self._waiting: list[socket.socket] = []  # connections that have not sent a run yet
        self._promised: dict[socket.socket, float] = {}  # until when to stay for connections that may send a run
        self._runs: dict[int, socket.socket] = {}  # by the pid of the guard

    def wait(self) -> socket.socket:
        """Serve until the time is over, then end this process. Returns only in a new fork server its control."""
        os.chdir("/")
        wake_read, wake_write = os.pipe()
        for descriptor in (wake_read, wake_write):
            os.set_blocking(descriptor, False)
        before = signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        try:
            while True:
                self._end_when_due()
                poll = select.poll()
                watched: dict[int, socket.socket] = {each.fileno(): each for each in self._waiting}
                watched.update((each.fileno(), each) for each in self._runs.values())
                for descriptor in (wake_read, *watched):
                    poll.register(descriptor, select.POLLIN)
                if self._listening is not None:
                    poll.register(self._listening, select.POLLIN)
                left_s = _LOOK_S if self._runs else max(0.0, self._due() - _now())
                for descriptor, _ in poll.poll(1000 * min(_LOOK_S, left_s)):
                    if descriptor == wake_read:
                        os.read(wake_read, _MESSAGE_BYTES)
                    elif descriptor not in watched:
                        self._accept()
                    elif (control := self._hear(watched[descriptor])) is not None:
                        return control
                self._reap()
        finally:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)

    def _end_when_due(self) -> None:
        if self._listening is not None and not os.path.exists(self._path):
            self._stop()  # it was removed so that no run finds this process
        if not self._runs and _now() >= self._due():
            self._stop()
            os._exit(0)

    def _due(self) -> float:
        """Return when this process ends if no run uses it."""
        until = -math.inf if self._listening is None else self._until
        return max([until, *self._promised.values()])

    def _stop(self) -> None:
        """Stop listening; end with the last run."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(self._path))

    def _accept(self) -> None:
        if self._listening is None:  # closed after the poll
            return
        connection, _ = self._listening.accept()
        _, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        if uid != os.geteuid():
            connection.close()
            return
        connection.settimeout(1.0)
        self._waiting.append(connection)

    def _reap(self) -> None:
        while True:
            try:
                pid, wait_status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if (connection := self._runs.pop(pid, None)) is not None:
                status = os.waitstatus_to_exitcode(wait_status)
                self._answer(connection, {"status": status if status >= 0 else 128 - status})
                connection.close()

    def _hear(self, connection: socket.socket) -> socket.socket | None:
        try:
            data, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 5, socket.MSG_CMSG_CLOEXEC)
            order = json.loads(data) if data else None
        except (OSError, ValueError):
            order, descriptors = None, []
        try:
            if connection in self._waiting and isinstance(order, dict):
                return self._obey(connection, order, descriptors)
            self._lost(connection)
            return None
        finally:
            for descriptor in descriptors:
                with contextlib.suppress(OSError):  # a new fork server has closed them already
                    os.close(descriptor)

    def _lost(self, connection: socket.socket) -> None:
        """Handle the loss of a connection; if it had a run here, end that by killing its guard."""
        for pid, of_run in self._runs.items():
            if of_run is connection:
                os.kill(pid, signal.SIGKILL)
                return
        if connection in self._waiting:
            self._waiting.remove(connection)
            self._promised.pop(connection, None)
            connection.close()

    def _obey(
        self, connection: socket.socket, order: dict[str, Any], descriptors: Sequence[int]
    ) -> socket.socket | None:
        match order.get("ask"):
            case "check" if isinstance(order.get("surroundings"), dict):
                reason = self._why_not(order["surroundings"])
                if not reason:
                    self._promised[connection] = _now() + _PROMISE_S
                if not reason and "script" in order:
                    self._compare(connection, order["script"])
                else:
                    self._answer(connection, {"reason": reason})
            case "describe":
                left_s = max(0.0, self._until - _now())
                state = {"pid": os.getpid(), "since": self._since, "left_s": left_s, "runs": len(self._runs)}
                self._answer(connection, {**self._described, **state, "memory_bytes": _memory_bytes()})
            case "extend" if isinstance(order.get("keep_s"), float):
                self._until = _now() + order["keep_s"]
                self._answer(connection, {"kept": self._listening is not None})
            case "stop":
                self._stop()
                self._answer(connection, {"runs": len(self._runs)})
            case "run" if len(descriptors) == 5 and isinstance(order.get("cores"), list):
                return self._run(connection, order, descriptors)
            case _:  # an unknown request
                self._lost(connection)
        return None

    @staticmethod
    def _answer(connection: socket.socket, answer: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            connection.send(json.dumps(answer).encode())

    def _why_not(self, surroundings: dict[str, str]) -> str:
        """Return why this process cannot be used there; if no run can use it any more, stop as well."""
        mine = self._surroundings
        if names := sorted({name for name, _ in mine.items() ^ surroundings.items()}):
            return f"not the same as then: {names[0]}"
        if changed := self._packages.changed():
            self._stop()
        return changed

    def _compare(self, connection: socket.socket, script: dict[str, str]) -> None:
        """Compare the imports with a script's in a fork, which answers: that reads the user's files."""
        try:
            pid = os.fork()
        except OSError as error:
            self._answer(connection, {"reason": _no_fork(error)})
            return
        if pid:
            return
        try:
            try:
                reason = self._why_not_script(script)
            except OSError as error:  # its working directory does not exist
                reason = f"the script cannot be read: {error}"
            self._answer(connection, {"reason": reason})
        finally:
            os._exit(0)

    def _run(
        self, connection: socket.socket, order: dict[str, Any], descriptors: Sequence[int]
    ) -> socket.socket | None:
        """Fork guard, agent and fork server for a run. Returns a socket only in the last: its control."""
        try:
            pid = os.fork()
        except OSError as error:
            self._answer(connection, {"reason": _no_fork(error)})
            self._lost(connection)
            return None
        if pid:
            self._waiting.remove(connection)
            self._promised.pop(connection, None)
            self._runs[pid] = connection
            return None
        try:
            return self._begin(connection, order, descriptors)
        except OSError:  # the keeper reports the end, and the client starts an agent of its own
            os._exit(1)

    def _begin(self, connection: socket.socket, order: dict[str, Any], descriptors: Sequence[int]) -> socket.socket:
        """Become the guard, and fork the others. Raises OSError in a process that cannot fork.

        Guard and agent get the variables, standard streams and processors of the process that the agent replaces, and
        hold the connection to it: that process ends once no process holds the connection.
        """
        environ, may_begin, *streams = descriptors
        env: dict[str, str] = json.loads(os.pread(environ, os.fstat(environ).st_size, 0))
        limits = os.memfd_create("limits")
        os.write(limits, _LIMITS)
        asked_by = connection.fileno()
        orders = {"run_tag": os.urandom(16).hex(), "limits": limits}
        become = partial(_become, env=env, streams=streams, cores=order["cores"])
        os.setsid()
        guard = os.getpid()
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if pid := os.fork():
            become("guard", {**orders, "agent": pid}, kept=[limits, asked_by])
        agent = os.getpid()
        _die_with(guard)
        if pid := os.fork():
            also = {
                "kept": self._path, "prefix": order.get("prefix"), "surroundings": self._surroundings, "guard": guard,
                "server": pid, "control": control.fileno(), "may_begin": may_begin, "asked_by": asked_by,
            }  # fmt: skip
            become("agent", {**orders, **also}, kept=[limits, asked_by, control.fileno(), may_begin])
        _die_with(agent)
        os.setsid()
        self._forget(theirs, control)
        return theirs

    def _forget(self, control: socket.socket, *others: socket.socket) -> None:
        """Close all descriptors that do not belong to a new fork server."""
        for each in (self._listening, *self._waiting, *self._runs.values(), *others):
            if each is not None:
                each.detach()
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in (0, 1, 2, control.fileno(), *self._open_files):
                with contextlib.suppress(OSError):  # descriptor of the listing itself
                    os.close(int(name))


def _no_fork(error: OSError) -> str:
    return f"the process kept warm cannot be forked: {error.strerror}"


def _become(
    role: str,
    orders: dict[str, Any],
    *,
    env: dict[str, str],
    streams: Sequence[int],
    cores: Sequence[int],
    kept: Sequence[int],
) -> None:
    """Execute the agent's program. Never returns."""
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGUSR1, signal.SIGUSR2))
        os.sched_setaffinity(0, cores)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        for descriptor in kept:
            os.set_inheritable(descriptor, True)
        # In a file: every user can read the arguments of a process.
        file = os.memfd_create("orders", 0)
        os.write(file, json.dumps(orders).encode())
        os.execve(sys.executable, [sys.executable, "-m", "launcher.agent", role, str(file)], env)
    finally:
        os._exit(127)


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def outlive_parent() -> None:
    """Undo that this process dies with its parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def _memory_bytes() -> int:
    """Return the proportional share of this process, else its resident memory."""
    for name, field in (("smaps_rollup", "Pss:"), ("status", "VmRSS:")):
        with contextlib.suppress(OSError), open(f"/proc/self/{name}", encoding="ascii") as file:
            for line in file:
                if line.startswith(field):
                    return int(line.split()[1]) << 10
    return 0


def _now() -> float:
    """Return the time of a clock that runs on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
