"""One host of `dtrain check`: the stream to its examiner, questions and answers, and how far its clock is off.

Used by a thread for each host (command.py). Every wait has a deadline; closing it ends the examiner.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from dataclasses import dataclass
from typing import Any

from launcher.check.facts import FORMAT, GREETING, Greeting, read
from launcher.errors import HostError, ProtocolError
from launcher.hosts.host import Host
from launcher.placement.job_spec import JobSpec
from launcher.protocol import MAX_NOISE_BYTES
from launcher.transport.connect import Stream, connect

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

    def __init__(self, host: Host, spec: JobSpec) -> None:
        self.host = host
        self._spec = spec
        self._stream: Stream | None = None
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._noise = b""
        self._begun = False  # the greeting has come
        self._closed = False

    @property
    def our_address(self) -> str | None:
        return None if self._stream is None else self._stream.our_address

    def open(self, deadline: float) -> Greeting:
        """Connect and wait for the greeting. Raises HostError."""
        stream = connect(self.host, self._spec, deadline, [self._spec.python, "-m", "launcher.check.examiner"])
        self._stream = stream
        if self._closed:  # meanwhile
            self.close()
            raise HostError(self.host.name, "was given up")
        threading.Thread(target=self._read, args=(stream,), name=f"read {self.host.name}", daemon=True).start()
        greeting = self._line(deadline)
        if greeting is None:
            raise HostError(self.host.name, self._why_not_started())
        # Its fields may be another version's.
        if greeting.get("format") != FORMAT:
            version = greeting.get("version", "of another version")
            raise HostError(self.host.name, f"has dtrain {version}, whose `dtrain check` is another one")
        checked: Greeting = self._checked(Greeting, greeting)
        return checked

    def ask(self, deadline: float, **question: Any) -> Any:
        """Return the answer as JSON has it. Raises HostError."""
        assert self._stream is not None
        try:
            self._stream.write(json.dumps(question).encode() + b"\n")
        except OSError as error:
            raise HostError(self.host.name, f"the connection broke: {error.strerror or error}") from error
        return self._line(deadline)

    def find_clock(self, deadline: float) -> Clock:
        """Compare the clocks by the quickest of several questions."""
        best: Clock | None = None
        for _ in range(ROUND_TRIPS):
            asked, began = time.time(), time.monotonic()
            theirs = self._checked(float, self.ask(deadline, ask="time"))
            took_s = time.monotonic() - began
            if best is None or took_s < best.round_trip_s:
                best = Clock(theirs - (asked + took_s / 2), took_s / 2, took_s)
        assert best is not None
        return best

    def end(self) -> None:
        """End the examiner's input, by which it ends."""
        if self._stream is not None:
            with contextlib.suppress(OSError, EOFError):  # it has ended
                self._stream.end()

    def close(self) -> None:
        """End it and release everything. Any thread may call it, more than once."""
        self._closed = True
        self.end()
        if self._stream is not None:
            self._stream.finish(FINISH_S)

    # ---- lines ----

    def _line(self, deadline: float) -> Any:
        """Return what the next line says; None at the end if nothing was said before. Raises HostError."""
        try:
            line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise HostError(self.host.name, "did not answer in time; see --start-timeout-s") from None
        if line is None:
            if not self._begun:
                return None
            raise HostError(self.host.name, "the connection closed before all was answered")
        try:
            said = json.loads(line)
            if "problem" in said:
                raise HostError(self.host.name, f"could not answer: {said['problem']}")
            return said["is"]
        except (ValueError, KeyError, TypeError) as error:
            raise HostError(self.host.name, f"said {line[:80]!r} where an answer was due") from error

    def _checked(self, cls: type[Any], value: object) -> Any:
        try:
            return read(cls, value)
        except ProtocolError as error:
            raise HostError(self.host.name, str(error)) from error

    def _read(self, stream: Stream) -> None:
        """Read to the end, in a thread of its own; what comes before the greeting is noise of a login shell."""
        buffer = b""
        with contextlib.suppress(OSError, EOFError):  # it broke, which is an end as well
            while data := stream.read():
                buffer += data
                if not self._begun:
                    start = buffer.find(GREETING)
                    self._noise = buffer if start < 0 else buffer[:start]
                    if start < 0:
                        if len(buffer) > MAX_NOISE_BYTES:
                            break
                        continue
                    self._begun, buffer = True, buffer[start + len(GREETING) :]
                *lines, buffer = buffer.split(b"\n")
                for line in lines:
                    self._lines.put(line)
        self._lines.put(None)

    def _why_not_started(self) -> str:
        assert self._stream is not None
        status, words = self._stream.finish(FINISH_S)
        python = self._spec.python
        if status in (126, 127):
            return f"there is no Python at {python}; name the one that has dtrain with --python"
        if "No module named launcher.check.examiner" in words:
            return f"{python} there has an older dtrain, without `dtrain check`"
        if "No module named" in words:
            return f"{python} there has no dtrain"
        said = [line.strip() for line in words.splitlines() if line.strip()]
        noise = self._noise.decode("utf-8", "replace").strip().splitlines()
        last = (said or noise or ["it said nothing"])[-1]
        return f"the examiner did not start (status {status}): {last}"
