"""A joined node, on node 0: the connection, and the stream to the agent at its other end.

A connection outlives its agents: each has its own `JoinedStream`. A thread of listener.py receives.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable
from enum import Enum, auto

from launcher.errors import StreamError
from launcher.transport.stream import broken_by
from launcher.transport.tcp.connection import Connection
from launcher.transport.tcp.encrypted_records import Kind
from launcher.transport.tcp.greeting import Ended
from launcher.transport.tcp.handshake import Side

HOLD_BYTES = 1 << 20  # with this much unread, nothing is received: the node waits, and nothing here grows
LOOK_S = 0.1  # interval of checks of a connection that is not read


class Stage(Enum):
    """The stage of a connection. Messages in the last two are ignored."""

    JOINING = auto()
    JOINED = auto()
    LEAVING = auto()  # the last message to it was sent
    CUT = auto()


class NodeConnection(Connection):
    """The connection of a node. `stream` is its current agent's; `ending`: its agent was given up and is ending."""

    def __init__(self, sock: socket.socket, token: bytes) -> None:
        super().__init__(sock, Side.LISTENER, token)
        self.stage = Stage.JOINING
        self.stream: JoinedStream | None = None
        self.ending = False


class JoinedStream:
    """A `Stream` to an agent on a joined node."""

    def __init__(self, connection: NodeConnection, give_up: Callable[[], None]) -> None:
        self.our_address: str | None = connection.our_address
        self.over = False  # nothing more will be received, and nothing can be sent
        self._connection = connection
        self._give_up = give_up
        self._changed = threading.Condition()
        self._unread: deque[bytes] = deque()
        self._unread_bytes = 0
        self._ended: Ended | None = None
        self._lost = False

    def read(self) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: self._unread or self.over)
            data = b"".join(self._unread)
            self._clear()
            if not data and self._lost and self._ended is not None:
                raise StreamError(f"the connection broke: {self._ended.words}")
            return data

    def write(self, data: bytes) -> None:
        with broken_by():
            self._connection.send(Kind.DATA, data, unless=lambda: self.over)

    def end(self) -> None:
        with broken_by(), contextlib.suppress(BrokenPipeError):  # it has ended by itself
            self._connection.send(Kind.END, unless=lambda: self.over)

    def finish(self, wait_s: float) -> tuple[int | None, str]:
        with self._changed:
            self._changed.wait_for(lambda: self._ended, wait_s)
            if self._ended is not None:
                return self._ended.status, self._ended.words
            self.over = True
            self._ended = Ended(None, "")
            self._clear()
        self._give_up()
        return None, ""

    # For the thread that receives

    @property
    def full(self) -> bool:
        return self._unread_bytes > HOLD_BYTES

    def add(self, data: bytes) -> None:
        """Add bytes that the agent wrote; wait while too much is unread. Raises ConnectionError."""
        with self._changed:
            if self.over:
                return
            self._unread.append(data)
            self._unread_bytes += len(data)
            self._changed.notify_all()
            while self.full and not self.over and not self._changed.wait(LOOK_S):
                self._connection.look()

    def ended(self, how: Ended, *, lost: bool = False) -> None:
        """Record how the agent ended, as its node reports; with `lost`, because the connection is gone."""
        with self._changed:
            if self._ended is None:
                self._ended, self._lost = how, lost
            self.over = True
            self._changed.notify_all()

    def _clear(self) -> None:
        self._unread.clear()
        self._unread_bytes = 0
        self._changed.notify_all()
