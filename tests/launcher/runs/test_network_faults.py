"""Hosts that a real network takes away, without a word: what is reported, what ends by itself, what goes on."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from testbed.attempts_seen import AttemptsSeen
from testbed.network import NetworkHosts
from testbed.processes import LEASE, LEASE_S, started_dtrain, wait_until

# Waits for the attempt that is named; has a child that hides and ignores what it can.
SCRIPT = """\
import os, signal, subprocess, sys, time
e = os.environ
names = ("TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE", "GROUP_RANK", "DTRAIN_HOST")
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.execvpe("sleep", ["sleep", "600"], {k: v for k, v in e.items() if k == "DTRAIN_TEST_MARK"})
print("here", *(e[name] for name in names), flush=True)
deadline = time.monotonic() + 120
while time.monotonic() < deadline and e["TORCHELASTIC_RESTART_COUNT"] != sys.argv[1]:
    time.sleep(0.05)
time.sleep(0.5)
"""
Fault = Callable[[NetworkHosts, str], None]

FAULTS: dict[str, Fault] = {
    "cut": NetworkHosts.cut,
    "drop": NetworkHosts.drop,
    "drop what it says": lambda hosts, name: hosts.drop(name, "out"),
    "drop what it is told": lambda hosts, name: hosts.drop(name, "in"),
    "freeze": NetworkHosts.freeze,
    "power off": NetworkHosts.poweroff,
}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(params=FAULTS)
def fault(request: pytest.FixtureRequest) -> Fault:
    return FAULTS[request.param]


def _options(hosts: NetworkHosts, *more: str | Path) -> list[str | Path]:
    lease = [*LEASE, "--grace-s", "1", "--nproc-per-node", "1"]
    return ["run", "--ssh-config", hosts.ssh_config, *lease, *more]


def test_a_silent_host_is_named_and_ends_its_own_workers(
    network_hosts: NetworkHosts, script: Path, fault: Fault
) -> None:
    _lose_far2(network_hosts, script, fault)


@pytest.mark.parametrize("fault", ["drop", "power off"], indirect=True)
def test_the_same_holds_through_openssh_s_own_client(network_hosts: NetworkHosts, script: Path, fault: Fault) -> None:
    _lose_far2(network_hosts, script, fault, "--ssh-command", "ssh")


def _lose_far2(network_hosts: NetworkHosts, script: Path, fault: Fault, *client: str) -> None:
    argv = _options(network_hosts, *client, "--hosts", "far1,far2", script, "never")
    with started_dtrain(*argv, cwd=script.parent, outlived=fault is NetworkHosts.freeze) as process:
        AttemptsSeen(process).attempt(0, 2)
        fault(network_hosts, "far2")
        assert process.wait(60) == 1
        stderr = process.stderr.read().decode()
    assert "host far2 was lost" in stderr
    assert "was heard" in stderr or "it received nothing from dtrain" in stderr
    assert not network_hosts.processes("far1")
    if fault is NetworkHosts.freeze:
        assert network_hosts.processes("far2")
        network_hosts.thaw("far2")  # it finds out by its own clock, and by nothing else
    wait_until(lambda: not network_hosts.processes("far2"), "the lost host has ended its processes by itself")


@pytest.mark.parametrize("fault", ["drop", "freeze", "power off"], indirect=True)
def test_an_elastic_run_goes_on_without_a_host_that_returns(
    network_hosts: NetworkHosts, script: Path, fault: Fault
) -> None:
    hosts = ["--hosts", "far1,far2,far3", "--nnodes", "1:3", "--grow"]
    argv = _options(network_hosts, *hosts, script, "2")
    with started_dtrain(*argv, cwd=script.parent) as process:
        seen = AttemptsSeen(process)
        assert seen.attempt(0, 3) == {0: "far1", 1: "far2", 2: "far3"}
        fault(network_hosts, "far1")  # the store was there
        assert seen.attempt(1, 2) == {0: "far2", 1: "far3"}
        if fault is NetworkHosts.poweroff:
            network_hosts.boot("far1")
        elif fault is NetworkHosts.freeze:
            network_hosts.thaw("far1")
        else:
            network_hosts.mend("far1")
        assert seen.attempt(2, 3) == {0: "far2", 1: "far3", 2: "far1"}
        assert process.wait(60) == 0, process.stderr
    for name in network_hosts.names:
        assert not network_hosts.processes(name)


def test_hosts_that_lose_dtrain_end_their_workers_by_themselves(network_hosts: NetworkHosts, script: Path) -> None:
    lease = ["--heartbeat-timeout-s", f"{2 * LEASE_S:g}"]  # what was last received may have been sent a while ago
    argv = _options(network_hosts, *lease, "--hosts", "far1,far2", script, "never")
    with started_dtrain(*argv, cwd=script.parent, outlived=True) as process:  # it waits for no lost host
        AttemptsSeen(process).attempt(0, 2)
        process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        wait_until(lambda: not any(map(network_hosts.processes, ("far1", "far2"))), "both are clean")
        assert time.monotonic() - began > 0.5 * LEASE_S  # not before the lease was over
        process.send_signal(signal.SIGCONT)
        assert process.wait(60) == 1
        assert b"it received nothing from dtrain" in process.stderr.read()


@pytest.mark.parametrize("cut_s", [2, 12])  # of 12 s, TCP takes up to 13.4 s to go on
def test_a_short_break_of_the_network_ends_nothing(network_hosts: NetworkHosts, script: Path, cut_s: int) -> None:
    argv = _options(network_hosts, "--heartbeat-timeout-s", "20", "--hosts", "far1,far2", script, "0")
    script.write_text(SCRIPT.replace("time.sleep(0.5)", f"time.sleep({cut_s + 6})"))
    with started_dtrain(*argv, cwd=script.parent) as process:
        AttemptsSeen(process).attempt(0, 2)
        network_hosts.cut("far2")
        time.sleep(cut_s)
        network_hosts.mend("far2")
        assert process.wait(60) == 0, process.stderr.read()


def test_an_sshd_that_dies_with_its_sessions_leaves_nothing(network_hosts: NetworkHosts, script: Path) -> None:
    argv = _options(network_hosts, "--hosts", "far1,far2", script, "never")
    with started_dtrain(*argv, cwd=script.parent) as process:
        AttemptsSeen(process).attempt(0, 2)
        network_hosts.kill_sshd("far2")
        assert process.wait(60) == 1
        assert b"host far2 was lost" in process.stderr.read()
    wait_until(lambda: not network_hosts.processes("far2"), "far2 is clean")
