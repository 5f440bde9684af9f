"""The examiner: answers `dtrain check` on one host. Starts no process, writes no file, ends with its input.

Started by command.py like an agent, as `python -m launcher.check.examiner`, with the protocol's stream on its standard
input and output. The main thread only reads, so that the end of the input ends the process even if something hangs;
each request has its own thread. An alarm ends it if even that fails.

To test connections, each examiner listens, echoes to peers with the token, and probes the others. A probe is a
connection as in training: small round trips, then about 100 KB at once, which reveals a path that drops large packets.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any, TypeVar

from launcher import __version__
from launcher.check.facts import Listening, Probe, Target
from launcher.decode import decode_dataclass, decode_value
from launcher.machine.network import interface_of
from launcher.protocol.commands import Prepare
from launcher.protocol.frames import Decoder, encode
from launcher.protocol.message import AGENT_TREES, PREAMBLE, PROTOCOL
from launcher.protocol.reports import Hello
from launcher.protocol.two_way import Answer, Question

LIFE_S = 600  # the limits of requests are far below
# Read before the user's exports can change it: "client address, port, server address, port".
_REACHED_AT = ([*os.environ.get("SSH_CONNECTION", "").split(" "), "", ""])[2] or None
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


def main() -> None:
    """Serve until the input ends."""
    signal.alarm(LIFE_S)
    for signum in (signal.SIGUSR1, signal.SIGUSR2):  # SLURM sends them to every process of a step
        signal.signal(signum, signal.SIG_IGN)
    python = "{}.{}.{}".format(*sys.version_info[:3])
    host = socket.gethostname()
    hello = Hello(PROTOCOL, __version__, python, host, os.getpid(), agent_identity="", time=time.monotonic())
    _write(PREAMBLE + encode(hello))
    decoder = Decoder()
    try:
        while data := os.read(0, 1 << 16):
            for message in decoder.feed(data):
                if isinstance(message, Question) and message.ask == "time":
                    _write(encode(Answer(time.time())))
                elif isinstance(message, Question):
                    threading.Thread(target=_answer, args=(message,), daemon=True).start()
    finally:
        os._exit(0)  # threads may wait for a disk that never answers


def _write(data: bytes) -> None:
    """Write to standard output. Never concurrent: each request is answered before the next one is sent."""
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


def _answer(question: Question) -> None:
    try:
        answer = encode(Answer(_find(question.ask, question.about)))
    except Exception as error:  # an unexpected error must be reported, too
        traceback.print_exc()
        answer = encode(Answer(None, problem=f"{type(error).__name__}: {error}"))
    _write(answer)


def _find(asked: str, about: Mapping[str, Any]) -> Any:
    from launcher.agent.sent_files import moved_orders
    from launcher.check.examiner_host import find_host_facts
    from launcher.machine.network import listening_address, socket_interfaces

    if asked == "facts":
        tree = os.environ.pop(AGENT_TREES, "").partition(os.pathsep)[0]
        prepare = moved_orders(decode_dataclass(Prepare, about["prepare"]), tree, os.environ)
        return asdict(find_host_facts(prepare))
    token = about["token"].encode()
    if asked == "listen":
        reached_at = _REACHED_AT if about["own_connection"] else None
        address = listening_address(about["address"], about["interfaces"], about["towards"], reached_at)
        return asdict(listen(address, token, about["store_port"]))
    if asked == "probe":
        targets = decode_value(tuple[Target, ...], about["targets"])
        found = all_at_once(lambda target: probe(target, token, about["limit_s"]), targets, most=AT_ONCE)
        return [vars(one) for one in found], socket_interfaces(about["master_addr"], about["interfaces"])
    raise ValueError(f"unknown request {asked!r}")


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


def probe(target: Target, token: bytes, limit_s: float) -> Probe:
    """Try a connection. Blocks for `limit_s` at most."""
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


if __name__ == "__main__":
    main()
