"""A node that has joined, as node 0 has it: the connection, and the stream to the agent at its other end.

The door's thread (listener_thread.py) reads, and alone closes; writing is done by any thread. A connection outlives the
agents behind it: each has a `JoinedStream` of its own.
"""

from __future__ import annotations

import json
import select
import socket
import threading
from collections import deque
from collections.abc import Callable

from launcher.errors import ProtocolError, StreamError
from launcher.transport.stream import broken_by
from launcher.transport.tcp.encrypted_records import Kind, Opener, Sealer
from launcher.transport.tcp.greeting import Greeting
from launcher.transport.tcp.handshake import Handshake, Side

__all__ = ["Connection", "JoinedStream"]

HOLD_BYTES = 1 << 20  # so much unread, and no more is taken from the node: it waits, and nothing here grows
POLL_MS = 100
LOCKED_S = 0.1  # what is in the middle of being written gets so long before something else is to follow


class Connection:
    """One TCP connection. `stream` is the agent's that runs behind it now; `ending`: one that nobody wants any more."""

    def __init__(self, sock: socket.socket, token: bytes, deadline: float) -> None:
        self.sock = sock
        self.peer = str(sock.getpeername()[0])
        self.our_address = str(sock.getsockname()[0])
        self.handshake = Handshake(Side.DOOR, token)
        self.deadline = deadline  # to have joined, later to be closed
        self.greeting: Greeting | None = None
        self.opener: Opener | None = None
        self.stream: JoinedStream | None = None
        self.ending = False
        self.paused = False  # not read, since its stream is not
        self.heard = 0.0
        self.closed = False
        self._sealer: Sealer | None = None
        self._sending = threading.Lock()

    def open(self) -> None:
        """Begin with sealed records, once the other end has proved itself."""
        keys = self.handshake.keys
        assert keys is not None
        self._sealer, self.opener = Sealer(keys.sending), Opener(keys.receiving)

    def post(self, kind: Kind, data: bytes = b"") -> bool:
        """Send a short record now or not at all, and hardly wait; say whether it is sent."""
        assert self._sealer is not None
        if self.closed or not self._sending.acquire(timeout=LOCKED_S):
            return False
        try:
            return self.post_raw(self._sealer.seal(kind, data))
        finally:
            self._sending.release()

    def post_raw(self, data: bytes) -> bool:
        try:
            if self.sock.send(data) == len(data):
                return True
        except OSError:
            pass
        self._shut()  # part of a record may be out, and nothing can follow it
        return False

    def write(self, data: bytes, stream: JoinedStream) -> None:
        """Send one whole write to a stream's agent. Blocks. Raises OSError when it or the connection is gone."""
        assert self._sealer is not None
        with self._sending:
            if stream.over:  # looked at in here: the next START may follow, and what is sent then is the next agent's
                raise BrokenPipeError("the agent has ended")
            for record in self._sealer.seal_write(data):
                self._send(record)

    def end(self, stream: JoinedStream) -> None:
        """End the input of a stream's agent, if that still runs. Blocks. Raises OSError when the connection is gone."""
        assert self._sealer is not None
        with self._sending:
            if not stream.over:
                self._send(self._sealer.seal(Kind.END))

    def close(self) -> None:
        """Close it; a thread that is sending gets an error first."""
        self._shut()
        with self._sending:
            self.sock.close()

    def _send(self, record: bytes) -> None:
        view = memoryview(record)
        poll = select.poll()
        while view:
            if self.closed:
                raise ConnectionError("the connection is closed")
            try:
                view = view[self.sock.send(view) :]
            except BlockingIOError:
                poll.register(self.sock, select.POLLOUT)
                poll.poll(POLL_MS)

    def _shut(self) -> None:
        if not self.closed:
            self.closed = True
            try:
                self.sock.shutdown(socket.SHUT_RDWR)
            except OSError:  # it never was, or no longer is connected
                return


class JoinedStream:
    """An agent on a node that has joined: a `Stream`. `greeting` is what its node said of itself."""

    def __init__(
        self,
        connection: Connection,
        greeting: Greeting,
        *,
        resume: Callable[[Connection], None],
        give_up: Callable[[Connection, JoinedStream], None],
    ) -> None:
        self.our_address: str | None = connection.our_address
        self.their_address = connection.peer
        self.greeting = greeting
        self._connection = connection
        self._resume = resume
        self._give_up = give_up
        self._changed = threading.Condition()
        self._unread: deque[bytes] = deque()
        self._unread_bytes = 0
        self._over = False  # nothing more will come
        self._ended = False
        self._given_up = False
        self._lost: str | None = None
        self._status: int | None = None
        self._words = ""

    # ---- for its user ----

    def read(self) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: self._unread or self._over or self._given_up)
            if self._given_up:
                return b""
            data = b"".join(self._unread)
            was_full = self.full
            self._clear()
            if not data and self._lost is not None:
                raise StreamError(f"the connection broke: {self._lost}")
        if was_full:
            self._resume(self._connection)
        return data

    def write(self, data: bytes) -> None:
        with broken_by():
            self._connection.write(data, self)

    def end(self) -> None:
        with broken_by():
            self._connection.end(self)

    def finish(self, wait_s: float) -> tuple[int | None, str]:
        with self._changed:
            self._changed.wait_for(lambda: self._ended, wait_s)
            give_up = not self._ended and not self._given_up
            self._given_up = self._given_up or give_up
            if give_up:
                self._clear()
                self._changed.notify_all()
        if give_up:
            self._give_up(self._connection, self)
        return self._status, self._words

    @property
    def over(self) -> bool:
        """Whether there is nobody any more who could be told something."""
        return self._over or self._given_up

    # ---- for the door's thread ----

    @property
    def full(self) -> bool:
        return self._unread_bytes > HOLD_BYTES

    def take(self, data: bytes) -> None:
        with self._changed:
            if not self._given_up:
                self._unread.append(data)
                self._unread_bytes += len(data)
                self._changed.notify_all()

    def output_ended(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def ended(self, said: bytes) -> None:
        """Take the node's word on how the agent ended. Raises ProtocolError."""
        try:
            fields = json.loads(said)
            status, words = fields["status"], str(fields["words"])
            if status is not None:
                status = int(status)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ProtocolError(f"the node did not say how its agent ended: {error!r}") from error
        with self._changed:
            self._status, self._words = status, words
            self._ended = self._over = True
            self._changed.notify_all()

    def lost(self, why: str) -> None:
        with self._changed:
            if not self._ended:
                self._lost = self._words = why
            self._ended = self._over = True
            self._changed.notify_all()

    def _clear(self) -> None:
        self._unread.clear()
        self._unread_bytes = 0
