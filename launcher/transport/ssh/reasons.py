"""Messages on why a host could not be reached over SSH, each with the next step. Pure."""

from __future__ import annotations

import socket

import paramiko

from launcher.transport.ssh.address import Address
from launcher.transport.ssh.route import Dropped, NotSsh

BY_OWN_SSH = "if ssh itself logs in without a question: --ssh-command ssh"
_FAMILY: dict[int, str] = {socket.AF_INET: "inet", socket.AF_INET6: "inet6"}


def why(address: Address, error: Exception, *, words: str = "", tries: int = 1) -> str:
    """Format why a connection failed after `tries` attempts; `words` is the end of a ProxyCommand's stderr."""
    where = address.where
    then = f"try: {address.command}"
    lost = isinstance(error, Dropped) or (words and isinstance(error, (OSError, EOFError)))
    if address.proxy_command is not None and lost:
        said = _last(words or str(error))
        return f"its ProxyCommand ({address.proxy_command}) did not get through: {said}; {then}"
    if isinstance(error, socket.gaierror):
        if error.errno == socket.EAI_AGAIN:
            return f"DNS lookup of {address.hostname} timed out; is DNS working on this machine?"
        family = "" if address.family == socket.AF_UNSPEC else f" in its AddressFamily {_FAMILY[address.family]}"
        said = (error.strerror or "no address").lower()
        return f"DNS lookup of {address.hostname} failed{family}: {said}; check --hosts and the ssh configuration"
    if isinstance(error, ConnectionRefusedError):
        return f"{where}: connection refused; is sshd running there? Try: {address.command}"
    if isinstance(error, Dropped):
        said = f", saying {str(error)!r}," if str(error) else ""
        times = f"{tries} times" if tries > 1 else "the connection"
        guess = "its sshd may have reached MaxStartups, or block us"
        return f"{where} closed {times}{said} before its greeting; {guess}; {then}"
    if isinstance(error, NotSsh):
        return f"{where} is not an SSH server: it said {str(error)!r}; {then}"
    if isinstance(error, TimeoutError):
        silent = f": {error}" if error.errno is None and error.args else " does not answer"
        return f"{where}{silent}; {then}"
    if isinstance(error, EOFError):
        return f"{where} closed the connection during the key exchange; {then}"
    if isinstance(error, OSError) and error.strerror:
        return f"{where}: {error.strerror[0].lower()}{error.strerror[1:]}; {then}"
    if isinstance(error, paramiko.SSHException) and "acceptable" in str(error):
        return f"{where} and dtrain have no algorithm in common ({error}); its sshd may be very old; {then}"
    return f"{where}: {error or type(error).__name__}; {then}"


def _last(words: str) -> str:
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"
