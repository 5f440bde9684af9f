"""The agent's side of debuggers: passes on data between a worker and a command beyond the controller.

For each, the agent offers a Unix socket in its own folder and signals the worker, whose handler connects
(in_worker.py). A Python program that was not prepared for that is reached by sys.remote_exec, from Python 3.14 on. Only
that process is accepted. When either end closes, or the attempt ends, the worker continues.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from launcher.agent.attempt import Attempt
from launcher.agent.observation.evidence import catches, read_proc
from launcher.agent.stream_writer import StreamWriter
from launcher.agent.workers.worker import DEBUGGER_FILE, Worker
from launcher.machine.socket_folder import peer
from launcher.protocol.commands import CloseDebugger, OpenDebugger
from launcher.protocol.message import CHANNEL_BYTES
from launcher.protocol.reports import DebuggerClosed, DebuggerOpened
from launcher.protocol.two_way import ChannelData, ChannelTaken

DEBUGGER_SIGNAL = 52  # used by no other library: evidence.py lists those
READY_S = 10.0  # for a process that has just started to install its handler
LOOK_S = 0.05
_IN_WORKER = Path(__file__).with_name("in_worker.py")
_READ_BYTES = 64 << 10
_IS_EXITING = 0x4  # PF_EXITING in the kernel, in /proc/PID/stat


class DebuggerChannels:
    """The debuggers of this host's workers. Call `step` whenever something happened, and after `pause_s`."""

    def __init__(self, writer: StreamWriter, selector: selectors.BaseSelector) -> None:
        self._writer = writer
        self._selector = selector
        self._channels: dict[int, _Channel] = {}
        self.trees: list[str] = []  # where files that were sent lie

    @property
    def pause_s(self) -> float:
        return LOOK_S if any(each.wants_signal for each in self._channels.values()) else float("inf")

    def open(self, order: OpenDebugger, attempt: Attempt | None) -> None:
        """Offer a debugger to a worker."""
        worker = None if attempt is None or attempt.number != order.attempt else attempt.workers.get(order.rank)
        if attempt is None or worker is None or worker.status is not None:
            self._refuse(order.channel, f"rank {order.rank} does not run there any more")
            return
        if any(each.worker is worker for each in self._channels.values()):
            self._refuse(order.channel, f"rank {order.rank} has a debugger already")
            return
        try:
            is_prepared = attempt.is_script(order.rank)
            channel = _Channel(order, worker, self._selector, self._writer, is_prepared=is_prepared, trees=self.trees)
        except OSError as error:
            self._refuse(order.channel, f"no debugger can be offered there: {error.strerror}")
            return
        self._channels[order.channel] = channel
        self.step()

    def pass_on(self, message: ChannelData | ChannelTaken) -> None:
        if (channel := self._channels.get(message.channel)) is None:
            return
        if isinstance(message, ChannelData):
            channel.write(message.data)
        else:
            channel.taken(message.count)
        self.step()

    def close(self, message: CloseDebugger) -> None:
        """Let a worker continue without its debugger; no one waits for an answer."""
        if (channel := self._channels.pop(message.channel, None)) is not None:
            channel.close()

    def stop(self, reason: str) -> None:
        """Let all workers continue without debuggers."""
        for number in [*self._channels]:
            self._end(number, reason)

    def step(self) -> None:
        for number, channel in [*self._channels.items()]:
            channel.step()
            if channel.closed_because is not None:
                self._end(number, channel.closed_because)

    def reaped(self, pids: Iterable[int]) -> None:
        """Record children that were reaped."""
        ended = {*pids}
        for number, channel in [*self._channels.items()]:
            if channel.worker.pid in ended:
                channel.is_gone = True
                self._end(number, f"the process of rank {channel.worker.rank} has ended")

    def _end(self, number: int, reason: str) -> None:
        self._channels.pop(number).close()
        self._refuse(number, reason)

    def _refuse(self, number: int, reason: str) -> None:
        self._writer.send(DebuggerClosed(channel=number, reason=reason))


class _Channel:
    """A debugger in a worker. `closed_because` is set once it is closed, empty if the worker closed it."""

    def __init__(
        self, order: OpenDebugger, worker: Worker, selector: selectors.BaseSelector, writer: StreamWriter, *,
        is_prepared: bool, trees: Sequence[str],
    ) -> None:  # fmt: skip
        """Raises OSError."""
        self.worker = worker
        self.closed_because: str | None = None
        self.wants_signal = True
        self.is_gone = False  # the worker; its pid may have been reused
        self._order = order
        self._selector = selector
        self._writer = writer
        self._is_prepared = is_prepared
        self._first = {"debugger": order.debugger, "trees": [tree for tree in trees if tree]}
        self._signal_until = time.monotonic() + READY_S
        self._path = Path(f"{worker.files.error}.debugger")
        self._unsent = bytearray()
        self._on_way = 0  # bytes that the command has not acknowledged
        self._watched = 0  # events
        self._connection: socket.socket | None = None
        self._script: Path | None = None
        self._listening: socket.socket | None = _bind(self._path)
        selector.register(self._listening, selectors.EVENT_READ, self._accept)

    def step(self) -> None:
        if self.wants_signal and self.closed_because is None:
            self._ask()

    def write(self, data: bytes) -> None:
        self._unsent += data
        self._send()

    def taken(self, number: int) -> None:
        self._on_way -= number
        self._watch()

    def close(self) -> None:
        """Release everything. Notify a worker that is running to a breakpoint that the debugger is gone."""
        if self._listening is not None:
            self._selector.unregister(self._listening)
            self._listening.close()
            self._listening = None
        for path in (self._path, self._script):
            if path is not None:
                with contextlib.suppress(OSError):
                    path.unlink()
        if self._connection is not None:
            connection, self._connection = self._connection, None
            if self._watched:
                self._selector.unregister(connection)
            connection.close()
            if not self.is_gone and self.worker.status is None and catches(self.worker.own_pid, DEBUGGER_SIGNAL):
                with contextlib.suppress(ProcessLookupError):  # behind a launch prefix it may be gone
                    os.kill(self.worker.own_pid, DEBUGGER_SIGNAL)

    def _ask(self) -> None:
        """Ask the worker to connect, once it can."""
        pid, rank = self.worker.own_pid, self.worker.rank
        if self._is_prepared and catches(pid, DEBUGGER_SIGNAL):
            self.wants_signal = False
            with contextlib.suppress(ProcessLookupError):  # behind a launch prefix it may be gone
                os.kill(pid, DEBUGGER_SIGNAL)
        elif not self._is_prepared:
            self.wants_signal = False
            self.closed_because = self._execute_there(pid)
        elif time.monotonic() > self._signal_until:
            self.closed_because = (
                f"rank {rank} takes no debugger: it has given signal {DEBUGGER_SIGNAL} another meaning"
            )

    def _execute_there(self, pid: int) -> str | None:
        """Ask a process that was not prepared; return why that is impossible."""
        remote_exec = getattr(sys, "remote_exec", None)
        if remote_exec is None:
            return (
                f"rank {self.worker.rank} is a program that dtrain did not start as a Python script; "
                "a debugger needs Python 3.14 for that. See where it is: dtrain stacks --native"
            )
        self._script = Path(f"{self._path}.py")
        try:
            self._script.write_text(_CODE.format(in_worker=str(_IN_WORKER), path=str(self._path)))
            remote_exec(pid, str(self._script))
        except (OSError, RuntimeError) as error:
            version = ".".join(map(str, sys.version_info[:2]))
            return f"rank {self.worker.rank} takes no debugger, if it is Python {version} at all: {error}"
        return None

    def _accept(self) -> None:
        if self._listening is None:  # closed after the selector reported it
            return
        try:
            connection, _ = self._listening.accept()
        except OSError:  # it has disconnected already
            return
        if peer(connection) != (self.worker.own_pid, os.geteuid()):
            connection.close()
            return
        self._selector.unregister(self._listening)
        self._listening.close()
        self._listening = None
        connection.setblocking(False)
        self._connection = connection
        with contextlib.suppress(OSError):  # it has disconnected, which will be read
            connection.send(json.dumps(self._first).encode() + b"\n")
        self._writer.send(DebuggerOpened(channel=self._order.channel))
        self._send()

    def _ready(self) -> None:
        self._send()
        if self._connection is None or self._on_way >= CHANNEL_BYTES:
            return
        try:
            data = self._connection.recv(min(_READ_BYTES, CHANNEL_BYTES - self._on_way))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._on_way += len(data)
            self._writer.send(ChannelData(channel=self._order.channel, data=data))
            self._watch()
        else:
            self._ended()

    def _ended(self) -> None:
        """Handle the end of the worker's data; for a process that is exiting, wait until it is reaped."""
        assert self._connection is not None
        self._selector.unregister(self._connection)
        self._watched = 0
        self._connection.close()
        self._connection = None
        if not _is_exiting(self.worker.own_pid):
            self.closed_because = ""

    def _send(self) -> None:
        if self._connection is None:
            return
        sent = 0
        try:
            while self._unsent:
                written = self._connection.send(self._unsent)
                del self._unsent[:written]
                sent += written
        except BlockingIOError:
            pass
        except OSError:  # its end will be read
            self._unsent.clear()
        if sent:
            self._writer.send(ChannelTaken(channel=self._order.channel, count=sent))
        self._watch()

    def _watch(self) -> None:
        if self._connection is None:
            return
        wanted = selectors.EVENT_READ if self._on_way < CHANNEL_BYTES else 0
        wanted |= selectors.EVENT_WRITE if self._unsent else 0
        if wanted != self._watched:
            if self._watched:
                self._selector.unregister(self._connection)
            if wanted:
                self._selector.register(self._connection, wanted, self._ready)
            self._watched = wanted


class Rest:
    """While a debugger is open in a rank of the run, on any host, `now` is True: silences of workers do not count.

    Workers read that from a file (DTRAIN_DEBUGGER_FILE in workers/worker.py) before they give up waiting for others:
    ddp/monitoring/debuggers.py.
    """

    def __init__(self) -> None:
        self.now = False
        self._file: Path | None = None

    def set_folder(self, folder: str) -> None:
        """Set the folder of the workers' files."""
        self._file = Path(folder, DEBUGGER_FILE)

    def update(self, resting: bool) -> None:
        self.now = resting
        if self._file is None:
            return
        news = Path(f"{self._file}.new")
        try:
            news.write_text("open" if resting else repr(time.monotonic()))
            os.replace(news, self._file)  # atomic for the workers
        except OSError as error:  # a full disk: then the time limits of their waits still apply
            print(f"dtrain agent: {self._file}: {error}", file=sys.stderr)


_CODE = """\
import importlib.util, sys
if "dtrain debugger" not in sys.modules:
    spec = importlib.util.spec_from_file_location("dtrain debugger", {in_worker!r})
    sys.modules["dtrain debugger"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["dtrain debugger"])
sys.modules["dtrain debugger"].open_debugger({path!r}, sys._getframe(1))
"""


def _bind(path: Path) -> socket.socket:
    """Return a socket that listens at a path of any length. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(f"/proc/self/fd/{folder}/{path.name}")
        listening.listen(1)
        listening.setblocking(False)
    except OSError:
        listening.close()
        raise
    finally:
        os.close(folder)
    return listening


def _is_exiting(pid: int) -> bool:
    fields = read_proc(pid, "stat").rpartition(b")")[2].split()
    return not fields or fields[0] in (b"Z", b"X") or bool(int(fields[6]) & _IS_EXITING)
