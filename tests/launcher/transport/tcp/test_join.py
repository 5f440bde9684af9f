"""A node that was started by hand lends itself to a run: real processes that join a real listener."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from testbed import REPOSITORY
from testbed.cable import Cable
from testbed.ports import free_port
from testbed.processes import Program, Result, started, wait_until

from launcher.errors import HostError, StreamError
from launcher.protocol.commands import Prepare, StartWorker, Stop
from launcher.protocol.frames import Decoder
from launcher.protocol.frames import encode as frame
from launcher.protocol.message import PREAMBLE, Message
from launcher.protocol.reports import Exited, Facts, Hello, Output
from launcher.transport.tcp.joined_node import JoinedStream
from launcher.transport.tcp.listener import Listener
from launcher.transport.tcp.rendezvous import Endpoint, publish

TOKEN = "canary-0123456789-canary"
JOINER = """
import functools, os, sys, time
from pathlib import Path
from launcher.errors import DtrainError
from launcher.transport.tcp.greeting import Greeting
from launcher.transport.tcp.relay import join
from launcher.transport.tcp.rendezvous import Endpoint, read_endpoint

where, deadline_s, rejoin_s, *command = sys.argv[1:]
token = os.environ["DTRAIN_TOKEN"]
host, _, port = where.rpartition(":")
find = Endpoint(host, int(port), token) if host else functools.partial(read_endpoint, Path(where), "run")
try:
    code = join(find, greeting=Greeting.ours(1, {"command": "x"}), agent_command=command,
                deadline=time.monotonic() + float(deadline_s), rejoin_s=float(rejoin_s),
                notify=lambda text: print(text, flush=True), env=os.environ)
except DtrainError as error:
    print(error, file=sys.stderr)
    code = error.exit_code
sys.exit(code)
"""
# Says that it has started, then returns what it gets, and says so when that is over.
ECHO = """
import os, sys
os.write(1, b"started %d\\n" % os.getpid())
while data := os.read(0, 1 << 16):
    while data:
        data = data[os.write(1, data):]
os.write(1, b"ended\\n")
os.write(2, b"its words")
sys.exit(5)
"""
FLOOD = "import os, select\nwhile not select.select([0], [], [], 0)[0]: os.write(1, bytes(1 << 16))"
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(100)"


class Run:
    """Node 0 of a run: its listener, with one other slot."""

    def __init__(self, port: int = 0) -> None:
        self.shown: list[str] = []
        self.listener = Listener(
            "127.0.0.1", port, TOKEN.encode(), expected={"command": "x"}, nodes=["a", "b"], notify=self.shown.append
        )

    def wait(self, within_s: float = 60.0) -> JoinedStream:
        return self.listener.wait("b", time.monotonic() + within_s)

    @contextlib.contextmanager
    def joiner(self, code: str = ECHO, **how: Any) -> Iterator[Program]:
        with joiner(f"127.0.0.1:{self.listener.port}", [sys.executable, "-c", code], **how) as process:
            yield process


@contextlib.contextmanager
def joiner(
    where: str, command: list[str], *, token: str = TOKEN, deadline_s: float = 60, rejoin_s: float = 60
) -> Iterator[Program]:
    argv = [sys.executable, "-c", JOINER, where, str(deadline_s), str(rejoin_s), *command]
    with started(*argv, env={"DTRAIN_TOKEN": token}, cwd=REPOSITORY) as process:
        yield process


def finished(process: Program) -> Result:
    out, err = process.communicate(timeout=60)
    return Result(process.returncode, out.decode(), err.decode(), 0.0)


@pytest.fixture
def run() -> Iterator[Run]:
    run = Run()
    try:
        yield run
    finally:
        run.listener.close(1, linger_s=0.0)


def read_until(stream: JoinedStream, end: bytes) -> bytes:
    data = b""
    while end not in data:
        more = stream.read()
        assert more, data
        data += more
    return data


class Agent:
    """A real agent at the other end of a stream, and all that it has said."""

    def __init__(self, stream: JoinedStream) -> None:
        self.stream = stream
        self.messages: list[Message] = []
        self._decoder = Decoder()
        stream.write(PREAMBLE)
        self.await_(Hello)
        prepare = Prepare(
            run_id="r", workdir="/", script=None, program="/bin/sh", export={}, grace_s=0.5, lease_s=0.0,
            lost_agents=[], part=0, parts=1, interfaces=[],
        )  # fmt: skip
        stream.write(frame(prepare))
        self.await_(Facts)

    def start(self, script: str, **env: str) -> None:
        self.stream.write(frame(StartWorker(0, 0, "", ["/bin/sh", "-c", script], env, {})))

    def await_(self, kind: type[Message]) -> Message:
        while not (found := [message for message in self.messages if isinstance(message, kind)]):
            self._read()
        return found[0]

    def output(self, until: bytes) -> bytes:
        while until not in (said := b"".join(m.data for m in self.messages if isinstance(m, Output))):
            self._read()
        return said

    def _read(self) -> None:
        data = self.stream.read()
        assert data, self.messages
        self.messages += self._decoder.feed(data)


# ---- the real agent ------------------------------------------------------------------------------------------


def test_a_real_agent_runs_workers_and_passes_signals_on(run: Run) -> None:
    where = f"127.0.0.1:{run.listener.port}"
    with joiner(where, [sys.executable, "-m", "launcher.agent"]) as process:
        stream = run.wait()
        agent = Agent(stream)
        script = 'trap "echo got USR1; exit 3" USR1; env; echo up; while :; do sleep 0.02; done'
        agent.start(script, X="x" * 100_000)
        said = agent.output(until=b"\nup\n")
        assert f"SSH_CONNECTION=127.0.0.1 {run.listener.port} 127.0.0.1 {process_port(process.pid)}\n".encode() in said
        assert TOKEN.encode() not in said
        process.send_signal(signal.SIGUSR1)
        agent.output(until=b"got USR1")
        exited = agent.await_(Exited)
        assert isinstance(exited, Exited)
        assert exited.status == 3
        assert process.poll() is None
        stream.write(frame(Stop(signum=signal.SIGKILL)))
        while stream.read():
            pass
        assert stream.finish(60.0) == (0, "")
        run.listener.close(3, "it failed on node 0")
        result = finished(process)
    assert (result.returncode, result.stderr) == (3, "")
    assert "as node rank 1" in result.stdout
    assert result.stdout.endswith("it failed on node 0\n")


@pytest.mark.parametrize("how", ["killed", "signalled"])
def test_nothing_stays_of_a_node_that_is_killed_or_signalled(run: Run, how: str) -> None:
    with joiner(f"127.0.0.1:{run.listener.port}", [sys.executable, "-m", "launcher.agent"]) as process:
        stream = run.wait()
        agent = Agent(stream)
        agent.start("echo $$; sleep 100")
        worker = psutil.Process(int(agent.output(until=b"\n")))
        if how == "killed":
            process.kill()
        else:
            process.send_signal(signal.SIGINT)
            rest = b"".join(iter(lambda: stream.read(), b""))
            assert b"it received SIGTERM" in rest
            assert stream.finish(60.0) == (0, "")
        assert process.wait(60) == {"killed": -signal.SIGKILL, "signalled": 128 + signal.SIGINT}[how]
        wait_until(lambda: not worker.is_running(), "its worker is gone")


def process_port(pid: int) -> int:
    (connection,) = [c for c in psutil.Process(pid).net_connections("tcp") if c.raddr]
    return int(connection.laddr.port)


# ---- breaks --------------------------------------------------------------------------------------------------


def cable_to(run: Run) -> Cable:
    return Cable(f"127.0.0.1:{run.listener.port}")


def joiner_by(cable: Cable, **how: Any) -> contextlib.AbstractContextManager[Program]:
    return joiner(cable.address.removeprefix("tcp://"), [sys.executable, "-c", ECHO], **how)


def test_after_a_break_the_node_returns_with_another_agent(run: Run) -> None:
    with cable_to(run) as cable, joiner_by(cable) as process:
        stream = run.wait()
        first = int(read_until(stream, b"\n").split()[1])
        cable.cut()
        with pytest.raises(StreamError):
            read_until(stream, b"nothing more")
        cable.mend()
        stream = run.wait()
        assert not psutil.pid_exists(first)
        assert int(read_until(stream, b"\n").split()[1]) != first
        stream.end()
        assert read_until(stream, b"ended\n")
        assert stream.finish(60.0) == (5, "its words")
        run.listener.close(0, "")
        result = finished(process)
    assert result.returncode == 0
    assert "dialling again for 60 s" in result.stdout
    assert "as node rank 1 again" in result.stdout


def test_a_node_whose_run_never_comes_back_ends_with_an_error(run: Run) -> None:
    with contextlib.ExitStack() as stack:
        cable = stack.enter_context(cable_to(run))
        with joiner_by(cable, rejoin_s=2.0) as process:
            read_until(run.wait(), b"\n")
            stack.close()
            result = finished(process)
    assert result.returncode == 1
    assert "the connection to node 0 broke (" in result.stderr
    assert f"no process listens at {cable.address.removeprefix('tcp://')}" in result.stderr


# ---- finding node 0 ------------------------------------------------------------------------------------------


def test_the_order_of_start_does_not_matter() -> None:
    port = free_port()
    with joiner(f"localhost:{port}", [sys.executable, "-c", ECHO]) as process:
        wait_until(lambda: _catches(process.pid, signal.SIGTERM), "it dials")
        run = Run(port)
        try:
            read_until(run.wait(), b"started")
        finally:
            run.listener.close(4, "")
        result = finished(process)
    assert (result.returncode, result.stderr) == (4, "")


def test_why_a_node_cannot_join_is_said_with_what_to_do(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as foreign:

        def answer() -> None:
            sock, _ = foreign.accept()
            with sock:
                sock.sendall(b"SSH-2.0-OpenSSH_9.2p1\r\n")
                sock.recv(100)

        thread = threading.Thread(target=answer)
        thread.start()
        with contextlib.ExitStack() as stack:
            cases = [
                (joiner(f"127.0.0.1:{run.listener.port}", ["x"], token="another token entirely"), "has another token"),
                (joiner(f"127.0.0.1:{foreign.getsockname()[1]}", ["x"]), r"it sent 'SSH-2.0-OpenSSH_9.2p1'; is that"),
                (
                    joiner("127.0.0.1:1", ["x"], deadline_s=2.0),
                    "no process listens at 127.0.0.1:1; start dtrain on node 0",
                ),
                (joiner("no-such-host.invalid:1", ["x"], deadline_s=2.0), "DNS lookup of no-such-host.invalid failed"),
            ]
            processes = [(stack.enter_context(process), why) for process, why in cases]
            for process, why in processes:
                result = finished(process)
                assert result.returncode == 1, result
                assert why in result.stderr
                assert "canary" not in result.stderr + result.stdout
        thread.join(60.0)
    wait_until(lambda: run.shown, "node 0 says it too")
    assert "another token" in run.shown[0]


def test_a_stale_rendezvous_file_misleads_no_node_for_long(run: Run, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as foreign, contextlib.ExitStack() as stack:  # took a dead run's port
        foreign.settimeout(60.0)
        stale = Endpoint("127.0.0.1", foreign.getsockname()[1], "the token of a run that is no more")
        stack.enter_context(publish(tmp_path, "run", stale))
        process = stack.enter_context(joiner(str(tmp_path), [sys.executable, "-c", ECHO], token="-"))
        with foreign.accept()[0] as sock:
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        stack.enter_context(publish(tmp_path, "run", Endpoint("127.0.0.1", run.listener.port, TOKEN)))
        read_until(run.wait(), b"started")
        run.listener.close(0)
        assert finished(process).returncode == 0


# ---- signals, and what the agent does ------------------------------------------------------------------------


def test_a_node_that_waits_for_node_0_can_be_ended_by_a_signal() -> None:
    with joiner("127.0.0.1:1", ["x"]) as process:
        wait_until(lambda: _catches(process.pid, signal.SIGUSR2), "it waits")
        process.send_signal(signal.SIGUSR1)  # for workers, of which there are none
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM


def test_the_second_signal_kills_an_agent_that_does_not_end(run: Run) -> None:
    with run.joiner(STUBBORN) as process:
        stream = run.wait()
        read_until(stream, b"up")
        process.send_signal(signal.SIGINT)
        wait_until(lambda: _pending_none(process.pid), "the first one was taken")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGINT
        assert stream.finish(60.0)[0] == -signal.SIGKILL


def _catches(pid: int, signum: int) -> bool:
    return bool(_mask(pid, "SigCgt") >> (signum - 1) & 1)


def _pending_none(pid: int) -> bool:
    return not (_mask(pid, "SigPnd") or _mask(pid, "ShdPnd"))


def _mask(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1], 16)
    raise AssertionError(name)


def test_an_agent_that_cannot_start_is_an_error_on_both_ends(run: Run) -> None:
    with joiner(f"127.0.0.1:{run.listener.port}", ["/no/such/python"]) as process:
        stream = run.wait()
        assert stream.read() == b""
        status, words = stream.finish(60.0)
        result = finished(process)
    assert (status, result.returncode) == (127, 1)
    assert "cannot run /no/such/python" in words
    assert "cannot run /no/such/python here: No such file or directory; name the Python" in result.stderr
    with pytest.raises(HostError):
        run.wait(0.0)


def test_what_no_one_reads_waits_with_the_workers_that_write_it(run: Run) -> None:
    with run.joiner(FLOOD) as process:
        stream = run.wait()
        children = psutil.Process(process.pid).children
        wait_until(children, "the agent is there")
        wait_until(lambda: _idle(children()[0]), "it waits for its reader")
        assert psutil.Process(process.pid).memory_info().rss < 100 << 20
        assert sum(len(stream.read()) for _ in range(200)) > 4 << 20  # and goes on when it is read
        run.listener.close(0)
        assert finished(process).returncode == 0


def test_a_signal_ends_a_node_whose_output_no_one_reads(run: Run) -> None:
    with run.joiner(FLOOD) as process:
        stream = run.wait()
        wait_until(lambda: stream.full, "no more is taken")
        (agent,) = psutil.Process(process.pid).children()
        wait_until(lambda: _idle(agent), "it waits for its reader")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGINT


def _idle(process: psutil.Process) -> bool:
    before = sum(process.cpu_times()[:2])
    time.sleep(0.1)
    return sum(process.cpu_times()[:2]) == before


def test_all_bytes_come_through_unchanged_both_ways(run: Run) -> None:
    data = os.urandom(1 << 20) * 8
    with run.joiner(ECHO) as process:
        stream = run.wait()
        read_until(stream, b"\n")

        def write() -> None:
            stream.write(data)
            stream.end()

        writer = threading.Thread(target=write)
        writer.start()
        received = bytearray()
        while more := stream.read():
            received += more
        writer.join(60.0)
        assert bytes(received) == data + b"ended\n"
        assert stream.finish(60.0) == (5, "its words")
        run.listener.close(0)
        assert finished(process).returncode == 0
