"""The TCP connection between node 0 and another node, for either end: the handshake, then encrypted records.

One thread receives, and only that one closes; any thread sends or shuts it. TCP_USER_TIMEOUT is not used: Linux also
counts the time in which the other end answers but does not read, and a run whose output waits in `less`, or that was
stopped by Ctrl-Z, is not lost (https://blog.cloudflare.com/when-tcp-sockets-refuse-to-die). So keepalives watch an idle
connection, and `dead` watches one with data in flight.
"""

from __future__ import annotations

import errno
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable

from launcher.transport.tcp.encrypted_records import Decryptor, Encryptor, Kind, Record
from launcher.transport.tcp.handshake import Handshake, Side

READ_BYTES = 1 << 16
LOCKED_S = 0.1  # time to wait for another thread's write
SILENCE_S = 20.0  # without an answer of the other machine's kernel, a connection is dead
LOOK_S = 2.0  # interval of checks for that
_KEEPALIVES = 3
_UNANSWERED = 3
_INFO_BYTES = 148
_INFO = struct.Struct("=2x2B20xI24x2I84xI")  # of struct tcp_info; `dead` names the fields


class Connection:
    """Wraps a connected socket. Blocks where it says so."""

    def __init__(self, sock: socket.socket, side: Side, token: bytes) -> None:
        _tune(sock)
        self.sock = sock
        self.peer = str(sock.getpeername()[0])
        self.our_address = str(sock.getsockname()[0])
        self.handshake = Handshake(side, token)
        self.heard = 0.0
        self.closed_because: str | None = None
        self._joins = side is Side.JOINER
        self._encryptor: Encryptor | None = None
        self._decryptor: Decryptor | None = None
        self._records: deque[Record] = deque()
        self._sending = threading.Lock()

    def shake_hands(self, deadline: float) -> None:
        """Authenticate both ends by the token. Blocks. Raises HandshakeError, OSError."""
        if self._joins:
            self.post_raw(self.handshake.greeting)
        while self.handshake.keys is None:
            if answer := self.handshake.feed(self.receive_raw(deadline)):
                self.post_raw(answer)
        self._encryptor = Encryptor(self.handshake.keys.sending)
        self._decryptor = Decryptor(self.handshake.keys.receiving)

    def receive(self, deadline: float = float("inf")) -> Record:
        """Return the next record. Blocks until `deadline` (monotonic). Raises OSError, ProtocolError."""
        assert self._decryptor is not None
        while not self._records:
            self._records.extend(self._decryptor.feed(self.receive_raw(deadline)))
        return self._records.popleft()

    def receive_raw(self, deadline: float) -> bytes:
        """Return the next bytes. Blocks until `deadline` (monotonic). Raises OSError."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        while (left_s := deadline - time.monotonic()) > 0:
            if not poll.poll(1000 * min(left_s, LOOK_S)):
                self.look()
                continue
            data = self.sock.recv(READ_BYTES)
            if not data:
                raise ConnectionError(self.closed_because or "the other end closed it")
            self.heard = time.monotonic()
            return data
        raise TimeoutError(errno.ETIMEDOUT, "it accepts the connection but sends nothing")

    def look(self) -> None:
        """Raise ConnectionError if it was shut, or the other machine is gone."""
        if self.closed_because is not None:
            raise ConnectionError(self.closed_because)
        if dead(self.sock):
            raise ConnectionError(f"it did not answer for {SILENCE_S:g} s")

    def post(self, kind: Kind, data: bytes = b"") -> bool:
        """Send a short record immediately or not at all; wait at most LOCKED_S. Return whether it was sent."""
        assert self._encryptor is not None
        if self.closed_because is not None or not self._sending.acquire(timeout=LOCKED_S):
            return False
        try:
            return self.post_raw(self._encryptor.encrypt(kind, data))
        finally:
            self._sending.release()

    def post_raw(self, data: bytes) -> bool:
        try:
            if self.sock.send(data) == len(data):
                return True
        except OSError:
            pass
        self.shut("it cannot be written to")  # part of a record may be sent, so nothing can follow
        return False

    def send(self, kind: Kind, data: bytes = b"", *, unless: Callable[[], bool] = lambda: False) -> None:
        """Send data of any length. Blocks. Raises OSError; BrokenPipeError if, once it is our turn, `unless` holds."""
        assert self._encryptor is not None
        poll = select.poll()
        with self._sending:
            if unless():
                raise BrokenPipeError("the agent has ended")
            for record in self._encryptor.encrypt_all(kind, data):
                view = memoryview(record)
                while view:
                    if self.closed_because is not None:
                        raise ConnectionError(self.closed_because)
                    poll.register(self.sock, select.POLLOUT)
                    poll.poll()  # `shut` ends this too
                    view = view[self.sock.send(view) :]

    def shut(self, why: str) -> None:
        """End the connection and all waits for it. Any thread may call this; the first reason counts."""
        if self.closed_because is None:
            self.closed_because = why
            try:
                self.sock.shutdown(socket.SHUT_RDWR)
            except OSError:  # not connected, or no longer
                return

    def close(self, why: str) -> None:
        """Release the connection; a sending thread gets an error first. Only the receiving thread calls this."""
        self.shut(why)
        with self._sending:
            self.sock.close()


def _tune(connection: socket.socket) -> None:
    """Set the socket non-blocking, without delay, and with keepalives that end it if an idle peer's machine is gone."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    pause_s = int(SILENCE_S / (_KEEPALIVES + 1))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVES)


def dead(connection: socket.socket) -> bool:
    """Return whether the other machine's kernel did not answer for SILENCE_S, although it was asked.

    With no data in flight it was asked by keepalives, even if they could not be sent: the kernel does not count those
    that failed, and retries forever.
    """
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(info) < _INFO.size:
        return False
    retransmits, probes, unacked, last_data_ms, last_ack_ms, unsent = _INFO.unpack_from(info)
    if min(last_data_ms, last_ack_ms) <= 1000 * SILENCE_S:
        return False
    return max(retransmits, probes) >= _UNANSWERED or not (unacked or unsent)
