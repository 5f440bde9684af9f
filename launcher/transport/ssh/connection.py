"""An authenticated SSH connection to one host, through jump hosts where the configuration has them.

Servers that are busy (MaxStartups), or just coming up, are tried again; nothing here goes on beyond its deadline.
"""

from __future__ import annotations

import logging
import random
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import paramiko

from launcher.errors import HostError
from launcher.placement.job_spec import SshOptions
from launcher.transport.ssh.address import Address, resolve
from launcher.transport.ssh.config import Target
from launcher.transport.ssh.jump import ConnectionPool, PooledConnection
from launcher.transport.ssh.keys import authenticate
from launcher.transport.ssh.reasons import why
from launcher.transport.ssh.route import (
    Dropped,
    NotSsh,
    Resolved,
    Route,
    Unreached,
    await_greeting,
    look_up,
    open_proxy,
    open_tcp,
)
from launcher.transport.ssh.trust import Trust

__all__ = ["SshConnection", "cut_at", "open_connection"]

KEY_EXCHANGE_S = 15.0  # at least; ConnectTimeout is for TCP and the greeting
CLOSE_S = 1.0  # to say good-bye through a jump host, which may hang
MOST_HOPS = 8
CONNECT_AT_ONCE = 32
REFUSED_S = (0.3, 0.5, 0.9, 1.3)  # pauses after refused connections: a server that restarts, or a wrong port
DROPPED_S = (0.2, 3.0)  # the first pause after a dropped connection, and the longest
_BUSY = re.compile(r"MaxStartups|Not allowed at this time|exchange_identification|closed by|reset by", re.IGNORECASE)
_FINAL = re.compile(r"denied|verification failed|not resolve", re.IGNORECASE)
# paramiko would choose counters with a MAC of their own: two passes in Python instead of one in OpenSSL.
_FAST = {"ciphers": ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com")}

logging.getLogger("paramiko").addHandler(logging.NullHandler())  # or it prints tracebacks where nobody has a handler


@dataclass
class SshConnection:
    """A connection and what it rests upon. `our_address` is this machine's address as the host sees it, if it does."""

    transport: paramiko.Transport
    route: Route
    jump: PooledConnection[SshConnection] | None = None

    @property
    def alive(self) -> bool:
        return self.transport.is_active()

    def close(self) -> None:
        """Release everything. May be called again."""
        if self.jump is None:
            self.transport.close()
            self.route.close()
            return
        # That sends something through the jump host's connection, which may take no more.
        closing = threading.Thread(target=self._close_tunnel, name="close a tunnel", daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        self.jump.close()

    def _close_tunnel(self) -> None:
        self.transport.close()
        self.route.close()


_pool: ConnectionPool[SshConnection] = ConnectionPool()
_connecting = threading.BoundedSemaphore(CONNECT_AT_ONCE)
_met_lock = threading.Lock()
_met: set[tuple[str, int]] = set()  # servers that have answered once; whoever lost one tries it again by himself


def open_connection(
    address: Address, options: SshOptions, deadline: float, trail: tuple[Target, ...] = ()
) -> SshConnection:
    """Connect, check the host's key and authenticate. Blocks until `deadline`.

    `trail` are the hops for which this connection is opened. Raises HostError with the next step.
    """
    tries = 0
    while True:
        try:
            return _try(address, options, deadline, trail)
        except (Dropped, ConnectionRefusedError, Unreached) as error:
            pause_s = _pause_s(address, error, tries)
            if pause_s is None or time.monotonic() + pause_s >= deadline:
                if isinstance(error, Unreached):
                    raise
                raise HostError(address.host, why(address, error, tries=tries + 1)) from error
            tries += 1
        time.sleep(pause_s)


def _pause_s(address: Address, error: Exception, tries: int) -> float | None:
    """Return how long to wait before the next try; None: there is no use."""
    chance = random.uniform(0.5, 1.5)
    if not isinstance(error, Dropped):
        known = (address.hostname, address.port) in _met
        return None if known or tries >= len(REFUSED_S) else REFUSED_S[tries] * chance
    words = str(error)
    if words and (_FINAL.search(words) or not _BUSY.search(words)):
        return None
    first, longest = DROPPED_S
    return min(longest, first * 2.0 ** min(tries, 10)) * chance


def _try(address: Address, options: SshOptions, deadline: float, trail: tuple[Target, ...]) -> SshConnection:
    reach = min(deadline, time.monotonic() + address.connect_timeout_s)
    try:
        trust = Trust(address)
        jump = None if address.jump is None else _acquire(address, address.jump, options, deadline, trail)
    except TimeoutError as error:
        raise HostError(address.host, why(address, error)) from error
    route: Route | None = None
    transport: paramiko.Transport | None = None
    try:
        found = look_up(address, reach) if jump is None and address.proxy_command is None else []
        with _place(deadline):
            reach = min(deadline, time.monotonic() + address.connect_timeout_s)
            route = _open_route(address, found, jump, reach)
            transport = _transport(address, route, trust)
            _shake_hands(transport, route, reach=reach, deadline=deadline)
            with _met_lock:
                _met.add((address.hostname, address.port))
            with cut_at(deadline, transport):
                trust.check(transport.get_remote_server_key())
                authenticate(transport, address, deadline)
        transport.set_keepalive(address.keepalive_s)
        return SshConnection(transport, route, jump)
    except BaseException as error:
        _give_up(transport, route, jump)
        if isinstance(error, (Dropped, ConnectionRefusedError, HostError)):
            raise
        if isinstance(error, (OSError, EOFError, NotSsh, paramiko.SSHException)):
            words = "" if route is None else route.words()
            raise HostError(address.host, why(address, error, words=words)) from error
        raise


@contextmanager
def _place(deadline: float) -> Iterator[None]:
    """Wait for a place among those who connect: sshd and this machine's processors take only so many key exchanges.

    Names are looked up before, all at once. Raises TimeoutError.
    """
    if not _connecting.acquire(timeout=max(0.0, deadline - time.monotonic())):
        raise TimeoutError(f"not tried, because connecting to {CONNECT_AT_ONCE} other hosts took all the time")
    try:
        yield
    finally:
        _connecting.release()


def _give_up(
    transport: paramiko.Transport | None, route: Route | None, jump: PooledConnection[SshConnection] | None
) -> None:
    if transport is not None and route is not None:
        SshConnection(transport, route, jump).close()
    elif route is not None:
        route.close()
    if jump is not None:
        jump.close()


# ---- jump hosts ----------------------------------------------------------------------------------------------


def _acquire(
    address: Address, hop: Target, options: SshOptions, deadline: float, trail: tuple[Target, ...]
) -> PooledConnection[SshConnection]:
    """Return a hold on the connection to the last hop before a host."""
    if hop in trail or len(trail) >= MOST_HOPS:
        way = ", ".join(step.destination for step in (*trail, hop))
        raise HostError(address.host, f"its jump hosts lead in a circle, or too far: {way}")

    def open_hop() -> SshConnection:
        return open_connection(resolve(hop, options, deadline), options, deadline, (*trail, hop))

    try:
        return _pool.acquire((options, hop), open_hop, deadline)
    except HostError as error:
        raise HostError(address.host, _at_hop(hop, error.reason)) from error


def _at_hop(hop: Target, reason: str) -> str:
    # With several hops, the innermost has already said which it is.
    return reason if reason.startswith("its jump host") else f"its jump host {hop.destination}: {reason}"


def _open_route(
    address: Address, found: list[Resolved], jump: PooledConnection[SshConnection] | None, reach: float
) -> Route:
    if jump is None:
        return open_tcp(address, found, reach) if address.proxy_command is None else open_proxy(address)
    assert address.jump is not None
    there = (address.hostname, address.port)
    try:
        left_s = max(0.1, reach - time.monotonic())
        return Route(jump.connection.transport.open_channel("direct-tcpip", there, ("127.0.0.1", 0), timeout=left_s))
    except paramiko.ChannelException as error:
        hop = f"its jump host {address.jump.destination}"
        if error.code == 1:
            reason = "forbids to go on from it (AllowTcpForwarding or PermitOpen in its sshd_config)"
            raise HostError(address.host, f"{hop} {reason}") from error
        reason = f"cannot reach {address.hostname} port {address.port}; is its sshd running, and its name known there?"
        raise Unreached(address.host, f"{hop} {reason}") from error
    except (OSError, EOFError, paramiko.SSHException) as error:
        if not jump.connection.alive:
            raise Dropped("its jump host's connection was closed by somebody") from error
        # The host may be gone, or the jump host's connection hang: the next who comes gets a new one.
        jump.retire()
        reason = f"did not open a way to {address.hostname} port {address.port}: {error or type(error).__name__}"
        raise HostError(address.host, f"its jump host {address.jump.destination} {reason}") from error


# ---- the handshake -------------------------------------------------------------------------------------------


def _transport(address: Address, route: Route, trust: Trust) -> paramiko.Transport:
    transport = paramiko.Transport(route.sock)
    transport.use_compression(address.compress)
    spoken = transport.get_security_options()
    allowed = address.algorithms
    spoken.ciphers = _choice(address, "ciphers", spoken.ciphers)
    spoken.digests = _choice(address, "macs", spoken.digests)
    spoken.kex = _choice(address, "kexalgorithms", spoken.kex)
    key_types = trust.algorithms(spoken.key_types)
    if not key_types:
        raise HostError(address.host, _none_spoken("hostkeyalgorithms", allowed["hostkeyalgorithms"]))
    spoken.key_types = key_types
    return transport


def _choice(address: Address, kind: str, spoken: Sequence[str]) -> tuple[str, ...]:
    fast = [name for name in _FAST.get(kind, ()) if name in spoken]
    ordered = tuple(dict.fromkeys([*fast, *spoken]))
    allowed = address.algorithms.get(kind)
    if allowed is None:
        return ordered
    if not (chosen := tuple(name for name in ordered if name in allowed)):
        raise HostError(address.host, _none_spoken(kind, allowed))
    return chosen


def _none_spoken(kind: str, allowed: Sequence[str]) -> str:
    return f"{kind} in its ssh configuration allow only {', '.join(allowed)}, and dtrain speaks none of them"


def _shake_hands(transport: paramiko.Transport, route: Route, *, reach: float, deadline: float) -> None:
    """Exchange keys. Raises Dropped if the server does not even greet; TimeoutError."""
    try:
        if isinstance(route.sock, socket.socket):
            await_greeting(route.sock, reach)
    except ConnectionResetError as error:
        raise Dropped from error
    except Dropped as error:
        raise Dropped(str(error) or route.words()) from error
    now = time.monotonic()
    transport.banner_timeout = max(0.1, reach - now)
    until = min(deadline, max(reach, now + KEY_EXCHANGE_S))
    transport.handshake_timeout = max(0.1, until - now)
    done = threading.Event()
    transport.start_client(event=done)
    if not done.wait(max(0.1, until - now)):
        raise TimeoutError("its key exchange hangs; on some links a smaller MTU helps")
    if transport.is_active():
        return
    reason = transport.get_exception()
    if not transport.remote_version:
        raise Dropped(route.words()) from reason
    raise reason or EOFError


@contextmanager
def cut_at(deadline: float, transport: paramiko.Transport) -> Iterator[None]:
    """Close the connection at the deadline: some of paramiko's waits have none. Raises TimeoutError then."""
    late = threading.Event()

    def cut() -> None:
        late.set()
        transport.close()

    timer = threading.Timer(max(0.1, deadline - time.monotonic()), cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, EOFError, paramiko.SSHException) as error:
        if late.is_set():
            raise TimeoutError from error
        raise
    finally:
        timer.cancel()
