"""The user's key files: private keys, locked or not, and public halves of keys in an agent."""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path

import paramiko

_MAGIC = b"openssh-key-v1\0"
_CLASSES: tuple[tuple[str, type[paramiko.PKey]], ...] = (
    ("ssh-ed25519", paramiko.Ed25519Key),
    ("ecdsa-sha2-", paramiko.ECDSAKey),
    ("ssh-rsa", paramiko.RSAKey),
)


@dataclass(frozen=True)
class Identity:
    """The content of a key file: a private key, a locked one, or the public half of one in an agent."""

    name: str
    exists: bool
    blob: bytes | None = None  # of the public key
    key: paramiko.PKey | None = None
    locked: bool = False
    problem: str = ""


_cache_lock = threading.Lock()
_cache: dict[tuple[str, int, int, int], Identity] = {}  # checking an RSA key is slow, and many hosts use the same one


def read_identity(name: str) -> Identity:
    """Read a key file, once until it changes. A problem with it is part of the result."""
    try:
        stat = os.stat(name)
    except OSError:
        return Identity(name, exists=False, blob=public_blob(Path(f"{name}.pub")))
    at = (name, stat.st_ino, stat.st_size, stat.st_mtime_ns)
    with _cache_lock:
        if at not in _cache:
            _cache[at] = _read(name)
        return _cache[at]


def _read(name: str) -> Identity:
    path = Path(name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return Identity(name, exists=True, problem=getattr(error, "strerror", None) or "no text")
    if "PRIVATE KEY" not in text:
        blob = public_blob(path)
        return Identity(name, exists=True, blob=blob, problem="" if blob else "no key")
    blob = _blob_inside(text) or public_blob(Path(f"{name}.pub"))
    type_ = "" if blob is None else key_type(blob)
    problem = "of a type that dtrain does not support"
    for prefix, kind in _CLASSES:
        if type_ and not type_.startswith(prefix):
            continue
        try:
            key = kind.from_private_key(io.StringIO(_in_own_format(text)))
            return Identity(name, exists=True, blob=key.asbytes(), key=key)
        except (paramiko.PasswordRequiredException, TypeError):  # TypeError is cryptography's
            return Identity(name, exists=True, blob=blob, locked=True)
        except (paramiko.SSHException, ValueError, IndexError, AssertionError) as error:
            problem = str(error) or type(error).__name__
    return Identity(name, exists=True, blob=blob, problem=problem)


def _in_own_format(text: str) -> str:
    """Convert a key from PKCS8, which paramiko does not read, to OpenSSH's format. Raises TypeError if it is locked."""
    if "BEGIN PRIVATE KEY" not in text and "BEGIN ENCRYPTED PRIVATE KEY" not in text:
        return text
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        load_pem_private_key,
    )

    key = load_pem_private_key(text.encode(), password=None)
    return key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()).decode()


def public_blob(path: Path) -> bytes | None:
    """Return the key of a file such as `id_ed25519.pub`, or of a certificate's file."""
    try:
        words = path.read_text(encoding="utf-8").split(None, 2)
        return base64.b64decode(words[1], validate=True) if len(words) > 1 else None
    except (OSError, UnicodeDecodeError, binascii.Error):
        return None


def _blob_inside(text: str) -> bytes | None:
    """Return the public key in an OpenSSH private key file, which is readable even if the private key is locked."""
    match = re.search(r"-----BEGIN OPENSSH PRIVATE KEY-----(.*?)-----END", text, re.DOTALL)
    try:
        data = base64.b64decode("".join(match[1].split())) if match else b""
        if not data.startswith(_MAGIC):
            return None
        at = len(_MAGIC)
        for _ in range(3):  # cipher, kdf, its options
            at += 4 + int.from_bytes(data[at : at + 4], "big")
        size = int.from_bytes(data[at + 4 : at + 8], "big")  # after the number of keys
        return data[at + 8 : at + 8 + size]
    except binascii.Error:
        return None


def key_type(blob: bytes) -> str:
    """Return the name of a public key's type, which is its first field."""
    return blob[4 : 4 + int.from_bytes(blob[:4], "big")].decode("ascii", "replace")
