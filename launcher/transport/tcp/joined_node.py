"""A node that has joined, as node 0 has it: the connection, and the stream to the agent at its other end.

A connection outlives the agents behind it: each has a `JoinedStream` of its own. A thread of listener.py receives.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable

from launcher.errors import StreamError
from launcher.transport.stream import broken_by
from launcher.transport.tcp.connection import Connection
from launcher.transport.tcp.encrypted_records import Kind
from launcher.transport.tcp.greeting import Ended, Greeting
from launcher.transport.tcp.handshake import Side

__all__ = ["JoinedStream", "NodeConnection"]

HOLD_BYTES = 1 << 20  # so much unread, and no more is taken from the node: it waits, and nothing here grows
LOOK_S = 0.1  # between looks at a connection that is not read


class NodeConnection(Connection):
    """A node's. `stream` is the agent's that runs behind it now; `ending`: one that nobody wants any more."""

    def __init__(self, sock: socket.socket, token: bytes) -> None:
        super().__init__(sock, Side.LISTENER, token)
        self.stream: JoinedStream | None = None
        self.ending = False
        self.leaving = False  # its last word was sent, nothing that it says counts any more


class JoinedStream:
    """An agent on a node that has joined: a `Stream`. `greeting` is what its node said of itself."""

    def __init__(self, connection: NodeConnection, greeting: Greeting, give_up: Callable[[JoinedStream], None]) -> None:
        self.our_address: str | None = connection.our_address
        self.their_address = connection.peer
        self.greeting = greeting
        self._connection = connection
        self._give_up = give_up
        self._changed = threading.Condition()
        self._unread: deque[bytes] = deque()
        self._unread_bytes = 0
        self._over = False  # nothing more will come
        self._ended: Ended | None = None
        self._given_up = False
        self._lost: str | None = None

    # ---- for its user ----

    def read(self) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: self._unread or self.over)
            data = b"".join(self._unread)
            self._clear()
            if not data and self._lost is not None and not self._given_up:
                raise StreamError(f"the connection broke: {self._lost}")
            return data

    def write(self, data: bytes) -> None:
        with broken_by():
            self._connection.send_write(data, unless=lambda: self.over)

    def end(self) -> None:
        with broken_by(), contextlib.suppress(BrokenPipeError):  # it has ended by itself
            self._connection.send(Kind.END, unless=lambda: self.over)

    def finish(self, wait_s: float) -> tuple[int | None, str]:
        with self._changed:
            self._changed.wait_for(lambda: self._ended, wait_s)
            give_up = self._ended is None and not self._given_up
            if give_up:
                self._given_up = True
                self._clear()
        if give_up:
            self._give_up(self)
        return (None, "") if self._ended is None else (self._ended.status, self._ended.words)

    @property
    def over(self) -> bool:
        """Whether there is nobody any more who could be sent something."""
        return self._over or self._given_up

    # ---- for the thread that receives ----

    @property
    def full(self) -> bool:
        return self._unread_bytes > HOLD_BYTES

    def take(self, data: bytes) -> None:
        """Keep what the agent wrote; wait while too much is unread. Raises ConnectionError."""
        with self._changed:
            if self.over:
                return
            self._unread.append(data)
            self._unread_bytes += len(data)
            self._changed.notify_all()
            while self.full and not self.over and not self._changed.wait(LOOK_S):
                self._connection.look()

    def output_ended(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def ended(self, how: Ended) -> None:
        """Take the node's word on how the agent ended."""
        with self._changed:
            self._ended, self._over = how, True
            self._changed.notify_all()

    def lost(self, why: str) -> None:
        with self._changed:
            if self._ended is None:
                self._lost, self._ended = why, Ended(None, why)
            self._over = True
            self._changed.notify_all()

    def _clear(self) -> None:
        self._unread.clear()
        self._unread_bytes = 0
        self._changed.notify_all()
