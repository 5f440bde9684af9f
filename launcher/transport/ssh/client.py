"""Agents on remote hosts, reached by the site's own client (--ssh-command): OpenSSH's, or one that is used like it.

How it logs in is its own business: Kerberos, a second factor, an open ControlMaster, ProxyJump, host keys. It has no
terminal, so it cannot ask. Only options of OpenSSH's client are added to it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import time

from launcher.errors import HostError, UsageError
from launcher.hosts.host import Host
from launcher.machine.network import address_towards
from launcher.placement.job_spec import SshOptions
from launcher.transport.client import Clients, ClientStream
from launcher.transport.ssh.config import Target, ask, parse_options
from launcher.transport.ssh.pauses import after_drop_s, after_refusal_s

_FAILED = 255  # exit status of ssh if it failed itself, or lost the connection
_END_S = 2.0  # for a client to end after its output
_ASK_S = 5.0  # for `ssh -G`
_HOST = "{host}"


def is_openssh(options: SshOptions) -> bool:
    return os.path.basename(options.command[0]) == "ssh"


def login_command(host: Host, options: SshOptions, *more: str) -> list[str]:
    """Return the command that logs in to a host; a line for the shell there is appended to it.

    `more` are options of ssh. Raises UsageError for what the command cannot be given.
    """
    program, *args = options.command
    target = Target(host.name, user=host.user, port=host.port)
    ends = []
    if is_openssh(options):
        args = [*more, *target.ssh_args(options.config), *args]
        ends = ["--"]
    elif host.port is not None or options.config is not None:
        given = "--ssh-config" if options.config is not None else f"the port of {host.name} in --hosts"
        raise UsageError(f"{given} is an option of ssh, and --ssh-command is {program}; write it there")
    if any(_HOST in arg for arg in args):
        return [program, *(arg.replace(_HOST, target.destination) for arg in args)]
    return [program, *args, *ends, target.destination]


def connect_by_client(
    host: Host, options: SshOptions, line: str, deadline: float, *, first: bytes, clients: Clients
) -> SshClientStream:
    """Log in, and start what `line`, for the shell there, starts. Blocks until it writes something, or `deadline`.

    `first` is written to it at once. A server that is busy, or just starting, is tried again. Raises HostError.
    """
    try:
        by_hand = shlex.join([*login_command(host, options), "true"])
        argv = [*login_command(host, options, "-T", "-o", "BatchMode=yes"), line]
    except UsageError as error:
        raise HostError(host.name, str(error)) from error
    drops = refusals = 0
    while True:
        stream = clients.open(
            host.name,
            lambda finished: SshClientStream(argv, None, finished=finished),
            deadline,
            first=first,
            what=options.command[0],
        )
        if not stream.has_ended:
            return stream
        status, words = stream.finish(_END_S)
        if status is not None or not stream.has_failed:
            return stream  # what it started has ended
        stream.give_up()
        if "Connection refused" in words:
            pause_s, refusals = after_refusal_s(refusals), refusals + 1
        else:
            pause_s, drops = after_drop_s(words or "silent", drops), drops + 1
        if pause_s is None or time.monotonic() + pause_s >= deadline:
            raise HostError(host.name, _why(options.command[0], words, by_hand))
        time.sleep(pause_s)


class SshClientStream(ClientStream):
    """A client and its pipes. A wrapper may have processes of its own, so the whole group is ended."""

    @property
    def has_failed(self) -> bool:
        """Return whether the client itself failed, or lost the connection; for one that has ended."""
        return self._client.returncode == _FAILED

    def kill(self) -> None:
        if self._client.poll() is None:  # not reaped, so the group is its own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._client.pid, signal.SIGKILL)

    def finish(self, wait_s: float) -> tuple[int | None, str]:
        status, words = super().finish(wait_s)
        return None if status == _FAILED else status, words


def our_address(host: Host, options: SshOptions) -> str:
    """Return this machine's address as the host sees it, by the route there. Blocks; raises HostError without one."""
    found: dict[str, list[str]] = {}
    if is_openssh(options):
        with contextlib.suppress(TimeoutError):
            status, out, _ = ask(login_command(host, options, "-G"), _ASK_S)
            found = parse_options(out) if status == 0 else {}
    if not found or found.keys() & {"proxyjump", "proxycommand"}:
        raise HostError(host.name, "the address of this machine for it is not known; write --master-addr")
    try:
        return address_towards(found["hostname"][0])
    except UsageError as error:
        raise HostError(host.name, f"{error}; or write --master-addr") from error


def _why(client: str, words: str, by_hand: str) -> str:
    """Return why a client failed, from its stderr, with the next step."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    said = lines[-1] if lines else "it said nothing"
    if "IDENTIFICATION HAS CHANGED" in words:
        fix = next((line for line in lines if line.startswith("ssh-keygen ")), "ssh-keygen -R HOST")
        return (
            "its host key has CHANGED. The connection may be intercepted; if you know that the key is new, remove the "
            f"old one with: {fix}"
        )
    if "ost key verification failed" in words:
        return f"{client} does not know its host key; if it is the right one, accept it once by: {by_hand}"
    if re.search(r"[Pp]ermission denied|[Aa]uthentication", said):
        return (
            f"{client}: {said}; log in first (kinit, ssh-add, a ControlMaster), as it cannot ask here; try: {by_hand}"
        )
    return f"{client}: {said}; try: {by_hand}"
