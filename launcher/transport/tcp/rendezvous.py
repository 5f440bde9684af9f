"""The rendezvous of nodes started by hand: the token of their run, and the address of node 0.

The user gives every node the token, and node 0's address. Or the nodes share a folder: node 0 writes both to a file
there when it listens, and removes it at the end; the other nodes read it. Only this user may read it, and it is trusted
only then. A file left by a killed run does no harm for long: its reader fails to connect, reads again (dial.py does
before every attempt), and finds the file of the next run.

Called by the command line. A token is never in a message, log or command line.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shlex
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from launcher.decode import decode_json
from launcher.errors import ProtocolError, UsageError
from launcher.machine.variables import in_pod

DEFAULT_FILE = Path("~/.config/dtrain/token")
MIN_CHARS = 16
MAX_BYTES = 4096
_MAX_FILE_BYTES = 8192


@dataclass(frozen=True)
class Endpoint:
    """The address and port of node 0 of a run, and the run's token, as decoded by os.fsdecode."""

    address: str
    port: int
    token: str = field(repr=False)


def find_token(env: Mapping[str, str], token_file: Path | None = None) -> bytes | None:
    """Return the token from DTRAIN_TOKEN, `token_file`, DTRAIN_TOKEN_FILE or the default file; None if there is none.

    Raises UsageError for one that others can read or guess, and for a named file that does not exist. In a pod the
    group may read it: Kubernetes gives a Secret's file to a user other than root only by the group.
    """
    is_pod = in_pod(env)
    if env.get("DTRAIN_TOKEN"):
        return _checked(os.fsencode(env["DTRAIN_TOKEN"]), "DTRAIN_TOKEN")
    if token_file is not None:
        return _read(token_file.expanduser(), f"--token-file {token_file}", is_pod=is_pod)
    if env.get("DTRAIN_TOKEN_FILE"):
        named = env["DTRAIN_TOKEN_FILE"]
        return _read(Path(named).expanduser(), f"DTRAIN_TOKEN_FILE={named}", is_pod=is_pod)
    default = DEFAULT_FILE.expanduser()
    return _read(default, str(default), is_pod=is_pod) if default.exists() else None


def new_token() -> bytes:
    """Return a random token, for nodes that read it from a file."""
    return secrets.token_hex(32).encode()


def _read(path: Path, named: str, *, is_pod: bool) -> bytes:
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            status = os.fstat(file.fileno())
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        there = path if isinstance(error, FileNotFoundError) else DEFAULT_FILE
        raise UsageError(f"{named}: cannot read the token: {error.strerror}; {_how_to_make(there)}") from error
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{named}: this is not a file; {_how_to_make(DEFAULT_FILE)}")
    if status.st_uid not in (0, os.geteuid()):
        raise UsageError(f"{named}: it belongs to another user (uid {status.st_uid}), who then knows the token")
    if status.st_mode & (0o037 if is_pod and status.st_uid == 0 else 0o077):
        mode = stat.S_IMODE(status.st_mode)
        mend = "set defaultMode: 0440 in its volume" if is_pod else f"type: chmod 600 {shlex.quote(str(path))}"
        raise UsageError(f"{named}: others can read it (mode {mode:04o}); {mend}")
    return _checked(data, named)


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe in its place would block forever


def _checked(data: bytes, named: str) -> bytes:
    token = data.strip()
    if len(token) < MIN_CHARS:
        raise UsageError(
            f"{named}: a token needs at least {MIN_CHARS} characters, this one has {len(token)}; "
            f"{_how_to_make(DEFAULT_FILE)}, and copy the file to every node"
        )
    if len(token) > MAX_BYTES:
        raise UsageError(f"{named}: a token has at most {MAX_BYTES} characters; is this the right file?")
    return token


def _how_to_make(path: Path) -> str:
    place = str(path) if str(path).startswith("~/") else shlex.quote(str(path))
    folder = os.path.dirname(place) or "."
    return f"make one with: (umask 077; mkdir -p {folder}; openssl rand -hex 32 > {place})"


def local_folder() -> Path:
    """Return this user's private folder for such files on this machine; make it if it does not exist.

    Raises UsageError if something else is in its place.
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
    """Publish node 0's endpoint as `name` in `folder` while the context lasts; replaces an older one."""
    path = _path(folder, name)
    beside = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "w", encoding="ascii") as file:
                json.dump(asdict(endpoint), file)
                file.flush()
                os.fsync(descriptor)  # a visible name must have its contents, on a shared file system too
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written for the other nodes: {error.strerror}") from error
    try:
        yield path
    finally:
        with contextlib.suppress(OSError, UsageError):  # a run that replaced it keeps its own
            if read_endpoint(folder, name) == endpoint:
                path.unlink()


def _look_again(folder: Path) -> None:
    """Open a folder, and the one above, so that NFS asks its server: else a file may stay missing for a minute."""
    for each in (folder.parent, folder):
        with contextlib.suppress(OSError):
            os.close(os.open(each, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def read_endpoint(folder: Path, name: str) -> Endpoint | None:
    """Return the endpoint in the file, None if there is none. Raises UsageError if others could have written it."""
    path = _path(folder, name)
    _look_again(path.parent)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            data = file.read(_MAX_FILE_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ESTALE:  # just replaced, on a shared file system
            return None
        raise UsageError(f"{path}: cannot be read to find node 0: {error.strerror}") from error
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or mode & 0o077:
        raise UsageError(f"{path}: not a file of this user alone (uid {status.st_uid}, mode {mode:04o}); remove it")
    try:
        return decode_json(Endpoint, data)
    except ProtocolError as error:
        raise UsageError(f"{path}: not a file written by dtrain; remove it") from error


def _path(folder: Path, name: str) -> Path:
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
    return folder / f"{safe}.rendezvous"
