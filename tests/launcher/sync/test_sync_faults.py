"""Networks that fail, and very many files, while `dtrain run --sync` sends them to real SSH hosts."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from testbed.network import NetworkHosts
from testbed.processes import run_dtrain, started_dtrain, wait_until
from testbed.sshd import BareHosts

LARGE_BYTES = 200 << 20
FILES = 50_000


def _is_arriving(hosts: NetworkHosts) -> bool:
    with suppress(FileNotFoundError):  # it has just got its last name
        return any(path.stat().st_size for path in (hosts.folder / "far1").rglob("large.bin"))
    return False


def _receivers(hosts: NetworkHosts) -> list[psutil.Process]:
    found = []
    for process in hosts.processes("far1"):
        with suppress(psutil.Error):  # it has just ended
            if any("marshal.loads" in arg for arg in process.cmdline()):
                found.append(process)
    return found


@contextmanager
def _in_the_middle(hosts: NetworkHosts) -> Iterator[None]:
    """Wait until a part of the file is there, and let no more arrive meanwhile."""
    wait_until(lambda: _is_arriving(hosts), "a part of the file is there")
    receivers = _receivers(hosts)
    for process in receivers:
        process.suspend()
    yield
    for process in receivers:
        process.resume()


@pytest.fixture
def argv(network_hosts: NetworkHosts, tmp_path: Path) -> list[str]:
    shutil.rmtree(network_hosts.folder / "far1/home/.cache", ignore_errors=True)
    (tmp_path / "large.bin").write_bytes(os.urandom(LARGE_BYTES))
    (tmp_path / "train.py").write_text("import os\nprint(os.path.getsize('large.bin'))")
    return ["run", "--sync", "code", "--hosts", "far1", "--ssh-config", str(network_hosts.ssh_config), "train.py"]


def test_a_transfer_goes_on_after_a_break_of_the_network(
    network_hosts: NetworkHosts, argv: list[str], tmp_path: Path
) -> None:
    with started_dtrain(*argv, cwd=tmp_path) as process:
        with _in_the_middle(network_hosts):
            network_hosts.cut("far1")
        time.sleep(3)
        network_hosts.mend("far1")
        stdout, stderr = process.communicate(timeout=60)
    assert stdout == b"[far1:0] %d\n" % LARGE_BYTES, stderr


def test_after_a_lost_network_the_next_run_succeeds(
    network_hosts: NetworkHosts, argv: list[str], tmp_path: Path
) -> None:
    with started_dtrain(argv[0], "--start-timeout-s", "40", *argv[1:], cwd=tmp_path, outlived=True) as process:
        with _in_the_middle(network_hosts):
            network_hosts.drop("far1")
        _, stderr = process.communicate(timeout=100)
        assert process.returncode == 1
        network_hosts.mend("far1")
    wait_until(lambda: not _receivers(network_hosts), "the receiver has heard that the connection is gone")
    assert b"far1: no byte arrived for 30 s while files were sent; start the run again: it goes on" in stderr
    again = run_dtrain(*argv, cwd=tmp_path)
    assert again.stdout == f"[far1:0] {LARGE_BYTES}\n", again.stderr


def test_a_project_of_50_000_files_is_sent_and_found_unchanged(bare_hosts: BareHosts) -> None:
    project = bare_hosts.here / "many"
    (project / "data").mkdir(parents=True)
    (project / "train.py").write_text("import os\nprint(len(os.listdir('data')))")
    (project / "data/0").touch()
    for number in range(1, FILES):
        os.link(project / "data/0", project / f"data/{number}")
    for _ in range(2):
        options = ["--sync", "code", "--hosts", "node1", "--ssh-config", str(bare_hosts.ssh_config)]
        result = run_dtrain("run", *options, "train.py", cwd=project)
        assert result.stdout == f"[node1:0] {FILES}\n", result.stderr
