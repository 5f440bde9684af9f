"""The link to one host of `dtrain check`: requests to its examiner and the answers, and the offset of its clock.

Used by one thread per host (command.py). Every wait has a deadline; closing it ends the examiner.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from launcher.controller.link import Link, close_links
from launcher.decode import decode_value
from launcher.errors import HostError
from launcher.hosts.host import Host
from launcher.job.events import AgentMessage, Connected, Event, Lost
from launcher.protocol.message import Message
from launcher.protocol.reports import Hello
from launcher.protocol.two_way import Answer, Question
from launcher.timeline.clock_offset import ClockOffset
from launcher.transport.connect import Connector

ROUND_TRIPS = 8
CONNECT_S = 1.0  # beyond the deadline: the connector reports better why it takes so long


@dataclass(frozen=True)
class Clock:
    """The offset of a host's clock ahead of ours, plus or minus `uncertainty_s`."""

    offset_s: float
    uncertainty_s: float
    round_trip_s: float


class HostLink:
    """The link to one examiner. Not thread-safe."""

    def __init__(self, host: Host, python: str) -> None:
        self.host = host
        self.our_address: str | None = None
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._link = Link(host, 1, python=python, events=self._events)

    def open(self, connector: Connector, deadline: float) -> Hello:
        """Connect and wait for the greeting. Raises HostError."""
        self._link.open(lambda: connector.connect(self.host, deadline))
        connected = self._next(deadline + CONNECT_S)
        assert isinstance(connected, Connected)
        self.our_address = connected.our_address
        greeting = self._hear(deadline)
        if not isinstance(greeting, Hello):
            raise HostError(self.host.name, f"sent {greeting.kind} instead of a greeting")
        return greeting

    def ask(self, deadline: float, ask: str, **about: Any) -> Any:
        """Send a request and return the answer, decoded from JSON. Raises HostError."""
        self._link.send(Question(ask, about))
        answer = self._hear(deadline)
        if not isinstance(answer, Answer):
            raise HostError(self.host.name, f"sent {answer.kind} instead of an answer")
        if answer.problem:
            raise HostError(self.host.name, f"could not answer: {answer.problem}")
        return answer.value

    def find_clock(self, deadline: float) -> Clock:
        """Compare the clocks by the fastest of several requests."""
        clock = ClockOffset()
        for _ in range(ROUND_TRIPS):
            asked = time.time()
            theirs = decode_value(float, self.ask(deadline, ask="time"))
            clock.hear(theirs, time.time(), asked=asked, asked_at=theirs)
        return Clock(-clock.offset_s, clock.error_s, 2 * clock.error_s)

    def _hear(self, deadline: float) -> Message:
        event = self._next(deadline)
        assert isinstance(event, AgentMessage)
        return cast(Message, event.message)

    def _next(self, deadline: float) -> Event:
        """Return the next event. Raises HostError at the end of the link, and at the deadline."""
        try:
            event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise HostError(self.host.name, "did not answer in time; see --start-timeout-s") from None
        if isinstance(event, Lost):
            raise HostError(self.host.name, event.reason)
        return event


def close_all(links: Iterable[HostLink]) -> None:
    """End the examiners by closing their input, and release everything. Any thread may call it."""
    close_links([link._link for link in links])
