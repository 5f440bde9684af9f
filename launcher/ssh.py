"""Agents on remote hosts, through paramiko: the user's own ssh configuration, agent, keys and known hosts.

Host keys are checked always. An unknown or changed key is a refusal whose text has the command that would mend it.
"""

from __future__ import annotations

import base64
import getpass
import hashlib
import os
import shlex
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import paramiko

from launcher.errors import HostError
from launcher.hosts import Host
from launcher.known_hosts import add_key, known_keys
from launcher.spec import SshOptions
from launcher.ssh_config import read_ssh_config

__all__ = ["SshStream", "connect_ssh"]

KEEPALIVE_S = 15
CONNECT_TIMEOUT_S = 20.0  # for TCP and for sshd's greeting, where the ssh configuration has no ConnectTimeout
READ_BYTES = 1 << 16


@dataclass(frozen=True)
class Address:
    """Where and how one host is reached, after the ssh configuration."""

    host: str  # as the user named it
    hostname: str
    port: int
    user: str
    alias: str | None  # HostKeyAlias
    identities: tuple[str, ...]
    only_identities: bool
    known_hosts: tuple[Path, ...]
    writable: Path | None  # the file to which a new key is added
    accept_new: bool
    connect_timeout_s: float
    command: str  # what reaches it with OpenSSH

    @property
    def paramiko_name(self) -> str:
        return self.hostname if self.port == 22 else f"[{self.hostname}]:{self.port}"

    @property
    def known_name(self) -> str:
        """Return the host's name in a known_hosts file."""
        return self.alias or self.paramiko_name


def connect_ssh(host: Host, options: SshOptions, command: list[str], deadline: float) -> SshStream:
    """Connect, check the host's key, authenticate, and start `command` there. Blocks until `deadline`.

    Raises HostError with the next step for every way in which that fails.
    """
    address = _resolve(host, options)
    client = paramiko.SSHClient()
    try:
        _trust(client, address)
        _connect(client, address, deadline)
        return SshStream(client, command)
    except HostError:
        client.close()
        raise
    except (OSError, EOFError, paramiko.SSHException) as error:
        client.close()
        raise HostError(host.name, _why(address, error)) from error


class SshStream:
    """An agent at the other end of an SSH channel."""

    def __init__(self, client: paramiko.SSHClient, command: list[str]) -> None:
        transport = client.get_transport()
        assert transport is not None
        transport.set_keepalive(KEEPALIVE_S)
        self._client = client
        self.our_address: str | None = str(transport.sock.getsockname()[0])  # type: ignore[union-attr]  # not tunnelled
        self._channel = transport.open_session(timeout=10)
        # Only fixed words and the interpreter's path are on the remote command line; all else goes through the stream.
        self._words = bytearray()
        self._channel.exec_command(f"cd / && exec {shlex.join(command)}")

    def read(self) -> bytes:
        return self._channel.recv(READ_BYTES)

    def write(self, data: bytes) -> None:
        self._channel.sendall(data)

    def end(self) -> None:
        self._channel.shutdown_write()

    def finish(self, wait_s: float) -> tuple[int | None, str]:
        self._channel.status_event.wait(wait_s)
        while self._channel.recv_stderr_ready() and len(self._words) < READ_BYTES:
            self._words += self._channel.recv_stderr(READ_BYTES)
        status = self._channel.exit_status if self._channel.exit_status >= 0 else None
        self._client.close()
        return status, self._words.decode("utf-8", "replace")


# ---- configuration -------------------------------------------------------------------------------------------


def _resolve(host: Host, options: SshOptions) -> Address:
    config = read_ssh_config(options.config).lookup(host.name)
    for word in ("proxyjump", "proxycommand"):
        if config.get(word, "none").lower() != "none":
            raise HostError(host.name, f"its ssh configuration has {word}, which dtrain cannot follow yet")
    try:
        port = int(config.get("port", 22))
        connect_timeout_s = float(config.get("connecttimeout", CONNECT_TIMEOUT_S))
    except ValueError as error:
        raise HostError(host.name, f"its Port or ConnectTimeout in the ssh configuration: {error}") from error
    user_files = _paths(config.get("userknownhostsfile", "~/.ssh/known_hosts ~/.ssh/known_hosts2"))
    system_files = _paths(config.get("globalknownhostsfile", "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"))
    strict = config.get("stricthostkeychecking", "ask").lower()
    named = [] if options.config is None else ["-F", str(options.config)]
    typed = f"{host.user}@{host.name}" if host.user else host.name
    return Address(
        host=host.name,
        hostname=config.get("hostname", host.name),
        port=port,
        user=host.user or config.get("user") or getpass.getuser(),
        alias=config.get("hostkeyalias"),
        identities=tuple(os.path.expanduser(name) for name in config.get("identityfile", [])),
        only_identities=config.get("identitiesonly", "no").lower() == "yes",
        known_hosts=(*user_files, *system_files),
        writable=user_files[0] if user_files else None,
        accept_new=options.accept_new or strict in ("accept-new", "no", "off"),
        connect_timeout_s=connect_timeout_s,
        command=shlex.join(["ssh", *named, typed, "true"]),
    )


def _paths(words: str) -> tuple[Path, ...]:
    names = shlex.split(words)
    return () if names == ["none"] else tuple(Path(name).expanduser() for name in names)


# ---- trust ---------------------------------------------------------------------------------------------------


def _trust(client: paramiko.SSHClient, address: Address) -> list[paramiko.PKey]:
    """Tell paramiko which keys the host may have; return those that it must not have."""
    known, revoked = known_keys(address.known_hosts, address.known_name)
    for key in (key for key in known if key not in revoked):
        client.get_host_keys().add(address.paramiko_name, key.get_name(), key)
    client.set_missing_host_key_policy(_UnknownKey(address, revoked))
    return revoked


class _UnknownKey(paramiko.MissingHostKeyPolicy):
    """Refuses a host that is in no known_hosts file, or adds it where that was asked for."""

    def __init__(self, address: Address, revoked: list[paramiko.PKey]) -> None:
        self._address = address
        self._revoked = revoked

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        address = self._address
        if key in self._revoked:
            raise HostError(address.host, f"its host key {_fingerprint(key)} is revoked in {_files(address)}")
        if not address.accept_new:
            raise HostError(
                address.host,
                f"its host key {_fingerprint(key)} is not in {_files(address)}; if it is the right one, accept it once "
                f"by: {address.command}  (or run with --accept-new-host-keys)",
            )
        if address.writable:
            add_key(address.writable, address.known_name, key)


def _fingerprint(key: paramiko.PKey) -> str:
    digest = base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")
    return f"{key.get_name()} SHA256:{digest}"


def _files(address: Address) -> str:
    return str(address.writable or "known_hosts")


# ---- connecting ----------------------------------------------------------------------------------------------


def _connect(client: paramiko.SSHClient, address: Address, deadline: float) -> None:
    left_s = max(0.1, deadline - time.monotonic())
    reach_s = min(left_s, address.connect_timeout_s)
    client.connect(
        address.hostname,
        port=address.port,
        username=address.user,
        key_filename=[  # type: ignore[arg-type]  # a list too, says its documentation
            name for name in address.identities if os.path.exists(name)
        ],
        look_for_keys=not address.identities,
        allow_agent=not address.only_identities or bool(address.identities),
        timeout=reach_s,
        banner_timeout=reach_s,
        auth_timeout=left_s,
        channel_timeout=left_s,
    )


def _why(address: Address, error: Exception) -> str:
    """Say why a connection failed, and what to do."""
    where = f"{address.hostname} port {address.port}"
    if isinstance(error, paramiko.BadHostKeyException):
        fix = f"ssh-keygen -f {shlex.quote(_files(address))} -R {shlex.quote(address.known_name)}"
        return (
            f"its host key has CHANGED: {_fingerprint(error.key)} is not the one in {_files(address)}. Somebody may be "
            f"in between; if you know that the key is new, forget the old one by: {fix}"
        )
    if isinstance(error, paramiko.PasswordRequiredException):
        names = " ".join(shlex.quote(name) for name in address.identities) or "~/.ssh/id_ed25519"
        return f"the key for {address.user}@{where} is locked by a passphrase; unlock it once by: ssh-add {names}"
    if isinstance(error, paramiko.AuthenticationException):
        tried = ", ".join(map(_with_presence, address.identities)) or "the default keys"
        return f"{address.user}@{where} accepts none of our keys ({tried}, ssh-agent); try: {address.command}"
    if isinstance(error, socket.gaierror):
        return f"the name {address.hostname} is not known; check --hosts and the ssh configuration"
    if isinstance(error, paramiko.ssh_exception.NoValidConnectionsError):
        first = next(iter(error.errors.values()))
        reason = (getattr(first, "strerror", None) or str(first)).lower()
        return f"{where}: {reason}; is sshd running there? Try: {address.command}"
    if isinstance(error, paramiko.SSHException) and "banner" in str(error):
        return f"{where} accepted the connection but said nothing; is that sshd? Try: {address.command}"
    if isinstance(error, paramiko.SSHException) and "No authentication methods" in str(error):
        tried = ", ".join(map(_with_presence, address.identities)) or "no default keys"
        return f"there is no key to show to {address.user}@{where} ({tried}, no ssh-agent); try: {address.command}"
    if isinstance(error, TimeoutError):
        return f"{where} does not answer; try: {address.command}"
    return f"{where}: {error or type(error).__name__}; try: {address.command}"


def _with_presence(identity: str) -> str:
    return identity if os.path.exists(identity) else f"{identity}, which does not exist"
