"""The controller: carries out the job's commands and passes events to it, in the only loop of a run.

Each host has a link (link.py), whose threads connect, read and write, so a stuck host never blocks the loop. Only the
loop touches the job.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.controller.link import LET_GO_S, Link, close_links
from launcher.controller.standard_input import StandardInput
from launcher.errors import DtrainError
from launcher.hosts.host import Host
from launcher.hosts.sources import discover
from launcher.job.ending import Outcome
from launcher.job.events import (
    AgentMessage,
    Answer,
    Close,
    Command,
    Discovered,
    Event,
    InputRead,
    Notice,
    Open,
    PassOn,
    ReaderBlocked,
    SaveEvidence,
    Send,
    Signalled,
    Slept,
    SuspendSelf,
    Tick,
)
from launcher.job.job import Job
from launcher.output.writer import OutputThread
from launcher.placement.job_spec import JobSpec
from launcher.protocol.commands import RestartWorker, StartWorker
from launcher.protocol.message import Command as AgentCommand
from launcher.protocol.reports import Exited, Returned
from launcher.protocol.two_way import ChannelTaken
from launcher.timeline.recording import Recording
from launcher.transport.connect import Connector
from launcher.transport.stream import Stream

if TYPE_CHECKING:
    from launcher.transport.tcp.listener import Listener

ASLEEP_S = 5.0  # excess of a wait that means that we were suspended; at most a quarter of the heartbeat timeout
LOOK_S = 0.1  # interval of checks for hosts that are not read
CONNECT_S = 30.0  # for an attempt to reach a host again
DISCOVERY_PAUSE_S = 2.0  # between runs of a discovery script
RUN_KEY_BYTES = 32
FLUSH_S = 1.0  # for messages to the hosts before this process stops itself
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CHOSEN = (*STOP_SIGNALS, signal.SIGQUIT)  # handled unless --signals-to-handle leaves them out
OTHER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGTSTP, signal.SIGCONT)


class Controller:
    """Runs one job from the first connection to the outcome."""

    def __init__(
        self,
        spec: JobSpec,
        output: OutputThread,
        *,
        show_progress: Callable[[str], None],
        notify_user: Callable[[str], None],
        quiet: bool = False,
        opened: Mapping[str, Callable[[], Stream]],
        listener: Listener | None = None,
        recording: Recording | None = None,
        watch: Callable[[Job, Event, float], None] = lambda *_: None,
        answer: Callable[[Answer | PassOn], None] = lambda _: None,
        function: Sequence[bytes] = (),
        take: Callable[[str, Returned | Exited], None] | None = None,
    ) -> None:
        """Prepare the job; start nothing.

        `function` are the frames with the function that workers call; `take` receives its results, and how each worker
        ended. `quiet`: `notify_user` gets only those of the job's notices that are errors.
        """
        self._function = function
        self._take = take
        self._has_function: set[Link] = set()
        self.caught: list[int] = []  # signals that ended the run, and that would have ended this process
        self._spec = spec
        self._opened = opened
        self._output = output
        self._show_progress = show_progress
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._evidence_file: tuple[int, Path | None] = (0, None)  # of the newest failure, and its attempt
        self._notify_user = notify_user
        self._quiet = quiet
        self._recording = recording
        self._watch = watch  # called with the job after each event, and the time
        self._answer = answer  # the questions of commands
        self._input = None if spec.stdin_rank is None else StandardInput(output, self.put, self._send)
        self._job = Job(spec, time.monotonic(), run_key=os.urandom(RUN_KEY_BYTES).hex())
        self._connector = Connector(spec, listener=listener)
        self._links: dict[str, Link] = {}  # the newest of each host
        self._older: list[Link] = []  # previous ones that are not released yet

    @property
    def hosts(self) -> list[Host]:
        """The hosts that had workers, also those that joined later."""
        return self._job.hosts

    def run(self, early_signals: Iterable[int] = ()) -> Outcome:
        """Run the job to its end. Blocks. Signals are handled only if this is called in the main thread.

        `early_signals` were caught by an earlier handler, which still adds to them.
        """
        over = threading.Event()
        discovery: threading.Thread | None = None
        with self._signals():
            for signum in early_signals:
                self.caught.append(signum)
                self._events.put(Signalled(signum))
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
                close_links([*self._older, *self._links.values()])
                self._connector.close()

    @property
    def evidence_file(self) -> Path | None:
        """The file with the stacks of all ranks when the newest attempt failed, if any were found."""
        attempt, path = self._evidence_file
        return path if self._job.attempt is not None and self._job.attempt.number == attempt else None

    def put(self, event: Event) -> None:
        """Queue an event for the loop. Callable from any thread."""
        self._events.put(event)

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
            if over_s > asleep_s:  # Ctrl-Z, or a suspended machine: the hosts were not silent, we did not listen
                self._carry_out(self._job.handle(Slept(over_s), now))
            if now >= next_look:
                next_look = now + LOOK_S
                for link in self._links.values():
                    if link.waiting:  # not read because the output is behind, so it is not silent
                        self._carry_out(self._job.handle(ReaderBlocked(link.host.name), now))
            self._note(event)
            self._carry_out(self._job.handle(event, now))
            if self._recording is not None:
                self._recording.heard(event, self._job, now)
            self._watch(self._job, event, now)
        self._show_progress("")
        return self._job.outcome

    def _note(self, event: Event) -> None:
        """Pass an event to the output: files to write, when to stop waiting for the terminal."""
        if isinstance(event, AgentMessage) and isinstance(event.message, Exited | Returned):
            message = event.message
            if isinstance(message, Exited) and message.error_file is not None:
                self._output.error_file(message.rank, message.attempt, message.error_file)
            if self._take is not None:
                self._take(event.host, message)
        elif isinstance(event, AgentMessage) and isinstance(event.message, ChannelTaken):
            if self._input is not None:
                self._input.taken(event.host, event.message)
        elif isinstance(event, InputRead):
            assert self._input is not None
            self._input.add(event.data)
        elif isinstance(event, Signalled) and event.signum in STOP_SIGNALS:
            self._output.hurry()

    def _discover(self, command: str, over: threading.Event) -> None:
        """Run the user's discovery script repeatedly, in its own thread."""
        known: tuple[Host, ...] | None = self._spec.hosts
        complaint = ""
        while not over.wait(DISCOVERY_PAUSE_S):
            try:
                hosts = discover(command, over)
            except DtrainError as error:
                if str(error) != complaint and not over.is_set():  # report each error once
                    complaint = str(error)
                    self._notify_user(complaint)
                continue
            complaint = ""
            if hosts != known:
                known = hosts
                self._events.put(Discovered(hosts))

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            if self._recording is not None:
                self._recording.sent(command, time.monotonic())
            if isinstance(command, Open):
                self._open(command.host, command.link)
            elif isinstance(command, Send):
                if isinstance(command.message, StartWorker):
                    start = command.message
                    self._output.add_worker(start.rank, command.host, start.attempt, start.local_rank)
                    if start.through == "function":
                        self._pass_function_on(self._links[command.host])
                elif isinstance(command.message, RestartWorker):
                    self._output.replace_worker(command.message.rank)
                self._send(command.host, command.message)
                if isinstance(command.message, StartWorker) and self._input is not None:
                    self._input.worker_starts(command.host, command.message)
            elif isinstance(command, Close):
                self._links[command.host].close()
            elif isinstance(command, Notice):
                if command.is_error or not self._quiet:
                    self._notify_user(command.text)
            elif isinstance(command, SaveEvidence):
                self._keep(command)
            elif isinstance(command, Answer | PassOn):
                self._answer(command)
            else:
                assert isinstance(command, SuspendSelf)
                self._suspend()

    def _send(self, host: str, message: AgentCommand) -> None:
        self._links[host].send(message)

    def _pass_function_on(self, link: Link) -> None:
        """Send the function once to each agent."""
        if link not in self._has_function:
            self._has_function.add(link)
            link.pass_on(self._function)

    def _open(self, host: Host, number: int) -> None:
        """Connect to a host in the background; an older link to it, already closed, is released without waiting."""
        name = host.name
        self._older = [link for link in self._older if not link.released(0.0)]
        if (old := self._links.get(name)) is not None and not old.released(0.0):
            self._older.append(old)
            old.release(LET_GO_S)
        first = number == 1
        deadline = time.monotonic() + (self._spec.start_timeout_s if first else CONNECT_S)
        opened = self._opened.get(name) if first else None
        link = self._links[name] = Link(
            host, number, python=self._spec.python, events=self._events, output=self._output,
            shows_prompts=self._input is not None and self._input.is_terminal,
        )  # fmt: skip
        link.open(opened or (lambda: self._connector.connect(host, deadline)))

    def _keep(self, keep: SaveEvidence) -> None:
        self._output.keep_evidence(keep.attempt, keep.number, keep.evidence, say=keep.asked)
        if not keep.asked:
            self._evidence_file = keep.attempt, self._output.evidence_path(keep.attempt, keep.number)

    def _suspend(self) -> None:
        """Stop as Ctrl-Z does, once the order has been sent to the hosts; SIGCONT continues here."""
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
            if signum in STOP_SIGNALS:
                self.caught.append(signum)
            self._events.put(Signalled(signum))

        if threading.current_thread() is not threading.main_thread():
            yield
            return
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
