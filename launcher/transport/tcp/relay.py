"""On a node that was started by hand: its agent, and all that passes between it and the door of node 0.

One selector, bounded buffers both ways. The agent is at the other end of three pipes, as a local one is; when this
process dies, however, it sees the end of its input and ends everything.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import IOBase
from typing import IO

from launcher.errors import HostError, ProtocolError
from launcher.protocol import SignalWorkers, encode
from launcher.transport.tcp import tcp
from launcher.transport.tcp.agent_process import END_S, AgentPipes
from launcher.transport.tcp.dial import JoinError, Link, Verdict, read_verdict
from launcher.transport.tcp.encrypted_records import Kind, Record
from launcher.transport.tcp.greeting import Ended
from launcher.transport.tcp.greeting import encode as encode_words
from launcher.transport.tcp.signals import Signals

__all__ = ["Broken", "Relay"]

HOLD_BYTES = 1 << 20  # with so much unsent in a direction, nothing more is read for it
READ_BYTES = 1 << 16
UNHEARD_S = 5.0  # an agent that ends after so much silence of node 0 has probably lost it: dial again
FLUSH_S = 2.0
KILLED_S = 20.0


@dataclass(frozen=True)
class Broken:
    """The connection is gone, and node 0 did not say that the run is over."""

    reason: str


class Relay:
    """Serves one connection to the door, with one agent after the other, until it is over."""

    def __init__(self, link: Link, command: Sequence[str], *, env: Mapping[str, str], signals: Signals) -> None:
        self._link = link
        self._command = list(command)
        self._env = {**env, "SSH_CONNECTION": _reached_by(link.sock)}
        self._signals = signals
        self._selector = selectors.DefaultSelector()
        self._watched: dict[int, int] = {}  # descriptor: events
        self._agent: AgentPipes | None = None
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._end: Verdict | Broken | None = None
        self._heard = time.monotonic()
        self._stops = 0  # passed on
        self._give_up_at: float | None = None
        self._next_look = 0.0

    def run(self) -> Verdict | Broken:
        """Serve until the run is over, the connection broken, or we are told to end; the agent has ended by then.

        Blocks. Raises JoinError where no agent can be started.
        """
        try:
            self._take([])
            while not self._done():
                self._watch()
                for key, _ in self._selector.select(self._pause_s()):
                    key.data()
                self._on_time(time.monotonic())
            return self._end or Broken("told to end")
        finally:
            if self._agent is not None:
                self._agent.close()
            self._selector.close()
            self._link.sock.close()

    def _done(self) -> bool:
        if self._agent is not None:
            return False
        if self._end is not None:
            return True
        return bool(self._signals.stops) and (not self._unsent or time.monotonic() >= (self._give_up_at or 0.0))

    # ---- the loop ----

    def _watch(self) -> None:
        """Look for what there is room for, and nothing else."""
        agent, sock = self._agent, self._link.sock
        self._want(self._signals, selectors.EVENT_READ, self._signals.woken)
        events = selectors.EVENT_READ * self._agent_has_room | selectors.EVENT_WRITE * bool(self._unsent)
        self._want(sock, events * (self._end is None), self._on_socket)
        if agent is not None:
            room = self._unsent_bytes < HOLD_BYTES or self._end is not None
            self._want(agent.stdout, selectors.EVENT_READ * room, self._read_agent)
            self._want(agent.stderr, selectors.EVENT_READ, self._listen)
            self._want(agent.stdin, selectors.EVENT_WRITE * bool(agent.unwritten), agent.write)
            if agent.input_over:
                self._forget(agent.stdin)

    @property
    def _agent_has_room(self) -> bool:
        return self._agent is None or self._agent.unwritten_bytes < HOLD_BYTES

    def _want(self, file: IO[bytes] | socket.socket | Signals, events: int, action: Callable[[], None]) -> None:
        descriptor = -1 if isinstance(file, IOBase) and file.closed else file.fileno()
        watched = self._watched.get(descriptor, 0)
        if descriptor < 0 or events == watched:
            return
        self._watched[descriptor] = events
        if not watched:
            self._selector.register(descriptor, events, action)
        elif not events:
            self._selector.unregister(descriptor)
        else:
            self._selector.modify(descriptor, events, action)

    def _forget(self, file: IO[bytes]) -> None:
        if not file.closed:
            self._want(file, 0, lambda: None)
            file.close()

    def _pause_s(self) -> float:
        agent = self._agent
        if agent is not None and agent.exited_at is not None:
            return 0.05
        return min(tcp.LOOK_S, max(0.0, (self._give_up_at or float("inf")) - time.monotonic()) + 0.01)

    def _on_time(self, now: float) -> None:
        for signum in self._signals.stops[self._stops :]:
            self._told(signum, now)
        for signum in self._signals.others():
            if self._agent is not None:
                self._agent.inject(encode(SignalWorkers(signum=signum)))
        if self._agent is not None and self._agent.gone(now):
            self._agent_ended(self._agent, now)
        if self._agent is not None and self._give_up_at is not None and now >= self._give_up_at:
            self._give_up_at = now + KILLED_S
            self._agent.kill()
        if now >= self._next_look:
            self._next_look = now + tcp.LOOK_S
            if self._end is None and tcp.dead(self._link.sock):
                self._broke(f"node 0 did not answer for {tcp.SILENCE_S:g} s")

    def _told(self, signum: int, now: float) -> None:
        """End in good order; told again, at once."""
        self._stops += 1
        if self._agent is None:
            self._give_up_at = now + FLUSH_S
        elif self._stops == 1:
            self._agent.terminate()
            self._give_up_at = now + END_S
        else:
            self._agent.kill()
            self._give_up_at = now + KILLED_S

    # ---- the agent ----

    def _start(self) -> None:
        if self._agent is not None:
            raise ProtocolError("node 0 wants a second agent while the first one runs")
        if self._signals.stops:
            self._say_ended(None, "this node was told to end")
            return
        try:
            self._agent = AgentPipes(self._command, self._env)
        except HostError as error:
            self._say_ended(127, error.reason)
            raise JoinError(error.reason) from error

    def _read_agent(self) -> None:
        assert self._agent is not None
        data = self._agent.read()
        if data is None:
            return
        if not data:
            self._forget(self._agent.stdout)
        self._send(Kind.DATA if data else Kind.END, data)

    def _listen(self) -> None:
        assert self._agent is not None
        if self._agent.listen():
            self._forget(self._agent.stderr)

    def _agent_ended(self, agent: AgentPipes, now: float) -> None:
        if not agent.stdout.closed:
            self._send(Kind.END, b"")
        for file in (agent.stdin, agent.stdout, agent.stderr):
            self._forget(file)
        self._say_ended(agent.status, agent.words)
        self._agent = None
        self._give_up_at = now + FLUSH_S if self._signals.stops else None
        if self._end is None and now - self._heard > UNHEARD_S:
            self._end = Broken(f"nothing was heard of node 0 for {now - self._heard:.0f} s")

    def _say_ended(self, status: int | None, words: str) -> None:
        self._send(Kind.ENDED, encode_words(Ended(status, words)))

    # ---- the connection ----

    def _on_socket(self) -> None:
        try:
            self._flush()
        except BlockingIOError:
            pass
        except OSError as error:
            self._broke((error.strerror or str(error)).lower())
            return
        if not self._agent_has_room:
            return
        try:
            data = self._link.sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._broke((error.strerror or str(error)).lower())
            return
        if not data:
            self._broke("node 0 closed it without a word")
            return
        self._heard = time.monotonic()
        try:
            self._take(self._link.opener.feed(data))
        except ProtocolError as error:
            self._broke(str(error))

    def _take(self, records: list[Record]) -> None:
        self._link.records.extend(records)
        while self._link.records and self._end is None:
            self._obey(self._link.records.popleft())

    def _obey(self, record: Record) -> None:
        agent = self._agent
        if record.kind is Kind.START:
            self._start()
        elif record.kind in (Kind.DATA, Kind.PART):
            if agent is not None:
                agent.put(record.data, whole=record.kind is Kind.DATA)
        elif record.kind is Kind.END:
            if agent is not None:
                agent.end()
        elif record.kind is Kind.PING:
            self._send(Kind.PONG, b"")
        elif record.kind is Kind.VERDICT:
            self._over(read_verdict(record.data))
        else:
            raise ProtocolError(f"node 0 said what only a node says: {record.kind.name}")

    def _send(self, kind: Kind, data: bytes) -> None:
        if self._end is not None:
            return
        sealed = self._link.sealer.seal(kind, data)
        self._unsent.append(memoryview(sealed))
        self._unsent_bytes += len(sealed)
        try:
            self._flush()
        except BlockingIOError:
            return
        except OSError as error:
            self._broke((error.strerror or str(error)).lower())

    def _flush(self) -> None:
        while self._unsent:
            sent = self._link.sock.send(self._unsent[0])
            self._unsent_bytes -= sent
            if sent < len(self._unsent[0]):
                self._unsent[0] = self._unsent[0][sent:]
            else:
                self._unsent.popleft()

    def _broke(self, reason: str) -> None:
        self._over(Broken(reason))

    def _over(self, end: Verdict | Broken) -> None:
        """Nothing passes from now on; the agent ends by the end of its input."""
        self._end = end
        self._want(self._link.sock, 0, self._on_socket)
        self._unsent.clear()
        self._unsent_bytes = 0
        if self._agent is not None:
            self._agent.drop()
            if self._give_up_at is None:
                self._give_up_at = time.monotonic() + END_S


def _reached_by(sock: socket.socket) -> str:
    """Return what sshd would: the agent's store listens where node 0 reaches this node."""
    theirs, ours = sock.getpeername(), sock.getsockname()
    return f"{theirs[0]} {theirs[1]} {ours[0]} {ours[1]}"
