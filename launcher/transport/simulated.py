"""Agents of simulated hosts, all on this machine: one process imports the agent's modules and forks them.

A thousand of them then take the time of a few imports, and share that memory. Each is a separate process with its own
guard, session and streams, as on a real host (agent/simulated.py).
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Sequence
from typing import IO

from launcher.errors import HostError
from launcher.machine.processes import raise_file_limit
from launcher.transport.local import LocalStream, start_process
from launcher.transport.stream import StderrTail

END_S = 1.0  # for the report that a killed agent ended, and for the process to end after the last one
_MESSAGE_BYTES = 64


class SimulatedAgents:
    """The process that forks the agents. It has ended once all their streams are finished.

    Raises HostError if it cannot be started.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = start_process(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
        raise_file_limit()  # afterwards: agents and workers must have the user's limit
        assert self._process.stderr is not None
        self.words = StderrTail(self._process.stderr)
        self._lock = threading.Lock()
        self._agents: list[_Agent] = []
        self._unfinished = 0
        self._status: int | None = None  # once the process has ended
        self._receiver = threading.Thread(target=self._receive, name="ends of agents", daemon=True)
        self._receiver.start()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # never opened
            self._control.close()  # not earlier: another thread may be sending

    def start(self, key: str) -> _Agent:
        """Start an agent; `key` identifies a process kept warm for it. Raises OSError."""
        with self._lock:
            agent = _Agent(self, len(self._agents))
            self._agents.append(agent)
            if self._status is not None:
                agent.ended_with(self._status)
        theirs = agent.open_pipes()
        with self._lock:
            self._unfinished += 1
        try:
            # If the process has ended, its agents' streams are closed, which reports it.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(self._control, [f"{agent.number} {key}".encode()], theirs)
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        return agent

    def kill(self, agent: _Agent) -> None:
        """Kill an agent's guard; kill the process as well if it does not report that in time, as it may be stopped."""
        with contextlib.suppress(OSError):
            self._control.send(str(agent.number).encode())
        if not agent.ended.wait(END_S):
            self._process.kill()

    def finished(self) -> None:
        """Record that a stream is finished; after the last one, wait for the process to end, or kill it."""
        with self._lock:
            self._unfinished -= 1
            if self._unfinished:
                return
        with contextlib.suppress(OSError):  # it has ended by itself
            self._control.shutdown(socket.SHUT_WR)
        self._receiver.join(END_S)
        if self._receiver.is_alive():
            self._process.kill()
            self._receiver.join()

    def _receive(self) -> None:
        """Pass on how agents ended, in a separate thread, until the process ends."""
        with contextlib.suppress(ConnectionError):
            while message := self._control.recv(_MESSAGE_BYTES):
                number, _, status = message.partition(b" ")
                self._agents[int(number)].ended_with(int(status))
        status_of_all = self._process.wait()
        with self._lock:
            self._status = status_of_all
            for agent in self._agents:
                agent.ended_with(status_of_all)


class _Agent:
    """A forked agent, with the interface of subprocess.Popen for LocalStream."""

    def __init__(self, agents: SimulatedAgents, number: int) -> None:
        self.number = number
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self.stderr: IO[bytes] | None = None
        self._agents = agents
        self._status: int | None = None
        self.ended = threading.Event()

    def open_pipes(self) -> list[int]:
        """Open its pipes; return the descriptors of their other ends. Raises OSError."""
        with contextlib.ExitStack() as unless_open:
            ends = []
            for _ in range(3):
                ends.append(os.pipe())
                for descriptor in ends[-1]:
                    unless_open.callback(os.close, descriptor)
            (in_read, in_write), (out_read, out_write), (err_read, err_write) = ends
            unless_open.pop_all()
        self.stdin, self.stdout, self.stderr = (
            os.fdopen(in_write, "wb", 0),
            os.fdopen(out_read, "rb", 0),
            os.fdopen(err_read, "rb", 0),
        )
        return [in_read, out_write, err_write]

    def ended_with(self, status: int) -> None:
        if self._status is None:
            self._status = status
        self.ended.set()

    def wait(self, timeout: float | None = None) -> int:
        if not self.ended.wait(timeout):
            raise subprocess.TimeoutExpired("agent", timeout or 0.0)
        assert self._status is not None
        return self._status

    def kill(self) -> None:
        self._agents.kill(self)


class SimulatedStream(LocalStream):
    """A `Stream` to a forked agent, connected by pipes."""

    def __init__(self, agents: SimulatedAgents, key: str = "") -> None:
        try:
            super().__init__(agents.start(key))
        except OSError as error:
            fix = "raise the limit of open files (ulimit -n; the hard one is used), or divide it between fewer hosts"
            reason = f"no pipes for another agent: {error.strerror}; {fix}"
            raise HostError("this machine", reason) from error
        self._agents = agents
        self._finishing = threading.Lock()

    def finish(self, wait_s: float) -> tuple[int | None, str]:
        status, words = super().finish(wait_s)
        if self._finishing.acquire(blocking=False):
            self._agents.finished()
        return status, words or ("" if status in (None, 0) else self._agents.words.wait(0.0))
