"""The door's thread: it lets the nodes of the run in, has everybody else turned away, and reads from those that are in.

One selector, no waiting. All state here, in admission.py and in node_slots.py is this thread's own; others send orders.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from launcher.errors import ProtocolError
from launcher.hosts.host import own_name
from launcher.transport.tcp import tcp
from launcher.transport.tcp.admission import Entrance
from launcher.transport.tcp.encrypted_records import Kind, Record
from launcher.transport.tcp.greeting import Greeting
from launcher.transport.tcp.handshake import HandshakeError
from launcher.transport.tcp.joined_node import Connection, JoinedStream
from launcher.transport.tcp.node_slots import Seat, Seats, Want

__all__ = ["Doorkeeper", "Verdict"]

CHALLENGE_S = 2.0  # for the holder of a place to answer when another claims it
TICK_S = 0.1
READ_BYTES = 1 << 16

Verdict = tuple[int, str]


class Doorkeeper:
    """`run` is the thread; `order` is how others have it do something: `want`, `end`."""

    def __init__(self, listening: socket.socket, token: bytes, seats: Seats, *, tell: Callable[[str], None]) -> None:
        self._listening = listening
        self._seats = seats
        self._host = own_name()
        self._orders: deque[Callable[[], None]] = deque()
        self._ordering = threading.Lock()
        self._wake, self._wake_write = socket.socketpair()
        self._wake.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ, self._woken)
        self._entrance = Entrance(listening, token, watch=self._watch, drop=self._drop, tell=tell)
        self._listens = False
        self._next_look = 0.0
        self.refused: dict[int, str] = {}  # by node rank, why the last one that came for it could not have it
        self._verdict: bytes | None = None
        self._linger_until = 0.0

    # ---- called from other threads ----

    def order(self, order: Callable[[], None]) -> None:
        """Have this done in the door's thread; nothing happens once that has ended."""
        with self._ordering:
            if self._wake_write.fileno() < 0:
                return
            self._orders.append(order)
            with contextlib.suppress(BlockingIOError):  # it has enough to wake up for
                self._wake_write.send(b"\0")

    # ---- orders ----

    def want(self, place: str, want: Want) -> None:
        """Give a stream to the place's node, which starts a new agent for it, as soon as there can be one."""
        if self._verdict is not None:
            want.refuse("the run is over")
            return
        seat = self._seats.named(place)
        if seat.want is not None:
            seat.want.refuse("somebody else waits for it")
        seat.want = want
        self._serve(seat)

    def end(self, verdict: Verdict, linger_s: float) -> None:
        """Tell everybody how the run ended, and those who come in the next moment; then stop."""
        if self._verdict is not None:
            return
        self._verdict = json.dumps({"exit_code": verdict[0], "text": verdict[1][:4000]}).encode()
        self._linger_until = time.monotonic() + linger_s
        for seat in self._seats.all:
            if seat.want is not None:
                seat.want.refuse("the run is over")
            for connection in (seat.connection, seat.challenger):
                if connection is not None:
                    self._say_verdict(connection)
            seat.challenger = None
        self._entrance.summary()

    # ---- the loop ----

    def run(self) -> None:
        try:
            self._listen(True)
            while not self._over:
                for key, _ in self._selector.select(self._pause_s()):
                    key.data()
                while self._orders:
                    self._orders.popleft()()
                self._on_time(time.monotonic())
        finally:
            self._close()

    @property
    def _over(self) -> bool:
        """Whether nobody is there any more to be told how the run ended, or the time for it is up."""
        if self._verdict is None:
            return False
        if time.monotonic() >= self._linger_until:
            return True
        missing = [s for s in self._seats.all if s.connection is None and s.last is not None]
        return not missing and not self._entrance.expected

    def _pause_s(self) -> float:
        if self._verdict is not None:
            return TICK_S / 5
        pending = self._entrance.pending or not self._listens or any(s.challenger for s in self._seats.all)
        return TICK_S if pending else tcp.LOOK_S

    def _woken(self) -> None:
        self._wake.recv(1 << 12)

    def _on_time(self, now: float) -> None:
        self._entrance.expire(now)
        self._listen(now >= self._entrance.deaf_until)
        for seat in self._seats.all:
            if seat.challenger is not None:
                self._judge(seat, now)
        if now >= self._next_look:
            self._next_look = now + tcp.LOOK_S
            for connection in [seat.connection for seat in self._seats.all if seat.connection is not None]:
                if connection.closed or tcp.dead(connection.sock):
                    self._drop(connection, f"it did not answer for {tcp.SILENCE_S:g} s")

    def _listen(self, listens: bool) -> None:
        if listens and not self._listens:
            self._selector.register(self._listening, selectors.EVENT_READ, self._entrance.accept)
        elif self._listens and not listens:
            self._selector.unregister(self._listening)
        self._listens = listens

    def _close(self) -> None:
        for connection in [*self._entrance.everybody, *(s.connection for s in self._seats.all if s.connection)]:
            self._drop(connection, "the run is over")
        self._listening.close()
        self._selector.close()
        with self._ordering:
            self._wake.close()
            self._wake_write.close()

    # ---- connections ----

    def _watch(self, connection: Connection) -> None:
        self._selector.register(connection.sock, selectors.EVENT_READ, lambda: self._readable(connection))

    def _drop(self, connection: Connection, why: str) -> None:
        """Close a connection, whatever it is, and let its stream know why."""
        if not connection.paused and connection.sock.fileno() >= 0:
            self._selector.unregister(connection.sock)
        connection.paused = False
        connection.close()
        self._entrance.forget(connection)
        if connection.stream is not None:
            connection.stream.lost(why)
            connection.stream = None
        for seat in self._seats.all:
            if seat.connection is connection:
                seat.connection = None
            if seat.challenger is connection:
                seat.challenger = None

    def _say_verdict(self, connection: Connection) -> None:
        """Tell a node how the run ended, and let it go."""
        assert self._verdict is not None
        if connection.stream is not None:
            connection.stream.lost("the run is over")
            connection.stream = None
        told = connection.post(Kind.VERDICT, self._verdict)
        for seat in self._seats.all:
            if seat.connection is connection:
                seat.connection = None
            if told and seat.last is not None and seat.last == connection.greeting:
                seat.last = None  # it will not come again
        self._resume(connection)
        self._entrance.leave(connection)

    # ---- what they say ----

    def _readable(self, connection: Connection) -> None:
        try:
            data = connection.sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(connection, (error.strerror or str(error)).lower())
            return
        if not data:
            self._entrance.closed(connection)
            self._drop(connection, "it was closed at the other end")
            return
        connection.heard = time.monotonic()
        if self._entrance.leaves(connection):
            return
        try:
            if connection.opener is None:
                self._entrance.shake_hands(connection, data)
                return
            for record in connection.opener.feed(data):
                self._obey(connection, record)
                if connection.closed or self._entrance.leaves(connection):
                    return
        except HandshakeError as error:
            self._entrance.turn_away(connection, error)
        except ProtocolError as error:
            self._drop(connection, str(error))

    def _obey(self, connection: Connection, record: Record) -> None:
        stream = connection.stream
        if connection.greeting is None:
            if record.kind is not Kind.GREETING:
                raise ProtocolError("the node did not say who it is")
            self._greeted(connection, Greeting.decode(record.data))
        elif record.kind is Kind.DATA:
            if stream is not None:
                stream.take(record.data)
                self._pause(connection, stream)
        elif record.kind is Kind.END:
            if stream is not None:
                stream.output_ended()
        elif record.kind is Kind.ENDED:
            if stream is not None:
                stream.ended(record.data)
            connection.stream, connection.ending = None, False
            if (seat := self._seats.of(connection)) is not None:
                self._serve(seat)
        elif record.kind is not Kind.PONG:
            raise ProtocolError(f"the node said what only node 0 says: {record.kind.name}")

    def _pause(self, connection: Connection, stream: JoinedStream) -> None:
        if stream.full and not connection.paused:
            connection.paused = True
            self._selector.unregister(connection.sock)

    def _resume(self, connection: Connection) -> None:
        if connection.paused and not connection.closed:
            connection.paused = False
            self._watch(connection)

    # ---- places ----

    def _greeted(self, connection: Connection, greeting: Greeting) -> None:
        """Give a node its place, if it can have one."""
        connection.greeting = greeting
        if self._verdict is not None:
            if any(seat.last is not None and seat.last.id == greeting.id for seat in self._seats.all):
                self._say_verdict(connection)  # it has dialled again
            else:
                self._drop(
                    connection, "the run is over"
                )  # it may be of the next run, whose door it finds if it dials again
            return
        found = self._seats.find(greeting)
        if isinstance(found, str):
            if greeting.node_rank is not None:
                self.refused[greeting.node_rank] = f"{greeting.who} at {connection.peer} was refused: {found}"
            self._entrance.refuse(connection, found)
        elif found.connection is None:
            self._seat(found, connection)
        elif found.last is not None and found.last.id == greeting.id:
            self._drop(found.connection, "its node dialled again")
            self._seat(found, connection)
        elif found.challenger is not None:
            self._entrance.refuse(connection, self._seats.taken(found))
        else:
            self._challenge(found, connection)

    def _challenge(self, seat: Seat, connection: Connection) -> None:
        """See whether the one that has the place is still there before another is refused or gets it."""
        assert seat.connection is not None
        seat.challenger, seat.challenged_at = connection, time.monotonic()
        self._entrance.prolong(connection, CHALLENGE_S)
        seat.connection.post(Kind.PING)

    def _judge(self, seat: Seat, now: float) -> None:
        challenger, holder = seat.challenger, seat.connection
        assert challenger is not None
        alive = holder is not None and not holder.closed and (holder.paused or holder.heard > seat.challenged_at)
        if holder is not None and not alive and now < seat.challenged_at + CHALLENGE_S:
            return
        seat.challenger = None
        if alive:
            self._entrance.refuse(challenger, self._seats.taken(seat))
            return
        if holder is not None:
            self._drop(holder, f"it did not answer for {CHALLENGE_S:g} s, and its node dialled again")
        self._seat(seat, challenger)

    def _seat(self, seat: Seat, connection: Connection) -> None:
        self._entrance.forget(connection)
        seat.connection, seat.last = connection, connection.greeting
        welcome = {"place": seat.name, "node_rank": seat.rank, "host": self._host}
        connection.post(Kind.WELCOME, json.dumps(welcome).encode())
        self._serve(seat)

    def _serve(self, seat: Seat) -> None:
        """Give the one who waits for the place its stream, if the node is there and its last agent is not."""
        connection, want = seat.connection, seat.want
        if connection is None or want is None or connection.stream is not None or connection.ending:
            return
        seat.want = None
        assert connection.greeting is not None
        if not want.open:
            return
        stream = JoinedStream(connection, connection.greeting, resume=self._let_resume, give_up=self._let_go)
        connection.stream = stream
        if not connection.post(Kind.START):
            seat.want = want
            self._drop(connection, "it cannot be written to")
        elif not want.grant(stream):  # withdrawn in this very moment: the agent is not to wait for anybody
            self._given_up(connection, stream)

    def _let_resume(self, connection: Connection) -> None:
        self.order(lambda: self._resume(connection))

    def _let_go(self, connection: Connection, stream: JoinedStream) -> None:
        self.order(lambda: self._given_up(connection, stream))

    def _given_up(self, connection: Connection, stream: JoinedStream) -> None:
        """End an agent that nobody listens to any more; its node stays, for the next one."""
        if connection.stream is not stream:
            return
        connection.stream, connection.ending = None, True
        self._resume(connection)
        if not connection.post(Kind.END):
            self._drop(connection, "it was given up")
