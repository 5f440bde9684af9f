"""Remote hosts over real sshd: configuration, trust, keys, and the errors for each way in which they fail.

What does not depend on who logs in, dtrain or OpenSSH's own client (--ssh-command), is tried by both.
"""

import contextlib
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from testbed.processes import run_dtrain, run_program, started
from testbed.sshd import SshHosts

from launcher.errors import HostError
from launcher.transport.client import Clients, ClientStream


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text("import os\nprint('ran on', os.environ['DTRAIN_TEST_HOST'], 'in', os.getcwd(), flush=True)")
    return path


# dtrain with as much time for what else is wrong as for the start.
PATIENT = "import launcher.job.gathering as g, launcher.cli.main as m; g.OTHER_REASONS_S = 600.0; m.main()"
by_both = pytest.mark.parametrize("client", [(), ("--ssh-command", "ssh")], ids=["paramiko", "openssh"])


def on(
    hosts: SshHosts, names: str = "node1,node2", config: Path | None = None, client: tuple[str, ...] = ()
) -> list[str]:
    return ["run", "--ssh-config", str(config or hosts.ssh_config), *client, "--hosts", names]


@by_both
def test_two_hosts_run_the_script_in_the_same_folder(
    ssh_hosts: SshHosts, script: Path, client: tuple[str, ...]
) -> None:
    result = run_dtrain(*on(ssh_hosts, client=client), "script.py", cwd=script.parent)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [
        f"[node1:0] ran on node1 in {script.parent}",
        f"[node2:1] ran on node2 in {script.parent}",
    ]


def test_slots_and_this_machine_can_be_mixed(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "WORLD_SIZE")
    script.write_text(f"import os\nprint(*(os.environ[n] for n in {names}))")
    result = run_dtrain(*on(ssh_hosts, "localhost:1,node1:2"), script, cwd=tmp_path)
    lines = sorted(line.partition("] ")[2] for line in result.stdout.splitlines())
    assert lines == ["0 0 1 0 2 3", "1 0 2 1 2 3", "2 1 2 1 2 3"], result.stderr


REACHES = """\
import os, socket
address = os.environ["MASTER_ADDR"]
with socket.create_connection((address, int(os.environ["MASTER_PORT"]))):
    print("reached", address, flush=True)
"""


@pytest.mark.parametrize(
    ("names", "address", "client"),
    [
        ("node2,node1", "127.0.0.3", ()),
        ("localhost,node1", "127.0.0.", ()),
        ("node1,localhost", "127.0.0.2", ()),
        ("localhost,node1", "127.0.0.", ("--ssh-command", "ssh")),
    ],
)
def test_store_is_reached_on_the_first_hosts_address(
    ssh_hosts: SshHosts, tmp_path: Path, names: str, address: str, client: tuple[str, ...]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(REACHES)
    result = run_dtrain(*on(ssh_hosts, names, client=client), script, cwd=tmp_path)
    assert result.stdout.count(f"reached {address}") == 2, result.stderr


@by_both
def test_exported_variables_travel_and_stay_out_of_sight(
    ssh_hosts: SshHosts, tmp_path: Path, client: tuple[str, ...]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, glob\n"
        "print([os.environ.get(n) for n in ('SECRET', 'GIVEN', 'MY_A', 'MY_B', 'NCCL_DEBUG', 'OTHER')])\n"
        "seen = b''\n"
        "for path in glob.glob('/proc/[0-9]*/cmdline'):\n"
        "    try: seen += open(path, 'rb').read()\n"
        "    except OSError: continue\n"
        "print('leaked' if b'canary' + b'-7' in seen else 'hidden')"
    )
    env = {"SECRET": "canary-7", "MY_A": "1", "MY_B": "2", "NCCL_DEBUG": "WARN", "OTHER": "stays"}
    options = ["-x", "SECRET", "-x", "GIVEN=a=b c", "-x", "MY_*"]
    result = run_dtrain(*on(ssh_hosts, "node1", client=client), "-v", *options, script, env=env, cwd=tmp_path)
    assert result.stdout.splitlines() == [
        "[node1:0] ['canary-7', 'a=b c', '1', '2', 'WARN', None]",
        "[node1:0] hidden",
    ], result.stderr
    assert "canary" not in result.stderr


# ---- refusals ----


def test_an_unknown_host_key_is_refused_with_what_accepts_it(ssh_hosts: SshHosts, script: Path) -> None:
    config = ssh_hosts.config("one_unknown", unknown=[2])
    result = run_dtrain(*on(ssh_hosts, config=config), script, cwd=script.parent)
    assert result.returncode == 1
    assert "1 of 2 hosts cannot start; no worker was started" in result.stderr
    assert "node2: its host key ssh-ed25519 SHA256:" in result.stderr
    assert f"accept it once by: ssh -F {config} node2 true" in result.stderr
    assert "--accept-new-host-keys" in result.stderr
    assert result.stdout == ""


def test_new_host_key_is_accepted_once_and_then_known(ssh_hosts: SshHosts, script: Path) -> None:
    config = ssh_hosts.config("accepting", unknown=[2])
    first = run_dtrain(*on(ssh_hosts, config=config), "--accept-new-host-keys", script, cwd=script.parent)
    assert first.returncode == 0, first.stderr
    second = run_dtrain(*on(ssh_hosts, config=config), script, cwd=script.parent)
    assert second.returncode == 0, second.stderr
    known = (ssh_hosts.folder / "accepting.known_hosts").read_text().splitlines()
    name = f"[{ssh_hosts.address(2)}]:{ssh_hosts.port}"
    argv = ["ssh-keygen", "-F", name, "-f", str(ssh_hosts.folder / "accepting.known_hosts")]
    lookup = subprocess.run(argv, capture_output=True, check=False)
    assert lookup.returncode == 0
    assert len(known) == 4


@pytest.mark.parametrize("accept", [[], ["--accept-new-host-keys"]])
def test_changed_host_key_is_refused_always(ssh_hosts: SshHosts, script: Path, accept: list[str]) -> None:
    ssh_hosts.change_host_key(1)
    result = run_dtrain(*on(ssh_hosts), *accept, script, cwd=script.parent)
    assert result.returncode == 1
    assert "node1: its host key has CHANGED" in result.stderr
    assert f"ssh-keygen -f {ssh_hosts.known_hosts} -R '[{ssh_hosts.address(1)}]:{ssh_hosts.port}'" in result.stderr


def test_wrong_key_is_named(ssh_hosts: SshHosts, script: Path) -> None:
    config = ssh_hosts.config("wrong", identity=ssh_hosts.wrong_identity)
    result = run_dtrain(*on(ssh_hosts, config=config), script, cwd=script.parent)
    assert result.returncode == 1
    assert "  node1, node2: " in result.stderr, "one line for the same reason"
    assert result.stderr.count("accepts none of our keys") == 1
    assert str(ssh_hosts.wrong_identity) in result.stderr


def test_every_unusable_host_is_named_in_one_message(ssh_hosts: SshHosts, script: Path) -> None:
    """An unknown name, a refused connection, a silent one, and hosts that lack the folder."""
    ssh_hosts.stop(3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        config = ssh_hosts.folder / "mixed"
        port = silent.getsockname()[1]
        config.write_text(ssh_hosts.ssh_config.read_text() + f"Host silent\n  HostName 127.0.0.1\n  Port {port}\n")
        result = run_program(
            sys.executable, "-c", PATIENT, *on(ssh_hosts, "node1,node3,nosuchhost,silent", config),
            "--workdir", "/no/such/folder", "--start-timeout-s", "15", script,
            cwd=script.parent,
        )  # fmt: skip
    assert result.returncode == 1
    assert "4 of 4 hosts cannot start; no worker was started" in result.stderr
    assert "node1: the working directory /no/such/folder does not exist" in result.stderr
    assert f"node3: {ssh_hosts.address(3)} port {ssh_hosts.port}: connection refused" in result.stderr
    assert "nosuchhost: DNS lookup of nosuchhost failed: " in result.stderr
    assert "silent: " in result.stderr
    assert result.stdout == ""


def test_missing_script_there_is_found_before_any_worker_starts(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    result = run_dtrain(*on(ssh_hosts), "nothing.py", cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.count(f"the script {tmp_path}/nothing.py does not exist") == 1


@by_both
def test_missing_python_there_is_named(ssh_hosts: SshHosts, script: Path, client: tuple[str, ...]) -> None:
    result = run_dtrain(*on(ssh_hosts, client=client), "--python", "/no/python", script, cwd=script.parent)
    assert result.returncode == 1
    assert result.stderr.count("there is no Python at /no/python; name the one that has dtrain with --python") == 1


@by_both
def test_python_without_dtrain_there_is_named(
    ssh_hosts: SshHosts, script: Path, tmp_path: Path, client: tuple[str, ...]
) -> None:
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {shlex.quote(os.path.realpath(sys.executable))} -I -S "$@"\n')
    bare.chmod(0o755)
    result = run_dtrain(*on(ssh_hosts, "node1", client=client), "--python", bare, script, cwd=script.parent)
    assert result.returncode == 1
    assert (
        f"node1: {bare} there has no dtrain; send it with --sync, or install it: {bare} -m pip install "
        in result.stderr
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("launcher.agent.agent.__version__ = '0.0.9'", "has dtrain 0.0.9, here it is "),
        ("launcher.agent.agent.sys.version_info = (3, 9, 1)", "is Python 3.9.1, here it is "),
        ("launcher.agent.agent.PROTOCOL = 99", "install the same there"),
    ],
)
def test_other_version_there_is_named(
    ssh_hosts: SshHosts, script: Path, tmp_path: Path, change: str, message: str
) -> None:
    other = tmp_path / "other_python"
    program = f"import launcher.agent.main, sys; {change}; launcher.agent.main.main()"
    other.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c "{program}"\n')
    other.chmod(0o755)
    result = run_dtrain(*on(ssh_hosts, "node1"), "--python", other, script, cwd=script.parent)
    assert result.returncode == 1
    assert "node1: " in result.stderr
    assert message in result.stderr
    assert result.stdout == ""


@by_both
def test_noisy_login_shell_does_no_harm(
    ssh_hosts: SshHosts, script: Path, tmp_path: Path, client: tuple[str, ...]
) -> None:
    noisy = tmp_path / "noisy_python"
    noisy.write_text(
        f'#!/bin/sh\necho "Welcome to the cluster"\necho motd >&2\nexec {shlex.quote(sys.executable)} "$@"\n'
    )
    noisy.chmod(0o755)
    result = run_dtrain(*on(ssh_hosts, "node1", client=client), "--python", noisy, script, cwd=script.parent)
    assert result.returncode == 0, result.stderr
    assert "ran on node1" in result.stdout
    assert "Welcome" not in result.stdout + result.stderr


@by_both
def test_host_that_dies_is_the_cause_and_the_others_are_stopped(
    ssh_hosts: SshHosts, tmp_path: Path, client: tuple[str, ...]
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time\nprint('up', flush=True)\ntime.sleep(600)")
    argv = [sys.executable, "-m", "launcher", *on(ssh_hosts, client=client), str(script)]
    with started(*argv, cwd=tmp_path) as process:
        for _ in range(2):
            process.stdout.readline()
        ssh_hosts.stop(2)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert b"host node2 was lost after" in stderr
    assert b"1 worker stopped by dtrain" in stderr


def test_a_client_that_starts_as_the_run_ends_is_not_left() -> None:
    """As to reach a host that was lost, once more."""
    clients, begins, goes_on = Clients(), threading.Event(), threading.Event()
    made: list[ClientStream] = []

    def make(finished: Callable[[ClientStream], None]) -> ClientStream:
        begins.set()
        assert goes_on.wait(60)
        made.append(ClientStream(["sleep", "600"], None, finished=finished))
        return made[0]

    def connect() -> None:
        with contextlib.suppress(HostError):
            clients.open("far", make, time.monotonic() + 60, first=b"", what="ssh")

    connecting = threading.Thread(target=connect)
    connecting.start()
    assert begins.wait(60)
    threading.Timer(0.2, goes_on.set).start()
    clients.close()
    assert made[0]._client.poll() is not None
    connecting.join(60)
    made[0].give_up()
    with pytest.raises(HostError, match="the run has ended"):
        clients.open("far", make, time.monotonic() + 60, first=b"", what="ssh")


def test_a_missing_jump_host_is_named_not_bypassed(ssh_hosts: SshHosts, script: Path) -> None:
    config = ssh_hosts.folder / "jump"
    config.write_text("Host node1\n  ProxyJump gate.invalid\n" + ssh_hosts.ssh_config.read_text())
    result = run_dtrain(*on(ssh_hosts, "node1", config), script, cwd=script.parent)
    assert result.returncode == 1
    assert "node1: its jump host gate.invalid: DNS lookup of gate.invalid failed: " in result.stderr


def test_bad_ssh_configuration_is_an_error(ssh_hosts: SshHosts, script: Path) -> None:
    result = run_dtrain("run", "--ssh-config", "/no/such/file", "--hosts", "node1", script, cwd=script.parent)
    assert "--ssh-config /no/such/file does not exist" in result.stderr
    assert result.returncode != 0
