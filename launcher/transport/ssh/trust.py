"""Verifies the identity of a host: its key against the known_hosts files, or its certificate against their
authorities. Always checked. The error for an unknown or changed key has the command that fixes it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import shlex
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from launcher.errors import HostError
from launcher.transport.ssh.address import Address
from launcher.transport.ssh.known_hosts import add_key, known_keys

if TYPE_CHECKING:
    import paramiko

_CERTIFICATE = "-cert-v01@openssh.com"
_RSA = ("rsa-sha2-512", "rsa-sha2-256")  # signature algorithms for keys of type ssh-rsa


class Trust:
    """The known_hosts entries of one host, read once, before its key is received."""

    def __init__(self, address: Address) -> None:
        self._address = address
        keys = known_keys(address.known_hosts, address.known_name)
        # As with ssh, entries without the port can confirm the host's key, but not contradict it.
        bare = [] if address.alias or address.port == 22 else known_keys(address.known_hosts, address.hostname)
        revoked = {key.blob for key in (*keys, *bare) if key.marker == "@revoked"} | _revoked_in(address)
        self._revoked = revoked
        self._known = [key for key in keys if not key.marker and key.blob not in revoked]
        self._vouching = [key for key in bare if not key.marker and key.blob not in revoked]
        self._authorities = [
            key for key in (*keys, *bare) if key.marker == "@cert-authority" and key.blob not in revoked
        ]

    def in_order(self, spoken: Sequence[str]) -> tuple[str, ...]:
        """Order the host key algorithms that we support: first those for which the host is known.

        A host has several keys. If we asked for one that is in no file, the host would seem unknown.
        """
        plain = [name for name in spoken if not name.endswith(_CERTIFICATE)]
        known = [key.type for key in self._known or self._vouching]
        names = [name for type_ in known for name in (_RSA if type_ == "ssh-rsa" else (type_,)) if name in plain]
        if self._authorities:
            names = [name + _CERTIFICATE for name in plain] + names
        return tuple(dict.fromkeys([*names, *plain]))

    def check(self, key: paramiko.PKey) -> None:
        """Raise HostError unless the key is trusted for this host."""
        address, blob = self._address, key.asbytes()
        if blob in self._revoked:
            raise HostError(address.host, f"its host key {_fingerprint(key)} is revoked in {self._files}")
        doubt = self._doubt_certificate(key)
        if doubt == "" or any(known.blob == blob for known in (*self._known, *self._vouching)):
            return
        if self._known:
            raise HostError(address.host, self._changed(key))
        if not address.accept_new:
            raise HostError(address.host, self._unknown(key, doubt))
        if (file := address.writable) is not None:
            try:
                add_key(file, address.known_name, key_type=key.get_name(), blob=blob, hashed=address.hash_names)
            except OSError as error:
                reason = f"its new host key cannot be added to {file}: {error.strerror}"
                raise HostError(address.host, reason) from error

    def _doubt_certificate(self, key: paramiko.PKey) -> str | None:
        """Return "" if the host's certificate is valid, else why it is not; None if it has none."""
        shown = getattr(key, "public_blob", None)
        if not self._authorities or shown is None or not shown.key_type.endswith(_CERTIFICATE):
            return None
        from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import (
            Encoding,
            PublicFormat,
            SSHCertificate,
            SSHCertificateType,
            load_ssh_public_identity,
        )

        line = f"{shown.key_type} {base64.b64encode(shown.key_blob).decode()}"
        try:
            certificate = load_ssh_public_identity(line.encode())
            assert isinstance(certificate, SSHCertificate)
            certificate.verify_cert_signature()
        except (ValueError, InvalidSignature, UnsupportedAlgorithm) as error:
            return f"its certificate is damaged ({error or type(error).__name__})"
        signer = certificate.signature_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).split()[1]
        blob = base64.b64decode(signer)
        name = self._address.alias or self._address.hostname
        if blob in self._revoked:
            return "its certificate's authority is revoked"
        if not any(known.blob == blob for known in self._authorities):
            return "its certificate is not of an authority in the known_hosts files"
        if certificate.type is not SSHCertificateType.HOST:
            return "its certificate is a user's, not a host's"
        if not certificate.valid_after <= time.time() < certificate.valid_before:
            return "its certificate is not valid at this time"
        if certificate.critical_options:
            return "its certificate has critical options, which are unknown for hosts"
        principals = [principal.decode("utf-8", "replace").lower() for principal in certificate.valid_principals]
        if principals and not any(fnmatchcase(name.lower(), principal) for principal in principals):
            return f"its certificate is for {', '.join(principals)}, not for {name}"
        return ""

    @property
    def _files(self) -> str:
        return str(self._address.writable or "known_hosts")

    def _changed(self, key: paramiko.PKey) -> str:
        line = self._known[0]
        fix = f"ssh-keygen -f {shlex.quote(str(line.file))} -R {shlex.quote(self._address.known_name)}"
        return (
            f"its host key has CHANGED: {_fingerprint(key)} is not the one in {line.file}, line {line.line}. The "
            f"connection may be intercepted; if you know that the key is new, remove the old one with: {fix}"
        )

    def _unknown(self, key: paramiko.PKey, doubt: str | None) -> str:
        signed = ""
        if doubt is not None:
            signed = f"; {doubt}"
        elif self._authorities:
            known = self._authorities[0]
            signed = f"; it has no certificate of the authority in {known.file}, line {known.line}"
        if self._address.not_asked:
            names = " and ".join(self._address.not_asked)
            signed += f"; {names} of its ssh configuration can be asked only with --ssh-command ssh"
        asks = "-o StrictHostKeyChecking=ask " if self._address.never_asks else ""
        return (
            f"its host key {_fingerprint(key)} is not in {self._files}{signed}; if it is the right one, accept it once "
            f"by: {self._address.command.replace('ssh ', f'ssh {asks}', 1)}  (or run with --accept-new-host-keys)"
        )


def _revoked_in(address: Address) -> set[bytes]:
    """Read RevokedHostKeys: one public key per line."""
    if address.revoked is None:
        return set()
    what = f"RevokedHostKeys {address.revoked} of its ssh configuration"
    try:
        data = address.revoked.read_bytes()
    except OSError as error:  # ssh rejects all keys then, too
        raise HostError(address.host, f"{what} cannot be read: {error.strerror}") from error
    if data.startswith(b"SSHKRL\n\0"):
        raise HostError(address.host, f"{what} is a binary KRL, which needs --ssh-command ssh")
    revoked = set()
    for line in data.decode("utf-8", "replace").splitlines():
        words = line.split()
        if len(words) > 1 and not line.startswith("#"):
            try:
                revoked.add(base64.b64decode(words[1], validate=True))
            except binascii.Error as error:
                raise HostError(address.host, f"{what} has a damaged line: {line[:60]}") from error
    return revoked


def _fingerprint(key: paramiko.PKey) -> str:
    digest = base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")
    return f"{key.get_name()} SHA256:{digest}"
