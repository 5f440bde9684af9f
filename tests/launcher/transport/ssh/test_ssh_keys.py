"""Whom we trust and how we prove who we are, over real sshd: known hosts, authorities, keys, certificates."""

from __future__ import annotations

import base64
import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import paramiko
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from testbed.processes import started, wait_until
from testbed.sshd import PASSPHRASE, SshHosts, certify, write_key

from launcher.errors import HostError
from launcher.hosts.host import Host, HostKind
from launcher.placement.job_spec import SshOptions
from launcher.transport.ssh.address import resolve
from launcher.transport.ssh.config import Target
from launcher.transport.ssh.stream import connect_ssh
from launcher.transport.ssh.trust import Trust

pytestmark = pytest.mark.ordinary_user


def reach(config: Path, name: str = "node1", *, accept_new: bool = False) -> None:
    """Connect and run nothing."""
    options = SshOptions(config=config, accept_new=accept_new)
    stream = connect_ssh(Host(name, HostKind.SSH), options, ["true"], time.monotonic() + 20)
    assert stream.finish(60)[0] == 0


def refusal(config: Path, name: str = "node1", *, accept_new: bool = False) -> str:
    with pytest.raises(HostError) as failure:
        reach(config, name, accept_new=accept_new)
    return failure.value.reason


def write_config(hosts: SshHosts, i: int, *lines: str, known_hosts: str | None = None, identity: bool = False) -> Path:
    """Write a configuration of one host with the given lines only."""
    path = hosts.folder / f"config{time.monotonic_ns()}"
    known = hosts.known_hosts
    if known_hosts is not None:
        known = path.with_suffix(".known_hosts")
        known.write_text(known_hosts)
    own = [f"IdentityFile {hosts.identity}", "IdentitiesOnly yes"] if identity else []
    usual = [f"HostName {hosts.address(i)}", f"Port {hosts.port}", f"UserKnownHostsFile {known}", "BatchMode yes"]
    path.write_text("\n  ".join([f"Host node{i}", *lines, *own, *usual, "GlobalKnownHostsFile /dev/null\n"]))
    return path


def new_key(path: Path) -> Path:
    return write_key(path, Ed25519PrivateKey.generate())


def public(key: Path) -> str:
    return " ".join(key.with_name(f"{key.name}.pub").read_text().split()[:2])


@contextlib.contextmanager
def agent(*keys: Path) -> Iterator[Path]:
    """An ssh-agent with these keys. Yields its socket."""
    with tempfile.TemporaryDirectory() as folder:  # not in tmp_path: the path of a socket is short
        path, answer = Path(folder, "agent"), Path(folder, "askpass")
        answer.write_text(f"#!/bin/sh\necho '{PASSPHRASE}'\n")
        answer.chmod(0o700)
        with started("ssh-agent", "-D", "-a", path):
            wait_until(path.exists, "the agent is there")
            ask = {"SSH_ASKPASS": str(answer), "SSH_ASKPASS_REQUIRE": "force"}
            env = {**os.environ, "SSH_AUTH_SOCK": str(path), **ask}
            for key in keys:
                subprocess.run(["ssh-add", "-q", key], env=env, check=True, capture_output=True)
            yield path


# ---- trust ----


def test_a_host_with_several_keys_is_asked_for_one_that_is_known(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    other = write_key(tmp_path / "other", ec.generate_private_key(ec.SECP256R1()))
    ssh_hosts.configure(1, f"HostKey {other}")
    name = f"[{ssh_hosts.address(1)}]:{ssh_hosts.port}"
    reach(write_config(ssh_hosts, 1, known_hosts=f"{name} {public(other)}\n", identity=True))
    reach(write_config(ssh_hosts, 1, identity=True))
    only = write_config(ssh_hosts, 1, "HostKeyAlgorithms ecdsa-sha2-nistp256", identity=True)
    assert "its host key has CHANGED: ecdsa-sha2-nistp256" in refusal(only)
    nothing = write_config(ssh_hosts, 1, "Ciphers chacha20-poly1305@openssh.com", identity=True)
    assert "ciphers in its ssh configuration allow only chacha20-poly1305@openssh.com" in refusal(nothing)
    reach(write_config(ssh_hosts, 1, "Ciphers aes256-ctr", "MACs hmac-sha2-512", "Compression yes", identity=True))


def test_names_of_known_hosts_are_those_of_ssh(ssh_hosts: SshHosts) -> None:
    key = public(ssh_hosts.host_key(1))
    other_key = public(new_key(ssh_hosts.folder / "other_key"))
    address = ssh_hosts.address(1)
    reach(write_config(ssh_hosts, 1, known_hosts=f"{address} {key}\n", identity=True))  # whatever its port
    unknown = write_config(
        ssh_hosts, 1, "KnownHostsCommand /bin/x", known_hosts=f"{address} {other_key}\n", identity=True
    )
    assert "; KnownHostsCommand of its ssh configuration can be asked only with --ssh-command ssh; if it" in refusal(
        unknown
    )
    alias = write_config(ssh_hosts, 1, "HostKeyAlias Login", known_hosts=f"login {key}\n", identity=True)
    reach(alias)
    revoked = f"[{address}]:{ssh_hosts.port} {key}\n@revoked * {key}\n"
    assert "is revoked in" in refusal(write_config(ssh_hosts, 1, known_hosts=revoked, identity=True), accept_new=True)
    listed = ssh_hosts.folder / "revoked"
    listed.write_text(f"# stolen\n{key}\n")
    assert "is revoked in" in refusal(write_config(ssh_hosts, 1, f"RevokedHostKeys {listed}", identity=True))
    listed.unlink()
    assert "cannot be read" in refusal(write_config(ssh_hosts, 1, f"RevokedHostKeys {listed}", identity=True))


def test_a_new_key_is_added_as_the_configuration_has_it(ssh_hosts: SshHosts) -> None:
    config = write_config(ssh_hosts, 1, "HashKnownHosts yes", known_hosts="# no newline", identity=True)
    reach(config, accept_new=True)
    (line,) = config.with_suffix(".known_hosts").read_text().splitlines()[1:]
    assert line.startswith("|1|")
    reach(config)
    reach(write_config(ssh_hosts, 1, "StrictHostKeyChecking no", "UserKnownHostsFile /dev/null", identity=True))


def test_a_host_certificate_of_a_known_authority_is_enough(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    authority = new_key(tmp_path / "authority")
    certificate = certify(authority, ssh_hosts.host_key(1), name=ssh_hosts.address(1), host=True)
    ssh_hosts.configure(1, f"HostCertificate {certificate}")
    line = f"@cert-authority *.1,[127.*]:*,127.* {public(authority)}\n"
    reach(write_config(ssh_hosts, 1, known_hosts=line, identity=True))
    other = line.replace(public(authority), public(new_key(tmp_path / "other")))
    assert "; its certificate is not of an authority" in refusal(
        write_config(ssh_hosts, 1, known_hosts=other, identity=True)
    )
    withdrawn = f"{line}@revoked * {public(authority)}\n"
    assert "is not in" in refusal(write_config(ssh_hosts, 1, known_hosts=withdrawn, identity=True))

    wrong = [
        ("name", "elsewhere", "+1h", "for elsewhere, not for 127.0.0.2"),
        ("time", "127.0.0.2", "20200101:20200102", "not valid"),
    ]
    for _, name, valid, reason in wrong:
        certify(authority, ssh_hosts.host_key(1), name=name, host=True, valid=valid)
        ssh_hosts.configure(1, f"HostCertificate {certificate}")
        assert reason in refusal(write_config(ssh_hosts, 1, known_hosts=line, identity=True))
    # A host that has none is distinguished from one whose key is unknown; and one that is known as well is in.
    ssh_hosts.configure(1)
    assert "it has no certificate of the authority in" in refusal(
        write_config(ssh_hosts, 1, known_hosts=line, identity=True)
    )
    known = f"{line}[{ssh_hosts.address(1)}]:{ssh_hosts.port} {public(ssh_hosts.host_key(1))}\n"
    reach(write_config(ssh_hosts, 1, known_hosts=known, identity=True))


def test_a_forged_certificate_is_none(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    authority = new_key(tmp_path / "authority")
    certificate = certify(authority, new_key(tmp_path / "host"), name="127.0.0.9", host=True)
    line = f"@cert-authority * {public(authority)}\n"
    config = write_config(ssh_hosts, 1, known_hosts=line)
    address = resolve(Target("node1"), SshOptions(config=config), time.monotonic() + 10)
    genuine = base64.b64decode(certificate.read_text().split()[1])
    with pytest.raises(HostError, match="its certificate is damaged"):
        Trust(address).check(paramiko.Ed25519Key(data=genuine.replace(b"127.0.0.9", b"127.0.0.2")))
    with pytest.raises(HostError, match=r"its certificate is for 127\.0\.0\.9, not for 127\.0\.0\.2"):
        Trust(address).check(paramiko.Ed25519Key(data=genuine))


# ---- keys ----


def test_the_named_key_is_found_among_many(
    ssh_hosts: SshHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh_hosts.configure(1, "MaxAuthTries 2")
    others = [new_key(tmp_path / f"other{i}") for i in range(3)]
    public_only = tmp_path / "public_only"
    public_only.with_name("public_only.pub").write_text(public(ssh_hosts.locked_identity))
    named = [f"IdentityFile {key}" for key in others]
    right = f"IdentityFile {ssh_hosts.identity}"
    with agent(*others, ssh_hosts.locked_identity) as sock:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(sock))
        assert "after 2 of our keys: too many authentication failures" in refusal(write_config(ssh_hosts, 1))
        assert "IdentitiesOnly yes" in refusal(write_config(ssh_hosts, 1, *named))
        reach(write_config(ssh_hosts, 1, right))  # what is named goes first, even with a full agent
        reach(write_config(ssh_hosts, 1, right, "IdentitiesOnly yes"))
        reach(write_config(ssh_hosts, 1, f"IdentityFile {ssh_hosts.locked_identity}"))  # which the agent has
        reach(write_config(ssh_hosts, 1, f"IdentityFile {public_only}", "IdentitiesOnly yes"))
        no_agent = write_config(ssh_hosts, 1, f"IdentityFile {ssh_hosts.locked_identity}", "IdentityAgent none")
        assert "is locked by a passphrase; unlock it once with: ssh-add" in refusal(no_agent)
        monkeypatch.delenv("SSH_AUTH_SOCK")
        of_its_own = (f"IdentityAgent {sock}", f"IdentityFile {ssh_hosts.locked_identity}", "IdentitiesOnly yes")
        reach(write_config(ssh_hosts, 1, *of_its_own))
        monkeypatch.setenv("MY_AGENT", str(sock))
        reach(write_config(ssh_hosts, 1, "IdentityAgent $MY_AGENT", *of_its_own[1:]))
    monkeypatch.setenv("SSH_AUTH_SOCK", str(sock))  # no one is there any more
    reach(write_config(ssh_hosts, 1, right))
    missing = refusal(write_config(ssh_hosts, 1, f"IdentityFile {tmp_path}/none", "IdentitiesOnly yes"))
    there = f"{ssh_hosts.user}@127.0.0.2 port {ssh_hosts.port}"
    assert f"there is no key to offer to {there} ({tmp_path}/none, which does not" in missing


def test_tokens_stand_for_what_they_do_in_ssh(
    ssh_hosts: SshHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEYS", str(tmp_path))
    key = tmp_path / f"id 127.0.0.2 node1 {ssh_hosts.port} {ssh_hosts.user} %"
    key.write_bytes(ssh_hosts.identity.read_bytes())
    known = tmp_path / "known node1"
    known.write_text(ssh_hosts.known_hosts.read_text())
    reach(
        write_config(
            ssh_hosts, 1, 'IdentityFile "${KEYS}/id %h %n %p %r %%"', "IdentitiesOnly yes",
            f'UserKnownHostsFile /nothing/there "{tmp_path}/known %k"',
        )
    )  # fmt: skip
    assert "%x" in refusal(write_config(ssh_hosts, 1, "IdentityFile ~/%x"))
    assert "${NOT_SET}, which is not set" in refusal(write_config(ssh_hosts, 1, "IdentityFile ${NOT_SET}/x"))


def test_certificates_of_a_users_authority_let_us_in(
    ssh_hosts: SshHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = new_key(tmp_path / "authority")
    ssh_hosts.configure(1, f"TrustedUserCAKeys {authority}.pub", "AuthorizedKeysFile none")
    key = new_key(tmp_path / "id")
    named = (f"IdentityFile {key}", "IdentitiesOnly yes")
    assert "accepts none of our keys" in refusal(write_config(ssh_hosts, 1, *named))
    certificate = certify(authority, key, name=ssh_hosts.user)
    reach(write_config(ssh_hosts, 1, *named))  # beside the key
    with agent(key) as sock:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(sock))
        reach(write_config(ssh_hosts, 1))  # both in the agent
        elsewhere = certificate.rename(tmp_path / "elsewhere")
        reach(write_config(ssh_hosts, 1, f"CertificateFile {elsewhere}", *named))
        key.unlink()
        reach(write_config(ssh_hosts, 1, f"CertificateFile {elsewhere}", *named))  # the key in the agent only
    monkeypatch.delenv("SSH_AUTH_SOCK")
    key = new_key(tmp_path / "another")
    certify(authority, key, name="somebody")
    assert "accepts none of our keys" in refusal(
        write_config(ssh_hosts, 1, f"IdentityFile {key}", "IdentitiesOnly yes")
    )


def test_what_keys_alone_cannot_do_is_said(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    usual = write_config(ssh_hosts, 1, identity=True)
    ssh_hosts.configure(1, "PubkeyAuthentication no", "PasswordAuthentication yes")
    assert "accepts no keys, only password, and dtrain cannot answer prompts" in refusal(usual)
    ssh_hosts.configure(1, "AuthenticationMethods publickey,password", "PasswordAuthentication yes")
    assert "accepts the key, but also wants password" in refusal(usual)
    assert "PubkeyAuthentication no" in refusal(write_config(ssh_hosts, 1, "PubkeyAuthentication no", identity=True))
    broken = tmp_path / "broken"
    broken.write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----\n")
    assert f"{broken}: " in refusal(write_config(ssh_hosts, 2, f"IdentityFile {broken}", "IdentitiesOnly yes"), "node2")
