"""Connections between hosts, for the examiner: it listens, echoes to peers with the token, and probes the others.

A probe is a connection as in training: small round trips, then about 100 KB at once, which reveals a path that drops
large packets.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from launcher.check.facts import Listening, Probe, Target
from launcher.machine.network import interface_of

AT_ONCE = 8  # probes
ROUND_TRIPS = 5
PING = b"dtrain check...\n"
BULK_BYTES = 96 << 10  # far more than a window of small packets
SENDS = (*(len(PING) for _ in range(ROUND_TRIPS)), BULK_BYTES)  # of a probe, each after the previous echo
CONNECTIONS = 512  # at the same time; others wait
CONNECTION_S = 15.0
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


T = TypeVar("T")
R = TypeVar("R")


def listen(address: str, token: bytes, store_port: int) -> Listening:
    """Listen on a free port of an address, and on the store's port unless that is 0, until this process ends.

    Raises OSError if the address is not one of this host's.
    """
    listening = _bind(address, 0)
    _serve(listening, token)
    problem = ""
    if store_port:
        try:
            _serve(_bind(address, store_port), token)
        except OSError as error:
            problem = os.strerror(error.errno) if error.errno else str(error)
    return Listening(address, int(listening.getsockname()[1]), 0 if problem else store_port, problem)


def _bind(address: str, port: int) -> socket.socket:
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((address, port), family=family, backlog=1024)


def _serve(listening: socket.socket, token: bytes) -> None:
    """Answer in the background, each connection in its own thread, with a limited number of threads."""
    places = threading.BoundedSemaphore(CONNECTIONS)

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            _echo_back(connection, token, time.monotonic() + CONNECTION_S)
        places.release()

    def accept() -> None:
        while True:
            places.acquire()  # waiting connections stay in the backlog
            try:
                connection, _ = listening.accept()
            except OSError:  # closed already, or no descriptor left
                places.release()
                time.sleep(0.01)
                continue
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def _echo_back(connection: socket.socket, token: bytes, deadline: float) -> None:
    """Echo what a probe sends; send nothing to peers that do not start with the token. Raises OSError."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hmac.compare_digest(_receive(connection, len(token), deadline), token):
        for count in SENDS:
            connection.sendall(_receive(connection, count, deadline))


def _receive(connection: socket.socket, count: int, deadline: float) -> bytes:
    """Read `count` bytes. Raises OSError, such as TimeoutError."""
    data = b""
    while len(data) < count:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        read = connection.recv(count - len(data))
        data += read
        if not read:
            raise ConnectionResetError(errno.ECONNRESET, "the connection was closed")
    return data


def probe_all(targets: Sequence[Target], token: bytes, limit_s: float) -> list[Probe]:
    """Probe every target, a few at a time, each within `limit_s`; return the results in order. Blocks."""
    return all_at_once(lambda target: probe(target, token, limit_s), targets, most=AT_ONCE)


def probe(target: Target, token: bytes, limit_s: float) -> Probe:
    deadline = time.monotonic() + limit_s
    try:
        connection = socket.create_connection((target.address, target.port), timeout=limit_s)
    except OSError as error:
        problem = "no answer" if isinstance(error, TimeoutError) else _PROBLEMS.get(error.errno or 0, "other")
        return Probe(**vars(target), problem=problem, reason=error.strerror or str(error))
    problem = reason = ""
    taken: list[float] = []
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        local = str(connection.getsockname()[0])
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
        # The minimum: delays by busy processors are not the network's.
        took_s = 0.0 if problem else min(taken)
        way = Probe(**vars(target), problem=problem, reason=reason, round_trip_s=took_s, local=local)
        return replace(way, interface=interface_of(local) or "", mtu=_path_mtu(connection))


def all_at_once(work: Callable[[T], R], things: Sequence[T], *, most: int) -> list[R]:
    """Do the work for all things in at most `most` threads; return the results in order.

    Blocks until all are done, so each needs its own deadline. Raises the exception of one that fails.
    """
    pool = ThreadPoolExecutor(most)
    try:
        return list(pool.map(work, things))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # after an interrupt, do not wait for one that hangs


def _echo(connection: socket.socket, data: bytes, deadline: float) -> None:
    """Send bytes and read their echo. Raises OSError, such as TimeoutError."""
    connection.settimeout(max(0.001, deadline - time.monotonic()))
    connection.sendall(data)
    if _receive(connection, len(data), deadline) != data:
        raise ConnectionResetError(errno.ECONNRESET, "something else answers there")


def _path_mtu(connection: socket.socket) -> int:
    level, option = (socket.IPPROTO_IP, _IP_MTU)
    if connection.family == socket.AF_INET6:
        level, option = socket.IPPROTO_IPV6, _IPV6_MTU
    try:
        return connection.getsockopt(level, option)
    except OSError:
        return 0
