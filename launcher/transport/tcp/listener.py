"""Node 0's control port, where the nodes started by hand join.

Called by the command line on the node with --node-rank 0, and by the controller, which waits here for a node where it
would otherwise connect to a host. Listens on one address only. A thread accepts, and each connection has its own
thread, which admits or rejects the peer, and then receives. A peer that sends nothing, too much, or something wrong
costs an entry in a table of fixed size for a few seconds; a full table drops its oldest entry, since a real node needs
only milliseconds to join.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from launcher.decode import decode_json
from launcher.errors import HostError, ProtocolError, UsageError
from launcher.hosts.host import own_name
from launcher.transport.tcp.admission import NodeSlots, Refused, RejectedPeers, Slot
from launcher.transport.tcp.encrypted_records import MAX_DATA_BYTES, Kind, Record
from launcher.transport.tcp.greeting import Ended, Greeting, RunEnd, Welcome, encode, where_at
from launcher.transport.tcp.handshake import HandshakeError, WrongToken
from launcher.transport.tcp.joined_node import JoinedStream, NodeConnection, Stage

JOINING = 128  # connections that have not joined, at once
JOIN_S = 5.0  # to join
LEAVING = 64
LEAVE_S = 1.0  # for the other end to read its last message, and to close
CHALLENGE_S = 2.0  # for the node in a slot to answer when another claims it
BREATH_S = 0.1  # pause of accepting when no descriptors or threads are left
ENDS_S = 2.0  # for the threads to end
_BACKLOG = 1024
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listener:
    """Listens from construction until it is closed.

    `expected` are the parts of the command that must be the same on every node, by name. `nodes` are their names by
    node rank; the first is this one. `notify` gets lines for the terminal, from other threads.
    """

    def __init__(
        self,
        address: str,
        port: int,
        token: bytes,
        *,
        expected: Mapping[str, str],
        nodes: Sequence[str],
        notify: Callable[[str], None],
    ) -> None:
        self._listening = _listen(address, port)
        self.address, self.port = str(self._listening.getsockname()[0]), int(self._listening.getsockname()[1])
        self._token = token
        self._slots = NodeSlots(nodes, expected)
        self._notify = notify
        self._rejected = RejectedPeers(notify)
        self._changed = threading.Condition()  # guards everything below, the slots, and what connections have
        self._connections: list[NodeConnection] = []  # all that have a thread, the oldest of each stage first
        self._refused: dict[int, str] = {}  # by node rank, why the last node that claimed it was refused
        self._run_end: RunEnd | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="listener", daemon=True)
        self._thread.start()

    def wait(self, node: str, deadline: float) -> JoinedStream:
        """Wait until a node has joined, and return the stream to a new agent there.

        Blocks until `deadline` (monotonic). Raises HostError if the node has not joined by then, or the run is over.
        """
        began, me = time.monotonic(), object()
        with self._changed:
            slot = self._slots.named(node)
            slot.waiter = me
            self._changed.notify_all()
            while self._run_end is None and slot.waiter is me:
                if (stream := self._start_agent(slot)) is not None:
                    return stream
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise HostError(node, self._missing(slot.rank, deadline - began))
                self._changed.wait(left_s)
        raise HostError(node, "the run is over" if self._run_end is not None else "another caller waits for it")

    def close(self, exit_code: int, text: str = "", *, linger_s: float = 1.0) -> None:
        """Report to every node how the run ended, also to one that dials again within `linger_s`, and close everything.

        Blocks. Only the first call has an effect.
        """
        with self._changed:
            if self._run_end is not None:
                return
            self._run_end = RunEnd(exit_code, text[:4000])
            for slot in self._slots.all:
                if slot.connection is not None:
                    self._send_run_end(slot.connection)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._expects_nodes(), linger_s)
            self._closed.set()
            with contextlib.suppress(OSError):
                self._listening.shutdown(socket.SHUT_RDWR)  # ends `accept`
            for connection in self._connections:
                connection.shut("the run is over")
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._connections, ENDS_S)
        self._thread.join(ENDS_S)
        self._listening.close()
        self._rejected.summarize()

    def _missing(self, rank: int, waited_s: float) -> str:
        at = f"as node rank {rank} at {where_at(self.address, self.port)}"
        if (refused := self._refused.get(rank)) is not None:
            return f"no node could join {at}: {refused}"
        there = f"type the same command there, with --node-rank {rank}"
        return f"no node joined {at} within {max(0.0, waited_s):.0f} s; {there}"

    def _start_agent(self, slot: Slot) -> JoinedStream | None:
        """Return the stream to a new agent if the slot's node is connected and its last agent has ended."""
        connection = slot.connection
        if connection is None or connection.stream is not None or connection.ending:
            return None
        stream = connection.stream = JoinedStream(connection, lambda: self._give_up(connection, stream))
        if not connection.post(Kind.START):
            connection.shut("it cannot be written to")
            slot.connection = None
            return None
        slot.waiter = None
        assert slot.last is not None
        hostname = slot.last.hostname
        if not slot.introduced and slot.name.partition(".")[0] != hostname.partition(".")[0]:
            self._notify(f"{slot.name} is {hostname} ({connection.peer})")
        slot.introduced = True
        return stream

    def _give_up(self, connection: NodeConnection, stream: JoinedStream) -> None:
        """End an agent whose stream was given up; its node stays, for the next agent."""
        with self._changed:
            if connection.stream is stream:
                connection.stream, connection.ending = None, True
                if not connection.post(Kind.END):
                    connection.shut("it was given up")

    def _send_run_end(self, connection: NodeConnection) -> None:
        """Report to a node how the run ended, and release it."""
        assert self._run_end is not None
        if connection.stream is not None:
            connection.stream.ended(Ended(None, "the run is over"), lost=True)
            connection.stream = None
        sent = connection.post(Kind.RUN_END, encode(self._run_end))
        slot = self._slots.vacate(connection)
        if slot is not None and sent:
            slot.last = None  # it will not dial again
        self._leave(connection)

    def _expects_nodes(self) -> bool:
        """Return whether a node that does not know yet how the run ended is connected, or may dial again."""
        missing = any(slot.connection is None and slot.last is not None for slot in self._slots.all)
        greeted = any(connection.handshake.greeted for connection in self._in(Stage.JOINING))
        return missing or greeted or bool(self._in(Stage.LEAVING))

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sock, _ = self._listening.accept()
            except OSError as error:
                if error.errno in _SCARCE:
                    self._closed.wait(BREATH_S)
                continue  # it was closed before accept
            try:
                self._admit(sock)
            except (OSError, RuntimeError):  # closed already, or no thread left
                sock.close()

    def _admit(self, sock: socket.socket) -> None:
        """Add a new connection to those that have to authenticate."""
        connection = NodeConnection(sock, self._token)
        with self._changed:
            if self._closed.is_set():
                raise ConnectionError
            joining = self._in(Stage.JOINING)
            if len(joining) >= JOINING:
                self._rejected.reject("beyond the limit")
                joining[0].stage = Stage.CUT
                joining[0].shut("there were too many connections")
            threading.Thread(target=self._serve, args=(connection,), name="listener's peer", daemon=True).start()
            self._connections.append(connection)

    def _in(self, stage: Stage) -> list[NodeConnection]:
        return [connection for connection in self._connections if connection.stage is stage]

    def _enter(self, connection: NodeConnection, stage: Stage) -> None:
        """Make a connection the youngest of a stage."""
        connection.stage = stage
        self._connections.remove(connection)
        self._connections.append(connection)

    def _serve(self, connection: NodeConnection) -> None:
        """Admit a node and receive from it until it ends, or reject it, in its own thread."""
        why = ""
        try:
            self._let_in(connection)
            while True:
                self._obey(connection, connection.receive())
        except HandshakeError as error:
            self._reject(connection, error)
        except TimeoutError:
            self._count(connection, "that sent nothing, or not enough in time")
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            self._count(connection, "that were closed again")
        except ProtocolError as error:
            why = str(error)
        finally:
            with self._changed:
                self._slots.vacate(connection)
                connection.close(why)
                if connection.stream is not None:
                    connection.stream.ended(Ended(None, connection.closed_because or why), lost=True)
                self._connections.remove(connection)
                self._changed.notify_all()

    def _let_in(self, connection: NodeConnection) -> None:
        deadline = time.monotonic() + JOIN_S
        connection.shake_hands(deadline)
        record = connection.receive(deadline)
        if record.kind is not Kind.GREETING:
            raise ProtocolError("the node did not send its greeting")
        greeting = Greeting.decode(record.data)
        try:
            with self._changed:
                self._claim(connection, greeting)
                self._changed.notify_all()
        except Refused as refusal:
            who = f"{greeting.who} at {connection.peer}"
            if greeting.node_rank is not None:
                self._refused[greeting.node_rank] = f"{who} was refused: {refusal}"
            self._rejected.reject("nodes that cannot join", f"{who} cannot join: {refusal}")
            connection.post(Kind.REFUSAL, str(refusal).encode()[:MAX_DATA_BYTES])
            self._drain(connection)

    def _obey(self, connection: NodeConnection, record: Record) -> None:
        stream = connection.stream
        if connection.stage is not Stage.JOINED:
            return
        if record.kind is Kind.DATA:
            if stream is not None:
                stream.add(record.data)  # waits while too much is unread
        elif record.kind is Kind.ENDED:
            how = decode_json(Ended, record.data)
            with self._changed:
                if stream is not None:
                    stream.ended(how)
                connection.stream, connection.ending = None, False
                self._changed.notify_all()
        elif record.kind is Kind.PONG:
            with self._changed:
                self._changed.notify_all()
        else:
            raise ProtocolError(f"the node sent a record that only node 0 sends: {record.kind.name}")

    def _claim(self, connection: NodeConnection, greeting: Greeting) -> None:
        """Give a node its slot. Raises Refused; ConnectionError if it may belong to another run."""
        connection.look()  # it may have been shut meanwhile
        if self._run_end is None:
            found = self._slots.find(greeting)
            if found.connection is not None:
                if found.last is not None and found.last.id == greeting.id:
                    found.connection.shut("its node dialled again")
                else:
                    self._challenge(found, connection)
            if self._run_end is None:
                connection.stage = Stage.JOINED
                found.connection, found.last = connection, greeting
                connection.post(Kind.WELCOME, encode(Welcome(found.rank, own_name())))
                return
        elif (own := self._slots.last_of(greeting)) is None:
            raise ConnectionError("the run is over")  # it may belong to the next run, which it finds if it dials again
        else:
            own.connection = connection  # it dialled again
        self._send_run_end(connection)

    def _challenge(self, slot: Slot, connection: NodeConnection) -> None:
        """Check whether the node in a slot is alive before another gets it. Raises Refused, ConnectionError."""
        holder = slot.connection
        assert holder is not None
        if slot.challenged:
            raise slot.taken()
        asked = time.monotonic()
        self._enter(connection, Stage.JOINING)  # as the youngest, since it waits for us

        def answers() -> bool:
            full = holder.stream is not None and holder.stream.full  # it is not read, so no answer can arrive
            return full or holder.heard > asked

        slot.challenged = True
        try:
            holder.post(Kind.PING)
            self._changed.wait_for(
                lambda: answers() or slot.connection is not holder or self._run_end or connection.closed_because,
                CHALLENGE_S,
            )
        finally:
            slot.challenged = False
        if connection.closed_because is not None:
            raise ConnectionError(connection.closed_because)
        if slot.connection is holder and self._run_end is None:
            if answers():
                raise slot.taken()
            holder.shut(f"it did not answer for {CHALLENGE_S:g} s, and its node dialled again")
        elif slot.connection is not None:
            raise slot.taken()

    def _reject(self, connection: NodeConnection, error: HandshakeError) -> None:
        kind, text = "that were not dtrain", f"{connection.peer} connected to the control port: {error}"
        if isinstance(error, WrongToken):
            kind = "with another token"
            text = f"a node at {connection.peer} has another token than this one; give both the same DTRAIN_TOKEN"
        self._rejected.reject(kind, text)
        if error.answer and connection.post_raw(error.answer):
            with contextlib.suppress(OSError):
                self._drain(connection)

    def _drain(self, connection: NodeConnection) -> None:
        """Wait until a peer that was sent its last message closes. Raises OSError then, or at the timeout."""
        # Not closed immediately: with unread bytes here, the other end could lose data that it has not read yet.
        self._leave(connection)
        deadline = time.monotonic() + LEAVE_S
        while True:
            connection.receive_raw(deadline)

    def _leave(self, connection: NodeConnection) -> None:
        """Ignore all later messages of a connection; the last message to it was sent."""
        with self._changed:
            leaving = self._in(Stage.LEAVING)
            if len(leaving) >= LEAVING:
                leaving[0].shut("others wait")
            self._enter(connection, Stage.LEAVING)

    def _count(self, connection: NodeConnection, kind: str) -> None:
        if connection.stage is Stage.JOINING:
            self._rejected.reject(kind)


def _listen(address: str, port: int) -> socket.socket:
    """Bind this address and no other. Raises UsageError."""
    try:
        family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"DNS lookup of {address} failed: {reason}; write an address with --master-addr") from error
    if where[0] in ("0.0.0.0", "::"):
        raise UsageError(f"{address} means all interfaces; name one address of this host with --master-addr")
    try:
        return socket.create_server(where, family=family, backlog=_BACKLOG)
    except OSError as error:
        raise UsageError(_why(str(where[0]), port, error)) from error


def _why(address: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        from launcher.agent.rendezvous import holder

        with contextlib.suppress(OSError):
            held = f"port {port} on {address} is in use by {holder(port)}"
            return f"{held}; name another by --master-port, the same on every node"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"no interface here has the address {address}; on node 0, --master-addr must be one of its own addresses"
    if error.errno == errno.EACCES:
        return f"this user may not use port {port} (below 1024); name another by --master-port, the same on every node"
    return f"cannot listen on {address}, port {port}: {os.strerror(error.errno or 0)}"
