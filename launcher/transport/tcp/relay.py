"""Takes part in a run on a node started by hand: dials node 0, and relays between it and the agent.

Used by the command that is typed on the node (cli/run_node.py). It dials again if the connection breaks.

The main thread decides, from events and signals; one thread receives from node 0 and writes to the agent, another
forwards the agent's output. Each blocks if its reader is behind, so nothing grows. The agent is connected by three
pipes, like a local one; if this process dies, the agent sees the end of its input and ends everything.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from launcher.errors import HostError, ProtocolError, StreamError
from launcher.machine import processes
from launcher.protocol.commands import SignalWorkers
from launcher.protocol.frames import encode as frame
from launcher.transport.local import LocalStream, start_process
from launcher.transport.tcp.connection import Connection
from launcher.transport.tcp.dial import JoinError, Signals, Stopped, dial
from launcher.transport.tcp.encrypted_records import Kind, Record
from launcher.transport.tcp.greeting import Ended, Greeting, RunEnd, encode
from launcher.transport.tcp.rendezvous import Endpoint

UNHEARD_S = 5.0  # an agent that ends after this much silence of node 0 has probably lost it: dial again
END_S = 900.0  # for an agent to end: far more than a working one needs, including its grace period
FLUSH_S = 2.0
KILLED_S = 20.0
LOOK_S = 0.1
LAST_OUTPUT_S = 1.0  # for the end of the agent's output after its own
LOCKED_S = 0.1
WORDS_CHARS = 8 << 10  # of the agent's stderr
_SECRET = "DTRAIN_TOKEN"


def join(
    find: Endpoint | Callable[[], Endpoint | None],
    *,
    greeting: Greeting,
    agent_command: Sequence[str],
    first: bytes = b"",
    deadline: float,
    rejoin_s: float,
    notify: Callable[[str], None],
    env: Mapping[str, str],
) -> int:
    """Take part in the run of node 0 to its end and return the exit code, 128+n if signal n ended us.

    `first` is what an agent reads before node 0's frames. `find` is the endpoint of node 0, or returns it before each
    attempt. `deadline` (monotonic) is for the first time; after a break, node 0 is dialled again for `rejoin_s`.
    `notify` gets lines for the terminal. Blocks; call from the main thread only, for the signals. Raises JoinError.
    """
    environment = {name: value for name, value in env.items() if name != _SECRET}
    broke = ""
    with Signals() as signals:
        while True:
            try:
                joined = dial(find, greeting, deadline=deadline, signals=signals)
            except Stopped:
                return 128 + signals.stops[0]
            except JoinError as error:
                if not broke:
                    raise
                raise JoinError(f"the connection to node 0 broke ({broke}); {error}") from error
            if isinstance(joined, RunEnd):
                return _ended(joined, notify)
            host, again = joined.welcome.host, " again" if broke else ""
            notify(f"joined {host} as node rank {joined.welcome.node_rank}{again}; its terminal shows the run")
            end = Relay(joined.connection, agent_command, first=first, env=environment, signals=signals).run()
            if signals.stops:
                return 128 + signals.stops[0]
            if isinstance(end, RunEnd):
                return _ended(end, notify)
            broke = end.reason
            notify(f"the connection to node 0 ({host}) broke: {broke}; dialling again for {rejoin_s:g} s")
            deadline = time.monotonic() + rejoin_s


def _ended(run_end: RunEnd, notify: Callable[[str], None]) -> int:
    if run_end.text:
        notify(run_end.text)
    return run_end.exit_code


@dataclass(frozen=True)
class Broken:
    """The connection is gone, and node 0 did not report the end of the run."""

    reason: str


class _Agent(LocalStream):
    """This node's agent (strictly, its guard's process), which receives node 0's frames, and between them our own."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._started = start_process(command, env)
        super().__init__(self._started)
        self.over = False  # it has ended, and its output too
        self.reported = False  # its end was reported to node 0, or cannot be
        self._writing = threading.Lock()
        self._between = False  # the last write ended a frame
        self._injected: list[bytes] = []

    def pass_on(self, data: bytes, *, whole: bool) -> None:
        """Write to its input; with `whole`, the bytes end a frame. Blocks. Its end is noticed elsewhere."""
        with self._writing, contextlib.suppress(StreamError, ValueError):
            self._between = False
            self.write(data)
            self._between = whole
            self._write_injected()

    def inject(self, frame: bytes) -> None:
        """Write a frame of ours as soon as possible between two of node 0's. Waits at most LOCKED_S."""
        self._injected.append(frame)
        if self._writing.acquire(timeout=LOCKED_S):
            try:
                with contextlib.suppress(StreamError, ValueError):
                    self._write_injected()
            finally:
                self._writing.release()

    def _write_injected(self) -> None:
        while self._between and self._injected:
            self.write(self._injected.pop(0))

    def end(self) -> None:
        """End its input after the write in progress. Blocks."""
        with self._writing, contextlib.suppress(StreamError):
            super().end()

    def wait(self, output: threading.Thread) -> Ended:
        """Wait for its end, and briefly for that of its output. Blocks."""
        status = self._started.wait()
        output.join(LAST_OUTPUT_S)
        words = self._words.wait(LAST_OUTPUT_S)
        self.over = True
        return Ended(status, words[-WORDS_CHARS:])

    def terminate(self) -> None:
        self._started.terminate()

    def kill(self) -> None:
        """Kill the agent itself, whose guard then ends the rest. Without children, kill the guard."""
        children = [child for child in processes.everything() if child.parent == self._started.pid]
        for child in children:
            processes.send(child, signal.SIGKILL)
        if not children:
            self._started.kill()


class Relay:
    """Serves one connection to node 0, with one agent after another, until the connection ends."""

    def __init__(
        self, connection: Connection, command: Sequence[str], *, env: Mapping[str, str], signals: Signals,
        first: bytes = b"",
    ) -> None:  # fmt: skip
        self._connection = connection
        theirs, ours = connection.sock.getpeername(), connection.sock.getsockname()
        # As set by sshd: the agent's store listens on the address at which node 0 reaches this node.
        self._env = {**env, "SSH_CONNECTION": f"{theirs[0]} {theirs[1]} {ours[0]} {ours[1]}"}
        self._command = command
        self._first = first
        self._signals = signals
        self._events = signals.events = queue.SimpleQueue()  # drop those of an earlier connection
        self._agent: _Agent | None = None  # the last one
        self._end: RunEnd | Broken | None = None
        self._limit: float | None = None  # deadline for the agent to end
        self._stops = 0  # signals to end that were passed on to an agent

    def run(self) -> RunEnd | Broken:
        """Serve until the run is over, the connection breaks, or a signal ends us; the agent has ended by then.

        Blocks. Raises JoinError if no agent can be started.
        """
        receiver = threading.Thread(target=self._receive, name="receive from node 0", daemon=True)
        receiver.start()
        try:
            while not self._done():
                ends = self._end is not None or bool(self._signals.stops)
                try:
                    self._handle(self._events.get(timeout=LOOK_S if ends else None))
                except queue.Empty:
                    self._on_time(time.monotonic())
            return self._end or Broken("ended by a signal")
        finally:
            self._connection.shut("this node has ended")
            receiver.join(FLUSH_S)

    def _done(self) -> bool:
        ended = self._agent is None or self._agent.reported
        return ended and (self._end is not None or bool(self._signals.stops))

    # The main thread

    def _handle(self, event: object) -> None:
        agent, now = self._agent, time.monotonic()
        if isinstance(event, JoinError):
            raise event
        if isinstance(event, RunEnd | Broken):
            if self._end is None:
                self._end = event
                self._connection.shut("the run is over")  # relay nothing more
                self._limit = self._limit or now + END_S
        elif isinstance(event, _Agent):  # it has ended
            silent_s = now - self._connection.heard
            if event is agent and self._end is None and silent_s > UNHEARD_S:
                self._end = Broken(f"node 0 was silent for {silent_s:.0f} s")
        elif isinstance(event, signal.Signals) and agent is not None and not agent.reported:
            if event in (signal.SIGUSR1, signal.SIGUSR2):
                agent.inject(frame(SignalWorkers(signum=event)))
                return
            self._stops += 1
            if self._stops == 1:
                agent.terminate()
                self._limit = now + END_S
            else:
                agent.kill()
                self._limit = now + KILLED_S

    def _on_time(self, now: float) -> None:
        agent = self._agent
        if agent is None or self._limit is None:
            return
        if agent.over:
            self._limit = min(self._limit, now + FLUSH_S)
        if now >= self._limit:
            self._limit = now + KILLED_S
            if agent.over:
                self._connection.shut("node 0 does not accept the report")
            else:
                agent.kill()

    # The thread that receives

    def _receive(self) -> None:
        try:
            while (record := self._connection.receive()).kind is not Kind.RUN_END:
                self._obey(record)
            self._events.put(RunEnd.decode(record.data))
        except JoinError as error:
            self._events.put(error)
        except ProtocolError as error:
            self._events.put(Broken(str(error)))
        except OSError as error:
            self._events.put(Broken((error.strerror or str(error)).lower()))
        finally:
            if self._agent is not None:
                self._agent.end()
            self._connection.close("the connection is closed")

    def _obey(self, record: Record) -> None:
        agent = self._agent
        if record.kind is Kind.START:
            if agent is not None and not agent.over:
                raise ProtocolError("node 0 wants a second agent while the first one runs")
            self._start()
        elif record.kind in (Kind.DATA, Kind.PART):
            if agent is not None:
                agent.pass_on(record.data, whole=record.kind is Kind.DATA)
        elif record.kind is Kind.END:
            if agent is not None:
                agent.end()
        elif record.kind is Kind.PING:
            self._connection.send(Kind.PONG)
        else:
            raise ProtocolError(f"node 0 sent a record that only a node sends: {record.kind.name}")

    def _start(self) -> None:
        if self._signals.stops:
            self._report(Ended(None, "this node is ending"))
            return
        try:
            self._agent = _Agent(self._command, self._env)
            self._agent.pass_on(self._first, whole=True)
        except HostError as error:
            self._report(Ended(127, error.reason))
            raise JoinError(error.reason) from error
        threading.Thread(target=self._serve, args=(self._agent,), name="agent", daemon=True).start()

    # The agent's threads

    def _serve(self, agent: _Agent) -> None:
        """Forward its output, wait for its end, and report that."""
        output = threading.Thread(target=self._forward_output, args=(agent,), name="agent's output", daemon=True)
        output.start()
        ended = agent.wait(output)
        try:
            self._report(ended)
        except OSError:  # the receiving thread reports why
            pass
        finally:
            agent.reported = True
            self._events.put(agent)
            agent.end()

    def _forward_output(self, agent: _Agent) -> None:
        while data := agent.read():
            try:
                self._connection.send(Kind.DATA, data, unless=lambda: agent.over)
            except OSError:  # no longer needed, but it must not block the agent
                continue

    def _report(self, ended: Ended) -> None:
        self._connection.send(Kind.ENDED, encode(ended))
