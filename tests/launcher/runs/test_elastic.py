"""Hosts that are lost while a run goes on, that come back, come late, and step in for others: real sshd."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed.attempts_seen import AttemptsSeen
from testbed.processes import LEASE, started_dtrain
from testbed.sshd import SshHosts

# Says where it is; the attempt named on the command line is the last one.
SCRIPT = """\
import glob, os, sys, time
e = os.environ
names = ("TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE", "GROUP_RANK", "DTRAIN_HOST")
print("here", *(e[name] for name in names), flush=True)
deadline = time.monotonic() + 60
while time.monotonic() < deadline and e["TORCHELASTIC_RESTART_COUNT"] != sys.argv[1]:
    time.sleep(0.05)
time.sleep(0.5)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@contextlib.contextmanager
def _running(hosts: SshHosts, script: Path, *options: str, last: int, ends: int = 0) -> Iterator[AttemptsSeen]:
    """Run the script until its last attempt; the run ends with the exit code `ends`."""
    # A short lease: a host whose sshd is gone cannot be asked whether its workers are.
    common = ["--ssh-config", str(hosts.ssh_config), "--nproc-per-node", "1", *LEASE]
    with started_dtrain("run", *common, *options, script, str(last), cwd=script.parent) as process:
        seen = AttemptsSeen(process)
        yield seen
        assert process.wait(60) == ends, process.stderr.read()
        seen.said = process.stderr.read().decode()


def test_after_a_lost_host_the_next_attempt_is_without_it(ssh_hosts: SshHosts, script: Path) -> None:
    with _running(ssh_hosts, script, "--hosts", "node1,node2,node3", "--nnodes", "2:3", last=1) as seen:
        assert seen.attempt(0, 3) == {0: "node1", 1: "node2", 2: "node3"}
        ssh_hosts.stop(1)
        assert seen.attempt(1, 2) == {0: "node2", 1: "node3"}
    assert "host node1 was lost" in seen.said
    assert "attempt 1 begins on 2 hosts, without node1" in seen.said
    assert "node1 could not be checked" in seen.said


def test_a_returned_host_makes_an_attempt_with_grow(ssh_hosts: SshHosts, script: Path) -> None:
    with _running(ssh_hosts, script, "--hosts", "node1,node2", "--nnodes", "1:2", "--grow", last=2) as seen:
        assert seen.attempt(0, 2) == {0: "node1", 1: "node2"}
        ssh_hosts.stop(1)
        assert seen.attempt(1, 1) == {0: "node2"}
        ssh_hosts.start(1)
        assert seen.attempt(2, 2) == {0: "node2", 1: "node1"}  # who stayed keeps its rank
    assert "node1 has come" in seen.said


def test_a_returned_host_waits_for_the_next_attempt_without_grow(ssh_hosts: SshHosts, script: Path) -> None:
    with _running(ssh_hosts, script, "--hosts", "node1,node2,node3", "--nnodes", "1:3", last=2) as seen:
        seen.attempt(0, 3)
        ssh_hosts.stop(3)
        assert seen.attempt(1, 2) == {0: "node1", 1: "node2"}
        ssh_hosts.start(3)
        with pytest.raises(AssertionError):  # longer than the first pauses between two tries to reach it
            seen.attempt(2, 1, timeout=7)
        ssh_hosts.stop(1)
        assert seen.attempt(2, 2) == {0: "node3", 1: "node2"}  # it steps in for the lost one: node2 keeps its rank


def test_a_spare_steps_in_for_a_lost_host(ssh_hosts: SshHosts, script: Path) -> None:
    options = ("--hosts", "node1,node2,node3", "--nnodes", "2", "--max-restarts", "1")
    with _running(ssh_hosts, script, *options, last=1) as seen:
        assert seen.attempt(0, 2) == {0: "node1", 1: "node2"}
        ssh_hosts.stop(1)
        assert seen.attempt(1, 2) == {0: "node3", 1: "node2"}


def test_a_run_begins_with_enough_hosts_and_takes_a_late_one(ssh_hosts: SshHosts, script: Path) -> None:
    ssh_hosts.stop(2)
    with _running(ssh_hosts, script, "--hosts", "node1,node2", "--nnodes", "1:2", "--grow", last=1) as seen:
        assert seen.attempt(0, 1) == {0: "node1"}
        ssh_hosts.start(2)
        assert seen.attempt(1, 2) == {0: "node1", 1: "node2"}
    assert "node2 cannot be used for now" in seen.said


def test_too_few_hosts_end_the_run_and_say_which_are_missing(ssh_hosts: SshHosts, script: Path) -> None:
    options = ("--hosts", "node1,node2", "--nnodes", "2:3", "--start-timeout-s", "10")
    with _running(ssh_hosts, script, *options, last=1, ends=1) as seen:
        seen.attempt(0, 2)
        ssh_hosts.stop(2)
    assert "host node2 was lost" in seen.said
    assert "1 of at least 2 hosts were ready for another attempt within 10 s" in seen.said


def test_a_host_that_ends_two_attempts_in_a_row_is_left_out(ssh_hosts: SshHosts, script: Path) -> None:
    """Its agent is killed in every attempt once all ranks are there, and comes back each time."""
    kill = """\
shown = f"runs/*/attempt_{e['TORCHELASTIC_RESTART_COUNT']}/{e['RANK']}/stdout.log"
while e["DTRAIN_HOST"] == "node1" and not any(open(path).read() for path in glob.glob(shown)):
    time.sleep(0.01)  # else its line may be lost with the agent
open("-".join(e[name] for name in names[:2]), "w").close()
ranks = [f"{e['TORCHELASTIC_RESTART_COUNT']}-{rank}" for rank in range(int(e["WORLD_SIZE"]))]
while e["DTRAIN_HOST"] == "node1":
    time.sleep(0.01)
    if all(map(os.path.exists, ranks)):
        os.kill(os.getppid(), 9)
"""
    script.write_text(SCRIPT.replace("deadline =", f"{kill}deadline ="))
    with _running(ssh_hosts, script, "--hosts", "node1,node2,node3", "--nnodes", "1:3", last=2) as seen:
        assert seen.attempt(0, 3) == {0: "node1", 1: "node2", 2: "node3"}
        seen.attempt(1, 3)
        assert seen.attempt(2, 2) == {0: "node2", 1: "node3"}
    assert "node1 is excluded from further attempts" in seen.said
    assert "0 processes left on 3 hosts" in seen.said
