"""Hosts reached by OpenSSH's own client, or a wrapper of it (--ssh-command), over real sshd."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from testbed.processes import run_dtrain, wait_until
from testbed.sshd import SshHosts

from launcher.errors import HostError, UsageError
from launcher.hosts.host import Host, HostKind
from launcher.placement.job_spec import SshOptions
from launcher.transport.client import Clients
from launcher.transport.ssh.client import SshClientStream, connect_by_client, login_command, our_address

pytestmark = pytest.mark.ordinary_user
SCRIPT = "import os\nprint('ran on', os.environ['DTRAIN_TEST_HOST'], 'in', os.getcwd(), flush=True)"


@pytest.fixture
def clients() -> Iterator[Clients]:
    clients = Clients()
    yield clients
    clients.close()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def connect(
    clients: Clients, config: Path, name: str, line: str = "echo up; cat", within_s: float = 60
) -> SshClientStream:
    options = SshOptions(config=config, command=("ssh",))
    host = Host(name, HostKind.SSH)
    return connect_by_client(host, options, line, time.monotonic() + within_s, first=b"", clients=clients)


def says(stream: SshClientStream) -> bytes:
    """Return what it says back."""
    stream.write(b"hello")
    stream.end()
    heard = b"".join(iter(stream.read, b""))
    assert stream.finish(60)[0] == 0
    return heard


def refusal(clients: Clients, config: Path, name: str, within_s: float = 20) -> str:
    with pytest.raises(HostError) as failure:
        connect(clients, config, name, within_s=within_s).finish(0)
    assert failure.value.host == name
    return failure.value.reason


def test_options_come_before_the_user_s_and_the_host() -> None:
    host = Host("alpha", HostKind.SSH, user="me", port=2222)
    ssh = SshOptions(config=Path("conf"), command=("/usr/bin/ssh", "-S", "sock"))
    assert login_command(host, ssh, "-T") == [
        "/usr/bin/ssh", "-T", "-F", "conf", "-p", "2222", "-S", "sock", "--", "me@alpha",
    ]  # fmt: skip
    host = Host("alpha", HostKind.SSH)
    assert login_command(host, SshOptions(command=("tsh", "ssh")), "-T") == ["tsh", "ssh", "alpha"]
    placed = SshOptions(command=("gcloud", "ssh", "{host}", "--to={host}", "--"))
    assert login_command(host, placed) == ["gcloud", "ssh", "alpha", "--to=alpha", "--"]
    with pytest.raises(UsageError, match="the port of alpha in --hosts is an option of ssh, and --ssh-command is tsh"):
        login_command(Host("alpha", HostKind.SSH, port=2222), SshOptions(command=("tsh",)))


def test_a_server_that_takes_one_at_a_time_is_tried_again(ssh_hosts: SshHosts, clients: Clients) -> None:
    ssh_hosts.configure(1, "MaxStartups 1:100:2")
    with ThreadPoolExecutor(8) as pool:
        streams = list(pool.map(lambda _: connect(clients, ssh_hosts.ssh_config, "node1"), range(8)))
    assert "drop connection" in ssh_hosts.log(1)
    assert [says(stream) for stream in streams] == [b"up\nhello"] * 8


def test_each_refusal_says_what_ssh_said_and_what_to_type(ssh_hosts: SshHosts, clients: Clients) -> None:
    ssh_hosts.stop(3)
    unknown = ssh_hosts.config("client_unknown", unknown=[2])
    reason = refusal(clients, unknown, "node2")
    assert reason.startswith("ssh does not know its host key; if it is the right one, ")
    assert reason.endswith(f"accept it once by: ssh -F {unknown} -- node2 true")
    wrong = ssh_hosts.config("client_wrong", identity=ssh_hosts.wrong_identity)
    reason = refusal(clients, wrong, "node1")
    assert "Permission denied (publickey); log in first (kinit" in reason.replace(").;", ");")
    assert reason.endswith(f"try: ssh -F {wrong} -- node1 true")
    assert "Connection refused; try: ssh " in refusal(clients, ssh_hosts.ssh_config, "node3")
    assert "Could not resolve hostname no.such: " in refusal(clients, ssh_hosts.ssh_config, "no.such")
    ssh_hosts.change_host_key(4)
    reason = refusal(clients, ssh_hosts.ssh_config, "node4")
    assert reason.startswith("its host key has CHANGED")
    assert f'remove the old one with: ssh-keygen -f "{ssh_hosts.known_hosts}" -R ' in reason


def test_a_client_that_never_answers_is_ended_with_its_children(
    ssh_hosts: SshHosts, clients: Clients, tmp_path: Path
) -> None:
    wrapper = tmp_path / "wrapper"
    wrapper.write_text("#!/bin/sh\necho asks for a token >&2\nsleep 600\necho over\n")
    wrapper.chmod(0o755)
    options = SshOptions(command=(str(wrapper),))
    with pytest.raises(HostError, match="did not start an agent there in time: asks for a token"):
        connect_by_client(
            Host("a", HostKind.SSH), options, "x", time.monotonic() + 2.0, first=b"x", clients=clients
        )  # fmt: skip
    wait_until(lambda: not sleeps(), "its child has ended too")

    ended: list[SshClientStream] = []

    def wait_long() -> None:
        stream = connect_by_client(
            Host("a", HostKind.SSH), options, "x", time.monotonic() + 600, first=b"", clients=clients
        )
        ended.append(stream)
        stream.give_up()

    thread = threading.Thread(target=wait_long)
    thread.start()
    wait_until(sleeps, "it has begun")
    clients.close()
    thread.join(60)
    assert ended
    wait_until(lambda: not sleeps(), "its child has ended too")


def sleeps() -> list[psutil.Process]:
    mark = os.environ["DTRAIN_TEST_MARK"]
    found = []
    for process in psutil.process_iter():
        try:
            if process.cmdline() == ["sleep", "600"] and process.environ().get("DTRAIN_TEST_MARK") == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder with a short path: sockets have at most 108 characters, and ssh adds 17 to theirs."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_an_open_controlmaster_lets_in_who_has_no_key(ssh_hosts: SshHosts, script: Path, short_folder: Path) -> None:
    wrong = ssh_hosts.config("client_master", identity=ssh_hosts.wrong_identity)
    hosts: list[str | Path] = ["--ssh-config", wrong, "--hosts", "node1,node2"]
    refused = run_dtrain("run", *hosts, script, cwd=script.parent)
    assert refused.returncode == 1
    assert "; if ssh itself logs in without a question: --ssh-command ssh; try: ssh -F" in refused.stderr
    masters = [
        subprocess.Popen(
            ["ssh", "-F", str(ssh_hosts.ssh_config), "-M", "-N", "-S", f"{short_folder}/{name}", name],
            stdin=subprocess.DEVNULL,
        )
        for name in ("node1", "node2")
    ]
    try:
        # While ssh makes a socket, it has another name.
        wait_until(lambda: all(Path(short_folder, name).exists() for name in ("node1", "node2")), "both are open")
        result = run_dtrain("run", "--ssh-command", f"ssh -S {short_folder}/%n", *hosts, script, cwd=script.parent)
    finally:
        for master in masters:
            master.terminate()
            master.wait(20)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("ran on node") == 2


def test_a_wrapper_gets_the_host_where_it_stands(ssh_hosts: SshHosts, script: Path, tmp_path: Path) -> None:
    wrapper = tmp_path / "site ssh"
    line = f'test "$1" = --to && host=$2 && shift 3 && ssh -F {shlex.quote(str(ssh_hosts.ssh_config))} "$host" "$@"'
    wrapper.write_text(f"#!/bin/sh\necho Welcome >&2\n{line}\n")
    wrapper.chmod(0o755)
    command = f"'{wrapper}' --to {{host}} --"
    (tmp_path / "dtrain.toml").write_text(f'ssh-command = "{command}"\n')
    result = run_dtrain("run", "--hosts", "node1,node2", script, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"[node{i + 1}:{i}] ran on node{i + 1} in {tmp_path}" for i in (0, 1)]
    # This machine would hold the store, and what the wrapper connects to is not known.
    result = run_dtrain("run", "--hosts", "localhost,node1", script, cwd=tmp_path)
    assert "node1: the address of this machine for it is not known; write --master-addr" in result.stderr
    (tmp_path / "dtrain.toml").unlink()
    result = run_dtrain("check", "--ssh-command", command, "--hosts", "node1,node2", "--no-allreduce", cwd=tmp_path)
    assert "unusable" not in result.stdout + result.stderr
    result = run_dtrain("check", "--ssh-command", command, "--hosts", "node1", "--python", "/no/python", cwd=tmp_path)
    assert "there is no Python at /no/python" in result.stdout + result.stderr


def test_the_address_of_this_machine_is_that_of_the_route(ssh_hosts: SshHosts) -> None:
    options = SshOptions(config=ssh_hosts.ssh_config, command=("ssh",))
    assert our_address(Host("node1", HostKind.SSH), options).startswith("127.0.0.")
    behind = SshOptions(config=ssh_hosts.ssh_config, command=("ssh", "-J", "node3"))
    with pytest.raises(HostError, match="write --master-addr"):
        our_address(Host("node1", HostKind.SSH), behind)


def test_a_jump_host_is_ssh_s_own_business(ssh_hosts: SshHosts, script: Path) -> None:
    command: list[str | Path] = ["--ssh-command", "ssh -J node3", "--ssh-config", ssh_hosts.ssh_config]
    result = run_dtrain("run", *command, "--hosts", "node1,node2", script, cwd=script.parent)
    assert result.stdout.count("ran on node") == 2, result.stderr
    assert ssh_hosts.log(3).count("Accepted publickey") >= 2


def test_a_run_stopped_while_connecting_leaves_no_client(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    wrapper = tmp_path / "wrapper"
    wrapper.write_text("#!/bin/sh\nsleep 600\n")
    wrapper.chmod(0o755)
    argv = [sys.executable, "-m", "launcher", "run", "--ssh-command", str(wrapper), "--hosts", "node1", "train.py"]
    with subprocess.Popen(argv, cwd=tmp_path, stderr=subprocess.PIPE) as process:
        wait_until(sleeps, "it connects")
        process.terminate()
        assert process.wait(60) == 128 + 15
    wait_until(lambda: not sleeps(), "nothing is left")
