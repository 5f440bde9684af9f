"""However a stream ends, and whatever goes wrong in a thread of its link, the controller gets to know it."""

import os
import queue
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from testbed.processes import wait_until
from testbed.sshd import SshHosts

from launcher.controller.link import Link, close_links
from launcher.errors import HostError, StreamError
from launcher.hosts.host import Host, HostKind
from launcher.job.events import Connected, Event, Lost
from launcher.output.console import Console
from launcher.output.logfiles import LogFiles
from launcher.output.writer import OutputThread
from launcher.placement.job_spec import SshOptions
from launcher.protocol.commands import Suspend
from launcher.protocol.frames import encode
from launcher.protocol.message import PREAMBLE
from launcher.protocol.two_way import Heartbeat
from launcher.transport.srun import Srun, SrunStream
from launcher.transport.ssh.stream import SshStream, connect_ssh
from launcher.transport.stream import Stream

WAIT_S = 60.0


class FakeStream:
    """A stream whose agent says nothing and does not end until it is given up; its users see what they are made to."""

    our_address: str | None = None

    def __init__(
        self, *, reads: Exception | None = None, writes: Exception | None = None, gate: threading.Barrier | None = None
    ) -> None:
        self.reads, self.writes, self.gate = reads, writes, gate
        self.finished = threading.Event()
        self.passed = gate is None

    def read(self) -> bytes:
        if self.reads is None:
            self.finished.wait()
            return b""
        raise self.reads

    def write(self, data: bytes) -> None:
        if self.writes is not None:
            raise self.writes

    def end(self) -> None:
        self.write(b"")

    def finish(self, wait_s: float) -> tuple[int | None, str]:
        if not self.finished.is_set() and self.gate is not None:
            self.gate.wait(WAIT_S)
            self.passed = True
        self.finished.set()
        return None, ""


@pytest.fixture
def output() -> Iterator[OutputThread]:
    logs = LogFiles(Path(os.devnull), lambda _: None)
    logs.usable = False
    with open(os.devnull, "wb") as nowhere:
        output = OutputThread(Console(out=nowhere.fileno(), err=nowhere.fileno()), logs)
        output.start()
        yield output
        output.close()


def opened(stream: Stream, events: "queue.SimpleQueue[Event]", output: OutputThread) -> Link:
    link = Link(Host("a", HostKind.SSH), 1, python="python3", events=events, output=output)
    link.open(lambda: stream)
    assert events.get(timeout=WAIT_S) == Connected("a", 1, stream.our_address)
    return link


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (StreamError("the connection broke: Broken pipe"), "the connection broke: Broken pipe"),
        (RuntimeError("nobody thought of it"), "RuntimeError: nobody thought of it"),
    ],
)
@pytest.mark.parametrize("where", ["reads", "writes"])
def test_an_error_in_either_thread_is_the_reason_of_the_loss(
    where: str, error: Exception, reason: str, output: OutputThread
) -> None:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    stream = FakeStream(**{where: error})  # type: ignore[arg-type]
    link = opened(stream, events, output)
    assert events.get(timeout=WAIT_S) == Lost("a", 1, reason)
    assert stream.finished.wait(WAIT_S)
    link.close()
    assert link.released(time.monotonic() + WAIT_S)


def test_a_link_is_idle_only_when_all_messages_are_written(output: OutputThread) -> None:
    """dtrain stops itself at Ctrl-Z once its links are idle: the order to suspend must be on its way by then."""
    may_pass, begun = threading.Semaphore(0), threading.Semaphore(0)

    class Slow(FakeStream):
        def write(self, data: bytes) -> None:
            if data != PREAMBLE and data:
                begun.release()
                assert may_pass.acquire(timeout=WAIT_S)

    link = opened(Slow(), queue.SimpleQueue(), output)
    link.send(Suspend(suspended=True))
    link.send(Suspend(suspended=True))
    for _ in range(2):
        assert begun.acquire(timeout=WAIT_S)
        assert not link.idle
        may_pass.release()
    wait_until(lambda: link.idle, "all is written")
    close_links([link])


def test_many_frames_hold_no_heartbeat_up(output: OutputThread) -> None:
    may_pass, begun = threading.Semaphore(0), threading.Semaphore(0)
    written: list[bytes] = []

    class Slow(FakeStream):
        def write(self, data: bytes) -> None:
            if data != PREAMBLE and data:
                written.append(data)
                begun.release()
                assert may_pass.acquire(timeout=WAIT_S)

    link = opened(Slow(), queue.SimpleQueue(), output)
    first, second, third = Heartbeat(1.0), Heartbeat(2.0), Heartbeat(3.0)
    link.pass_on([b"one", b"two", b"three"])
    assert begun.acquire(timeout=WAIT_S)
    for message in (first, Suspend(suspended=True), second):
        link.send(message)
    may_pass.release(6)
    wait_until(lambda: link.idle, "all is written")
    link.send(third)
    may_pass.release()
    wait_until(lambda: link.idle, "the last one is written")
    beats = [encode(first), encode(second)]
    assert written == [b"one", *beats, b"two", b"three", encode(Suspend(suspended=True)), encode(third)]
    close_links([link])


def test_all_links_are_given_up_at_once(output: OutputThread) -> None:
    gate = threading.Barrier(8)
    streams = [FakeStream(gate=gate) for _ in range(gate.parties)]
    links = [opened(stream, queue.SimpleQueue(), output) for stream in streams]
    close_links(links)
    assert all(stream.passed for stream in streams)
    assert all(link.released(time.monotonic() + WAIT_S) for link in links)


def test_a_connect_under_way_at_the_end_is_waited_for_briefly(
    output: OutputThread,
) -> None:
    may_end, ended = threading.Event(), threading.Event()

    def connect() -> Stream:
        assert may_end.wait(WAIT_S)
        time.sleep(0.3)  # as for `ssh -G` to answer
        ended.set()
        raise HostError("a", "it is too late")

    links = [Link(Host("a", HostKind.SSH), 1, python="", events=queue.SimpleQueue(), output=output) for _ in range(2)]
    for link in links:
        link.open(connect)
    began = time.monotonic()
    close_links(links)
    assert not ended.is_set()
    assert time.monotonic() - began < WAIT_S / 2
    may_end.set()
    close_links(links)
    assert ended.is_set()


def stalled(ssh_hosts: SshHosts, command: str) -> SshStream:
    """A channel that is open, of a connection that is in the middle of a key exchange which does not go on."""
    options = SshOptions(config=ssh_hosts.ssh_config)
    stream = connect_ssh(Host("node1", HostKind.SSH), options, ["sh", "-c", command], time.monotonic() + WAIT_S)
    transport = stream._connection.transport
    transport.clear_to_send_timeout = 0.2
    transport.clear_to_send.clear()
    return stream


def test_a_stalled_key_exchange_loses_the_host_on_writing(ssh_hosts: SshHosts, output: OutputThread) -> None:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    link = opened(stalled(ssh_hosts, "cat"), events, output)
    lost = Lost("a", 1, "the connection broke: Key-exchange timed out waiting for key negotiation")
    assert events.get(timeout=WAIT_S) == lost
    assert link.released(time.monotonic() + WAIT_S)


def read_all(stream: Stream) -> bytes:
    return b"".join(iter(stream.read, b""))


def test_a_stalled_key_exchange_loses_the_host_on_reading(ssh_hosts: SshHosts) -> None:
    stream = stalled(ssh_hosts, "yes")
    with pytest.raises(StreamError, match="Key-exchange timed out"):
        read_all(stream)  # what is read makes room, and the other end has to know
    stream.finish(0.0)


def test_an_srun_is_awaited_at_any_descriptor() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    with ExitStack() as many:
        try:
            for _ in range(1100):
                many.enter_context(open(os.devnull, "rb"))
            stream = SrunStream(["echo", "up"], os.environ, finished=lambda _: None)
            assert stream.answers(time.monotonic() + WAIT_S)
            assert read_all(stream) == b"up\n"
            assert stream.finish(WAIT_S)[0] == 0
            stream.end()
            silent = SrunStream(["sleep", "60"], os.environ, finished=lambda _: None)
            assert not silent.answers(time.monotonic() + 0.1)
            silent.finish(0.0)
            assert read_all(silent) == b""
            silent.end()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_silent_sruns_end_with_the_run_and_slurm_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, line in (("srun", "exec sleep 600"), ("scontrol", f"echo asked >> {tmp_path}/asked")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    job = {"JOB_ID": "12", "JOB_NODELIST": "n[1-2]", "JOB_NUM_NODES": "2", "TASKS_PER_NODE": "1(x2)"}
    for variable, value in job.items():
        monkeypatch.setenv(f"SLURM_{variable}", value)
    srun = Srun()
    ended: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def connect(name: str) -> None:
        try:
            stream = srun.connect(Host(name, HostKind.SRUN), ["agent"], time.monotonic() + 600)
        except HostError as error:
            ended.put(error.reason.encode())
        else:
            ended.put(read_all(stream))
            stream.end()

    before = set(psutil.Process().children())  # other tests may have left zombies, which have a name too

    def is_sleep(process: psutil.Process) -> bool:
        try:
            return process.name() == "sleep"
        except psutil.NoSuchProcess:  # scontrol ends while we look
            return False

    def sleeping() -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if child not in before and is_sleep(child)]

    threads = [threading.Thread(target=connect, args=(name,), daemon=True) for name in ("n1", "n2")]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(sleeping()) == 2, "both have begun", WAIT_S)
    srun.close()
    # The second: close() may come while connect() has started its srun and does no more.
    assert {ended.get(timeout=WAIT_S) for _ in threads} <= {b"", b"the run has ended"}
    for thread in threads:
        thread.join(WAIT_S)
    assert sleeping() == []
    assert (tmp_path / "asked").read_text() == "asked\n"
