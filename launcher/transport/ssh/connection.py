"""An authenticated SSH connection to one host, through jump hosts if the configuration has them.

Connecting to busy servers (MaxStartups), or to those just starting, is retried; nothing here exceeds its deadline.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import paramiko

from launcher.errors import HostError
from launcher.placement.job_spec import SshOptions
from launcher.transport.ssh.address import Address, resolve
from launcher.transport.ssh.config import Target
from launcher.transport.ssh.key_exchange import cut_at, exchange_keys, make_transport
from launcher.transport.ssh.keys import authenticate
from launcher.transport.ssh.pauses import after_drop_s, after_refusal_s
from launcher.transport.ssh.reasons import why
from launcher.transport.ssh.route import Dropped, NotSsh, Resolved, Route, Unreached, look_up, open_proxy, open_tcp
from launcher.transport.ssh.trust import Trust

CLOSE_S = 1.0  # to close the connection through a jump host, which may hang
MOST_HOPS = 8
CONNECT_AT_ONCE = 32

logging.getLogger("paramiko").addHandler(logging.NullHandler())  # otherwise it prints tracebacks if there is no handler


@dataclass
class SshConnection:
    """A connection with its route, and its jump host."""

    transport: paramiko.Transport
    route: Route
    jump: _Shared | None = None
    _closing: threading.Lock = field(default_factory=threading.Lock, init=False)

    def close(self) -> None:
        """Release everything, once; any thread may call it."""
        if not self._closing.acquire(blocking=False):
            return
        if self.jump is None:
            self._close_own()
            return
        # Closing sends something through the jump host's connection, which may be blocked.
        closing = threading.Thread(target=self._close_own, name="close a tunnel", daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        self.jump.release()

    def _close_own(self) -> None:
        self.transport.close()
        self.route.close()


_connecting = threading.BoundedSemaphore(CONNECT_AT_ONCE)
_met_lock = threading.Lock()
_met: set[tuple[str, int]] = set()  # servers that have answered once; the caller retries if it loses one


def open_connection(
    address: Address, options: SshOptions, deadline: float, trail: tuple[Target, ...] = ()
) -> SshConnection:
    """Connect, check the host's key and authenticate. Blocks until `deadline`.

    `trail` are the hops for which this connection is opened. Raises HostError with the next step.
    """
    tries = 0
    before: Dropped | ConnectionRefusedError | None = None  # error of the previous attempt
    while True:
        try:
            return _try(address, options, deadline, trail)
        except (Dropped, ConnectionRefusedError, Unreached) as error:
            pause_s = _pause_s(address, error, tries)
            if pause_s is None or time.monotonic() + pause_s >= deadline:
                if isinstance(error, Unreached):
                    raise
                raise HostError(address.host, why(address, error, tries=tries + 1)) from error
            before = None if isinstance(error, Unreached) else error
            tries += 1
        except HostError as error:
            if before is None or not isinstance(error.__cause__, TimeoutError):
                raise
            # The deadline cut this attempt short; the previous error says more.
            raise HostError(address.host, why(address, before, tries=tries)) from before
        time.sleep(pause_s)


def _pause_s(address: Address, error: Exception, tries: int) -> float | None:
    """Return how long to wait before the next attempt; None: do not retry."""
    if isinstance(error, Dropped):
        return after_drop_s(str(error), tries)
    return None if (address.hostname, address.port) in _met else after_refusal_s(tries)


def _try(address: Address, options: SshOptions, deadline: float, trail: tuple[Target, ...]) -> SshConnection:
    reach = min(deadline, time.monotonic() + address.connect_timeout_s)
    route: Route | None = None
    with ExitStack() as unless_connected:
        try:
            trust = Trust(address)
            jump = None if address.jump is None else _acquire(address, address.jump, options, deadline, trail)
            if jump is not None:
                unless_connected.callback(jump.release)
            found = look_up(address, reach) if jump is None and address.proxy_command is None else []
            with _place(deadline):
                reach = min(deadline, time.monotonic() + address.connect_timeout_s)
                route = _open_route(address, found, jump, reach)
                unless_connected.callback(route.close)
                transport = make_transport(address, route, trust)
                connection = SshConnection(transport, route, jump)
                unless_connected.pop_all()
                unless_connected.callback(connection.close)
                exchange_keys(transport, route, reach=reach, deadline=deadline)
                with _met_lock:
                    _met.add((address.hostname, address.port))
                with cut_at(deadline, transport):
                    trust.check(transport.get_remote_server_key())
                    authenticate(transport, address, deadline)
            transport.set_keepalive(address.keepalive_s)
        except (Dropped, ConnectionRefusedError, HostError):
            raise
        except (OSError, EOFError, NotSsh, paramiko.SSHException) as error:
            unless_connected.close()  # before reading stderr, whose explanation may still come
            words = "" if route is None else route.words()
            raise HostError(address.host, why(address, error, words=words)) from error
        unless_connected.pop_all()
        return connection


@contextmanager
def _place(deadline: float) -> Iterator[None]:
    """Limit concurrent key exchanges, for sshd's and this machine's sake; wait for a place.

    Names are looked up before, all at the same time. Raises TimeoutError.
    """
    if not _connecting.acquire(timeout=max(0.0, deadline - time.monotonic())):
        raise TimeoutError(f"not tried, because connecting to {CONNECT_AT_ONCE} other hosts took all the time")
    try:
        yield
    finally:
        _connecting.release()


@dataclass(eq=False)
class _Shared:
    """A connection to a jump host, shared by all hosts behind it, and closed when the last of them releases it."""

    key: Hashable
    users: int = 1
    ready: threading.Event = field(default_factory=threading.Event)
    connection: SshConnection | None = None
    error: HostError | None = None

    @property
    def broken(self) -> bool:
        return self.ready.is_set() and (self.connection is None or not self.connection.transport.is_active())

    def release(self) -> None:
        with _shared_lock:
            self.users -= 1
            last = self.users == 0
            if last:
                self.retire()
        if last and self.connection is not None:
            self.connection.close()

    def retire(self) -> None:
        """Stop sharing it with other hosts."""
        with _shared_lock:
            if _shared.get(self.key) is self:
                del _shared[self.key]


_shared_lock = threading.RLock()
_shared: dict[Hashable, _Shared] = {}


def _acquire(address: Address, hop: Target, options: SshOptions, deadline: float, trail: tuple[Target, ...]) -> _Shared:
    """Return the connection to the last hop before a host; the first caller opens it, and all share its failure."""
    if hop in trail or len(trail) >= MOST_HOPS:
        way = ", ".join(step.destination for step in (*trail, hop))
        raise HostError(address.host, f"its jump hosts lead in a circle, or too far: {way}")
    key = (options, hop)
    with _shared_lock:
        shared = _shared.get(key)
        first = shared is None or shared.broken
        if shared is None or first:
            shared = _shared[key] = _Shared(key)
        else:
            shared.users += 1
    if first:
        try:
            shared.connection = open_connection(resolve(hop, options, deadline), options, deadline, (*trail, hop))
        except HostError as error:
            shared.error = error
        finally:
            if shared.connection is None:
                shared.error = shared.error or HostError("", "the attempt to reach it was given up")
                shared.retire()
            shared.ready.set()
    elif not shared.ready.wait(max(0.0, deadline - time.monotonic())):
        shared.release()
        raise TimeoutError
    if shared.error is not None:
        reason = shared.error.reason
        if not reason.startswith("its jump host"):  # with several hops, the innermost has named itself
            reason = f"its jump host {hop.destination}: {reason}"
        raise HostError(address.host, reason) from shared.error
    return shared


def _open_route(address: Address, found: list[Resolved], jump: _Shared | None, reach: float) -> Route:
    if jump is None:
        return open_tcp(address, found, reach) if address.proxy_command is None else open_proxy(address)
    assert address.jump is not None
    assert jump.connection is not None
    there = (address.hostname, address.port)
    try:
        left_s = max(0.1, reach - time.monotonic())
        return Route(jump.connection.transport.open_channel("direct-tcpip", there, ("127.0.0.1", 0), timeout=left_s))
    except paramiko.ChannelException as error:
        hop = f"its jump host {address.jump.destination}"
        if error.code == 1:
            reason = "forbids forwarding (AllowTcpForwarding or PermitOpen in its sshd_config)"
            raise HostError(address.host, f"{hop} {reason}") from error
        reason = f"cannot reach {address.where}; is its sshd running, and its name known there?"
        raise Unreached(address.host, f"{hop} {reason}") from error
    except (OSError, EOFError, paramiko.SSHException) as error:
        if not jump.connection.transport.is_active():
            raise Dropped("its jump host's connection was closed by its peer") from error
        # The host may be gone, or the jump host's connection hang: the next caller gets a new one.
        jump.retire()
        reason = f"did not open a connection to {address.where}: {error or type(error).__name__}"
        raise HostError(address.host, f"its jump host {address.jump.destination} {reason}") from error
