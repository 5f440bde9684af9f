"""The TCP connection between node 0 and another node, as either end has it: proofs first, then encrypted records.

One thread receives, and alone closes; any thread sends or shuts it. TCP_USER_TIMEOUT is not used: Linux also counts the
time in which the other end answers but takes no more, and a run whose output waits in `less`, or that was stopped by
Ctrl-Z, is not lost (https://blog.cloudflare.com/when-tcp-sockets-refuse-to-die). So an idle connection is watched by
keepalives, one with something under way by `dead`.
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
LOCKED_S = 0.1  # what is in the middle of being written gets so long before something else is to follow
SILENCE_S = 20.0  # without an answer of the other machine's kernel, a connection is dead
LOOK_S = 2.0  # how often that is looked at
_KEEPALIVES = 3
_UNANSWERED = 3
_INFO_BYTES = 148
_INFO = struct.Struct("=2x2B20xI24x2I84xI")  # of struct tcp_info: as `dead` names them


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
        """Have both ends prove that they know the token. Blocks. Raises HandshakeError, OSError."""
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
                raise ConnectionError(self.closed_because or "it was closed at the other end")
            self.heard = time.monotonic()
            return data
        raise TimeoutError(errno.ETIMEDOUT, "it accepts the connection but says nothing")

    def look(self) -> None:
        """Raise ConnectionError if it was shut, or the other machine is gone."""
        if self.closed_because is not None:
            raise ConnectionError(self.closed_because)
        if dead(self.sock):
            raise ConnectionError(f"it did not answer for {SILENCE_S:g} s")

    def post(self, kind: Kind, data: bytes = b"") -> bool:
        """Send a short record now or not at all, and hardly wait; say whether it is sent."""
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
        self.shut("it cannot be written to")  # part of a record may be out, and nothing can follow it
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
        """End it, whoever waits for it. Any thread may do this; the first reason counts."""
        if self.closed_because is None:
            self.closed_because = why
            try:
                self.sock.shutdown(socket.SHUT_RDWR)
            except OSError:  # it never was, or no longer is connected
                return

    def close(self, why: str) -> None:
        """Release it; a thread that is sending gets an error first. Only the thread that receives does this."""
        self.shut(why)
        with self._sending:
            self.sock.close()


def _tune(connection: socket.socket) -> None:
    """Make it non-blocking, prompt, and end by itself when the other machine is gone while nothing is under way."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    pause_s = int(SILENCE_S / (_KEEPALIVES + 1))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVES)


def dead(connection: socket.socket) -> bool:
    """Say whether nothing of the other machine's kernel was heard for SILENCE_S, though it was asked.

    Where nothing is under way it was asked by keepalives, whether they got out or not: the kernel does not count those
    that it could not send, and tries for ever.
    """
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(info) < _INFO.size:
        return False
    retransmits, probes, unacked, last_data_ms, last_ack_ms, unsent = _INFO.unpack_from(info)
    if min(last_data_ms, last_ack_ms) <= 1000 * SILENCE_S:
        return False
    return max(retransmits, probes) >= _UNANSWERED or not (unacked or unsent)
