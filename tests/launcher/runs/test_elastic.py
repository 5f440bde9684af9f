"""Hosts that are lost while a run goes on, that come back, come late, and step in for others: real sshd."""

from pathlib import Path

import pytest
from testbed.attempts_seen import AttemptsSeen
from testbed.processes import started_dtrain
from testbed.sshd import SshHosts

# Says where it is; the attempt named on the command line is the last one.
SCRIPT = """\
import os, sys, time
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


def _options(hosts: SshHosts, *more: str) -> list[str]:
    # A lease of a few seconds: a host whose sshd is gone cannot be asked whether its workers are.
    return ["run", "--ssh-config", str(hosts.ssh_config), "--nproc-per-node", "1", "--heartbeat-timeout-s", "3", *more]


def test_after_a_lost_host_the_next_attempt_is_without_it(ssh_hosts: SshHosts, script: Path) -> None:
    argv = _options(ssh_hosts, "--hosts", "node1,node2,node3", "--nnodes", "2:3", str(script), "1")
    with started_dtrain(*argv, cwd=script.parent) as process:
        seen = AttemptsSeen(process)
        assert seen.attempt(0, 3) == {0: "node1", 1: "node2", 2: "node3"}
        ssh_hosts.stop(1)
        assert seen.attempt(1, 2) == {0: "node2", 1: "node3"}
        assert process.wait(60) == 0, process.stderr.read()
        stderr = process.stderr.read()
    assert b"host node1 was lost" in stderr
    assert b"attempt 1 begins on 2 hosts, without node1" in stderr
    assert b"node1 could not be checked" in stderr


def test_a_returned_host_makes_an_attempt_with_grow(ssh_hosts: SshHosts, script: Path) -> None:
    argv = _options(ssh_hosts, "--hosts", "node1,node2", "--nnodes", "1:2", "--grow", str(script), "2")
    with started_dtrain(*argv, cwd=script.parent) as process:
        seen = AttemptsSeen(process)
        assert seen.attempt(0, 2) == {0: "node1", 1: "node2"}
        ssh_hosts.stop(1)
        assert seen.attempt(1, 1) == {0: "node2"}
        ssh_hosts.start(1)
        assert seen.attempt(2, 2) == {0: "node2", 1: "node1"}  # who stayed keeps its rank
        assert process.wait(60) == 0, process.stderr.read()
        assert b"node1 has come" in process.stderr.read()


def test_a_returned_host_waits_for_the_next_attempt_without_grow(ssh_hosts: SshHosts, script: Path) -> None:
    argv = _options(ssh_hosts, "--hosts", "node1,node2,node3", "--nnodes", "1:3", str(script), "2")
    with started_dtrain(*argv, cwd=script.parent) as process:
        seen = AttemptsSeen(process)
        seen.attempt(0, 3)
        ssh_hosts.stop(3)
        assert seen.attempt(1, 2) == {0: "node1", 1: "node2"}
        ssh_hosts.start(3)
        with pytest.raises(AssertionError):  # longer than the first pauses between two tries to reach it
            seen.attempt(2, 1, timeout=7)
        ssh_hosts.stop(1)
        assert seen.attempt(2, 2) == {0: "node3", 1: "node2"}  # it steps in for the lost one: node2 keeps its rank
        assert process.wait(60) == 0, process.stderr.read()


def test_a_spare_steps_in_for_a_lost_host(ssh_hosts: SshHosts, script: Path) -> None:
    argv = _options(ssh_hosts, "--hosts", "node1,node2,node3", "--nnodes", "2", "--max-restarts", "1", str(script), "1")
    with started_dtrain(*argv, cwd=script.parent) as process:
        seen = AttemptsSeen(process)
        assert seen.attempt(0, 2) == {0: "node1", 1: "node2"}
        ssh_hosts.stop(1)
        assert seen.attempt(1, 2) == {0: "node3", 1: "node2"}
        assert process.wait(60) == 0, process.stderr.read()


def test_a_run_begins_with_enough_hosts_and_takes_a_late_one(ssh_hosts: SshHosts, script: Path) -> None:
    ssh_hosts.stop(2)
    argv = _options(ssh_hosts, "--hosts", "node1,node2", "--nnodes", "1:2", "--grow", str(script), "1")
    with started_dtrain(*argv, cwd=script.parent) as process:
        seen = AttemptsSeen(process)
        assert seen.attempt(0, 1) == {0: "node1"}
        ssh_hosts.start(2)
        assert seen.attempt(1, 2) == {0: "node1", 1: "node2"}
        assert process.wait(60) == 0, process.stderr.read()
        assert b"node2 cannot be used for now" in process.stderr.read()


def test_too_few_hosts_end_the_run_and_say_which_are_missing(ssh_hosts: SshHosts, script: Path) -> None:
    argv = _options(ssh_hosts, "--hosts", "node1,node2", "--nnodes", "2:3", "--start-timeout-s", "10", str(script), "1")
    with started_dtrain(*argv, cwd=script.parent) as process:
        seen = AttemptsSeen(process)
        seen.attempt(0, 2)
        ssh_hosts.stop(2)
        assert process.wait(60) == 1
        stderr = process.stderr.read()
    assert b"host node2 was lost" in stderr
    assert b"1 of at least 2 hosts were ready for another attempt within 10 s" in stderr


def test_a_host_that_ends_two_attempts_in_a_row_is_left_out(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    """Its agent is killed in every attempt once all ranks are there, and comes back each time."""
    script = tmp_path / "script.py"
    kill = """\
open("-".join(e[name] for name in names[:2]), "w").close()
ranks = [f"{e['TORCHELASTIC_RESTART_COUNT']}-{rank}" for rank in range(int(e["WORLD_SIZE"]))]
while e["DTRAIN_HOST"] == "node1":
    time.sleep(0.01)
    if all(map(os.path.exists, ranks)):
        os.kill(os.getppid(), 9)
"""
    script.write_text(SCRIPT.replace("deadline =", f"{kill}deadline ="))
    argv = _options(ssh_hosts, "--hosts", "node1,node2,node3", "--nnodes", "1:3", str(script), "2")
    with started_dtrain(*argv, cwd=tmp_path) as process:
        seen = AttemptsSeen(process)
        assert seen.attempt(0, 3) == {0: "node1", 1: "node2", 2: "node3"}
        seen.attempt(1, 3)
        assert seen.attempt(2, 2) == {0: "node2", 1: "node3"}
        assert process.wait(60) == 0, process.stderr.read()
        stderr = process.stderr.read()
    assert b"node1 is excluded from further attempts" in stderr
    assert b"0 processes left on 3 hosts" in stderr
