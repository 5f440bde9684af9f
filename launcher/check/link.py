"""One host of `dtrain check`: the stream to its examiner, questions and answers, and how far its clock is off.

Used by a thread for each host (command.py). Every wait has a deadline; closing it ends the examiner.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from dataclasses import dataclass
from typing import Any

from launcher.decode import decode_value
from launcher.errors import HostError, ProtocolError, StreamError
from launcher.hosts.host import Host
from launcher.protocol.frames import Decoder, encode
from launcher.protocol.message import PREAMBLE, Message
from launcher.protocol.reports import Hello
from launcher.protocol.two_way import Answer, Question
from launcher.transport.connect import Connector, why_not_started
from launcher.transport.stream import Stream

__all__ = ["Clock", "HostLink"]

FINISH_S = 2.0
ROUND_TRIPS = 8


@dataclass(frozen=True)
class Clock:
    """How far a host's clock is ahead of ours, give or take `uncertainty_s`."""

    offset_s: float
    uncertainty_s: float
    round_trip_s: float


class HostLink:
    """The stream to one examiner. Everything but `close` is for one thread."""

    def __init__(self, host: Host, python: str) -> None:
        self.host = host
        self._python = python
        self._stream: Stream | None = None
        self._messages: queue.SimpleQueue[Message | ProtocolError | None] = queue.SimpleQueue()
        self._decoder = Decoder()
        self._closed = False

    @property
    def our_address(self) -> str | None:
        return None if self._stream is None else self._stream.our_address

    def open(self, connector: Connector, deadline: float) -> Hello:
        """Connect and wait for the greeting. Raises HostError."""
        stream = self._stream = connector.connect(self.host, deadline)
        if self._closed:  # meanwhile
            self.close()
            raise HostError(self.host.name, "was given up")
        threading.Thread(target=self._read, args=(stream,), name=f"read {self.host.name}", daemon=True).start()
        greeting = self._next(deadline)
        if greeting is None:
            reason = why_not_started(self._python, *stream.finish(FINISH_S), self._decoder.noise)
            raise HostError(self.host.name, reason)
        if not isinstance(greeting, Hello):
            raise HostError(self.host.name, f"said {greeting.kind} where a greeting was due")
        self._send(PREAMBLE)
        return greeting

    def ask(self, deadline: float, ask: str, **about: Any) -> Any:
        """Return the answer as JSON has it. Raises HostError."""
        self._send(encode(Question(ask, about)))
        answer = self._next(deadline)
        if not isinstance(answer, Answer):
            raise HostError(self.host.name, "the connection closed before all was answered")
        if answer.problem:
            raise HostError(self.host.name, f"could not answer: {answer.problem}")
        return answer.value

    def find_clock(self, deadline: float) -> Clock:
        """Compare the clocks by the quickest of several questions."""
        clocks = []
        for _ in range(ROUND_TRIPS):
            asked, began = time.time(), time.monotonic()
            theirs = decode_value(float, self.ask(deadline, ask="time"))
            took_s = time.monotonic() - began
            clocks.append(Clock(theirs - (asked + took_s / 2), took_s / 2, took_s))
        return min(clocks, key=lambda clock: clock.round_trip_s)

    def close(self) -> None:
        """End the examiner, by its input, and release everything. Any thread may call it, more than once."""
        self._closed = True
        if self._stream is not None:
            with contextlib.suppress(StreamError):  # it has ended
                self._stream.end()
            self._stream.finish(FINISH_S)

    def _send(self, data: bytes) -> None:
        assert self._stream is not None
        try:
            self._stream.write(data)
        except StreamError as error:
            raise HostError(self.host.name, str(error)) from error

    def _next(self, deadline: float) -> Message | None:
        """Return what it says next; None at the end. Raises HostError."""
        try:
            message = self._messages.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise HostError(self.host.name, "did not answer in time; see --start-timeout-s") from None
        if isinstance(message, ProtocolError):
            raise HostError(self.host.name, str(message)) from message
        return message

    def _read(self, stream: Stream) -> None:
        """Read to the end, in a thread of its own: not every stream can be given up while it is read."""
        try:
            with contextlib.suppress(StreamError):  # it broke, which is an end as well
                while data := stream.read():
                    for message in self._decoder.feed(data):
                        self._messages.put(message)
        except ProtocolError as error:
            self._messages.put(error)
        self._messages.put(None)
