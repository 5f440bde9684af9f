"""The door of node 0: where the nodes that were started by hand come in.

Called by the command line on the node with --node-rank 0, and by connect.py, which waits here for a node as it
connects to a host elsewhere. Listens on one address only. What happens at it is listener_thread.py's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from launcher.errors import HostError, UsageError

if TYPE_CHECKING:
    from types import TracebackType

    from launcher.transport.tcp.joined_node import JoinedStream

__all__ = ["Door"]

_BACKLOG = 1024


class Door:
    """Listens from the moment it is made until it is closed.

    `expected` is what must be the same in the command of every node, by name. `places` are the names of the nodes by
    node rank; the first is this one. `tell` gets lines for the terminal, from another thread. `typed` says what to
    type on a node, by its rank.
    """

    def __init__(
        self,
        address: str,
        port: int,
        token: bytes,
        *,
        expected: Mapping[str, str],
        places: Sequence[str],
        tell: Callable[[str], None],
        typed: Callable[[int], str] | None = None,
    ) -> None:
        from launcher.transport.tcp.listener_thread import Doorkeeper
        from launcher.transport.tcp.node_slots import Seats

        listening = _listen(address, port)
        self.address, self.port = str(listening.getsockname()[0]), int(listening.getsockname()[1])
        self._places = list(places)
        self._typed = typed
        self._tell = tell
        self._introduced: set[str] = set()
        self._keeper = Doorkeeper(listening, token, Seats(places, expected), tell=tell)
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._keeper.run, name="door", daemon=True)
        self._thread.start()

    def wait(self, place: str, deadline: float) -> JoinedStream:
        """Wait until the node of a place has joined, and return the stream to a new agent there.

        Blocks until `deadline` (monotonic). Raises HostError when the node is not there by then, or the run is over.
        """
        from launcher.transport.tcp.node_slots import Want

        want = Want()
        if not self._closed:
            self._keeper.order(lambda: self._keeper.want(place, want))
            began = time.monotonic()
            if not want.wait(max(0.0, deadline - began)):
                raise HostError(place, self._missing(place, deadline - began))
        if want.stream is None:
            raise HostError(place, want.refusal or "the run is over")
        self._introduce(place, want.stream)
        return want.stream

    def _introduce(self, place: str, stream: JoinedStream) -> None:
        """Say once which machine has come for a place, where the place has another name."""
        hostname = stream.greeting.hostname
        if place not in self._introduced and place.partition(".")[0] != hostname.partition(".")[0]:
            self._tell(f"{place} is {hostname} ({stream.their_address})")
        self._introduced.add(place)

    def close(self, exit_code: int, text: str = "", *, linger_s: float = 1.0) -> None:
        """Tell every node how the run ended, also one that dials again within `linger_s`, and close everything.

        Blocks for that. Only the first call counts.
        """
        with self._closing:
            if not self._closed:
                self._keeper.order(lambda: self._keeper.end((exit_code, text), linger_s))
                self._closed = True
                self._thread.join(linger_s + 2.0)

    def __enter__(self) -> Door:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(1, "dtrain on node 0 has ended")

    def _missing(self, place: str, waited_s: float) -> str:
        rank = self._places.index(place)
        typed = f"; type there: {self._typed(rank)}" if self._typed is not None else ""
        where = f"{_bracketed(self.address)}:{self.port}"
        refused = self._keeper.refused.get(rank)
        if refused is not None:
            return f"nobody could join as node rank {rank} at {where}: {refused}"
        return f"nobody has joined as node rank {rank} at {where} within {max(0.0, waited_s):.0f} s{typed}"


def _listen(address: str, port: int) -> socket.socket:
    """Bind this address and no other. Raises UsageError."""
    try:
        family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"DNS lookup of {address} failed: {reason}; write an address with --master-addr") from error
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if where[0] in ("0.0.0.0", "::"):
            raise UsageError(f"{address} means all interfaces; name one address of this host with --master-addr")
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
        listening.listen(_BACKLOG)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        raise UsageError(_why(str(where[0]), port, error)) from error
    except UsageError:
        listening.close()
        raise
    return listening


def _why(address: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        from launcher.agent.store import holder

        with contextlib.suppress(OSError):
            return f"port {port} on {address} is in use by {holder(port)}; name another, the same on every node"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"no interface here has the address {address}; on node 0, --master-addr is an address of its own"
    if error.errno == errno.EACCES:
        return f"port {port} is not for this user (below 1024); name another, the same on every node"
    return f"cannot listen on {address}, port {port}: {os.strerror(error.errno or 0)}"


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
