"""The link to one host: opens the stream, reads and writes it in two threads, and releases it.

Used by the controller (controller.py), whose loop never waits for a host, and by `dtrain check`, which has no output.
Output goes directly to the output thread, whose full queue makes the reader wait, and thus the host; everything else
becomes an event. However the stream ends or a thread fails, the controller gets a `Lost` with the reason.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence

from launcher.controller.paths_here import with_paths_here
from launcher.errors import DtrainError, HostError
from launcher.hosts.host import Host
from launcher.job.events import AgentMessage, Connected, Event, Lost
from launcher.output.writer import OutputThread
from launcher.protocol.frames import Decoder, encode
from launcher.protocol.message import PREAMBLE
from launcher.protocol.message import Command as AgentCommand
from launcher.protocol.reports import Asks, Bye, Output
from launcher.protocol.two_way import Heartbeat
from launcher.transport.not_started import why_not_started
from launcher.transport.stream import Stream

LET_GO_S = 10.0  # for an agent to end after its stream
END_S = 2.0  # for all agents to end with the run, and then to give up those that do not
ATTEMPT_S = 1.0  # for attempts to connect at the end of the run: they may be running ssh, or starting an agent
_NO_THREAD = "this machine has no thread left for it; raise the limit of processes (ulimit -u), or name fewer hosts"
READER_FIRST_S = 3.0  # the reader usually knows better why a stream broke, and may take 2 s to find out


class Link:
    """A stream to a host, the `number`-th to it. `python` is the interpreter of the agent there."""

    def __init__(
        self, host: Host, number: int, *, python: str, events: queue.SimpleQueue[Event],
        output: OutputThread | None = None, shows_prompts: bool = False,
    ) -> None:  # fmt: skip
        self.host = host
        self._shows_prompts = shows_prompts  # the user at the terminal can answer them
        self.waiting = False  # the reader waits for the output
        self._number = number
        self._python = python
        self._events = events
        self._output = output
        self._stream: Stream | None = None  # set once, by the reader
        self._closed = False
        self._read_all = threading.Event()
        self._queued = 0  # messages; counted by the loop alone
        self._written = 0  # of those; counted by the writer alone
        self._outgoing: queue.SimpleQueue[bytes | Sequence[bytes] | None] = queue.SimpleQueue()
        self._heartbeats: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None

    def open(self, connect: Callable[[], Stream]) -> None:
        """Connect in the background, then read until the end."""
        self._reader = threading.Thread(target=self._read, args=(connect,), name=f"read {self.host.name}", daemon=True)
        try:
            self._reader.start()
        except RuntimeError:
            self._lose(_NO_THREAD)

    def send(self, message: AgentCommand) -> None:
        if not isinstance(message, Heartbeat):
            self.pass_on(encode(message))
        elif self._stream is not None and not self._closed:
            self._heartbeats.put(encode(message))
            self.pass_on(())

    def pass_on(self, frames: bytes | Sequence[bytes]) -> None:
        """Write a message, or one of many frames, which must not delay heartbeats; without frames: a heartbeat."""
        if self._stream is not None and not self._closed:
            self._queued += 1
            self._outgoing.put(frames)

    @property
    def idle(self) -> bool:
        """True if all messages are written; for the loop."""
        return self._written == self._queued

    def close(self) -> None:
        """End the stream once all messages are written. The reader releases the connection when the agent ends."""
        if not self._closed:
            self._closed = True
            self._outgoing.put(None)

    def released(self, deadline: float) -> bool:
        """Wait until the connection is released, at most until `deadline`; return whether it is, or was never made.

        An attempt to connect has its own time limit.
        """
        if self._stream is not None and self._reader is not None:
            self._reader.join(max(0.0, deadline - time.monotonic()))
            return not self._reader.is_alive()
        return True

    def attempted(self, deadline: float) -> None:
        """Wait until `deadline` for the end of an attempt to connect that is no longer needed."""
        if self._stream is None and self._reader is not None and self._reader.is_alive():
            self._reader.join(max(0.0, deadline - time.monotonic()))

    def release(self, after_s: float = 0.0) -> threading.Thread:
        """Give up the agent and release the connection in the returned thread, since that may block."""
        stream = self._stream
        assert stream is not None

        def give_up() -> None:
            if not self.released(time.monotonic() + after_s):
                stream.finish(0.0)

        thread = threading.Thread(target=give_up, name=f"release {self.host.name}", daemon=True)
        thread.start()
        return thread

    def _lose(self, reason: str) -> None:
        """Report the end of the stream; only the first report of a link counts for the job."""
        self._events.put(Lost(self.host.name, self._number, reason))

    # In the reader's thread

    def _read(self, connect: Callable[[], Stream]) -> None:
        try:
            stream = connect()
        except Exception as error:  # an unexpected failure of a host must be reported, too
            self._lose(_reason(error))
            return
        if self._closed:  # given up meanwhile: its agent must not wait for us
            stream.finish(0.0)
            return
        self._stream = stream
        writer = threading.Thread(target=self._write, args=(stream,), name=f"write {self.host.name}", daemon=True)
        try:
            writer.start()
        except RuntimeError:
            self._lose(_NO_THREAD)
            stream.finish(0.0)
            return
        self._events.put(Connected(self.host.name, self._number, stream.our_address))
        try:
            reason = self._pump(stream)
        except Exception as error:
            reason = _reason(error)
        self._read_all.set()
        self._lose(reason)
        stream.finish(LET_GO_S)

    def _pump(self, stream: Stream) -> str:
        """Read until the end; return why it ended."""
        decoder, trees = Decoder(), getattr(stream, "trees", ())
        greeted = said_bye = False
        while data := stream.read():
            for message in decoder.feed(data):
                greeted = True
                if trees:
                    message = with_paths_here(message, trees)
                said_bye = said_bye or isinstance(message, Bye)
                if isinstance(message, Output):
                    if self._closed or self._output is None:  # given up: its ranks may run on another host by now
                        continue
                    self.waiting = True
                    self._output.write(message.rank, message.stream, message.data)
                    self.waiting = False
                elif isinstance(message, Asks):
                    if not self._closed and self._shows_prompts and self._output is not None:
                        (self._output.ask if message.waits else self._output.withdraw)(message.rank)
                else:
                    # The job ignores messages that are not an agent's.
                    self._events.put(AgentMessage(self.host.name, self._number, message))  # type: ignore[arg-type]
        if said_bye:
            return "ended"
        return self._why_ended(stream, decoder, greeted)

    def _why_ended(self, stream: Stream, decoder: Decoder, greeted: bool) -> str:
        status, words = stream.finish(2.0)
        if greeted:
            last = [line.strip() for line in words.splitlines() if line.strip()]
            how = "the connection closed" if status is None else f"its agent ended with status {status}"
            if status == 128 + signal.SIGKILL:
                how = "its agent was killed"
            return f"{how}{': ' + last[-1] if last else ''}"
        return why_not_started(self._python, status, words, decoder.noise)

    # In the writer's thread

    def _write(self, stream: Stream) -> None:
        try:
            stream.write(PREAMBLE)
            while (data := self._outgoing.get()) is not None:
                if isinstance(data, bytes):
                    stream.write(data)
                else:
                    self._write_frames(stream, data)
                self._written += 1
            stream.end()
        except Exception as error:
            if not self._read_all.wait(READER_FIRST_S):
                self._lose(_reason(error))
                stream.finish(0.0)  # a blocked read returns

    def _write_frames(self, stream: Stream, frames: Sequence[bytes]) -> None:
        """Write frames, and before each of them the waiting heartbeats, which would otherwise follow all frames."""
        if not frames:
            with contextlib.suppress(queue.Empty):  # it was written between frames
                stream.write(self._heartbeats.get_nowait())
        for frame in frames:
            while not self._heartbeats.empty():
                stream.write(self._heartbeats.get_nowait())
            stream.write(frame)


def close_links(links: Sequence[Link]) -> None:
    """Give up all hosts, and wait for all together. Blocks no longer for many than for one."""
    for link in links:
        link.close()
    deadline = time.monotonic() + ATTEMPT_S
    for link in links:
        link.attempted(deadline)
    deadline = time.monotonic() + END_S
    stuck = [link.release() for link in links if not link.released(deadline)]
    deadline = time.monotonic() + END_S
    for thread in stuck:
        thread.join(max(0.0, deadline - time.monotonic()))


def _reason(error: Exception) -> str:
    """Return the reason for `Lost`; an unexpected error with the name of its type."""
    if isinstance(error, HostError):
        return error.reason
    return str(error) if isinstance(error, DtrainError) else f"{type(error).__name__}: {error}"
