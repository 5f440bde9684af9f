"""The user's ssh configuration: which files, with what they include, and what they say of one host."""

from __future__ import annotations

import glob
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import paramiko

from launcher.errors import UsageError

__all__ = ["read_ssh_config"]

_DEPTH = 16  # as OpenSSH's


def read_ssh_config(named: Path | None) -> paramiko.SSHConfig:
    """Read the file named by `--ssh-config`, or the user's and then the system's. Raises UsageError."""
    files = [named] if named is not None else [Path("~/.ssh/config").expanduser(), Path("/etc/ssh/ssh_config")]
    config = paramiko.SSHConfig()
    for file in files:
        if not file.exists():
            if named is not None:
                raise UsageError(f"--ssh-config {named} does not exist")
            continue
        base = Path("/etc/ssh") if str(file).startswith("/etc/ssh/") else Path("~/.ssh").expanduser()
        try:
            # `Host *` ends the last block of one file before the next begins.
            config.parse(["Host *\n", *_with_includes(file, base, 0)])
        except (OSError, UnicodeDecodeError, ValueError, paramiko.ConfigParseError) as error:
            raise UsageError(f"the ssh configuration {file} cannot be read: {error}") from error
    return config


def _with_includes(file: Path, base: Path, depth: int) -> Iterator[str]:
    """Yield the lines of a file with those of the files that it includes in their places."""
    if depth > _DEPTH:
        raise ValueError(f"{file} is included {depth} deep")
    block = "Host *\n"
    for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
        word, _, rest = line.strip().replace("=", " ", 1).partition(" ")
        if word.lower() in ("host", "match"):
            block = line
        if word.lower() != "include":
            yield line
            continue
        for pattern in shlex.split(rest):
            path = os.path.join(base, os.path.expanduser(pattern))
            for found in sorted(glob.glob(path)):
                yield from _with_includes(Path(found), base, depth + 1)
                yield "\n"
        yield block  # an included file may have begun blocks of its own
