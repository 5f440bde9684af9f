"""A node that has joined, as node 0 has it: the connection, and the stream to the agent at its other end.

One thread of listener.py receives, and alone closes; any thread sends. A connection outlives the agents behind it: each
has a `JoinedStream` of its own.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from launcher.transport.tcp import tcp
from launcher.transport.tcp.encrypted_records import Kind, Opener, Record, Sealer
from launcher.transport.tcp.greeting import Ended, Greeting
from launcher.transport.tcp.handshake import Handshake, Side

__all__ = ["Connection", "JoinedStream"]

HOLD_BYTES = 1 << 20  # so much unread, and no more is taken from the node: it waits, and nothing here grows
READ_BYTES = 1 << 16
LOCKED_S = 0.1  # what is in the middle of being written gets so long before something else is to follow
LOOK_S = 0.1  # between looks at a connection that is not read


class Connection:
    """One TCP connection. `stream` is the agent's that runs behind it now; `ending`: one that nobody wants any more."""

    def __init__(self, sock: socket.socket, token: bytes) -> None:
        tcp.tune(sock)
        self.peer = str(sock.getpeername()[0])
        self.our_address = str(sock.getsockname()[0])
        self.handshake = Handshake(Side.DOOR, token)
        self.stream: JoinedStream | None = None
        self.ending = False
        self.leaving = False  # its last word was sent, nothing that it says counts any more
        self.heard = 0.0
        self.closed_because: str | None = None
        self._sock = sock
        self._sealer: Sealer | None = None
        self._opener: Opener | None = None
        self._records: deque[Record] = deque()
        self._sending = threading.Lock()

    def shake_hands(self, deadline: float) -> None:
        """Have both ends prove that they know the token. Blocks. Raises HandshakeError, OSError."""
        while self.handshake.keys is None:
            if answer := self.handshake.feed(self.receive_raw(deadline)):
                self.post_raw(answer)
        self._sealer, self._opener = Sealer(self.handshake.keys.sending), Opener(self.handshake.keys.receiving)

    def receive(self, deadline: float = float("inf")) -> Record:
        """Return the next record. Blocks until `deadline` (monotonic). Raises OSError, ProtocolError."""
        assert self._opener is not None
        while not self._records:
            self._records.extend(self._opener.feed(self.receive_raw(deadline)))
        return self._records.popleft()

    def receive_raw(self, deadline: float) -> bytes:
        """Return the next bytes. Blocks until `deadline` (monotonic). Raises OSError."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        while (left_s := deadline - time.monotonic()) > 0:
            if not poll.poll(1000 * min(left_s, tcp.LOOK_S)):
                self.look()
                continue
            data = self._sock.recv(READ_BYTES)
            if not data:
                raise ConnectionError(self.closed_because or "it was closed at the other end")
            self.heard = time.monotonic()
            return data
        raise TimeoutError

    def look(self) -> None:
        """Raise ConnectionError if it was shut, or the other machine is gone."""
        if self.closed_because is not None:
            raise ConnectionError(self.closed_because)
        if tcp.dead(self._sock):
            raise ConnectionError(f"it did not answer for {tcp.SILENCE_S:g} s")

    def post(self, kind: Kind, data: bytes = b"") -> bool:
        """Send a short record now or not at all, and hardly wait; say whether it is sent."""
        assert self._sealer is not None
        if self.closed_because is not None or not self._sending.acquire(timeout=LOCKED_S):
            return False
        try:
            return self.post_raw(self._sealer.seal(kind, data))
        finally:
            self._sending.release()

    def post_raw(self, data: bytes) -> bool:
        try:
            if self._sock.send(data) == len(data):
                return True
        except OSError:
            pass
        self.shut("it cannot be written to")  # part of a record may be out, and nothing can follow it
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

    def _send(self, record: bytes) -> None:
        view = memoryview(record)
        poll = select.poll()
        while view:
            if self.closed_because is not None:
                raise ConnectionError(self.closed_because)
            poll.register(self._sock, select.POLLOUT)
            poll.poll()  # `shut` ends this too
            view = view[self._sock.send(view) :]

    def shut(self, why: str) -> None:
        """End it, whoever waits for it. Any thread may do this; the first reason counts."""
        if self.closed_because is None:
            self.closed_because = why
            try:
                self._sock.shutdown(socket.SHUT_RDWR)
            except OSError:  # it never was, or no longer is connected
                return

    def close(self, why: str) -> None:
        """Release it; a thread that is sending gets an error first. Only the thread that receives does this."""
        self.shut(why)
        with self._sending:
            self._sock.close()


class JoinedStream:
    """An agent on a node that has joined: a `Stream`. `greeting` is what its node said of itself."""

    def __init__(self, connection: Connection, greeting: Greeting, give_up: Callable[[JoinedStream], None]) -> None:
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
                raise ConnectionError(self._lost)
            return data

    def write(self, data: bytes) -> None:
        self._connection.write(data, self)

    def end(self) -> None:
        self._connection.end(self)

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
