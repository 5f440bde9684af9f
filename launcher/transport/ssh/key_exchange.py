"""Exchanges keys with an SSH server over a route, with the algorithms that the configuration allows."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import paramiko

from launcher.errors import HostError
from launcher.transport.ssh.address import Address
from launcher.transport.ssh.route import Dropped, Route, await_greeting
from launcher.transport.ssh.trust import Trust

KEY_EXCHANGE_S = 15.0  # at least; ConnectTimeout is for TCP and the greeting
# paramiko prefers counter modes with a separate MAC: two passes in Python instead of one in OpenSSL.
_FAST = {"ciphers": ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com")}


def make_transport(address: Address, route: Route, trust: Trust) -> paramiko.Transport:
    transport = paramiko.Transport(route.sock)
    transport.use_compression(address.compress)
    spoken = transport.get_security_options()
    spoken.ciphers = _choice(address, "ciphers", spoken.ciphers)
    spoken.digests = _choice(address, "macs", spoken.digests)
    spoken.kex = _choice(address, "kexalgorithms", spoken.kex)
    spoken.key_types = _choice(address, "hostkeyalgorithms", trust.in_order(spoken.key_types))
    return transport


def _choice(address: Address, kind: str, spoken: Sequence[str]) -> tuple[str, ...]:
    fast = [name for name in _FAST.get(kind, ()) if name in spoken]
    ordered = tuple(dict.fromkeys([*fast, *spoken]))
    allowed = address.algorithms.get(kind)
    if allowed is None:
        return ordered
    if not (chosen := tuple(name for name in ordered if name in allowed)):
        only = f"allow only {', '.join(allowed)}, and dtrain supports none of them"
        raise HostError(address.host, f"{kind} in its ssh configuration {only}")
    return chosen


def exchange_keys(transport: paramiko.Transport, route: Route, *, reach: float, deadline: float) -> None:
    """Exchange keys. Raises Dropped if the server closes before its greeting; TimeoutError."""
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
    """Close the connection at the deadline, since some waits in paramiko have none. Raises TimeoutError then."""
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
