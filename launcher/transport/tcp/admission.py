"""Those at the door who are not in yet, and those who are on their way out. Owned by listener_thread.py.

Whoever says nothing, too much, or the wrong thing costs an entry in a table of fixed size for a few seconds. A table
that is full loses its oldest entry, since a real node needs only milliseconds to get in.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable

from launcher.transport.tcp import tcp
from launcher.transport.tcp.encrypted_records import MAX_DATA_BYTES, Kind
from launcher.transport.tcp.handshake import HandshakeError, WrongToken
from launcher.transport.tcp.joined_node import Connection
from launcher.transport.tcp.rejected_peers import Strangers

__all__ = ["Entrance"]

STRANGERS = 128  # connections that have not joined, at once
STRANGER_S = 5.0  # to join
LEAVING = 64
LEAVE_S = 1.0  # for the other end to read what it was told last, and to close
ACCEPT_AT_ONCE = 32
BREATH_S = 0.1  # without new connections, when there are no descriptors for them


class Entrance:
    """`watch` has a connection read from, `drop` has it closed; both are the doorkeeper's."""

    def __init__(
        self,
        listening: socket.socket,
        token: bytes,
        *,
        watch: Callable[[Connection], None],
        drop: Callable[[Connection, str], None],
        tell: Callable[[str], None],
    ) -> None:
        self.deaf_until = 0.0  # there were no descriptors for new connections
        self._listening = listening
        self._token = token
        self._watch = watch
        self._drop = drop
        self._tell = tell
        self._outside: dict[Connection, None] = {}  # the oldest first
        self._leaving: dict[Connection, None] = {}
        self._strangers = Strangers()

    # ---- who is here ----

    @property
    def pending(self) -> bool:
        """Whether anybody is here whose time will be up."""
        return bool(self._outside or self._leaving)

    @property
    def expected(self) -> bool:
        """Whether anybody is here who may have to be told how the run ended, or is to read it."""
        return bool(self._leaving) or any(connection.handshake.greeted for connection in self._outside)

    @property
    def everybody(self) -> list[Connection]:
        return [*self._outside, *self._leaving]

    def leaves(self, connection: Connection) -> bool:
        return connection in self._leaving

    def forget(self, connection: Connection) -> None:
        """Note that a connection is in, or closed."""
        self._outside.pop(connection, None)
        self._leaving.pop(connection, None)

    def prolong(self, connection: Connection, seconds: float) -> None:
        """Give one more time; it counts as the youngest."""
        connection.deadline += seconds
        self._outside.pop(connection)
        self._outside[connection] = None

    def expire(self, now: float) -> None:
        """Close those whose time is up."""
        for table in (self._outside, self._leaving):
            while table and (oldest := next(iter(table))).deadline <= now:
                if table is self._outside:
                    self._strangers.count("that said nothing, or not enough in time")
                self._drop(oldest, "")

    def summary(self) -> None:
        if text := self._strangers.summary():
            self._tell(text)

    # ---- in ----

    def accept(self) -> None:
        for _ in range(ACCEPT_AT_ONCE):
            try:
                sock, _ = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self.deaf_until = time.monotonic() + BREATH_S
                    return
                continue  # it was gone before we came
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        """Take a new connection among those that have to prove themselves."""
        if len(self._outside) >= STRANGERS:
            self._strangers.count("for which there was no time")
            self._drop(next(iter(self._outside)), "")
        try:
            tcp.tune(sock)
            connection = Connection(sock, self._token, time.monotonic() + STRANGER_S)
        except OSError:  # gone already
            sock.close()
            return
        self._outside[connection] = None
        self._watch(connection)

    def shake_hands(self, connection: Connection, data: bytes) -> None:
        """Go on with the proofs; sealed records follow them. Raises HandshakeError."""
        answer = connection.handshake.feed(data)
        if answer and not connection.post_raw(answer):
            self._drop(connection, "")
        elif connection.handshake.keys is not None:
            connection.open()

    # ---- out ----

    def closed(self, connection: Connection) -> None:
        """Count one that went by itself before it was in."""
        if connection in self._outside:
            self._strangers.count("that were closed again")

    def turn_away(self, connection: Connection, error: HandshakeError) -> None:
        kind, text = "that were no dtrain", f"something at {connection.peer} knocked at the control port: {error}"
        if isinstance(error, WrongToken):
            kind = "with another token"
            text = f"a node at {connection.peer} has another token than this one; give both the same DTRAIN_TOKEN"
        self._tell_once(kind, text)
        if error.answer and connection.post_raw(error.answer):
            self.leave(connection)
        else:
            self._drop(connection, "")

    def refuse(self, connection: Connection, reason: str) -> None:
        """Tell a node that has proved itself why it cannot join."""
        assert connection.greeting is not None
        self._tell_once(
            "nodes that cannot join", f"{connection.greeting.who} at {connection.peer} cannot join: {reason}"
        )
        connection.post(Kind.REFUSAL, reason.encode()[:MAX_DATA_BYTES])
        self.leave(connection)

    def leave(self, connection: Connection) -> None:
        """Wait for one that was told its last word to go; nothing that it says counts any more."""
        # Not closed at once: with unread bytes here, the other end's kernel could drop what it has not read yet.
        if len(self._leaving) >= LEAVING:
            self._drop(next(iter(self._leaving)), "")
        self._outside.pop(connection, None)
        connection.deadline = time.monotonic() + LEAVE_S
        self._leaving[connection] = None

    def _tell_once(self, kind: str, text: str) -> None:
        if (told := self._strangers.turned_away(kind, text)) is not None:
            self._tell(told)
