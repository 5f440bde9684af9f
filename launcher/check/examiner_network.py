"""The ways between hosts, for the examiner: a door that echoes to those who know the token, and knocking at others'.

A knock is a connection as a training makes it: small round trips, then some 100 KB at once, which is what shows a path
that loses large packets.
"""

from __future__ import annotations

import errno
import hmac
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue

from launcher.check.facts import Dialled, Listening, Target
from launcher.machine.routes import interface_of

__all__ = ["dial", "listen"]

AT_ONCE = 8  # knocks
ROUND_TRIPS = 5
PING = b"dtrain check...\n"
BULK_BYTES = 96 << 10  # far more than a window of small packets
CONNECTIONS = 4096
CONNECTION_S = 15.0
MOST_BYTES = BULK_BYTES + 64 * len(PING)  # that one connection may send: this is no place to be reflected from
_IP_MTU, _IPV6_MTU = 14, 24
_PROBLEMS = {
    errno.ECONNREFUSED: "refused",
    errno.EHOSTUNREACH: "no route",
    errno.ENETUNREACH: "no route",
    errno.EACCES: "no route",
    errno.EPERM: "no route",
    errno.EINVAL: "no route",
    errno.ETIMEDOUT: "no answer",
}


# ---- the door ------------------------------------------------------------------------------------------------


def listen(address: str, token: bytes, store_port: int) -> Listening:
    """Open the door on a free port of an address, and on the store's port unless that is 0.

    It stays open as long as this process. Raises OSError where the address is none of this host's.
    """
    door = _Door(token)
    port = door.open(address, 0)
    problem = ""
    if store_port:
        try:
            door.open(address, store_port)
        except OSError as error:
            problem = error.strerror or str(error)
    threading.Thread(target=door.serve, daemon=True).start()
    return Listening(address, port, 0 if problem else store_port, problem)


class _Door:
    """All connections in one thread. One that does not begin with the token is closed without a word."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._selector = selectors.DefaultSelector()
        self._visitors: dict[socket.socket, _Visitor] = {}

    def open(self, address: str, port: int) -> int:
        family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(where)
            listening.listen(256)
        except OSError:
            listening.close()
            raise
        listening.setblocking(False)
        self._selector.register(listening, selectors.EVENT_READ)
        return int(listening.getsockname()[1])

    def serve(self) -> None:
        while True:
            for key, events in self._selector.select(1.0):
                assert isinstance(key.fileobj, socket.socket)
                visitor = self._visitors.get(key.fileobj)
                if visitor is None:
                    self._let_in(key.fileobj)
                elif not visitor.step(self._token, events):
                    self._close(visitor)
                else:
                    # Read on while it does not read itself: a knock sends all before it listens.
                    writing = selectors.EVENT_WRITE if visitor.unsent else 0
                    self._selector.modify(key.fileobj, selectors.EVENT_READ | writing)
            now = time.monotonic()
            for visitor in [visitor for visitor in self._visitors.values() if now > visitor.until]:
                self._close(visitor)

    def _let_in(self, listening: socket.socket) -> None:
        try:
            connection, _ = listening.accept()
        except OSError:  # it is gone already
            return
        if len(self._visitors) >= CONNECTIONS:
            connection.close()
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._visitors[connection] = _Visitor(connection)
        self._selector.register(connection, selectors.EVENT_READ)

    def _close(self, visitor: _Visitor) -> None:
        self._selector.unregister(visitor.connection)
        del self._visitors[visitor.connection]
        visitor.connection.close()


class _Visitor:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.until = time.monotonic() + CONNECTION_S
        self.unsent = b""
        self._head = b""
        self._known = False
        self._bytes = 0

    def step(self, token: bytes, events: int) -> bool:
        """Read and echo; return False when the connection is to be closed."""
        try:
            if events & selectors.EVENT_READ:
                data = self.connection.recv(1 << 16)
                self._bytes += len(data)
                if not data or self._bytes > MOST_BYTES + len(token):
                    return False
                if not self._known:
                    self._head += data
                    if len(self._head) < len(token):
                        return True
                    if not hmac.compare_digest(self._head[: len(token)], token):
                        return False
                    self._known, data = True, self._head[len(token) :]
                self.unsent += data
            if self.unsent:
                self.unsent = self.unsent[self.connection.send(self.unsent) :]
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True


# ---- knocking ------------------------------------------------------------------------------------------------


def dial(targets: Sequence[Target], token: bytes, limit_s: float) -> list[Dialled]:
    """Knock at every target, a few at a time, each within `limit_s`; return how that went, in their order. Blocks."""
    waiting: SimpleQueue[int] = SimpleQueue()
    for number in range(len(targets)):
        waiting.put(number)
    found: dict[int, Dialled] = {}

    def work() -> None:
        while True:
            try:
                number = waiting.get_nowait()
            except Empty:
                return
            found[number] = knock(targets[number], token, limit_s)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(AT_ONCE, len(targets)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[number] for number in range(len(targets))]


def knock(target: Target, token: bytes, limit_s: float) -> Dialled:
    deadline = time.monotonic() + limit_s
    host, address, port = target.host, target.address, target.port
    try:
        connection = socket.create_connection((address, port), timeout=limit_s)
    except OSError as error:
        problem = "no answer" if isinstance(error, TimeoutError) else _PROBLEMS.get(error.errno or 0, "other")
        return Dialled(host, address, port, problem, error.strerror or str(error))
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        local = str(connection.getsockname()[0])
        mtu = _path_mtu(connection)
        interface = interface_of(local) or ""
        taken: list[float] = []
        try:
            connection.sendall(token)
            for _ in range(ROUND_TRIPS):
                began = time.monotonic()
                _echo(connection, PING, deadline)
                taken.append(time.monotonic() - began)
            _echo(connection, PING * (BULK_BYTES // len(PING)), deadline)
        except OSError as error:
            problem = "no large packets" if len(taken) == ROUND_TRIPS else "stranger"
            reason = error.strerror or str(error) or "the connection was closed"
            return Dialled(host, address, port, problem, reason, local=local, interface=interface, mtu=mtu)
        # The least: what busy processors add is not the network's.
        return Dialled(host, address, port, "", "", min(taken), local, interface, _path_mtu(connection))


def _echo(connection: socket.socket, data: bytes, deadline: float) -> None:
    """Send bytes and read the same back. Raises OSError, which TimeoutError is."""
    connection.settimeout(max(0.001, deadline - time.monotonic()))
    connection.sendall(data)
    back = b""
    while len(back) < len(data):
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        read = connection.recv(len(data) - len(back))
        back += read
        if not read or not data.startswith(back):
            raise ConnectionResetError(errno.ECONNRESET, "something else answers there")


def _path_mtu(connection: socket.socket) -> int:
    level, option = (socket.IPPROTO_IP, _IP_MTU)
    if connection.family == socket.AF_INET6:
        level, option = socket.IPPROTO_IPV6, _IPV6_MTU
    try:
        return connection.getsockopt(level, option)
    except OSError:
        return 0
