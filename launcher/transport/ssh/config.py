"""Asks OpenSSH's client (`ssh -G`) for the user's ssh configuration of one host.

Match, exec, Include, canonical names and everything else that its version supports then work as on the command line.
paramiko has its own parser, which supports only a part: a host would be reached differently than by `ssh`.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import UsageError
from launcher.machine.processes import kill_session

ASK_AT_ONCE = 16  # processes
_ASK_S = 5.0  # for `ssh -V`
_INSTALL = "install it: apt-get install openssh-client, or dnf install openssh-clients"


@dataclass(frozen=True)
class Target:
    """A host as typed for ssh: the values given here override the configuration."""

    name: str
    user: str | None = None
    port: int | None = None
    jump: str | None = None  # as in ProxyJump

    def ssh_args(self, config: Path | None) -> list[str]:
        """Return ssh's arguments before the host."""
        args = [] if config is None else ["-F", str(config)]
        if self.jump is not None:
            args += ["-J", self.jump]
        if self.port is not None:
            args += ["-p", str(self.port)]
        return args

    @property
    def destination(self) -> str:
        return f"{self.user}@{self.name}" if self.user else self.name


def look_up(target: Target, config: Path | None, timeout_s: float) -> dict[str, list[str]]:
    """Return the options for a host, by their names in lower case, with their values as written.

    Only IdentityFile and CertificateFile can have several values. `config` replaces the default files. Blocks, since
    Match exec and canonical names may; raises UsageError with ssh's message, and TimeoutError.
    """
    if config is not None and not config.exists():
        raise UsageError(f"--ssh-config {config} does not exist")
    argv = [_client().path, "-T", "-G", *target.ssh_args(config), "--", target.destination]
    status, out, words = ask(argv, timeout_s)
    if status == 0:
        return parse_options(out)
    hint = ""
    if "jumphost loop" in words:
        hint = "; write ProxyJump none in its block"
    elif "No user exists for uid" in words:  # as in containers
        hint = f"; ssh needs a line for user id {os.getuid()} in /etc/passwd of this machine"
    raise UsageError(f"the ssh configuration is not usable: {_first_lines(words) or 'ssh -G failed'}{hint}")


def defaults() -> Mapping[str, list[str]]:
    """Return the options without any configuration. Raises UsageError without OpenSSH's client."""
    return _client().defaults


@dataclass(frozen=True)
class _Client:
    """OpenSSH's client on this machine: other programs called ssh do not support -G."""

    path: str
    defaults: Mapping[str, list[str]]


_lock = threading.Lock()
_asking = threading.BoundedSemaphore(ASK_AT_ONCE)
_found: list[_Client] = []  # found once, although all hosts ask at the same time


def _client() -> _Client:
    with _lock:
        if not _found:
            _found.append(_find())
        return _found[0]


def _find() -> _Client:
    path = shutil.which("ssh")
    try:
        if path is not None and "OpenSSH" in ask([path, "-V"], _ASK_S)[2]:
            status, out, _ = ask([path, "-T", "-G", "-F", os.devnull, "--", "localhost"], _ASK_S)
            return _Client(path, parse_options(out) if status == 0 else {})
    except OSError as error:  # TimeoutError is one
        raise UsageError(f"OpenSSH's client {path} does not run: {error}") from error
    found = "there is no ssh on this machine" if path is None else f"{path} is not OpenSSH's"
    raise UsageError(f"dtrain needs OpenSSH's client to reach hosts, but {found}; {_INSTALL}")


def ask(argv: list[str], timeout_s: float) -> tuple[int, str, str]:
    """Run a program; return its exit status, output and stderr. Raises OSError, and TimeoutError after killing it."""
    # In its own session: Match exec must not prompt on the terminal, and is killed with its group.
    deadline = time.monotonic() + max(0.1, timeout_s)
    with (
        _asking,
        subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as process,
    ):
        try:
            out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            kill_session(process)
            raise TimeoutError(f"{shlex.join(argv)} did not end in {timeout_s:.0f} s (Match exec? DNS?)") from None
    return process.returncode, out.decode("utf-8", "replace"), err.decode("utf-8", "replace")


def parse_options(text: str) -> dict[str, list[str]]:
    """Parse the output of `ssh -G`."""
    options: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        options.setdefault(name.lower(), []).append(value)
    return options


def _first_lines(words: str) -> str:
    lines = [line.strip() for line in words.splitlines() if line.strip() and "terminating" not in line]
    return "; ".join(lines[:3])
