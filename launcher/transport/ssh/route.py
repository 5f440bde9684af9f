"""The route to an SSH server, below SSH: a TCP connection, or the two ends of a ProxyCommand.

Everything here has a deadline, including name lookups and addresses that drop packets.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from launcher.errors import HostError
from launcher.transport.ssh.address import Address
from launcher.transport.stream import StderrTail

if TYPE_CHECKING:
    import paramiko

_PROXY_WORDS_BYTES = 4096  # of stderr; its end decides about another attempt
LET_GO_S = 1.0  # for a ProxyCommand to end by itself, and after SIGTERM
GREETING_BYTES = 8192
_ENDED = getattr(select, "POLLRDHUP", 0)  # Linux only: elsewhere an end after some bytes is noticed at the deadline

Resolved = tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]


class Dropped(Exception):
    """The other end closed the connection before its greeting; the text is what it sent, if anything."""


class NotSsh(Exception):
    """The other end is not an SSH server."""


class Unreached(HostError):
    """A jump host could not connect to it. It may be starting."""


@dataclass
class Route:
    """A route to a server. `our_address` is this machine's address as the server sees it, if it is direct."""

    sock: socket.socket | paramiko.Channel
    our_address: str | None = None
    proxy: _Proxy | None = None

    def close(self) -> None:
        """Release everything. May be called again."""
        self.sock.close()
        if self.proxy is not None:
            self.proxy.close()

    def words(self) -> str:
        """Return the end of a ProxyCommand's stderr."""
        return "" if self.proxy is None else self.proxy.words()


def open_tcp(address: Address, resolved: list[Resolved], deadline: float) -> Route:
    """Connect to the first of a host's addresses that answers, in the resolver's order, as OpenSSH does.

    An address that drops packets uses only its share of the time. Raises OSError; TimeoutError at the deadline.
    """
    errors: list[OSError] = []
    for number, one in enumerate(resolved):
        try:
            sock = _connect(one, address, (deadline - time.monotonic()) / (len(resolved) - number))
        except OSError as error:
            errors.append(error)
            continue
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return Route(sock, our_address=str(sock.getsockname()[0]))
    # An address that does not answer is no reason to retry; a refusal says more than other errors.
    raise min(errors, key=lambda error: (not isinstance(error, TimeoutError), error.errno != errno.ECONNREFUSED))


def look_up(address: Address, deadline: float) -> list[Resolved]:
    """Return the addresses; resolve in another thread, since the system's resolver has no deadline. Raises OSError."""
    try:
        return _get_addresses(address, socket.AI_NUMERICHOST)
    except OSError:  # a name, not an address
        pass
    except UnicodeError as error:
        raise socket.gaierror(socket.EAI_NONAME, "no host can have this name") from error
    answer: list[list[Resolved] | OSError] = []

    def ask() -> None:
        try:
            answer.append(_get_addresses(address, 0))
        except OSError as error:
            answer.append(error)

    thread = threading.Thread(target=ask, name=f"look up {address.hostname}", daemon=True)
    thread.start()
    thread.join(max(0.0, deadline - time.monotonic()))
    if not answer:
        raise socket.gaierror(socket.EAI_AGAIN, f"no answer about the name {address.hostname} in time")
    if isinstance(answer[0], OSError):
        raise answer[0]
    return answer[0]


def _get_addresses(address: Address, flags: int) -> list[Resolved]:
    return list(socket.getaddrinfo(address.hostname, address.port, address.family, socket.SOCK_STREAM, 0, flags))


def _connect(one: Resolved, address: Address, within_s: float) -> socket.socket:
    family, kind, protocol, _, there = one
    sock = socket.socket(family, kind, protocol)
    try:
        _bind(sock, address)
        sock.settimeout(max(0.1, within_s))
        sock.connect(there)
        sock.settimeout(None)
    except OSError as error:
        sock.close()
        if isinstance(error, TimeoutError) and error.errno is None:
            raise TimeoutError from error  # without the text of the socket module
        raise
    return sock


def _bind(sock: socket.socket, address: Address) -> None:
    """Bind to our address that BindAddress or BindInterface asks for."""
    if address.bind_address is not None:
        ours = [address.bind_address]
        what = f"BindAddress {address.bind_address}"
    elif address.bind_interface is not None:
        import psutil

        found = psutil.net_if_addrs().get(address.bind_interface, ())
        ours = [one.address for one in found if one.family == sock.family]
        what = f"BindInterface {address.bind_interface}"
    else:
        return
    for name in ours:
        with contextlib.suppress(OSError):
            sock.bind((name, 0))
            return
    raise OSError(errno.EADDRNOTAVAIL, f"{what} of its ssh configuration gives no usable address here")


def open_proxy(address: Address) -> Route:
    """Start the ProxyCommand with a socket as its standard input and output. Raises OSError."""
    assert address.proxy_command is not None
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            return Route(ours, proxy=_Proxy(address.proxy_command, theirs))
        except OSError:
            ours.close()
            raise


class _Proxy:
    """A ProxyCommand, and the end of its stderr."""

    def __init__(self, line: str, end: socket.socket) -> None:
        # Run by exec in the user's shell, as ssh_config(5) defines it. The line is the user's, not composed here. In
        # its own session: Ctrl-C at dtrain must not reach it, and it must not prompt.
        shell = os.environ.get("SHELL") or "/bin/sh"
        self._process = subprocess.Popen(
            [shell, "-c", f"exec {line}"],
            stdin=end.fileno(),
            stdout=end.fileno(),
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stderr is not None
        self._words = StderrTail(self._process.stderr, _PROXY_WORDS_BYTES)

    def words(self) -> str:
        return self._words.wait(0.2).strip()  # an explanation may follow the end of the connection

    def close(self) -> None:
        """End and reap it. Its input has been closed, which ends most proxies."""
        for signum in (None, signal.SIGTERM, signal.SIGKILL):
            if signum is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signum)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(LET_GO_S)
                break
        self._words.wait(LET_GO_S)


def await_greeting(sock: socket.socket, deadline: float) -> None:
    """Wait for a server's greeting and leave it unread. Raises Dropped, NotSsh, OSError; TimeoutError at the deadline.

    Call before sending anything: the message of a server that accepts no more connections would be lost if it closes
    with unread bytes from us.
    """
    poll = select.poll()
    poll.register(sock, select.POLLIN | _ENDED)
    seen = b""
    while (left_s := deadline - time.monotonic()) > 0:
        happened = poll.poll(left_s * 1000)
        if not happened:
            break
        seen = sock.recv(GREETING_BYTES, socket.MSG_PEEK)
        if any(line.startswith(b"SSH-") for line in seen.split(b"\n")):
            return
        if not seen or happened[0][1] & (_ENDED | select.POLLHUP):
            raise Dropped(_text(seen))
        if len(seen) == GREETING_BYTES or b"\0" in seen:
            break
        time.sleep(0.01)  # the socket stays readable, so poll would not wait for more
    if seen:
        raise NotSsh(_text(seen))
    raise TimeoutError


def _text(data: bytes) -> str:
    lines = data.decode("utf-8", "replace").splitlines()
    return next(("".join(c if c.isprintable() else "?" for c in line)[:200] for line in lines if line.strip()), "")
