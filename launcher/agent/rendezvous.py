"""The rendezvous of one attempt's workers: its store, and the ports that other launchers' variables name.

The agent binds the store's port, starts store_process.py at the first connection, and ends it. Every attempt has an
empty store of its own, on a new socket; the process that serves them is the same. Failures are reported as StoreFailed.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from launcher.agent.stream_writer import StreamWriter
from launcher.agent.workers.warm_start import ForkServer
from launcher.agent.workers.worker import BOOTSTRAP
from launcher.errors import DtrainError, StoreError
from launcher.protocol.commands import OpenStore, ReservePorts
from launcher.protocol.reports import PortsReserved, StoreFailed, StoreOpened

RELEASE_S = 0.3  # to close a store; the agent is blocked meanwhile

_RESERVED, _TRIES = 10_000, 100  # ports
_READ_BYTES = 1 << 16
_BACKLOG = 4096  # every rank's first connection waits here while the store imports torch


class Rendezvous:
    """Holds the store, if this host has it, until `close_store`; and reserved ports until workers start.

    Owned by the attempt.
    """

    def __init__(
        self, attempt: int, selector: selectors.BaseSelector, writer: StreamWriter, store_process: StoreProcess
    ) -> None:
        self._attempt = attempt
        self._selector = selector
        self._writer = writer
        self._store_process = store_process
        self._store: RendezvousStore | None = None
        self._reserved: list[socket.socket] = []

    @property
    def is_used(self) -> bool:
        """Return whether a client has connected to the store."""
        return self._store is not None and self._store.listening is None

    def open_store(self, message: OpenStore, address: str) -> None:
        self.close_store(keep_process=True)  # an earlier order may have been overtaken
        try:
            self._store = RendezvousStore(
                address, message.port, self._store_process, self._selector, exact=message.exact, failed=self._failed
            )
        except DtrainError as error:
            self._failed(str(error))
            return
        self._writer.send(StoreOpened(attempt=self._attempt, address=self._store.address, port=self._store.port))

    def serve(self) -> None:
        """Start the store's process now, not at the first connection."""
        if self._store is not None:
            self._store.serve()

    def store_ended(self, last_words: str) -> None:
        """Record that the store's process was reaped."""
        if self.is_used:
            self._failed(f"the store's process ended: {last_words}")

    def close_store(self, *, keep_process: bool) -> int | None:
        """Release the store's port; return the pid of its process if that must still be reaped."""
        store, self._store = self._store, None
        return None if store is None else store.close(keep_process=keep_process)

    def reserve_ports(self, message: ReservePorts, address: str) -> None:
        """Bind the requested number of free ports, and hold them until `release_ports`."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        candidates = _unchosen_ports()
        try:
            for _ in range(message.count):
                self._reserved.append(socket.socket(family, socket.SOCK_STREAM))
                _bind_first(self._reserved[-1], address, candidates)
        except OSError as error:
            self._failed(f"cannot find free ports on {address}: {error.strerror}")
            return
        ports = [reserved.getsockname()[1] for reserved in self._reserved]
        self._writer.send(PortsReserved(attempt=self._attempt, address=address, ports=ports))

    def release_ports(self) -> None:
        """Let workers bind the ports."""
        while self._reserved:
            self._reserved.pop().close()

    def _failed(self, reason: str) -> None:
        self._writer.send(StoreFailed(attempt=self._attempt, reason=reason, time=time.monotonic()))


def _unchosen_ports() -> Iterator[int]:
    """Yield ports below those that the kernel chooses: no connection can take one before the worker does."""
    import random  # for TF_CONFIG alone

    try:
        lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:  # another kernel than Linux
        lowest = 0
    first = max(1024, lowest - _RESERVED)
    yield from random.sample(range(first, lowest), max(0, lowest - first))


def _bind_first(sock: socket.socket, address: str, candidates: Iterator[int]) -> None:
    """Bind the first of these ports that is free, or one that the kernel chooses. Raises OSError."""
    for port in itertools.islice(candidates, _TRIES):
        with contextlib.suppress(OSError):  # it is in use
            sock.bind((address, port))
            return
    sock.bind((address, 0))


class StoreProcess:
    """The process of store_process.py, kept for the stores of later attempts since it has torch's extension imported.

    Owned by the agent. `pid` is None while there is none. It is forked from `fork_server` if that has imported torch.
    """

    def __init__(self, fork_server: ForkServer, selector: selectors.BaseSelector) -> None:
        self._fork_server = fork_server
        self._selector = selector
        self.pid: int | None = None
        self._control: socket.socket | None = None
        self._complaints: int | None = None  # the read end of its output, which waits if no one reads: torch may log
        self._said = b""  # the end of it

    def serve(self, listening: socket.socket) -> None:
        """Serve a store on this socket, in place of the previous one; do not wait for it.

        Raises StoreError if the process cannot be started.
        """
        if self.pid is None:
            try:
                self._start()
            except OSError as error:
                raise StoreError(f"its process cannot be started: {error.strerror}; see ulimit -n and -u") from error
        assert self._control is not None
        with contextlib.suppress(OSError):  # it has just died; that is reported when it is reaped
            socket.send_fds(self._control, [b"s"], [listening.fileno()])

    def release(self) -> bool:
        """Close the store and its port; return whether that was done within RELEASE_S."""
        if self._control is None:
            return False
        try:
            self._control.send(b"r")
            while answer := self._control.recv(1):
                if answer == b"r":
                    return True
        except OSError:  # still importing, or dead
            pass
        return False

    def ended(self, wait_status: int) -> str:
        """Return why it ended by itself, after it was reaped: its last line of output, if there is one."""
        while self._read():
            pass
        text = self._said.decode("utf-8", "replace").strip()
        self._forget()
        if text:
            return text.splitlines()[-1]
        status = os.waitstatus_to_exitcode(wait_status)
        if status >= 0:
            return f"it ended with status {status}"
        from launcher.job.failures.failure import signal_name  # slow to import, only needed here

        return f"it was killed by {signal_name(-status)}"

    def kill(self) -> int | None:
        """Kill it, a child not reaped yet, and return the pid to reap: it may be stuck in the kernel."""
        killed = self.pid
        if killed is not None:
            os.kill(killed, signal.SIGKILL)
            self._forget()
        return killed

    def _start(self) -> None:
        """Start it. Raises OSError."""
        with contextlib.ExitStack() as unless_started, contextlib.ExitStack() as its_own:
            control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            unless_started.callback(control.close)
            its_own.callback(theirs.close)
            complaints, complaints_write = os.pipe()
            unless_started.callback(os.close, complaints)
            its_own.callback(os.close, complaints_write)
            control.settimeout(RELEASE_S)
            os.set_blocking(complaints, False)
            self.pid = self._fork_server.fork_or_spawn(
                [sys.executable, "-u", str(BOOTSTRAP), "module", "launcher.agent.store_process"],
                {**os.environ, "OMP_NUM_THREADS": "1"},
                cwd="/",
                stdin=theirs.fileno(),
                stdout=complaints_write,
                stderr=complaints_write,
            )
            self._control, self._complaints, self._said = control, complaints, b""
            unless_started.pop_all()
        self._selector.register(complaints, selectors.EVENT_READ, self._read)

    def _read(self) -> bool:
        """Read some of its output; return whether there was any."""
        if self._complaints is None:  # it was killed after the selector reported it
            return False
        try:
            data = os.read(self._complaints, _READ_BYTES)
        except BlockingIOError:
            return False
        self._said = (self._said + data)[-_READ_BYTES:]
        if not data:
            self._close_output()
        return bool(data)

    def _close_output(self) -> None:
        if self._complaints is not None:
            self._selector.unregister(self._complaints)
            os.close(self._complaints)
            self._complaints = None

    def _forget(self) -> None:
        assert self._control is not None
        self._control.close()
        self._close_output()
        self.pid = self._control = None


class RendezvousStore:
    """A bound and listening socket, passed to the store's process at the first connection, which `selector` reports.

    `listening` is None from then on. Calls `failed` if the process cannot be started.
    """

    def __init__(
        self, address: str, port: int, process: StoreProcess, selector: selectors.BaseSelector, *, exact: bool,
        failed: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.listening: socket.socket | None = _bind(address, port, exact=exact)
        self.address, self.port = self.listening.getsockname()[:2]
        self._process = process
        self._selector = selector
        self._failed = failed
        selector.register(self.listening, selectors.EVENT_READ, self.serve)

    def serve(self) -> None:
        """Pass the socket to the store's process, unless that was done."""
        if self.listening is not None:  # else it was closed after the selector reported it
            try:
                self._process.serve(self.listening)
            except StoreError as error:
                self._failed(str(error))
            self._stop_listening(self.listening)

    def _stop_listening(self, listening: socket.socket) -> None:
        self._selector.unregister(listening)
        listening.close()
        self.listening = None

    def close(self, *, keep_process: bool) -> int | None:
        """Release the port; return the pid of a process that was killed for that and must be reaped."""
        if self.listening is not None:
            self._stop_listening(self.listening)
            released = True
        else:
            released = keep_process and self._process.release()
        return None if keep_process and released else self._process.kill()


def _bind(address: str, port: int, *, exact: bool) -> socket.socket:
    listening = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address, port))
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE and not exact:
            return _bind(address, 0, exact=True)
        raise StoreError(_why(address, port, error)) from error
    return listening


def _why(address: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {address} is in use by {holder(port)}; name another with --master-port, or leave it out"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"no interface here has the address {address}; name one that the other hosts reach with --master-addr"
    return f"cannot listen on {address}, port {port}: {error.strerror}"


def holder(port: int) -> str:
    """Describe the process that listens on a port, as far as it can be known."""
    import psutil

    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return "a process of another user"
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,) and connection.pid:
            try:
                parts = " ".join(psutil.Process(connection.pid).cmdline()).split()  # may contain lines of code
                return f"pid {connection.pid} ({' '.join(parts)[:80]})"
            except psutil.Error:  # ended meanwhile, or another user's
                return f"pid {connection.pid}"
    return "a process of another user"
