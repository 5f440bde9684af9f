"""What is shown and said while files are sent."""

import os
import threading
from pathlib import Path

import pytest

from launcher.errors import HostError, StreamError
from launcher.hosts.host import Host, HostKind
from launcher.placement.job_spec import CommandKind, JobSpec, WorkerCommand
from launcher.sync.receiver import BEGIN
from launcher.transport import synced
from launcher.transport.sync_progress import Progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("launcher.transport.sync_progress.time.monotonic", lambda: now[0])
    return now


def test_one_line_is_for_all_hosts_and_the_job_has_the_time(clock: list[float]) -> None:
    progress, shown, spent = Progress(), list[str](), list[float]()
    progress.tell(say=shown.append, show=shown.append, wait=spent.append)
    progress.starts("alpha", 40 << 20)
    progress.starts("beta", 60 << 20)
    clock[0] += 1.5
    progress.sent("alpha", 10 << 20)
    progress.sent("beta", 10 << 20)  # too soon to be shown
    clock[0] += 0.5
    progress.sent("beta", 10 << 20)
    progress.ends("alpha")
    clock[0] += 0.5
    progress.sent("beta", 10 << 20)
    assert shown == [
        "sending files to 2 hosts: 10 of 100 MB",
        "sending files to 2 hosts: 30 of 100 MB",
        "sending files to beta: 30 of 60 MB",
    ]
    assert spent == [1.5, 0.5, 0.5]


def test_notes_wait_until_they_can_be_said() -> None:
    progress, said = Progress(), list[str]()
    progress.notes(["first"])
    assert said == []
    progress.tell(say=said.append, show=said.append, wait=lambda _: None)
    progress.notes(["second"])
    assert said == ["first", "second"]


class Silent:
    """A stream to a receiver that says this at most, and never more: its network is cut, or a signal stopped it."""

    our_address: str | None = None

    def __init__(self, says: bytes) -> None:
        self._here, self._there = os.pipe()
        os.write(self._there, says)
        self._is_finished = threading.Event()

    def read(self) -> bytes:
        return os.read(self._here, 4096)

    def write(self, data: bytes) -> None:
        self._is_finished.wait()
        raise StreamError("given up")

    def end(self) -> None:
        pass

    def finish(self, wait_s: float) -> tuple[int | None, str]:
        if not self._is_finished.is_set():
            self._is_finished.set()
            os.close(self._there)
        return None, ""


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        (BEGIN, r"no byte arrived for 0\.1 s while files were sent; start the run again"),
        (b"", r"let us in, but no byte arrived for 0\.1 s; does a start-up file of its shell"),
    ],
)
def test_a_cut_network_is_named(says: bytes, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(synced, "STALL_S", 0.1)
    (tmp_path / "train.py").touch()
    host = Host("alpha", HostKind.SSH)
    spec = JobSpec(WorkerCommand(CommandKind.SCRIPT, "train.py"), (host,), workdir=tmp_path, sync=("code",), run_id="r")
    with pytest.raises(HostError, match=reason):
        synced.Outgoing().begin(host, Silent(says), spec)
