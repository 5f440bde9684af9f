"""The seam between controller and agents: one byte stream a host, whatever carries it.

`connect` opens the stream for a host and starts the agent at its other end: a pair of pipes here, an SSH channel
elsewhere (ssh/stream.py). A stream is read by one thread, written and ended by another, and finished by the loop.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

from launcher.errors import HostError
from launcher.hosts.host import Host, HostKind
from launcher.placement.job_spec import JobSpec

__all__ = ["LocalStream", "Stream", "agent_command", "connect", "end_all", "start_agent", "start_local_agents"]


class Stream(Protocol):
    """A connection to one agent. `our_address` is this machine's address as the host sees it, if it is remote."""

    our_address: str | None

    def read(self) -> bytes:
        """Block until there is something to read and return it; b"" at the end."""

    def write(self, data: bytes) -> None:
        """Write everything; may block. Raises OSError when the other end is gone."""

    def end(self) -> None:
        """End our direction; the agent takes that as the order to stop. Its words can still be read."""

    def finish(self, wait_s: float) -> tuple[int | None, str]:
        """Wait for the agent's end, then give it up and release everything; a blocked `read` returns.

        Returns its exit status (None if it did not end in time) and what its stderr said. May be called again.
        """


def connect(host: Host, spec: JobSpec, deadline: float, command: list[str] | None = None) -> Stream:
    """Open the stream to a host before `deadline` (monotonic), to an agent or what else `command` starts. Blocks.

    Raises HostError.
    """
    command = command or agent_command(spec)
    if host.kind is HostKind.SSH:
        from launcher.transport.ssh.stream import connect_ssh  # paramiko takes 0.2 s to import

        return connect_ssh(host, spec.ssh, command, deadline)
    if host.kind is HostKind.SRUN:
        from launcher.transport.srun import connect_srun

        return connect_srun(host, spec, command, deadline)
    return LocalStream(command)


def end_all() -> None:
    """End what still carries a stream, at the end of the run: nothing of it is to outlive this process."""
    if (srun := sys.modules.get("launcher.transport.srun")) is not None:
        srun.end_all()


def start_local_agents(spec: JobSpec) -> dict[str, Stream]:
    """Open the streams to the hosts that are on this machine, by host name, without waiting for their agents.

    Called before the controller is even imported: that takes about as long as an agent's start. Raises HostError.
    """
    return {host.name: LocalStream(agent_command(spec)) for host in spec.hosts if not host.remote}


def agent_command(spec: JobSpec) -> list[str]:
    """Return what starts an agent, wherever."""
    return [spec.python, "-m", "launcher.agent"]


def start_agent(command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start an agent on this machine with pipes for its three streams. Raises HostError."""
    # In a session of its own: a Ctrl-C typed at dtrain must reach it as an order, not as a signal. In the root
    # folder: a `launcher` package of the user's working directory must not be taken for ours.
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env=env,
            start_new_session=True,
            bufsize=0,
        )
    except OSError as error:
        reason = f"cannot run {command[0]} here: {error.strerror}; name the Python that has dtrain with --python"
        raise HostError("this machine", reason) from error


class LocalStream:
    """An agent on this machine, at the other end of two pipes."""

    our_address: str | None = None

    def __init__(self, command: list[str], env: Mapping[str, str] | None = None) -> None:
        self._process = start_agent(command, env)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._stdin = self._process.stdin
        self._stdout = self._process.stdout
        self._stderr = self._process.stderr
        self._words = b""
        self._listener = threading.Thread(target=self._listen, name="agent's stderr", daemon=True)
        self._listener.start()

    def read(self) -> bytes:
        return self._stdout.read(1 << 16) or b""

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._stdin.write(view) or 0 :]

    def end(self) -> None:
        self._stdin.close()

    def finish(self, wait_s: float) -> tuple[int | None, str]:
        try:
            status: int | None = self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self._process.kill()  # given up: an agent whose guard is killed stops in good order, by itself
            self._process.wait()
            status = None
        self._listener.join(1.0)
        return status, self._words.decode("utf-8", "replace")

    def _listen(self) -> None:
        """Keep the last that the agent said on stderr, and never let it wait for a reader."""
        while words := self._stderr.read(1 << 16):
            self._words = (self._words + words)[-(1 << 16) :]
