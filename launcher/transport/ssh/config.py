"""What the user's ssh configuration says of one host.

Where OpenSSH's client is installed, it answers (`ssh -G`): Match, exec, Include, canonical names and whatever its
version knows are then as on the command line. Elsewhere paramiko's reader does, as far as it goes.
"""

from __future__ import annotations

import glob
import os
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.errors import UsageError

if TYPE_CHECKING:
    import paramiko

__all__ = ["Target", "defaults", "look_up", "read_ssh_config"]

_DEPTH = 16  # as OpenSSH's
_CRITERIA = {"all", "canonical", "final", "host", "originalhost", "user", "localuser"}  # paramiko knows these
ASK_AT_ONCE = 16  # processes
_ASK_S = 5.0  # for `ssh -V`


@dataclass(frozen=True)
class Target:
    """A host as it would be typed for ssh: what is given here wins over the configuration."""

    name: str
    user: str | None = None
    port: int | None = None
    jump: str | None = None  # as in ProxyJump

    def words(self, config: Path | None) -> list[str]:
        """Return ssh's arguments up to the host."""
        words = [] if config is None else ["-F", str(config)]
        if self.jump is not None:
            words += ["-J", self.jump]
        if self.port is not None:
            words += ["-p", str(self.port)]
        return words

    @property
    def destination(self) -> str:
        return f"{self.user}@{self.name}" if self.user else self.name


def look_up(target: Target, config: Path | None, timeout_s: float) -> dict[str, list[str]]:
    """Return the options that hold for a host, by their names in small letters, with their values as they are written.

    Only IdentityFile and CertificateFile can have several values. `config` stands for the usual files. Blocks, for
    Match exec and canonical names may; raises UsageError with ssh's own words, and TimeoutError.
    """
    if config is not None and not config.exists():
        raise UsageError(f"--ssh-config {config} does not exist")
    if (ssh := _client().path) is not None:
        argv = [ssh, "-T", "-G", *target.words(config), "--", target.destination]
        status, out, words = _ask(argv, timeout_s)
        if status == 0:
            return _options(out)
        # ssh does nothing for a user without a line in /etc/passwd, as there are in containers.
        if "No user exists for uid" not in words:
            hint = "; write ProxyJump none in its block" if "jumphost loop" in words else ""
            raise UsageError(f"the ssh configuration is not usable: {_first_lines(words) or 'ssh -G failed'}{hint}")
    return _by_paramiko(target, config)


def defaults() -> Mapping[str, list[str]]:
    """Return the options where nothing is configured; empty without OpenSSH's client."""
    return _client().defaults


@dataclass(frozen=True)
class _Client:
    """OpenSSH's client on this machine, if there is one: other programs are called ssh as well, and know no -G."""

    path: str | None
    defaults: Mapping[str, list[str]]


_lock = threading.Lock()
_asking = threading.BoundedSemaphore(ASK_AT_ONCE)
_found: list[_Client] = []  # once: all hosts ask at the same time


def _client() -> _Client:
    with _lock:
        if not _found:
            _found.append(_find())
        return _found[0]


def _find() -> _Client:
    path = shutil.which("ssh")
    try:
        if path is not None and "OpenSSH" in _ask([path, "-V"], _ASK_S)[2]:
            status, out, _ = _ask([path, "-T", "-G", "-F", os.devnull, "--", "localhost"], _ASK_S)
            return _Client(path, _options(out) if status == 0 else {})
    except (OSError, TimeoutError):
        pass  # then it would not answer about a host either
    return _Client(None, {})


def _ask(argv: list[str], timeout_s: float) -> tuple[int, str, str]:
    # In a session of its own: a Match exec must not ask on the terminal, and is ended with the rest.
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
            os.killpg(process.pid, signal.SIGKILL)
            raise TimeoutError(f"{shlex.join(argv)} did not end in {timeout_s:.0f} s (Match exec? DNS?)") from None
    return process.returncode, out.decode("utf-8", "replace"), err.decode("utf-8", "replace")


def _options(text: str) -> dict[str, list[str]]:
    options: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        options.setdefault(name.lower(), []).append(value)
    return options


def _first_lines(words: str) -> str:
    lines = [line.strip() for line in words.splitlines() if line.strip() and "terminating" not in line]
    return "; ".join(lines[:3])


def _by_paramiko(target: Target, config: Path | None) -> dict[str, list[str]]:
    import paramiko

    read = read_ssh_config(config, first=_typed(target))
    try:
        found = read.lookup(target.name)
    except (paramiko.SSHException, KeyError, ValueError) as error:
        raise UsageError(f"the ssh configuration is not usable: {error or type(error).__name__}") from error
    options = {name: [value] if isinstance(value, str) else list(value or ["none"]) for name, value in found.items()}
    # Of these two the first one counts.
    first = next((name for name in found if name in ("proxyjump", "proxycommand")), None)
    if first is not None:
        options.pop("proxycommand" if first == "proxyjump" else "proxyjump", None)
    return options


def _typed(target: Target) -> list[str]:
    """Return what was typed as lines of a configuration, of which the first ones count."""
    typed = {"User": target.user, "Port": target.port, "ProxyJump": target.jump}
    return ["Host *\n", *(f"{name} {value}\n" for name, value in typed.items() if value is not None)]


def read_ssh_config(named: Path | None, first: Sequence[str] = ()) -> paramiko.SSHConfig:
    """Read the file named by `--ssh-config`, or the user's and then the system's, after the `first` lines.

    Raises UsageError.
    """
    import paramiko

    files = [named] if named is not None else [Path("~/.ssh/config").expanduser(), Path("/etc/ssh/ssh_config")]
    config = paramiko.SSHConfig()
    config.parse(first)
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
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(keepends=True), 1):
        word, _, rest = line.strip().replace("=", " ", 1).partition(" ")
        if word.lower() in ("host", "match"):
            block = line
        if word.lower() == "match":
            _check_match(rest, f"{file} line {number}")
        if word.lower() != "include":
            yield line
            continue
        for pattern in shlex.split(rest):
            path = os.path.join(base, os.path.expanduser(pattern))
            for found in sorted(glob.glob(path)):
                yield from _with_includes(Path(found), base, depth + 1)
                yield "\n"
        yield block  # an included file may have begun blocks of its own


def _check_match(rest: str, where: str) -> None:
    """Refuse what paramiko would take for granted."""
    words = iter(shlex.split(rest))
    for word in words:
        criterion = word.removeprefix("!").lower()
        if criterion not in _CRITERIA:
            raise ValueError(f"{where}: only OpenSSH's client can follow Match {criterion}; install it here")
        if criterion not in ("all", "canonical", "final"):
            next(words, None)
