"""Reading of known_hosts, and what `ssh -G` says of a host."""

from __future__ import annotations

import base64
import os
import re
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from paramiko.hostkeys import HostKeys

from launcher.errors import HostError, UsageError
from launcher.placement.job_spec import SshOptions
from launcher.transport.ssh import config as ssh_config
from launcher.transport.ssh.address import Address, resolve
from launcher.transport.ssh.config import Target, look_up
from launcher.transport.ssh.known_hosts import KnownKey, add_key, known_keys


def new_key() -> str:
    return Ed25519PrivateKey.generate().public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def texts(keys: list[KnownKey], mark: str = "") -> list[str]:
    return [f"{key.type} {base64.b64encode(key.blob).decode()}" for key in keys if key.marker == mark]


def test_every_form_of_a_line_is_read(tmp_path: Path) -> None:
    keys = [new_key() for _ in range(7)]
    file = tmp_path / "known_hosts"
    file.write_text(
        "# a comment\n\n"
        f"node1 {keys[0]}\n"
        f"other,node1,10.0.0.1 {keys[1]} with a comment\n"
        f"node? {keys[2]}\n"
        f"{HostKeys.hash_host('node1')} {keys[3]}\n"
        f"@cert-authority *.corp.example {keys[4]}\n"
        f"@revoked node* {keys[5]}\n"
        f"node*,!node1 {keys[6]}\n"
        "node1 ssh-ed25519 damaged\n"
        "node1 a-type-of-the-future AAAA\n"
        "nonsense\n"
    )
    found = known_keys([tmp_path / "absent", file], "node1")
    assert texts(found) == keys[:4]
    assert texts(found, "@revoked") == [keys[5]]
    assert [key.line for key in found] == [3, 4, 5, 6, 8]
    assert texts(known_keys([file], "a.corp.example"), "@cert-authority") == [keys[4]]
    assert texts(known_keys([file], "NODE1")) == keys[:4]


def test_port_is_part_of_the_name_and_brackets_are_no_pattern(tmp_path: Path) -> None:
    keys = [new_key(), new_key(), new_key()]
    file = tmp_path / "known_hosts"
    file.write_text(f"[127.0.0.2]:2222 {keys[0]}\n[127.0.0.*]:* {keys[1]}\n127.0.0.2 {keys[2]}\n")
    assert texts(known_keys([file], "[127.0.0.2]:2222")) == keys[:2]
    assert texts(known_keys([file], "127.0.0.2")) == keys[2:]


def test_added_key_is_found_again(tmp_path: Path) -> None:
    file = tmp_path / "new" / "known_hosts"
    (key,) = known_keys([_with(tmp_path, "a")], "a")
    add_key(file, "[b]:22022", key_type=key.type, blob=key.blob)
    assert [found.blob for found in known_keys([file], "[b]:22022")] == [key.blob]
    add_key(file, "c", key_type=key.type, blob=key.blob, hashed=True)  # seen, though the file was read before
    assert [found.blob for found in known_keys([file], "c")] == [key.blob]
    assert [line.split()[0][:3] for line in file.read_text().splitlines()] == ["[b]", "|1|"]
    assert file.stat().st_mode & 0o777 == 0o600


def _with(folder: Path, name: str) -> Path:
    file = folder / "one"
    file.write_text(f"{name} {new_key()}\n")
    return file


# ---- what holds for one host ----


def address(config: Path, name: str = "alpha", **more: str | int) -> Address:
    return resolve(Target(name, **more), SshOptions(config=config), time.monotonic() + 10)  # type: ignore[arg-type]


def test_options_of_a_host_are_those_of_ssh(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        "Host alpha\n  HostName %h.example\n  User one\n  Port 2222\n  IdentityFile /keys/%h_%r\n"
        "  ProxyCommand connect %h %p %% %n\n  ProxyJump never\n"
        "Match host *.example user one\n  IdentityFile /keys/second\n  AddressFamily inet6\n"
        "Host *a !alpha\n  ProxyJump one@gate:23,last\n  ConnectTimeout 7\n  StrictHostKeyChecking accept-new\n"
        "Host *\n  User other\n  UserKnownHostsFile /known/one /known/two\n  ServerAliveInterval 3\n"
    )
    alpha = address(config)
    assert (alpha.hostname, alpha.port, alpha.user) == ("alpha.example", 2222, "one")
    assert alpha.identities == ("/keys/alpha.example_one", "/keys/second")
    assert not alpha.default_identities
    assert alpha.proxy_command == "connect alpha.example 2222 % alpha"
    assert alpha.jump is None
    assert alpha.known_hosts[:2] == (Path("/known/one"), Path("/known/two"))
    assert alpha.keepalive_s == 3
    assert alpha.command == f"ssh -F {config} alpha true"
    beta = address(config, "beta")
    assert beta.jump == Target("last", jump="one@gate:23")
    assert (beta.user, beta.connect_timeout_s, beta.accept_new) == ("other", 7.0, True)
    assert beta.default_identities
    typed = address(config, "alpha", user="typed", port=7)
    assert (typed.port, typed.user, typed.identities[0]) == (7, "typed", "/keys/alpha.example_typed")
    assert typed.command == f"ssh -F {config} -p 7 typed@alpha true"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("ProxyJump -oProxyCommand=x", "jump"),
        ("ProxyJump alpha", "jumphost loop via alpha"),
        ("ProxyJump x,@", "jump"),
        ("Port nine", "port"),
        ("ProxyUseFdpass yes\nProxyCommand x", "ProxyUseFdpass"),
        ("ConnectTimeout soon", "(time|number)"),
        ("IdentityFile ~/%y", "%y"),
    ],
)
def test_what_cannot_be_followed_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    config = tmp_path / "config"
    config.write_text(f"{text}\n")
    with pytest.raises(HostError, match=f"(?i){complaint}"):
        address(config)


def test_bad_configuration_is_reported_in_the_words_of_ssh(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("Host *\n  Prot 22\n")
    with pytest.raises(HostError, match=re.escape(f"{config}: line 2: Bad configuration option: prot")):
        address(config)


def test_a_host_is_never_taken_for_an_option(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("")
    with pytest.raises(HostError):
        address(config, f"-oProxyCommand=touch {tmp_path}/touched")
    with pytest.raises(HostError):
        address(config, "x", user=f"-oProxyCommand=touch {tmp_path}/touched")
    assert not (tmp_path / "touched").exists()


def test_match_exec_asks_and_cannot_hang(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text('Match host fast exec "test %n = fast"\n  Port 7\nMatch host slow exec "sleep 60"\n  Port 8\n')
    assert look_up(Target("fast"), config, 5.0)["port"] == ["7"]
    with pytest.raises(TimeoutError, match="Match exec"):
        look_up(Target("slow"), config, 0.3)


@pytest.fixture
def unknown_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """No ssh was looked for yet, whatever other tests have done in this process."""
    monkeypatch.setattr(ssh_config, "_found", [])


def test_without_openssh_the_package_is_named(
    unknown_client: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config"
    config.write_text("Port 7\n")
    monkeypatch.setenv("PATH", "/nowhere")
    install = "install it: apt-get install openssh-client, or dnf install openssh-clients"
    with pytest.raises(HostError, match=f"there is no ssh on this machine; {install}"):
        address(config)
    other = tmp_path / "ssh"
    other.write_text("#!/bin/sh\necho Dropbear v2022.83 >&2\n")
    other.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=f"{other} is not OpenSSH's; {install}"):
        look_up(Target("x"), config, 5.0)


def test_a_user_without_a_line_in_passwd_learns_what_ssh_needs(
    unknown_client: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses = tmp_path / "ssh"
    refuses.write_text(
        "#!/bin/sh\ncase $1 in -V) echo OpenSSH_9.2 >&2;; *) echo No user exists for uid 7 >&2; exit 255;; esac\n"
    )
    refuses.chmod(0o700)
    config = tmp_path / "config"
    config.write_text("")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    needed = f"No user exists for uid 7; ssh needs a line for user id {os.getuid()} in /etc/passwd"
    with pytest.raises(UsageError, match=needed):
        look_up(Target("x"), config, 5.0)
