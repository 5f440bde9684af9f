"""The agent's side of the rendezvous store: binds its port, starts store.py at the first connection, ends it."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys

from launcher.errors import StoreError
from launcher.worker import spawn

__all__ = ["Rendezvous"]

_BACKLOG = 4096  # every rank's first connection waits here while the store imports torch


class Rendezvous:
    """A bound and listening socket, and from the first connection on the process that serves it.

    `listening` is None once the store's process has it. `complaints` is the read end of that process's stderr.
    """

    def __init__(self, address: str, port: int, *, exact: bool) -> None:
        self.listening: socket.socket | None = _bind(address, port, exact=exact)
        self.address, self.port = self.listening.getsockname()[:2]
        self.pid: int | None = None
        self.complaints: int | None = None
        self._stdin: int | None = None

    def start(self) -> None:
        """Start the store's process and hand it the socket."""
        assert self.listening is not None
        stdin_read, self._stdin = os.pipe()
        self.complaints, complaints_write = os.pipe()
        descriptor = self.listening.fileno()
        try:
            self.pid = spawn(
                [sys.executable, "-m", "launcher.store", str(descriptor)],
                {**os.environ, "OMP_NUM_THREADS": "1"},
                cwd="/",
                stdin=stdin_read,
                stdout=complaints_write,
                stderr=complaints_write,
                keep=[descriptor],
            )
        finally:
            os.close(stdin_read)
            os.close(complaints_write)
        os.set_blocking(self.complaints, False)
        self.listening.close()
        self.listening = None

    def ended(self) -> str:
        """Return why the store's process ended by itself, once it was reaped; its last words are the reason."""
        self.pid = None
        assert self.complaints is not None
        try:
            text = os.read(self.complaints, 1 << 16).decode("utf-8", "replace").strip()
        except BlockingIOError:
            text = ""
        return text.splitlines()[-1] if text else "it said nothing"

    def close(self) -> int | None:
        """Release the port; kill the store's process, a child not reaped yet, and return the pid to be reaped."""
        if self.listening is not None:
            self.listening.close()
            self.listening = None
        killed, self.pid = self.pid, None
        if killed is not None:
            os.kill(killed, signal.SIGKILL)  # not waited for: it may be stuck in the kernel
        for descriptor in (self._stdin, self.complaints):
            if descriptor is not None:
                os.close(descriptor)
        self._stdin = self.complaints = None
        return killed


def _bind(address: str, port: int, *, exact: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for candidate in [port] if exact else [port, 0]:
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((address, candidate))
            listening.listen(_BACKLOG)
            return listening
        except OSError as error:
            listening.close()
            if error.errno == errno.EADDRINUSE and candidate != 0 and not exact:
                continue
            raise StoreError(_why(address, candidate, error)) from error
    raise AssertionError("port 0 is never in use")


def _why(address: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        holder = _holder(port)
        return f"port {port} on {address} is in use by {holder}; name another with --master-port, or leave it out"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"no interface here has the address {address}; name one that the other hosts reach with --master-addr"
    return f"cannot listen on {address}, port {port}: {error.strerror}"


def _holder(port: int) -> str:
    import psutil

    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return "a process of another user"
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,) and connection.pid:
            try:
                return f"pid {connection.pid} ({' '.join(psutil.Process(connection.pid).cmdline())[:80]})"
            except psutil.Error:  # ended meanwhile, or another user's
                return f"pid {connection.pid}"
    return "a process of another user"
