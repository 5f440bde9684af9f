"""Agents on remote hosts, at the other end of an SSH channel. The rest of this package serves this module.

It uses the user's own ssh configuration (config.py, address.py), jump hosts and proxies (connection.py,
route.py), known hosts (trust.py, known_hosts.py), keys and agent (key_exchange.py, keys.py), through paramiko.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from launcher.errors import HostError, StreamError
from launcher.hosts.host import Host
from launcher.placement.job_spec import SshOptions
from launcher.protocol.message import PREAMBLE
from launcher.transport.ssh.address import resolve
from launcher.transport.ssh.config import Target
from launcher.transport.stream import broken_by, shell_line

if TYPE_CHECKING:
    from launcher.transport.ssh.connection import SshConnection

READ_BYTES = 1 << 16


def connect_ssh(host: Host, options: SshOptions, command: list[str], deadline: float) -> SshStream:
    """Connect, check the host's key, authenticate, and start `command` there. Blocks until `deadline`.

    Raises HostError with the next step for every kind of failure.
    """
    address = resolve(Target(host.name, user=host.user, port=host.port), options, deadline)
    import_paramiko()
    import paramiko

    from launcher.transport.ssh.connection import open_connection
    from launcher.transport.ssh.key_exchange import cut_at
    from launcher.transport.ssh.reasons import why

    connection = open_connection(address, options, deadline)
    with contextlib.ExitStack() as unless_started:
        unless_started.callback(connection.close)
        try:
            with cut_at(deadline, connection.transport):
                stream = SshStream(connection, command, deadline)
        except TimeoutError as error:
            raise HostError(address.host, why(address, error)) from error
        except (OSError, EOFError, paramiko.SSHException) as error:
            what = "opens no session (MaxSessions in its sshd_config?)"
            if not isinstance(error, paramiko.ChannelException):
                what = "does not run our command (a restricted account?)"
            reason = f"{address.hostname} accepts {address.user}, but {what}; try: {address.command}"
            raise HostError(address.host, reason) from error
        unless_started.pop_all()
        return stream


_import_lock = threading.Lock()


def import_paramiko() -> None:
    """Import it without what it needs only for Match exec, which is not used here: 60 of its 165 ms."""
    with _import_lock:
        if "paramiko" in sys.modules or "invoke" in sys.modules:
            return
        sys.modules["invoke"] = None  # type: ignore[assignment]  # documented to make the import fail
        try:
            import paramiko  # noqa: F401
        finally:
            del sys.modules["invoke"]


class SshStream:
    """An agent at the other end of an SSH channel. A `Stream`."""

    def __init__(self, connection: SshConnection, command: list[str], deadline: float) -> None:
        self._connection = connection
        self.our_address = connection.route.our_address
        self._channel = connection.transport.open_session(timeout=max(0.1, deadline - time.monotonic()))
        self._words = bytearray()
        self._begun = bytearray()  # received before the agent's preamble
        self._has_agent = False
        self._channel.exec_command(shell_line(command))

    def read(self) -> bytes:
        with self._broken_by():
            data = self._channel.recv(READ_BYTES)
            self._listen()
        if not self._has_agent:
            self._begun += data
            self._has_agent = PREAMBLE in self._begun
            del self._begun[: -len(PREAMBLE)]
        return data

    def write(self, data: bytes) -> None:
        with self._broken_by():
            self._channel.sendall(data)

    def end(self) -> None:
        with self._broken_by():
            self._channel.shutdown_write()

    def finish(self, wait_s: float) -> tuple[int | None, str]:
        self._channel.status_event.wait(wait_s)
        if not (self._has_agent or self._channel.status_event.is_set()):
            self._kill()
        with contextlib.suppress(StreamError), self._broken_by():
            self._listen()
        status = self._channel.exit_status if self._channel.exit_status >= 0 else None
        self._connection.close()
        return status, self._words.decode("utf-8", "replace")

    def _kill(self) -> None:
        """Make sshd kill a shell still running its start-up files, and its children (RFC 4254, 6.9).

        Otherwise they would outlive the connection. OpenSSH supports it since 7.9; paramiko has no method for it.
        """
        import paramiko

        message = paramiko.Message()
        message.add_byte(paramiko.common.cMSG_CHANNEL_REQUEST)
        message.add_int(self._channel.remote_chanid)
        message.add_string("signal")
        message.add_boolean(False)
        message.add_string("KILL")
        with contextlib.suppress(StreamError), self._broken_by():
            self._connection.transport._send_user_message(message)  # type: ignore[attr-defined]  # not public

    def _broken_by(self) -> AbstractContextManager[None]:
        import paramiko

        return broken_by(paramiko.SSHException)  # such as a stalled key exchange while the channel is open

    def _listen(self) -> None:
        """Keep the end of stderr, and never let it fill the channel's window."""
        while self._channel.recv_stderr_ready():
            self._words += self._channel.recv_stderr(READ_BYTES)
        del self._words[:-READ_BYTES]
