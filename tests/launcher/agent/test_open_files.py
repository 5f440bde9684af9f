"""What a real agent has open for each worker, and that it survives a limit of open files without leaving any open."""

import os
import resource
import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from testbed.agent import AgentProcess
from testbed.processes import wait_until

from launcher.agent.cleanup.run_tag import RunTag
from launcher.agent.host_facts import FILES_EACH
from launcher.agent.workers.warm_start import ForkServer, Warmth
from launcher.agent.workers.worker import make_fifo, spawn
from launcher.protocol.commands import StartWorker
from launcher.protocol.message import Report
from launcher.protocol.reports import Exited, Started, StoreFailed

WAITS = "import time\ntime.sleep(600)\n"
AT_MOST = 16  # descriptors that a start needs


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    with AgentProcess(tmp_path) as agent:
        agent.prepare()
        yield agent


def open_files(pid: int) -> set[int]:
    return {int(name) for name in os.listdir(f"/proc/{pid}/fd")}


def held_files(pid: int) -> set[int]:
    """Return those that stay open: an agent reads files in /proc now and then."""
    looks = []
    for _ in range(20):
        looks.append(open_files(pid))
        time.sleep(0.01)
    return set.intersection(*looks)


@contextmanager
def room_for(pid: int, files: int) -> Iterator[None]:
    """Let a process open so many files more for a while."""
    used = open_files(pid)
    unused = [number for number in range(max(used) + files + 2) if number not in used]
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (unused[files], before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def test_the_limit_of_open_files_limits_a_host_s_workers(agent: AgentProcess) -> None:
    agent.start(WAITS, rank=0)
    before = len(held_files(agent.pid))
    for rank in (1, 2, 3):
        agent.start(WAITS, rank=rank)
    assert len(held_files(agent.pid)) == before + 3 * FILES_EACH
    agent.end_attempt()


def test_a_store_without_descriptors_is_reported(agent: AgentProcess) -> None:
    before = held_files(agent.pid)
    failed = []
    for files in range(AT_MOST):
        opened = agent.open_store(files)
        with room_for(agent.pid, files), socket.create_connection((opened.address, opened.port)) as client:
            client.settimeout(60)
            if files < 6:  # both ends of the control, of its stderr, and of what tells that it was executed
                failed.append(agent.expect(StoreFailed))
                with pytest.raises(ConnectionResetError):
                    client.recv(1)
            else:
                wait_until(lambda: len(held_files(agent.pid)) == len(before) + 2, "its process runs")
        agent.end_attempt(files)
        if files >= 6:
            break
        assert held_files(agent.pid) == before
    assert {message.reason for message in failed} == {
        "its process cannot be started: Too many open files; see ulimit -n and -u"
    }


def test_a_worker_without_descriptors_leaves_none_open(agent: AgentProcess) -> None:
    before = held_files(agent.pid)
    script = agent.folder / "script.py"
    script.write_text(WAITS)
    for files in range(AT_MOST):
        with room_for(agent.pid, files):
            agent.tell(StartWorker(rank=0, attempt=files, through="script", argv=[str(script)], env={}, defaults={}))
            answer = agent.expect(Report, lambda message: isinstance(message, Started | Exited))
        if not isinstance(answer, Exited):
            break
        assert "Too many open files" in str(answer.error)
        agent.end_attempt(files)
        assert held_files(agent.pid) == before
    assert FILES_EACH <= files < AT_MOST
    agent.end_attempt(files)


def test_a_failed_fork_leaves_no_descriptor_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    before = open_files(os.getpid())
    monkeypatch.setattr(os, "fork", fork)
    with pytest.raises(BlockingIOError):
        spawn(["true"], {}, cwd="/", stdout=1, stderr=2)
    assert open_files(os.getpid()) == before


def test_what_is_missing_at_a_start_is_named(tmp_path: Path) -> None:
    """The folder or the program, and the file of a FIFO whose folder is gone."""
    for argv, cwd, named in ((["/bin/true"], "/gone", "/gone"), (["/gone/true"], "/", "/gone/true")):
        with pytest.raises(FileNotFoundError) as raised:
            spawn(argv, {}, cwd=cwd, stdout=1, stderr=2)
        assert raised.value.filename == named
    path = tmp_path / "gone/fifo"
    with pytest.raises(FileNotFoundError) as raised:
        make_fifo(path)
    assert raised.value.filename == str(path)


@pytest.mark.parametrize("files", range(3))
def test_a_fork_that_cannot_be_asked_for_leaves_none_open(files: int) -> None:
    with selectors.DefaultSelector() as selector:
        fork_server = ForkServer(RunTag("0" * 32, None), selector, Warmth())
        before = open_files(os.getpid())
        with room_for(os.getpid(), files), pytest.raises(OSError, match="Too many open files"):
            fork_server.fork(["true"], {}, cwd="/", stdout=1, stderr=2)
        assert open_files(os.getpid()) == before
