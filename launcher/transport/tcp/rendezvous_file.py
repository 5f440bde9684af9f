"""How nodes that share a folder find node 0: a file there that says where it listens, and holds the run's token.

Node 0 writes it when it listens and removes it at the end; the other nodes read it. It is for this user's eyes
only, and is believed only if it is. A file that a killed run has left misleads nobody for long: its reader dials in
vain, reads again (dial.py does so before every attempt), and finds what the next run has put in its place.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from launcher.decode import decode_json
from launcher.errors import ProtocolError, UsageError

__all__ = ["Endpoint", "local_folder", "publish", "read_endpoint"]

_MAX_BYTES = 8192


@dataclass(frozen=True)
class Endpoint:
    """Where node 0 of a run listens, and the run's token."""

    address: str
    port: int
    token: bytes = field(repr=False)


@dataclass(frozen=True)
class _Contents:
    """The file's; the token's bytes as Latin-1."""

    address: str
    port: int
    token: str = field(repr=False)


def local_folder() -> Path:
    """Return this user's folder for such files on this machine, which nobody else can enter; it is made if need be.

    Raises UsageError if something else has its place.
    """
    folder = Path(tempfile.gettempdir()) / f"dtrain-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise UsageError(f"{folder}: cannot be used as a folder: {error.strerror}; see TMPDIR") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise UsageError(f"{folder}: this is not a folder of this user alone (mode 0700); remove it, or set TMPDIR")
    return folder


@contextmanager
def publish(folder: Path, name: str, endpoint: Endpoint) -> Iterator[Path]:
    """Have other nodes find node 0 in `folder` under `name` while the context lasts; replaces an older one."""
    path = _path(folder, name)
    contents = _Contents(endpoint.address, endpoint.port, endpoint.token.decode("latin-1"))
    beside = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "w", encoding="ascii") as file:
                json.dump(asdict(contents), file)
                file.flush()
                os.fsync(descriptor)  # whoever sees the name sees the contents, on a shared file system too
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written, for the other nodes to find: {error.strerror}") from error
    try:
        yield path
    finally:
        with contextlib.suppress(OSError, UsageError):  # a run that has replaced it keeps its own
            if read_endpoint(folder, name) == endpoint:
                path.unlink()


def read_endpoint(folder: Path, name: str) -> Endpoint | None:
    """Return what the file says, None if there is none. Raises UsageError where others could have written it."""
    path = _path(folder, name)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            data = file.read(_MAX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ESTALE:  # replaced just now, on a shared file system
            return None
        raise UsageError(f"{path}: cannot be read, to find node 0: {error.strerror}") from error
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or mode & 0o077:
        raise UsageError(f"{path}: not a file of this user alone (uid {status.st_uid}, mode {mode:04o}); remove it")
    try:
        written = decode_json(_Contents, data)
        return Endpoint(written.address, written.port, written.token.encode("latin-1"))
    except (ProtocolError, UnicodeError) as error:
        raise UsageError(f"{path}: this is not how dtrain writes where node 0 is; remove it") from error


def _path(folder: Path, name: str) -> Path:
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
    return folder / f"{safe}.rendezvous"
