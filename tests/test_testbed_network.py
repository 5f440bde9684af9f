"""The hosts with a network of their own: every fault does what it says, and nothing of them is left."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from testbed.namespaces import path_of
from testbed.network import NetworkHosts, why_not
from testbed.present import present
from testbed.processes import Program, everyone, kill, left_behind, started, wait_until

TESTS = Path(__file__).parent
SILENCE_S = 1.05
MENDED_S = 60.0  # a retransmission may be seconds away


@contextlib.contextmanager
def session(hosts: NetworkHosts, name: str, command: str = "cat") -> Iterator[Program]:
    """Yield an ssh client to which the remote command has said something."""
    argv = ("ssh", "-F", hosts.ssh_config, name, f"echo begun; {command}")
    with started(*argv, stdin=subprocess.PIPE) as process:
        assert heard(process, MENDED_S) == b"begun\n", hosts.log(name)
        yield process


def say(process: Program, text: bytes) -> None:
    present(process.stdin).write(text)
    present(process.stdin).flush()


def heard(process: Program, timeout_s: float) -> bytes | None:
    """What comes next; empty at the end of file, None if nothing happens for so long."""
    ready, _, _ = select.select([process.stdout], [], [], timeout_s)
    return os.read(process.stdout.fileno(), 65536) if ready else None


def silent(*processes: Program) -> bool:
    """Whether no client prints anything, sees an end of file or ends for `SILENCE_S`."""
    ready, _, _ = select.select([process.stdout for process in processes], [], [], SILENCE_S)
    return not ready and all(process.poll() is None for process in processes)


def ssh(hosts: NetworkHosts, name: str, command: str) -> "subprocess.CompletedProcess[str]":
    argv = ["ssh", "-F", str(hosts.ssh_config), name, command]
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)


def ssh_all(hosts: NetworkHosts, command: str) -> "list[subprocess.CompletedProcess[str]]":
    with ThreadPoolExecutor() as pool:
        return [*pool.map(lambda name: ssh(hosts, name, command), hosts.names)]


def test_each_is_a_host_of_its_own_and_reaches_the_others_by_name(network_hosts: NetworkHosts) -> None:
    ask = (
        "echo $DTRAIN_TEST_HOST $(hostname) ${SSH_CONNECTION}; cat /proc/1/cmdline; cat /proc/sys/kernel/random/boot_id"
    )
    answers = ssh_all(network_hosts, ask)
    boots = {answer.stdout.splitlines()[-1] for answer in answers}
    assert len(boots) == 3
    assert Path("/proc/sys/kernel/random/boot_id").read_text().strip() not in boots
    for name, answer in zip(network_hosts.names, answers, strict=True):
        words = answer.stdout.split()
        assert words[:2] == [name, name], answer
        assert (words[2], words[4]) == (network_hosts.address_here, network_hosts.address(name))
        assert f"\0{name}\0" in answer.stdout  # process 1 there is the host's
    greet = "import socket; print(socket.create_connection(('far2', 22)).recv(4))"
    assert ssh(network_hosts, "far1", f'{sys.executable} -IS -c "{greet}"').stdout == "b'SSH-'\n"


def test_cut_dropped_and_frozen_hosts_are_silent_and_go_on(network_hosts: NetworkHosts) -> None:
    with contextlib.ExitStack() as stack:
        sessions = {name: stack.enter_context(session(network_hosts, name)) for name in network_hosts.names}
        network_hosts.cut("far1")
        network_hosts.drop("far2")
        network_hosts.freeze("far3")
        for process in sessions.values():
            say(process, b"still there?\n")
        late = stack.enter_context(started("ssh", "-F", network_hosts.ssh_config, "far3", "true"))
        assert silent(*sessions.values(), late)  # a new connection to a frozen host hangs too
        assert [_carrier(network_hosts, name) for name in ("far1", "far2")] == [False, True]
        assert {p.status() for p in network_hosts.processes("far3")} == {psutil.STATUS_STOPPED}
        network_hosts.mend("far1")
        network_hosts.mend("far2")
        network_hosts.thaw("far3")
        for name, process in sessions.items():
            assert heard(process, MENDED_S) == b"still there?\n", name
        assert late.wait(MENDED_S) == 0


def _carrier(hosts: NetworkHosts, name: str) -> bool:
    """Whether the host has carrier, as it sees it itself."""
    (process, *_) = hosts.processes(name)
    argv = [path_of("nsenter"), f"--net=/proc/{process.pid}/ns/net", path_of("ip"), "link", "show", "eth0"]
    shown = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    return "NO-CARRIER" not in shown


def test_packets_can_be_lost_in_one_direction(network_hosts: NetworkHosts, tmp_path: Path) -> None:
    arrived = tmp_path / "arrived"
    with socket.socket(type=socket.SOCK_DGRAM) as clock:
        clock.bind((network_hosts.address_here, 0))
        clock.settimeout(60)
        tick = f"import socket, select; clock = socket.socket(type=2); clock.connect({clock.getsockname()})\n"
        tick += "while not select.select([0], [], [], 0.05)[0]: clock.send(b'tick')"
        with (
            session(network_hosts, "far1", f"tee {arrived}") as writes,
            session(network_hosts, "far2", f'{sys.executable} -IS -c "{tick}"') as ticks,
        ):
            assert clock.recv(9) == b"tick"
            network_hosts.drop("far1", "out")
            network_hosts.drop("far2", "in")
            say(writes, b"hello\n")
            present(ticks.stdin).close()  # would end it, but it does not come to know
            assert silent(writes, ticks)
            wait_until(lambda: arrived.read_bytes() == b"hello\n", "what is said to it arrives")
            while select.select([clock], [], [], 0)[0]:
                clock.recv(9)
            for _ in range(5):
                assert clock.recv(9) == b"tick"
            network_hosts.mend("far1")
            network_hosts.mend("far2")
            assert heard(writes, MENDED_S) == b"hello\n"
            assert heard(ticks, MENDED_S) == b""


def test_power_loss_is_silent_and_the_address_and_key_stay(network_hosts: NetworkHosts) -> None:
    with session(network_hosts, "far1") as process:
        running = network_hosts.processes("far1")
        assert running
        network_hosts.poweroff("far1")
        assert network_hosts.processes("far1") == []
        assert not any(p.is_running() for p in running)
        say(process, b"still there?\n")
        assert silent(process)
        network_hosts.boot("far1")
        assert ssh(network_hosts, "far1", "hostname").stdout == "far1\n"  # and known_hosts is believed
        # It knows nothing of the old connection, and says so to the next packet of it.
        assert process.wait(MENDED_S) == 255
        assert heard(process, 0) == b""


def test_a_killed_sshd_closes_its_connections_alone(network_hosts: NetworkHosts) -> None:
    with session(network_hosts, "far1", "exec sleep 600") as process:
        (sleep,) = network_hosts.processes("far1")
        wait_until(lambda: sleep.name() == "sleep", "the shell has become it")
        network_hosts.kill_sshd("far1")
        assert heard(process, MENDED_S) == b""
        assert "Connection refused" in ssh(network_hosts, "far1", "true").stderr
        network_hosts.start_sshd("far1")
        assert ssh(network_hosts, "far1", "true").returncode == 0
        wait_until(lambda: network_hosts.processes("far1") == [sleep], "it runs on, alone")
        sleep.kill()


def test_what_is_left_on_a_host_is_found_also_when_it_is_cut_off(network_hosts: NetworkHosts) -> None:
    before = everyone()
    ssh(network_hosts, "far2", "env -i setsid sleep 600 >/dev/null 2>&1 &")  # without the mark

    def found() -> list[psutil.Process]:
        return left_behind(before, {network_hosts.mark}, network_hosts.pids)

    wait_until(lambda: [p.name() for p in found()] == ["sleep"], "it is found")
    network_hosts.cut("far2")
    assert network_hosts.processes("far2") == found()
    network_hosts.freeze("far2")
    kill(found())
    assert found() == []


def test_reset_undoes_every_fault(network_hosts: NetworkHosts) -> None:
    network_hosts.cut("far1")
    network_hosts.freeze("far1")
    network_hosts.drop("far2")
    network_hosts.kill_sshd("far2")
    network_hosts.poweroff("far3")
    network_hosts.reset()
    assert [answer.stdout for answer in ssh_all(network_hosts, "hostname")] == ["far1\n", "far2\n", "far3\n"]


def test_nothing_is_left_after_an_error(network_hosts: NetworkHosts, tmp_path: Path) -> None:
    before = everyone()
    hosts = NetworkHosts(tmp_path / "lab", count=1)

    def fail() -> None:
        with hosts, session(hosts, "far1", "setsid sleep 600"):
            assert all(path.exists() for path in hosts.traces)
            assert ssh(network_hosts, "far1", "true").returncode == 0  # each test session has hosts of its own
            hosts.freeze("far1")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert left_behind(before, {hosts.mark}) == []
    assert not any(path.exists() for path in hosts.traces)


def test_nothing_is_left_when_the_tests_are_killed(network_hosts: NetworkHosts, tmp_path: Path) -> None:
    before = everyone()
    killed = (
        "import os, pathlib, signal, subprocess\nfrom testbed.network import NetworkHosts\n"
        f"with NetworkHosts(pathlib.Path({str(tmp_path)!r}), count=1) as hosts:\n"
        "    subprocess.run(['ssh', '-F', hosts.ssh_config, 'far1', 'sleep 600 >/dev/null 2>&1 &'], check=True)\n"
        "    hosts.freeze('far1')\n"
        "    print(hosts.mark, *hosts.pids, *(p.pid for p in hosts.processes('far1')))\n"
        "    print(*hosts.traces, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with started(sys.executable, "-c", killed, env={"PYTHONPATH": str(TESTS)}) as process:
        out, err = process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL, err
        mark, *pids = out.decode().splitlines()[0].split()
        traces = [Path(word) for word in out.decode().splitlines()[1].split()]
        assert len(pids) > 5
        wait_until(lambda: not {p.pid for p in everyone() - before} & {*map(int, pids)}, "all have ended")
        wait_until(lambda: not any(path.exists() for path in traces), "the kernel has removed the rest")
        assert left_behind(before, {mark}) == []


def test_a_container_without_the_privileges_is_recognised(network_hosts: NetworkHosts) -> None:
    assert why_not() is None
    program = "from testbed.network import why_not; print(why_not())"
    setpriv = ("setpriv", "--inh-caps=-sys_admin", "--bounding-set=-sys_admin")
    with started(*setpriv, sys.executable, "-c", program, env={"PYTHONPATH": str(TESTS)}) as process:
        out, err = process.communicate(timeout=60)
    assert b"unshare failed: Operation not permitted" in out, err
