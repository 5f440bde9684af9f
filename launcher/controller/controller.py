"""The controller: carries the job's commands out and brings it the events. The one loop of a run.

For each host a thread connects and then reads: output goes straight to the output thread (whose full queue makes the
reader wait, and with it the host), all else becomes an event. Another thread a host writes, so that a stuck host never
holds the loop up. Only the loop touches the job.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.errors import DtrainError, HostError, ProtocolError
from launcher.hosts.host import Host, HostKind
from launcher.hosts.sources import discover
from launcher.job.events import (
    Close,
    Command,
    Connected,
    Discovered,
    Event,
    Keep,
    Lost,
    Notice,
    Open,
    Said,
    Signalled,
    Slept,
    SuspendSelf,
    Tell,
    Tick,
    Unread,
)
from launcher.job.job import Job
from launcher.job.outcome import Outcome
from launcher.output.stacks import groups, one_line, write_out
from launcher.output.writer import OutputThread
from launcher.placement.job_spec import JobSpec
from launcher.protocol import PREAMBLE, Bye, Decoder, Exited, Output, RestartWorker, StartWorker, encode
from launcher.transport.connect import Stream, connect, end_all

if TYPE_CHECKING:
    from launcher.transport.tcp.listener import Listener

__all__ = ["Controller"]

ASLEEP_S = 5.0  # a wait that took so much longer than asked for; or a quarter of the heartbeat timeout
LOOK_S = 0.1  # between looks for hosts that are not read
LET_GO_S = 10.0  # for the end of an agent whose link was given up
CONNECT_S = 30.0  # for an attempt to reach a host again
DISCOVERY_PAUSE_S = 2.0  # before a discovery script is asked again
DOOR_S = 0.2
RUN_KEY_BYTES = 32
FLUSH_S = 1.0  # for what hosts are told before this process stops itself
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CHOSEN = (*STOP_SIGNALS, signal.SIGQUIT)  # may be left to the system, by --signals-to-handle
OTHER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGTSTP, signal.SIGCONT)


class Controller:
    """Runs one job from the first connection to the outcome."""

    def __init__(
        self,
        spec: JobSpec,
        output: OutputThread,
        *,
        show_progress: Callable[[str], None],
        tell_user: Callable[[str], None],
        opened: Mapping[str, Stream],
        door: Listener | None = None,
    ) -> None:
        self._spec = spec
        self._door = door
        self._opened = opened
        self._output = output
        self._show_progress = show_progress
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.evidence_file: Path | None = None  # of the newest failure
        self._tell_user = tell_user
        self._job = Job(spec, time.monotonic(), run_key=os.urandom(RUN_KEY_BYTES).hex())
        self._limit = threading.BoundedSemaphore(spec.ssh.connect_at_once)
        self._links: dict[str, _Link] = {}  # the newest of each host

    def run(self) -> Outcome:
        """Run the job to its end. Blocks; must be called from the main thread, for the signals."""
        over = threading.Event()
        discovery: threading.Thread | None = None
        with self._signals():
            try:
                self._carry_out(self._job.start())
                if self._spec.hosts_script is not None:
                    discovery = threading.Thread(
                        target=self._discover, args=(self._spec.hosts_script, over), daemon=True
                    )
                    discovery.start()
                return self._loop()
            finally:
                over.set()
                if discovery is not None:
                    discovery.join(1.0)
                links = list(self._links.values())
                for link in links:
                    link.close()
                deadline = time.monotonic() + 2.0
                for link in links:
                    link.finish(deadline)
                end_all()

    def _loop(self) -> Outcome:
        next_look = time.monotonic()
        asleep_s = min(ASLEEP_S, self._spec.heartbeat_timeout_s / 4)
        while self._job.outcome is None:
            self._show_progress(self._job.progress)
            now = time.monotonic()
            until = self._job.deadline()
            try:
                event = self._events.get(timeout=max(0.0, until - now))
            except queue.Empty:
                event = Tick()
            over_s = time.monotonic() - max(until, now)
            now = time.monotonic()
            if over_s > asleep_s:  # by Ctrl-Z, or a suspended machine: the hosts were not silent, nobody listened
                self._carry_out(self._job.handle(Slept(over_s), now))
            if now >= next_look:
                next_look = now + LOOK_S
                for link in self._links.values():
                    if link.waiting:  # nothing is read from it because the output is behind: that is not its silence
                        self._carry_out(self._job.handle(Unread(link.host.name), now))
            self._note(event)
            self._carry_out(self._job.handle(event, now))
        self._show_progress("")
        return self._job.outcome

    def _note(self, event: Event) -> None:
        """Let the output side know what it needs: files to write, when nobody may wait for it."""
        if isinstance(event, Said) and isinstance(event.message, Exited) and event.message.error_file is not None:
            self._output.error_file(event.message.rank, event.message.attempt, event.message.error_file)
        elif isinstance(event, Signalled) and event.signum in STOP_SIGNALS:
            self._output.hurry()

    def _discover(self, command: str, over: threading.Event) -> None:
        """Ask the user's script again and again which hosts there are; in a thread of its own."""
        known: tuple[Host, ...] | None = self._spec.hosts
        complaint = ""
        while not over.wait(DISCOVERY_PAUSE_S):
            try:
                hosts = discover(command, over)
            except DtrainError as error:
                if str(error) != complaint:  # once, until it says something else
                    complaint = str(error)
                    self._tell_user(complaint)
                continue
            complaint = ""
            if hosts != known:
                known = hosts
                self._events.put(Discovered(hosts))

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Open):
                self._open(command.host, command.link)
            elif isinstance(command, Tell):
                if isinstance(command.message, StartWorker):
                    start = command.message
                    self._output.add_worker(start.rank, command.host, start.attempt, start.local_rank)
                elif isinstance(command.message, RestartWorker):
                    self._output.end_line(command.message.rank)
                self._links[command.host].tell(encode(command.message))
            elif isinstance(command, Close):
                self._links[command.host].close()
            elif isinstance(command, Notice):
                self._tell_user(command.text)
            elif isinstance(command, Keep):
                self._keep(command)
            else:
                assert isinstance(command, SuspendSelf)
                self._suspend()

    def _open(self, name: str, number: int) -> None:
        """Connect to a host in the background; an older link to it was closed, and is let go without waiting."""
        if (old := self._links.get(name)) is not None:
            threading.Thread(target=old.finish, args=(time.monotonic() + LET_GO_S,), daemon=True).start()
        link = _Link(self._job.fleet.states[name].host, number, self._spec, self._events, self._output, self._door)
        first = number == 1
        deadline = time.monotonic() + (self._spec.start_timeout_s if first else CONNECT_S)
        link.open(self._opened.get(name) if first else None, self._limit, deadline)
        self._links[name] = link

    def _keep(self, keep: Keep) -> None:
        self._output.keep_evidence(keep.attempt, keep.number, write_out(keep.evidence))
        where = self._output.evidence_path(keep.attempt, keep.number)
        if keep.asked:
            lines = [one_line(group) for group in groups(keep.evidence)]
            self._tell_user("\n".join([*lines, f"stacks of all ranks: {where}"]))
        else:
            self.evidence_file = where

    def _suspend(self) -> None:
        """Stop as Ctrl-Z does, once the hosts have been told; SIGCONT brings us back here."""
        deadline = time.monotonic() + FLUSH_S
        while any(not link.idle for link in self._links.values()) and time.monotonic() < deadline:
            time.sleep(0.005)
        stopped_at = time.monotonic()
        os.kill(os.getpid(), signal.SIGSTOP)
        now = time.monotonic()
        self._carry_out(self._job.handle(Slept(now - stopped_at), now))

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def enqueue(signum: int, _frame: object) -> None:
            self._events.put(Signalled(signum))

        before = {}
        for signum in (*STOP_SIGNALS, *OTHER_SIGNALS):
            if signum in CHOSEN and signum.name not in self._spec.signals:
                continue
            if signum in (signal.SIGHUP, signal.SIGTSTP) and signal.getsignal(signum) == signal.SIG_IGN:
                continue  # started by nohup, or by a shell without job control
            before[signum] = signal.signal(signum, enqueue)
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)


class _Link:
    """One stream to a host with its two threads; `number` counts the host's streams."""

    def __init__(
        self,
        host: Host,
        number: int,
        spec: JobSpec,
        events: queue.SimpleQueue[Event],
        output: OutputThread,
        door: Listener | None,
    ) -> None:
        self.host = host
        self._door = door
        self.waiting = False  # the reader waits for the output
        self.idle = True  # everything told is written
        self._number = number
        self._spec = spec
        self._events = events
        self._output = output
        self._stream: Stream | None = None  # set once, by the reader
        self._closed = False
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name=f"write {host.name}", daemon=True)

    def open(self, opened: Stream | None, limit: threading.BoundedSemaphore, deadline: float) -> None:
        """Read from the stream in a thread of its own, which first connects unless the stream is `opened`."""

        def connect_and_read() -> None:
            stream = opened or self._connect(limit, deadline)
            if stream is None:
                return
            if self._closed:  # given up meanwhile: its agent is not to wait for a word of ours
                stream.finish(0.0)
                return
            self._read(stream)

        self._reader = threading.Thread(target=connect_and_read, name=f"read {self.host.name}", daemon=True)
        self._reader.start()

    def tell(self, data: bytes) -> None:
        if self._stream is not None and not self._closed:
            self.idle = False
            self._outgoing.put(data)

    def close(self) -> None:
        """End the stream once everything told is written; the connection itself is released by `finish`."""
        if not self._closed:
            self._closed = True
            self._outgoing.put(None)

    def finish(self, deadline: float) -> None:
        """Wait for the agent's end, but not beyond `deadline`, and release the connection."""
        stream = self._stream
        if stream is None:  # never connected; an attempt under way has its own time limit
            return
        self._reader.join(max(0.0, deadline - time.monotonic()))
        stream.finish(max(0.0, deadline - time.monotonic()))

    # ---- in the reader's thread ----

    def _connect(self, limit: threading.BoundedSemaphore, deadline: float) -> Stream | None:
        if self.host.kind is HostKind.JOINED:
            return self._wait_at_the_door(deadline)
        if not limit.acquire(timeout=max(0.0, deadline - time.monotonic())):
            at_once = self._spec.ssh.connect_at_once
            self._events.put(
                Lost(
                    self.host.name,
                    self._number,
                    f"was not tried: others took the {at_once} places till the time was up",
                )
            )
            return None
        try:
            return connect(self.host, self._spec, deadline)
        except HostError as error:
            self._events.put(Lost(self.host.name, self._number, error.reason))
        except DtrainError as error:
            self._events.put(Lost(self.host.name, self._number, str(error)))
        except Exception as error:  # a host that fails in a way nobody thought of must still be answered for
            self._events.put(Lost(self.host.name, self._number, f"{type(error).__name__}: {error}"))
        finally:
            limit.release()
        return None

    def _wait_at_the_door(self, deadline: float) -> Stream | None:
        assert self._door is not None
        try:
            # A moment before the job gives up, so that it knows why.
            stream = self._door.wait(self.host.name, deadline - DOOR_S)
            hostname = stream.greeting.hostname
            if self._number == 1 and self.host.name.partition(".")[0] != hostname.partition(".")[0]:
                self._output.say(f"{self.host.name} is {hostname} ({stream.their_address})")
            return stream
        except DtrainError as error:
            self._events.put(Lost(self.host.name, self._number, getattr(error, "reason", str(error))))
        return None

    def _read(self, stream: Stream) -> None:
        self._stream = stream
        self._writer.start()
        self._events.put(Connected(self.host.name, self._number, stream.our_address))
        self._events.put(Lost(self.host.name, self._number, self._pump(stream)))

    def _pump(self, stream: Stream) -> str:
        """Read until the end; return why it ended."""
        decoder = Decoder()
        greeted = said_bye = False
        try:
            while data := stream.read():
                for message in decoder.feed(data):
                    greeted = True
                    said_bye = said_bye or isinstance(message, Bye)
                    if isinstance(message, Output):
                        if self._closed:  # given up; by now its ranks may be somebody else's
                            continue
                        self.waiting = True
                        self._output.write(message.rank, message.stream, message.data)
                        self.waiting = False
                    else:
                        # The job ignores what is none of an agent's messages.
                        self._events.put(Said(self.host.name, self._number, message))  # type: ignore[arg-type]
        except ProtocolError as error:
            return str(error)
        except (OSError, EOFError) as error:
            return f"the connection broke: {error or type(error).__name__}"
        if said_bye:
            return "ended"
        return self._why_ended(stream, decoder, greeted)

    def _why_ended(self, stream: Stream, decoder: Decoder, greeted: bool) -> str:
        status, words = stream.finish(2.0)
        last = [line.strip() for line in words.splitlines() if line.strip()]
        if greeted:
            how = "the connection closed" if status is None else f"its agent ended with status {status}"
            if status == 128 + signal.SIGKILL:
                how = "its agent was killed"
            return f"{how}{': ' + last[-1] if last else ''}"
        python = self._spec.python
        if status in (126, 127):
            return f"there is no Python at {python}; name the one that has dtrain with --python"
        if "No module named" in words:
            return f"{python} there has no dtrain; install it: {python} -m pip install dtrain"
        noise = decoder.noise.decode("utf-8", "replace").strip().splitlines()
        said = (last or noise or ["it said nothing"])[-1]
        return f"the agent did not start (status {status}): {said}"

    # ---- in the writer's thread ----

    def _write(self) -> None:
        assert self._stream is not None
        try:
            self._stream.write(PREAMBLE)
            while (data := self._outgoing.get()) is not None:
                self._stream.write(data)
                self.idle = self._outgoing.empty()
            self._stream.end()
        except (OSError, EOFError):  # the reader sees the end as well, and says so
            return
