"""Authentication: the user's keys and certificates, from files and from ssh-agent, in a sensible order.

Keys named in the configuration come before others in an agent: servers accept only a few attempts (MaxAuthTries).
"""

from __future__ import annotations

import base64
import binascii
import copy
import shlex
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import paramiko
from paramiko.agent import AgentKey, AgentSSH
from paramiko.message import Message

from launcher.errors import HostError
from launcher.transport.ssh.address import Address
from launcher.transport.ssh.identity import Identity, key_type, public_blob, read_identity
from launcher.transport.ssh.reasons import BY_OWN_SSH

_CERTIFICATE = "-cert-v01@openssh.com"
_AGENT_S = 10.0  # for its list of keys; a signature may need a touch or a click, and waits for the deadline


def authenticate(transport: paramiko.Transport, address: Address, deadline: float) -> None:
    """Offer our keys until one is accepted. Raises HostError with the next step; may raise SSHException and OSError."""
    identities = [read_identity(name) for name in address.identities]
    with _agent_keys(address, deadline) as agent:
        keys = _in_order(address, identities, agent)
        for shown, key in enumerate(keys, 1):
            transport.auth_timeout = _left(deadline)
            try:
                more = transport.auth_publickey(address.user, key)
            except paramiko.BadAuthenticationType as error:
                raise HostError(address.host, _no_keys_wanted(address, error.allowed_types)) from error
            except (paramiko.AuthenticationException, OSError, EOFError) as error:
                if time.monotonic() >= deadline:
                    raise TimeoutError from error
                if not transport.is_active():
                    raise HostError(address.host, _closed(address, shown)) from error
                continue
            if not more:
                return
            if "publickey" not in more:
                wanted = f"accepts the key, but also wants {' or '.join(more)}, and dtrain cannot answer prompts"
                reason = f"{address.login} {wanted}; a key alone must suffice from here, or {BY_OWN_SSH}"
                raise HostError(address.host, reason)
        allowed = _without_key(transport, address, deadline)
        if allowed is None:
            return
    if allowed and "publickey" not in allowed:
        raise HostError(address.host, _no_keys_wanted(address, allowed))
    raise HostError(address.host, _none_accepted(address, identities, shown=len(keys), agent=bool(agent)))


def _without_key(transport: paramiko.Transport, address: Address, deadline: float) -> list[str] | None:
    """Ask which methods the server accepts, after all keys; None: it accepts us without any."""
    if not transport.is_active():
        return []
    transport.auth_timeout = _left(deadline)
    try:
        return list(transport.auth_none(address.user)) or None
    except paramiko.BadAuthenticationType as error:
        return list(error.allowed_types)
    except paramiko.AuthenticationException:
        return []


def _left(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())


class _Agent(AgentSSH):
    """An agent at a given socket; paramiko's class supports only the one of the environment."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self._connect(sock)  # type: ignore[attr-defined]  # meant for subclasses, and missing in the stubs


class _KeyInAgent(AgentKey):
    """A key in an agent. If it cannot or must not sign, it counts as not accepted: the next one follows."""

    def __init__(self, agent: AgentSSH, blob: bytes, comment: str) -> None:
        super().__init__(agent, blob, comment)
        self.public_blob = None  # some versions of paramiko use it without setting it
        if self.name.endswith(_CERTIFICATE):
            self.inner_key = None  # otherwise the agent is asked for the plain key's signature, which it may not have

    def sign_ssh_data(self, data: Any, algorithm: str | None = None) -> Message:
        try:
            return super().sign_ssh_data(data, algorithm)
        except (paramiko.SSHException, OSError, struct.error):
            message = Message()
            message.add_string(algorithm or self.name)
            message.add_string(b"")
            return message


@contextmanager
def _agent_keys(address: Address, deadline: float) -> Iterator[list[_KeyInAgent]]:
    """Yield the keys of the agent; none if there is no agent, or it does not answer."""
    if address.agent is None:
        yield []
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.settimeout(min(_AGENT_S, _left(deadline)))
            sock.connect(address.agent)
            agent = _Agent(sock)
            keys = [_KeyInAgent(agent, key.blob, key.comment) for key in agent.get_keys()]
            sock.settimeout(_left(deadline))
        except (OSError, paramiko.SSHException, struct.error, IndexError):
            keys = []
        yield keys


_Order = dict[tuple[str, bytes], paramiko.PKey]  # each key once, by its name and the blob offered


def _in_order(address: Address, identities: Sequence[Identity], agent: Sequence[_KeyInAgent]) -> list[paramiko.PKey]:
    """Return certificates, then named keys (in the agent first), then other keys of the agent, then default files."""
    order: _Order = {}
    held = {key.blob: key for key in agent}
    named = {one.blob for one in identities}
    signers: dict[bytes, paramiko.PKey] = {one.blob: one.key for one in identities if one.blob and one.key}
    signers.update({blob: key for blob, key in held.items() if not address.only_identities or blob in named})
    for path in (*address.certificates, *(f"{one.name}-cert.pub" for one in identities)):
        _add_certificate(order, path, signers)
    in_agent = [held[one.blob] for one in identities if one.blob in held]
    in_files = [one.key for one in identities if one.key is not None and one.blob not in held]
    others = [] if address.only_identities else agent
    for key in (*in_agent, *others, *in_files) if address.default_identities else (*in_agent, *in_files, *others):
        order.setdefault((key.get_name(), _blob(key)), key)
    return list(order.values())


def _blob(key: paramiko.PKey) -> bytes:
    return key.blob if isinstance(key, AgentKey) else key.asbytes()


def _add_certificate(order: _Order, path: str, signers: dict[bytes, paramiko.PKey]) -> None:
    """Add the key of a certificate, with the certificate, if we have the key."""
    certificate = public_blob(Path(path))
    key = next((key for key in signers.values() if certificate and _is_for(certificate, key)), None)
    if certificate is None or key is None:
        return
    signer = _KeyInAgent(key.agent, key.blob, key.comment) if isinstance(key, AgentKey) else copy.copy(key)
    try:
        signer.load_certificate(path)
    except (ValueError, binascii.Error, UnicodeDecodeError):
        return
    order.setdefault((signer.get_name(), certificate), signer)


def _is_for(certificate: bytes, key: paramiko.PKey) -> bool:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        PublicFormat,
        SSHCertificate,
        load_ssh_public_identity,
    )

    line = f"{key_type(certificate)} {base64.b64encode(certificate).decode()}"
    try:
        read = load_ssh_public_identity(line.encode())
    except (ValueError, UnsupportedAlgorithm):
        return False
    if not isinstance(read, SSHCertificate):
        return False
    public = read.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).split()[1]
    return base64.b64decode(public) == _blob(key)


def _none_accepted(address: Address, identities: Sequence[Identity], *, shown: int, agent: bool) -> str:
    # Of the default files, only those that exist are worth naming.
    named = [one for one in identities if one.exists or one.blob or not address.default_identities]
    tried = ", ".join(map(_state, named)) or "no default keys"
    if (locked := [one.name for one in named if one.locked]) and not (agent and shown > len(locked)):
        names = " ".join(map(shlex.quote, locked))
        others = f"; it accepts none of the other {shown}" if shown else ""
        return f"the key for {address.login} is locked by a passphrase{others}; unlock it once with: ssh-add {names}"
    agents = "ssh-agent" if agent else "no ssh-agent" if address.agent is None else "no keys in ssh-agent"
    if shown:
        return f"{address.login} accepts none of our keys ({tried}, {agents}); {BY_OWN_SSH}; try: {address.command}"
    return f"there is no key to offer to {address.login} ({tried}, {agents}); {BY_OWN_SSH}; try: {address.command}"


def _state(identity: Identity) -> str:
    if not identity.exists:
        return f"{identity.name}, which does not exist"
    if identity.locked:
        return f"{identity.name}, which is locked"
    return f"{identity.name}: {identity.problem}" if identity.problem else identity.name


def _closed(address: Address, shown: int) -> str:
    if shown == 1:
        return f"{address.login} closed the connection after our key; try: {address.command}"
    return (
        f"{address.login} closed the connection after {shown} of our keys: too many authentication failures; "
        f"select the right one by IdentityFile and IdentitiesOnly yes in the ssh configuration; "
        f"try: {address.command}"
    )


def _no_keys_wanted(address: Address, allowed: Sequence[str]) -> str:
    return (
        f"{address.login} accepts no keys, only {' or '.join(allowed)}, and dtrain cannot answer prompts; "
        f"install a key there (ssh-copy-id), or ask its administrator to allow them; {BY_OWN_SSH}"
    )
