"""Connects to the hosts of a run: `Connector.connect` opens the stream to any of them, over any transport.

Used by the controller's links and by `dtrain check`. stream.py has the interface of streams; the transports are
local.py, ssh/, srun.py, tcp/.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING
from zlib import crc32

from launcher.errors import StreamError
from launcher.hosts.host import Host, HostKind
from launcher.placement.job_spec import CommandKind, JobSpec
from launcher.transport.client import Clients
from launcher.transport.local import LocalStream
from launcher.transport.setup import first_bytes, host_command
from launcher.transport.stream import Stream, shell_line

if TYPE_CHECKING:
    from launcher.transport.tcp.listener import Listener

AGENT = "launcher.agent"
LISTENER_S = 0.2  # this long before the deadline, the listener is asked why no node has joined
_GIVE_UP_S = 2.0
_EARLY = 32  # SSH hosts at most; with more, this machine's processors are the bottleneck


class Connector:
    """Opens the streams of one run, to an agent or another `module`; the owner of the streams owns it.

    `listener` accepts the nodes that are started by hand.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        module: str = AGENT,
        listener: Listener | None = None,
    ) -> None:
        self._spec = spec
        self._listener = listener
        self._module = module
        self._clients = Clients()
        # A host on this machine may hold the store; the others must know its address.
        own = any(not host.remote for host in spec.hosts)
        self._needs_address = own and spec.master_addr is None and not spec.interfaces
        self._srun = None
        if spec.sync:
            from launcher.transport.synced import outgoing_of

            outgoing_of(spec)  # it takes as long as connecting
        if any(host.kind is HostKind.SRUN for host in spec.hosts):
            from launcher.transport.srun import Srun

            self._srun = Srun()

    def connect(self, host: Host, deadline: float) -> Stream:
        """Open the stream to a host before `deadline` (monotonic). Blocks; any thread may call it. Raises HostError."""
        if host.kind is HostKind.JOINED:
            assert self._listener is not None
            return self._listener.wait(host.name, deadline - LISTENER_S)
        if self._spec.sync and host.remote:
            from launcher.transport.synced import outgoing_of

            stream = self.open_receiver(host, deadline, ["-m", self._module])
            return outgoing_of(self._spec).begin(host, stream, self._spec)
        is_agent = self._module == AGENT
        command = agent_command(self._spec, host) if is_agent else host_command(self._spec, self._module)
        return self._open(host, command, deadline, first_bytes(self._spec))

    def open_receiver(self, host: Host, deadline: float, args: Sequence[str] = ()) -> Stream:
        """Open a stream to the program that takes files on a remote host, or sends them. Raises HostError.

        `args` are those of Python for what it becomes then.
        """
        from launcher.transport.synced import receiver_command  # only for runs that send files, or fetch some

        return self._open(host, receiver_command(self._spec, args), deadline, first_bytes(self._spec))

    def _open(self, host: Host, command: list[str], deadline: float, first: bytes) -> Stream:
        """Start a command on a host, or here, which reads `first` from its input. Raises HostError."""
        if host.kind is HostKind.SSH and self._spec.ssh.command:
            return self._by_client(host, command, deadline, first)
        if host.kind is HostKind.SSH:
            from launcher.transport.ssh.stream import connect_ssh  # paramiko takes 0.2 s to import

            return _begun(connect_ssh(host, self._spec.ssh, command, deadline), first)
        if host.kind is HostKind.SRUN:
            assert self._srun is not None
            return self._srun.connect(host, command, deadline, first)
        return _begun(LocalStream(command), first)

    def _by_client(self, host: Host, command: Sequence[str], deadline: float, first: bytes) -> Stream:
        from launcher.transport.ssh.client import connect_by_client, our_address

        ssh = self._spec.ssh
        address = our_address(host, ssh) if self._needs_address else None
        stream = connect_by_client(host, ssh, shell_line(command), deadline, first=first, clients=self._clients)
        stream.our_address = address
        return stream

    def close(self) -> None:
        """End processes that still carry a stream, at the end of the run: none may outlive this process."""
        self._clients.close()
        if self._srun is not None:
            self._srun.close()


def start_agents(spec: JobSpec) -> dict[str, Callable[[], Stream]]:
    """Start opening the streams to the hosts on this machine and to a few SSH hosts, without waiting for their agents.

    Called before the controller is imported, which takes about as long as starting an agent, or half as long as
    connecting. Returns functions, by host name, that wait for the stream and raise HostError; a failure on this machine
    is raised here.
    """
    simulated = [host for host in spec.hosts if host.kind is HostKind.SIMULATED]
    if len(simulated) > 1:
        from launcher.transport.simulated import SimulatedAgents, SimulatedStream

        agents = SimulatedAgents(host_command(spec, AGENT, "--simulated", _script_word(spec)))
        streams: dict[str, Stream] = {}
        with contextlib.ExitStack() as unless_all:
            unless_all.callback(_give_up, streams.values())
            for host in simulated:
                streams[host.name] = SimulatedStream(agents, warm_key(spec, host))
            unless_all.pop_all()
        return {name: partial(_same, stream) for name, stream in streams.items()}
    opened: dict[str, Callable[[], Stream]] = {}
    for host in spec.hosts:
        if not host.remote:
            opened[host.name] = partial(_same, _begun(LocalStream(agent_command(spec, host)), first_bytes(spec)))
    by_ssh = [host for host in spec.hosts if host.kind is HostKind.SSH]
    if 0 < len(by_ssh) <= _EARLY and not spec.ssh.command:  # a client would outlive us if we were killed now
        connector, deadline = Connector(spec), time.monotonic() + spec.start_timeout_s
        with contextlib.suppress(RuntimeError):  # no thread left: the controller reports it
            for host in by_ssh:
                opened[host.name] = _Opening(partial(connector.connect, host, deadline)).wait
        with contextlib.suppress(Exception):  # the threads report that it cannot be imported
            from launcher.transport.ssh.stream import import_paramiko

            import_paramiko()  # before the controller's imports, with which the threads would compete for it
    return opened


def _begun(stream: Stream, first: bytes) -> Stream:
    """Write the first bytes to a stream that was opened just now."""
    if first:
        with contextlib.suppress(StreamError):  # its reader reports why
            stream.write(first)
    return stream


def _same(stream: Stream) -> Stream:
    return stream


def _give_up(streams: Collection[Stream]) -> None:
    """End agents after one of them could not be started, and wait until they have ended."""
    for stream in streams:
        with contextlib.suppress(StreamError):
            stream.end()
    for stream in streams:
        stream.finish(_GIVE_UP_S)


class _Opening:
    """A stream that is opened in another thread."""

    def __init__(self, connect: Callable[[], Stream]) -> None:
        self._connect = connect
        self._stream: Stream | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._open, name="open", daemon=True)
        self._thread.start()

    def wait(self) -> Stream:
        """Return the stream once it is open. Raises the error that prevented it."""
        self._thread.join()
        if self._stream is None:
            assert self._error is not None
            raise self._error
        return self._stream

    def _open(self) -> None:
        try:
            self._stream = self._connect()
        except Exception as error:  # for the thread that waits
            self._error = error


def agent_command(spec: JobSpec, host: Host | None = None) -> list[str]:
    """Return the command that starts an agent; with `host`, one that may use a process kept warm there."""
    key = "" if host is None else warm_key(spec, host)
    return host_command(spec, AGENT, *([key, _script_word(spec)] if key else []))


def _script_word(spec: JobSpec) -> str:
    """Return the script as an argument safe in any shell, for comparison with that of a warm process."""
    target = spec.command.target
    if spec.command.kind is CommandKind.SCRIPT:
        target = os.path.join(spec.workdir, target)
    script = {"kind": spec.command.kind.value, "target": target, "cwd": str(spec.workdir)}
    return json.dumps(script).encode().hex()


def warm_key(spec: JobSpec, host: Host) -> str:
    """Return the key of a process kept warm for this script; empty if none can be."""
    is_bare = not (spec.setup or spec.agent_prefix)
    if spec.start_method == "exec" or spec.command.kind is CommandKind.PROGRAM or host.remote or not is_bare:
        return ""
    words = (host.name, spec.command.kind.value, str(spec.workdir), spec.command.target)
    return f"{host.part}-{crc32(os.fsencode(chr(0).join(words))):08x}"
