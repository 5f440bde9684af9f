"""The token that the nodes of a run share when they are started by hand: where it is found, and whether it is safe.

Called by the command line. A token is in no message, log or command line.
"""

from __future__ import annotations

import os
import secrets
import shlex
import stat
from collections.abc import Mapping
from pathlib import Path

from launcher.errors import UsageError

__all__ = ["DEFAULT_FILE", "find_token", "new_token"]

DEFAULT_FILE = Path("~/.config/dtrain/token")
MIN_CHARS = 16
MAX_BYTES = 4096


def find_token(env: Mapping[str, str], token_file: Path | None = None) -> bytes | None:
    """Return the token from DTRAIN_TOKEN, `token_file`, DTRAIN_TOKEN_FILE or the default file; None if there is none.

    Raises UsageError for one that others can read or guess, and for a file that was named and is not there.
    """
    if env.get("DTRAIN_TOKEN"):
        return _checked(os.fsencode(env["DTRAIN_TOKEN"]), "DTRAIN_TOKEN")
    if token_file is not None:
        return _read(token_file.expanduser(), f"--token-file {token_file}")
    if env.get("DTRAIN_TOKEN_FILE"):
        named = env["DTRAIN_TOKEN_FILE"]
        return _read(Path(named).expanduser(), f"DTRAIN_TOKEN_FILE={named}")
    default = DEFAULT_FILE.expanduser()
    return _read(default, str(default)) if default.exists() else None


def new_token() -> bytes:
    """Return a random token, for nodes that learn it from a file (rendezvous_file.py)."""
    return secrets.token_hex(32).encode()


def _read(path: Path, named: str) -> bytes:
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            status = os.fstat(file.fileno())
            _check_access(path, named, status)
            return _checked(file.read(MAX_BYTES + 1), named)
    except OSError as error:
        raise UsageError(f"{named}: cannot read the token: {error.strerror}; {_how_to_make(path)}") from error


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe in its place would block for ever


def _check_access(path: Path, named: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{named}: this is no file; {_how_to_make(path)}")
    if status.st_uid not in (0, os.geteuid()):
        raise UsageError(f"{named}: it belongs to another user (uid {status.st_uid}), who knows the token then")
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise UsageError(f"{named}: others can read it (mode {mode:04o}); type: chmod 600 {shlex.quote(str(path))}")


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
    return f"make one by: (umask 077; mkdir -p {folder}; openssl rand -hex 32 > {place})"
