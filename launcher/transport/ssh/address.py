"""The address of one host, and how to reach it, from the ssh configuration. Nothing here connects.

Options that change where a connection goes, or which keys it trusts, are honoured, or an error names them. Those that
only add to a session of OpenSSH's client (forwards, SetEnv, RemoteCommand, ControlMaster, ...) have no meaning here.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import os
import pwd
import re
import shlex
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import DtrainError, HostError
from launcher.placement.job_spec import SshOptions
from launcher.transport.ssh.config import Target, defaults, look_up

CONNECT_TIMEOUT_S = 20.0  # if the ssh configuration has no ConnectTimeout
KEEPALIVE_S = 15  # at most; BatchMode sets ServerAliveInterval to 300, but firewalls drop idle connections sooner
_FAMILIES = {"any": socket.AF_UNSPEC, "inet": socket.AF_INET, "inet6": socket.AF_INET6}
_ALGORITHMS = ("kexalgorithms", "ciphers", "macs", "hostkeyalgorithms")
_VOUCHING = ("KnownHostsCommand", "VerifyHostKeyDNS")
_NO = ("no", "off", "false")
_DEFAULT_IDENTITY = re.compile(r"~/\.ssh/id_\w+|.*/\.ssh/id_(rsa|ecdsa|ecdsa_sk|ed25519|ed25519_sk|xmss|dsa)")
_DEFAULT_IDENTITIES = ("~/.ssh/id_rsa", "~/.ssh/id_ecdsa", "~/.ssh/id_ed25519")
_USER_FILES = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
_SYSTEM_FILES = "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"
_IN_PATHS = re.compile(r"\$\{(\w+)\}|%.?")
_IN_COMMANDS = re.compile(r"%.?")
_UNSAFE = re.compile(r"[\s'\"`$\\;&<>|(){}\x00-\x1f]|^-")  # in a shell; same as in OpenSSH


@dataclass(frozen=True)
class Address:
    """A host with its ssh configuration applied. At most one of `jump` and `proxy_command` is set."""

    host: str  # as the user named it
    hostname: str
    port: int
    user: str
    family: int
    bind_address: str | None
    bind_interface: str | None
    jump: Target | None  # the hop before it
    proxy_command: str | None  # a line for the user's shell
    alias: str | None  # HostKeyAlias
    known_hosts: tuple[Path, ...]
    writable: Path | None  # the file to which a new key is added
    hash_names: bool
    accept_new: bool
    never_asks: bool  # StrictHostKeyChecking yes
    revoked: Path | None  # RevokedHostKeys
    not_asked: tuple[str, ...]  # options that might confirm its key, but are not supported
    identities: tuple[str, ...]
    default_identities: bool  # not named in the configuration
    certificates: tuple[str, ...]
    only_identities: bool
    agent: str | None  # its socket
    algorithms: Mapping[str, tuple[str, ...]]  # the only ones allowed, by ssh's names for the four kinds
    compress: bool
    connect_timeout_s: float
    keepalive_s: int
    command: str  # to reach it with OpenSSH

    @property
    def where(self) -> str:
        return f"{self.hostname} port {self.port}"

    @property
    def login(self) -> str:
        return f"{self.user}@{self.where}"

    @property
    def known_name(self) -> str:
        """The host's name in a known_hosts file."""
        return self.alias or (self.hostname if self.port == 22 else f"[{self.hostname}]:{self.port}")


def resolve(target: Target, options: SshOptions, deadline: float) -> Address:
    """Ask the ssh configuration about a host. Blocks until `deadline` at most. Raises HostError."""
    try:
        found = look_up(target, options.config, deadline - time.monotonic())
        return _address(target, options, _Answer(found))
    except (DtrainError, OSError, ValueError) as error:
        raise HostError(target.name, str(error)) from error


class _Answer:
    """The options of one host."""

    def __init__(self, options: Mapping[str, Sequence[str]]) -> None:
        self._options = options

    def all(self, name: str) -> list[str]:
        return [value for value in self._options.get(name, ()) if value.lower() != "none"]

    def one(self, name: str) -> str | None:
        return next(iter(self.all(name)), None)

    def none(self, name: str) -> bool:
        """Return whether the option is set to `none`."""
        return bool(self._options.get(name)) and not self.all(name)

    def word(self, name: str, default: str) -> str:
        return (self.one(name) or default).lower()

    def yes(self, name: str) -> bool:
        return self.word(name, "no") in ("yes", "true", "on")

    def number(self, name: str, default: float) -> float:
        text = self.one(name)
        try:
            return default if text is None else float(text)
        except ValueError:
            raise ValueError(f"{name} in its ssh configuration is {text!r}, which is not a number") from None


def _address(target: Target, options: SshOptions, answer: _Answer) -> Address:
    hostname = answer.one("hostname") or target.name
    port = int(answer.number("port", 22))
    user = target.user or answer.one("user") or getpass.getuser()
    tokens = _tokens(target, hostname, port, user, answer)
    _refuse(answer)
    user_files = _files(answer, "userknownhostsfile", _USER_FILES, tokens)
    revoked = answer.one("revokedhostkeys")
    identities = answer.all("identityfile")
    named = bool(identities) or answer.none("identityfile")
    default = not named or (len(identities) > 2 and all(map(_DEFAULT_IDENTITY.fullmatch, identities)))
    checking = answer.word("stricthostkeychecking", "ask")
    return Address(
        host=target.name,
        hostname=hostname,
        port=port,
        user=user,
        family=_FAMILIES.get(answer.word("addressfamily", "any"), socket.AF_UNSPEC),
        bind_address=answer.one("bindaddress"),
        bind_interface=answer.one("bindinterface"),
        jump=_jump(target, answer, tokens, (hostname, port, user)),
        proxy_command=_proxy_command(answer, tokens),
        alias=answer.one("hostkeyalias"),
        known_hosts=(*user_files, *_files(answer, "globalknownhostsfile", _SYSTEM_FILES, tokens)),
        writable=user_files[0] if user_files else None,
        hash_names=answer.yes("hashknownhosts"),
        accept_new=options.accept_new or checking in ("accept-new", *_NO),
        never_asks=checking not in ("ask", "accept-new", *_NO),
        revoked=Path(_home_in(revoked)) if revoked else None,
        not_asked=tuple(name for name in _VOUCHING if answer.word(name.lower(), "no") not in _NO),
        identities=tuple(_expand(name, tokens) for name in (identities if named else _DEFAULT_IDENTITIES)),
        default_identities=default,
        certificates=tuple(_expand(name, tokens) for name in answer.all("certificatefile")),
        only_identities=answer.yes("identitiesonly"),
        agent=_agent(answer, tokens),
        algorithms=_algorithms(answer),
        compress=answer.yes("compression"),
        connect_timeout_s=answer.number("connecttimeout", CONNECT_TIMEOUT_S) or CONNECT_TIMEOUT_S,
        keepalive_s=min(KEEPALIVE_S, int(answer.number("serveraliveinterval", 0)) or KEEPALIVE_S),
        command=shlex.join(["ssh", *target.ssh_args(options.config), target.destination, "true"]),
    )


def _refuse(answer: _Answer) -> None:
    """Raise ValueError for options that would make the connection a different one than intended."""
    if answer.one("proxycommand") and answer.yes("proxyusefdpass"):
        raise ValueError("its ssh configuration has ProxyUseFdpass, which needs --ssh-command ssh")
    if answer.word("pubkeyauthentication", "yes") in _NO:
        raise ValueError("its ssh configuration has PubkeyAuthentication no, which needs --ssh-command ssh")


def _algorithms(answer: _Answer) -> dict[str, tuple[str, ...]]:
    """Return the user's restrictions; otherwise we choose, and not as this machine's ssh does."""
    usual = _Answer(defaults())
    chosen = {name: answer.one(name) or "" for name in _ALGORITHMS if answer.one(name) != usual.one(name)}
    return {name: tuple(text.split(",")) for name, text in chosen.items() if text and text[0] not in "+-^"}


def _jump(target: Target, answer: _Answer, tokens: Mapping[str, str], there: tuple[str, int, str]) -> Target | None:
    """Return the last hop before the host; its `jump` has the hops before it, instead of those configured for it."""
    text = answer.one("proxyjump")
    if text is None:
        return None
    *before, last = _expand(text, tokens).split(",")
    hop = _parse_hop(last)
    hostname, port, user = there
    named_alike = hop.name == target.name and hop.port in (None, port)
    if (named_alike or (hop.name, hop.port or 22) == (hostname, port)) and hop.user in (None, user):
        raise ValueError(f"jumphost loop via {hop.name}; write ProxyJump none in its block")
    return Target(hop.name, user=hop.user, port=hop.port, jump=",".join(before) or None)


def _parse_hop(text: str) -> Target:
    match = re.fullmatch(
        r"(?:ssh://)?(?:(?P<user>[^@\s]+)@)?(?:\[(?P<v6>[^\]\s]+)\]|(?P<name>[^@:\s/]+)|(?P<bare>[^@\s/]*:[^@\s/]*:[^@\s/]*))"
        r"(?::(?P<port>[0-9]{1,5}))?/?",
        text.strip(),
    )
    name = match and (match["v6"] or match["name"] or match["bare"])
    if match is None or not name or name.startswith("-"):
        raise ValueError(f"its ssh configuration has ProxyJump {text!r}; it must be [USER@]HOST[:PORT], ...")
    return Target(name, user=match["user"], port=int(match["port"]) if match["port"] else None)


def _proxy_command(answer: _Answer, tokens: Mapping[str, str]) -> str | None:
    text = answer.one("proxycommand")
    if text is None or answer.one("proxyjump") is not None:
        return None
    for token, what in (("%h", "host name"), ("%n", "host name"), ("%r", "user name")):
        if token in text and _UNSAFE.search(tokens[token]):  # the line is for a shell
            raise ValueError(f"its {what} {tokens[token]!r} has characters that ProxyCommand must not contain")
    return _expand(text, tokens, path=False)


def _agent(answer: _Answer, tokens: Mapping[str, str]) -> str | None:
    if answer.none("identityagent"):
        return None
    text = answer.one("identityagent") or "SSH_AUTH_SOCK"
    if text == "SSH_AUTH_SOCK" or re.fullmatch(r"\$\w+", text):
        return os.environ.get(text.removeprefix("$")) or None
    return _expand(text, tokens, strict=False)


def _files(answer: _Answer, name: str, default: str, tokens: Mapping[str, str]) -> tuple[Path, ...]:
    if answer.none(name):
        return ()
    text = answer.one(name) or default
    # `ssh -G` omits the quotes: whether a space is part of a name is decided by which files exist.
    names = shlex.split(text) if '"' in text else re.split(r" (?=[/~])", text)
    split = [part for one in names for part in ([one] if os.path.exists(_home_in(one)) else one.split(" "))]
    return tuple(Path(_expand(one, tokens, strict=False)) for one in split if one)


def _tokens(target: Target, hostname: str, port: int, user: str, answer: _Answer) -> dict[str, str]:
    """Return the TOKENS of ssh_config(5) for files and proxies."""
    here = socket.gethostname()
    jump = answer.one("proxyjump") or ""
    return {
        "%%": "%",
        "%C": hashlib.sha1(f"{here}{hostname}{port}{user}{jump}".encode()).hexdigest(),
        "%d": _home_in("~"),
        "%h": hostname,
        "%i": str(os.getuid()),
        "%j": jump,
        "%k": answer.one("hostkeyalias") or target.name,
        "%L": here.split(".")[0],
        "%l": here,
        "%n": target.name,
        "%p": str(port),
        "%r": user,
        "%u": getpass.getuser(),
    }


def _expand(text: str, tokens: Mapping[str, str], *, path: bool = True, strict: bool = True) -> str:
    """Replace `%h` and other tokens by their values, in a path also `~` and `${NAME}`."""

    def value(match: re.Match[str]) -> str:
        if match[0].startswith("$"):
            if match[1] not in os.environ and strict:
                raise ValueError(f"its ssh configuration has ${{{match[1]}}}, which is not set here")
            return os.environ.get(match[1], match[0])
        if match[0] not in tokens and strict:
            raise ValueError(f"its ssh configuration has {match[0]} in {text!r}, which has no meaning there")
        return tokens.get(match[0], match[0])

    return _IN_PATHS.sub(value, _home_in(text)) if path else _IN_COMMANDS.sub(value, text)


def _home_in(path: str) -> str:
    """Expand `~`: for ssh this is the home in /etc/passwd, regardless of HOME."""
    if path == "~" or path.startswith("~/"):
        with contextlib.suppress(KeyError):  # in a container
            return pwd.getpwuid(os.getuid()).pw_dir + path[1:]
    return os.path.expanduser(path)
