"""Ways to a host: jump hosts, proxies, addresses, busy and silent servers; all over real sshd, and in time."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from testbed.processes import run_dtrain, wait_until
from testbed.sshd import SshHosts

from launcher.errors import HostError
from launcher.hosts.host import Host, HostKind
from launcher.placement.job_spec import SshOptions
from launcher.transport.ssh import connection as ssh_connection
from launcher.transport.ssh import pauses
from launcher.transport.ssh.address import resolve
from launcher.transport.ssh.config import Target
from launcher.transport.ssh.route import look_up, open_tcp
from launcher.transport.ssh.stream import SshStream, connect_ssh

pytestmark = pytest.mark.ordinary_user


def connect(
    config: Path, name: str, *, command: tuple[str, ...] = ("cat",), user: str | None = None, within_s: float = 60
) -> SshStream:
    host = Host(name, HostKind.SSH, user=user)
    return connect_ssh(host, SshOptions(config=config), list(command), time.monotonic() + within_s)


def says(stream: SshStream) -> bytes:
    """Whether it is there: it says back what it gets."""
    stream.write(b"hello")
    stream.end()
    heard = b""
    while data := stream.read():
        heard += data
    assert stream.finish(60)[0] == 0
    return heard


def refusal(config: Path, name: str, *, within_s: float = 20, user: str | None = None) -> str:
    with pytest.raises(HostError) as failure:
        connect(config, name, within_s=within_s, user=user).finish(0)
    assert failure.value.host == name
    return failure.value.reason


def config_of(hosts: SshHosts, name: str, first: str) -> Path:
    """Write a configuration with lines that come before those of the hosts."""
    path = hosts.folder / name
    path.write_text(first + "\n" + hosts.ssh_config.read_text())
    return path


def logins(hosts: SshHosts, i: int) -> int:
    return hosts.log(i).count("Accepted publickey")


@pytest.fixture
def unmet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No server was ever met, whatever other tests have done in this process."""
    monkeypatch.setattr(ssh_connection, "_met", set())


# ---- jump hosts ----


def test_hosts_behind_a_jump_host_share_its_connection(ssh_hosts: SshHosts) -> None:
    config = config_of(ssh_hosts, "behind", "Host node1 node2\n  ProxyJump node3")
    before = logins(ssh_hosts, 3)
    with ThreadPoolExecutor(6) as pool:
        streams = list(pool.map(lambda i: connect(config, f"node{i % 2 + 1}"), range(6)))
    assert logins(ssh_hosts, 3) == before + 1
    assert all(stream.our_address is None for stream in streams)  # it is not this machine that they see
    assert [says(stream) for stream in streams[:5]] == [b"hello"] * 5
    assert ssh_hosts.sessions(3) == 1
    assert says(streams[5]) == b"hello"
    wait_until(lambda: ssh_hosts.sessions(3) == 0, "the connection to the jump host has ended")
    assert says(connect(config, "node1")) == b"hello"
    assert logins(ssh_hosts, 3) == before + 2


def test_a_jump_host_that_went_down_is_asked_again(ssh_hosts: SshHosts) -> None:
    config = config_of(ssh_hosts, "anew", "Host node1\n  ProxyJump node3")
    first = connect(config, "node1")
    ssh_hosts.stop(3)
    wait_until(lambda: first.read() == b"", "the end is seen")
    ssh_hosts.start(3)
    second = connect(config, "node1")
    first.finish(0)
    assert says(second) == b"hello"


def test_jump_hosts_in_a_row_each_have_their_own_configuration(ssh_hosts: SshHosts) -> None:
    port = ssh_hosts.port
    config = config_of(ssh_hosts, "row", f"Host node1\n  ProxyJump node2,{ssh_hosts.user}@node3:{port}")
    before = logins(ssh_hosts, 2), logins(ssh_hosts, 3)
    assert says(connect(config, "node1")) == b"hello"
    assert (logins(ssh_hosts, 2), logins(ssh_hosts, 3)) == (before[0] + 1, before[1] + 1)

    own = config_of(ssh_hosts, "own", "Host node1\n  ProxyJump node3\nHost node3\n  ProxyJump node2")
    assert says(connect(own, "node1")) == b"hello"
    assert logins(ssh_hosts, 2) == before[0] + 2


def test_what_goes_wrong_at_a_hop_is_said_of_that_hop(ssh_hosts: SshHosts) -> None:
    first = "Host node1\n  ProxyJump node2,node3\n"
    wrong = config_of(ssh_hosts, "hop_key", f"{first}Host node2\n  IdentityFile {ssh_hosts.wrong_identity}")
    wrong.write_text(wrong.read_text().replace(str(ssh_hosts.identity), str(ssh_hosts.wrong_identity), 2))
    assert refusal(wrong, "node1").startswith(f"its jump host node2: {ssh_hosts.user}@127.0.0.3 port ")

    unknown = ssh_hosts.config("hop_unknown", unknown=[3])
    unknown.write_text(first + unknown.read_text())
    assert refusal(unknown, "node1").startswith("its jump host node3: its host key ssh-ed25519 SHA256:")

    config = config_of(ssh_hosts, "hop", "Host node1\n  ProxyJump node3\nHost node4\n  ProxyJump node4")
    ssh_hosts.configure(3, "AllowTcpForwarding no")
    assert "its jump host node3 forbids forwarding (AllowTcpForwarding" in refusal(config, "node1")
    assert "jumphost loop via node4" in refusal(config, "node4")
    around = config_of(
        ssh_hosts, "around", "Host node1\n ProxyJump node2\nHost node2\n ProxyJump node3\nHost node3\n ProxyJump node2"
    )
    assert "in a circle" in refusal(around, "node1")


def test_a_host_that_its_jump_host_cannot_reach_is_named(ssh_hosts: SshHosts, unmet: None) -> None:
    config = config_of(
        ssh_hosts, "unreached", "Host node1 nowhere\n  ProxyJump node3\nHost nowhere\n  HostName no.such"
    )
    ssh_hosts.stop(1)
    began = time.monotonic()
    reason = refusal(config, "node1", within_s=100)
    assert f"its jump host node3 cannot reach 127.0.0.2 port {ssh_hosts.port}" in reason
    assert time.monotonic() - began < 50
    wait_until(lambda: ssh_hosts.sessions(3) == 0, "nothing is kept open for it")


def test_a_silent_host_behind_a_jump_host_is_given_up_alone(ssh_hosts: SshHosts) -> None:
    with full_queue(ssh_hosts.ssh_config) as odd:
        odd.write_text("Host node1 odd\n  ProxyJump node3\n" + odd.read_text())
        stream = connect(odd, "node1")
        began = time.monotonic()
        assert "its jump host node3 did not open a connection to 127.0.0.1" in refusal(odd, "odd", within_s=3.0)
        assert time.monotonic() - began < 15  # of itself a connection has 20 s
        other = connect(odd, "node1")  # by a connection of its own: the first one might hang, for all that is known
        assert ssh_hosts.sessions(3) == 2
        assert says(stream) == says(other) == b"hello"


def test_a_run_goes_through_a_jump_host(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os\nprint('ran on', os.environ['DTRAIN_TEST_HOST'])")
    config = config_of(ssh_hosts, "run", "Host node1 node2\n  ProxyJump node3")
    result = run_dtrain("run", "--ssh-config", config, "--hosts", "node1,node2", "script.py", cwd=tmp_path)
    assert sorted(result.stdout.splitlines()) == ["[node1:0] ran on node1", "[node2:1] ran on node2"], result.stderr


# ---- proxies ----


def test_a_proxy_command_carries_the_connection_and_is_reaped(ssh_hosts: SshHosts) -> None:
    line = f"ssh -F {ssh_hosts.ssh_config} -W %h:%p node3; true"
    config = config_of(ssh_hosts, "proxy", f"Host node1\n  ProxyCommand {line.removesuffix('; true')}")
    stream = connect(config, "node1")
    proxy = stream._connection.route.proxy
    assert proxy is not None
    assert stream.our_address is None
    assert says(stream) == b"hello"
    assert proxy._process.poll() is not None


def test_a_proxy_command_that_fails_or_hangs_is_named(ssh_hosts: SshHosts) -> None:
    fails = "sh -c 'echo noise >&2; echo no way to %h >&2; exit 3'"
    config = config_of(
        ssh_hosts, "proxies",
        f"Host node1\n  ProxyCommand {fails}\nHost node2\n  ProxyCommand sleep 60\n"
        "Host node3\n  ProxyUseFdpass yes\n  ProxyCommand true\nHost node4\n  ProxyCommand echo %r",
    )  # fmt: skip
    assert f"its ProxyCommand ({fails.replace('%h', '127.0.0.2')}) did not get through: no way to 127.0.0.2" in refusal(
        config, "node1"
    )
    began = time.monotonic()
    assert "does not answer" in refusal(config, "node2", within_s=2.0)
    assert time.monotonic() - began < 30  # and the fixture sees that it is gone
    assert "ProxyUseFdpass" in refusal(config, "node3")
    config.write_text(config.read_text().replace(f"  User {ssh_hosts.user}\n", ""))
    # What the user typed must not become a shell's words.
    reason = refusal(config, "node4", user="$(touch/tmp/x)")
    assert "characters" in reason


# ---- servers that are busy, silent or something else ----


def test_a_server_that_takes_one_at_a_time_is_tried_again(ssh_hosts: SshHosts) -> None:
    ssh_hosts.configure(1, "MaxStartups 1:100:2")
    with ThreadPoolExecutor(8) as pool:
        streams = list(pool.map(lambda _: connect(ssh_hosts.ssh_config, "node1"), range(8)))
    assert "drop connection" in ssh_hosts.log(1)  # or there was nothing to be tried again
    assert [says(stream) for stream in streams] == [b"hello"] * 8


def test_a_server_that_is_coming_up_is_awaited_for_a_moment(
    ssh_hosts: SshHosts, unmet: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh_hosts.stop(4)
    began = time.monotonic()
    reason = refusal(ssh_hosts.ssh_config, "node4", within_s=100)
    assert "connection refused; is sshd running there? Try: ssh -F" in reason
    assert time.monotonic() - began < 50
    monkeypatch.setattr(pauses, "REFUSED_S", (0.3,) * 100)
    starter = threading.Timer(0.6, ssh_hosts.start, [4])
    starter.start()
    try:
        assert says(connect(ssh_hosts.ssh_config, "node4")) == b"hello"
    finally:
        starter.join()
    ssh_hosts.stop(4)
    began = time.monotonic()
    refusal(ssh_hosts.ssh_config, "node4", within_s=100)
    assert time.monotonic() - began < 10  # one that was lost is not waited for here: the run goes on without it


@contextlib.contextmanager
def server(
    config: Path, *, greeting: bytes = b"", closes: bool = False, backlog: int = 5, greeted: int = 1000
) -> Iterator[Path]:
    """A server that is none: it says a greeting and nothing more. Yields a configuration for it under `odd`.

    After so many that are `greeted` it neither greets nor closes.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=backlog) as listener:
        held = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = listener.accept()
                    held.append(sock)
                    if len(held) <= greeted:
                        sock.sendall(greeting)
                        if closes:
                            sock.close()

        thread = threading.Thread(target=serve, daemon=True)
        if backlog:
            thread.start()
        port = listener.getsockname()[1]
        odd = config.with_name(f"odd{port}")
        odd.write_text(f"Host odd\n  HostName 127.0.0.1\n  Port {port}\n{config.read_text()}")
        try:
            yield odd
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for sock in held:
                sock.close()
            if backlog:
                thread.join(60)


@pytest.mark.parametrize(
    ("greeting", "closes", "reason"),
    [
        (b"", False, "does not answer"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", False, "its key exchange hangs"),
        (b"220 mail.example ESMTP\r\n", False, "is not an SSH server: it said '220 mail.example ESMTP'"),
        (b"\0\0\0", False, "is not an SSH server"),
        (b"", True, "before its greeting; its sshd may have reached MaxStartups"),
        (b"Not allowed at this time\r\n", True, "saying 'Not allowed at this time', before its greeting"),
        (b"Go away\r\n", True, "closed the connection, saying 'Go away', before its greeting"),
    ],
)
def test_what_is_no_server_is_reported_in_time(ssh_hosts: SshHosts, greeting: bytes, closes: bool, reason: str) -> None:
    with server(ssh_hosts.ssh_config, greeting=greeting, closes=closes) as config:
        began = time.monotonic()
        assert reason in refusal(config, "odd", within_s=3)
        assert time.monotonic() - began < 15


def test_a_server_s_refusal_is_reported_by_what_it_said(ssh_hosts: SshHosts) -> None:
    with server(ssh_hosts.ssh_config, greeting=b"Not allowed at this time\r\n", closes=True, greeted=1) as config:
        assert "closed the connection, saying 'Not allowed at this time', before its greeting" in refusal(
            config, "odd", within_s=4
        )


@contextlib.contextmanager
def full_queue(config: Path) -> Iterator[Path]:
    """A port that drops what comes, as a firewall does. Yields a configuration for it under `odd`."""
    with server(config, backlog=0) as odd, contextlib.ExitStack() as stack:
        for _ in range(4):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", int(odd.name.removeprefix("odd"))))
        yield odd


def test_an_address_that_swallows_everything_is_given_up_in_time(ssh_hosts: SshHosts) -> None:
    with full_queue(ssh_hosts.ssh_config) as config:
        began = time.monotonic()
        assert "does not answer" in refusal(config, "odd", within_s=2.0)
        assert time.monotonic() - began < 15


def test_the_first_of_several_addresses_that_answers_is_taken(ssh_hosts: SshHosts) -> None:
    address = resolve(Target("node1"), SshOptions(config=ssh_hosts.ssh_config), time.monotonic() + 20)
    refused, answers = (look_up(replace(address, port=port), 0.0)[0] for port in (1, ssh_hosts.port))
    with full_queue(ssh_hosts.ssh_config) as odd:
        silent = look_up(replace(address, hostname="127.0.0.1", port=int(odd.name.removeprefix("odd"))), 0.0)[0]
        route = open_tcp(address, [refused, silent, answers], time.monotonic() + 20)
        assert route.sock.getpeername() == answers[4]
        route.close()
        with pytest.raises(TimeoutError):
            open_tcp(address, [refused, silent], time.monotonic() + 0.5)
    with pytest.raises(ConnectionRefusedError):
        open_tcp(address, [refused, refused], time.monotonic() + 20)


def test_ipv6_address_family_bind_address_and_port(ssh_hosts: SshHosts) -> None:
    ssh_hosts.configure(1, f"ListenAddress [::1]:{ssh_hosts.port}")
    key = ssh_hosts.known_hosts.read_text().split()[1:3]
    with ssh_hosts.known_hosts.open("a") as known:
        known.write(f"[::1]:{ssh_hosts.port} {' '.join(key)}\n")
    usual = ssh_hosts.ssh_config.read_text().replace(f"Port {ssh_hosts.port}", "Port 1")
    config = ssh_hosts.folder / "six"
    config.write_text(
        "Host six\n  HostName ::1\n  BindAddress ::1\n"
        "Host alias\n  HostName ::1\n  AddressFamily inet6\n  HostKeyAlias node1alias\n"
        "Host lo\n  HostName ::1\n  BindInterface lo\n"
        "Host four\n  HostName 127.0.0.2\n  AddressFamily inet6\n"
        "Host noname\n  HostName a..b\n"
        f"Host wrong\n  HostName ::1\n  BindAddress 192.0.2.1\n{usual.replace('Host node1', 'Host *')}"
    )
    with ssh_hosts.known_hosts.open("a") as known:
        known.write(f"node1alias {' '.join(key)}\n")
    for name in ("six", "alias", "lo"):
        host = Host(name, HostKind.SSH, port=ssh_hosts.port)  # wins over the configuration
        stream = connect_ssh(host, SshOptions(config=config), ["cat"], time.monotonic() + 10)
        assert stream.our_address == "::1"
        assert says(stream) == b"hello"
    assert "bindAddress 192.0.2.1 of its ssh configuration gives no usable address here" in refusal(config, "wrong")
    assert "DNS lookup of 127.0.0.2 failed in its AddressFamily inet6" in refusal(config, "four")
    assert "DNS lookup of a..b failed: no host can have this name" in refusal(config, "noname")


# ---- shells and accounts ----


@pytest.mark.parametrize("client", [(), ("--ssh-command", "ssh")], ids=["paramiko", "openssh"])
def test_a_noisy_slow_shell_and_a_banner_do_no_harm(
    ssh_hosts: SshHosts, tmp_path: Path, client: tuple[str, ...]
) -> None:
    banner = tmp_path / "banner"
    banner.write_text("UNAUTHORISED ACCESS\nIS PROHIBITED\n" * 20)
    ssh_hosts.configure(1, f"Banner {banner}")
    rc = ssh_hosts.home(1) / ".bashrc"
    rc.write_text(
        "set -e\necho to stdout; echo to stderr >&2\nprintf 'no newline'\nsleep 0.3\ncd /tmp\nalias exec=false\n"
    )
    try:
        script = tmp_path / "script.py"
        script.write_text("import os\nprint('ran in', os.getcwd())")
        options = ["--ssh-config", str(ssh_hosts.ssh_config), *client]
        result = run_dtrain("run", *options, "--hosts", "node1", script, cwd=tmp_path)
        assert result.stdout == f"[node1:0] ran in {tmp_path}\n", result.stderr
        assert "to std" not in result.stderr
        assert "PROHIBITED" not in result.stderr
    finally:
        rc.unlink()


def test_start_up_files_that_end_or_wait_are_reported(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    if Path(pwd.getpwuid(os.getuid()).pw_shell).name != "bash":
        pytest.skip("the account's shell does not read .bashrc")
    script = tmp_path / "script.py"
    script.write_text("")
    waiting = tmp_path / "pid"
    lines = ("export PYTHONHOME=/nowhere", "exit 3", f"echo $$ > {waiting}; exec sleep 1000")
    files = [ssh_hosts.home(number) / ".bashrc" for number in (1, 2, 3)]
    config = ssh_hosts.config("strict", unknown=[4])
    config.write_text(f"StrictHostKeyChecking yes\n{config.read_text()}")
    for file, line in zip(files, lines, strict=True):
        file.write_text(f"{line}\n")

    def why(host: str) -> str:
        # Without separated privileges, as here, sshd does not end what it is asked to end.
        limit_s = "6" if host == "node3" else "60"  # only there it is waited for
        options = ["--ssh-config", str(config), "--hosts", host, "--start-timeout-s", limit_s]
        return run_dtrain("run", *options, script, cwd=tmp_path, outlived=host == "node3").stderr

    try:
        assert "cannot find its own library: PYTHONHOME may be set to /nowhere there; unset it" in why("node1")
        assert "(status 3): it said nothing; does its shell end first, or a start-up file of it" in why("node2")
        assert "node3: let us in, but no agent answered within 6 s (--start-timeout-s); does a start-up" in why("node3")
        log = ssh_hosts.folder / "node3" / "sshd.log"
        wait_until(lambda: "session_signal_req" in log.read_text(), "sshd is asked to kill it")
        os.kill(int(waiting.read_text()), signal.SIGKILL)
        assert "accept it once by: ssh -o StrictHostKeyChecking=ask " in why("node4")
    finally:
        for file in files:
            file.unlink()


def test_an_account_that_runs_nothing_or_something_else_says_so(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    ssh_hosts.configure(1, "ForceCommand echo This account is currently not available.; exit 1")
    ssh_hosts.configure(2, "MaxSessions 0")
    ssh_hosts.configure(3, "ForceCommand internal-sftp")
    ssh_hosts.configure(4, "ForceCommand kill -KILL $PPID")
    result = run_dtrain(
        "run", "--ssh-config", ssh_hosts.ssh_config, "--hosts", "node[1-4]", "--start-timeout-s", "60", script,
        cwd=tmp_path, outlived=True,  # node4's command ends after its connection
    )  # fmt: skip
    assert "node1: the agent did not start (status 1): This account is currently not available." in result.stderr
    assert f"node2: 127.0.0.3 accepts {ssh_hosts.user}, but opens no session (MaxSessions" in result.stderr
    assert "node3: the agent did not start (status 1): This service allows sftp connections only." in result.stderr
    assert "node4: the connection closed before the agent had started\n" in result.stderr
