"""One host's stream in the controller: what is told, and whether it is written."""

import queue
import threading
import time

from testbed.processes import wait_until

from launcher.controller.controller import _Link
from launcher.hosts.host import Host, HostKind
from launcher.job.events import Connected, Event
from launcher.output.console import Console
from launcher.output.logfiles import LogFiles
from launcher.output.writer import OutputThread
from launcher.placement.job_spec import Command, CommandKind, JobSpec


class Stream:
    """Keeps what is written to it; the order to suspend waits until it `may_pass`."""

    our_address = None

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.may_pass = threading.Event()
        self._ended = threading.Event()

    def read(self) -> bytes:
        self._ended.wait()
        return b""

    def write(self, data: bytes) -> None:
        if data == b"suspend":
            assert self.may_pass.wait(20)
        self.written.append(data)

    def end(self) -> None:
        self._ended.set()

    def finish(self, wait_s: float) -> tuple[int | None, str]:
        return 0, ""


class Queue(queue.SimpleQueue[bytes | None]):
    """Whoever asks whether it is empty is overtaken by another thread before it can use the answer."""

    def __init__(self) -> None:
        self.asked, self.may_know = threading.Event(), threading.Event()

    def empty(self) -> bool:
        answer = super().empty()
        self.asked.set()
        assert self.may_know.wait(20)
        return answer


def test_a_link_is_idle_only_when_all_that_was_told_is_written() -> None:
    """dtrain stops itself at Ctrl-Z once its links are idle: the order to suspend must be on its way by then."""
    host = Host("here", HostKind.LOCAL)
    spec = JobSpec(Command(CommandKind.SCRIPT, "t.py"), (host,), run_id="r", python="p")
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    output = OutputThread(Console(), LogFiles(spec.log_dir, lambda _: None))
    link, stream, outgoing = _Link(host, 1, spec, events, output, None), Stream(), Queue()
    link._outgoing = outgoing
    link.open(stream, 0.0)
    assert isinstance(events.get(timeout=20), Connected)
    link.tell(b"heartbeat")
    wait_until(lambda: b"heartbeat" in stream.written and (outgoing.asked.is_set() or link.idle), "it is written")
    link.tell(b"suspend")
    outgoing.may_know.set()
    watched_until = time.monotonic() + 0.2
    was_idle = False
    while not was_idle and time.monotonic() < watched_until:
        was_idle = link.idle
    stream.may_pass.set()
    wait_until(lambda: link.idle, "all is written")
    assert (was_idle, stream.written[-1]) == (False, b"suspend")
    link.close()
    link.finish(time.monotonic() + 20)
