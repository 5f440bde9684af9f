"""This machine's addresses and interfaces, and by which of them another host is reached. Linux; sends nothing."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
from collections.abc import Iterator, Sequence

from launcher.errors import UsageError

__all__ = ["address_of_interface", "address_towards", "addresses", "interface_of", "is_own"]

_IFF_UP = 1
_DISCARD = 9  # a port has to be named; nothing is sent to it


class _SockAddr(ctypes.Structure):
    _fields_ = (("family", ctypes.c_ushort), ("data", ctypes.c_ubyte * 26))  # as long as an IPv6 one


class _IfAddrs(ctypes.Structure):
    """struct ifaddrs of getifaddrs(3), up to the last field that is read here."""


_IfAddrs._fields_ = (
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SockAddr)),
)


def address_towards(host: str) -> str:
    """Return this machine's address by which the kernel would reach a host, a name or an address.

    Blocks for the name's resolution. Raises UsageError where the name is unknown or no route leads there.
    """
    try:
        found = socket.getaddrinfo(host, _DISCARD, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"DNS lookup of {host} failed: {_reason(error)}; write an address instead") from error
    problem: OSError | None = None
    for family, kind, protocol, _, where in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(where)
                return str(probe.getsockname()[0])
        except OSError as error:
            problem = error
    reason = _reason(problem) if problem else "it has no address"
    raise UsageError(f"no route leads from this machine to {host} ({reason}); see `ip route get {host}`") from problem


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has an address, also as a secondary one; None if none has it.

    Every address of 127.0.0.0/8 is the loopback interface's.
    """
    wanted = _canonical(address)
    if wanted.startswith("127."):
        wanted = "127.0.0.1"
    return next((name for name, _, found in _interfaces() if found == wanted), None)


def addresses() -> dict[str, list[str]]:
    """Return the addresses of every interface that is up, without link-local ones; IPv4 first."""
    named: dict[str, list[str]] = {}
    for name, up, address in sorted(_interfaces(), key=lambda found: ":" in found[2]):
        if up and not ipaddress.ip_address(address.partition("%")[0]).is_link_local:
            named.setdefault(name, []).append(address)
    return named


def is_own(host: str) -> bool:
    """Say whether a name or an address is this machine's. Blocks for the name's resolution; unknown: it is not."""
    try:
        found = socket.getaddrinfo(host, _DISCARD, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    ours = {address for _, _, address in _interfaces()}
    resolved = [_canonical(str(where[0])) for *_, where in found]
    return any(address in ours or ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in resolved)


def address_of_interface(names: Sequence[str]) -> tuple[str, str] | None:
    """Return the first of the named interfaces that is up and has an address, and that address."""
    known = addresses()
    return next(((name, known[name][0]) for name in names if name in known), None)


def _interfaces() -> Iterator[tuple[str, bool, str]]:
    """Yield every address of this machine with its interface and whether that is up."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        raise UsageError(f"cannot list this machine's interfaces: {os.strerror(ctypes.get_errno())}")
    found = []
    try:
        entry = first
        while entry:
            interface = entry.contents
            text = _text(interface.address.contents) if interface.address else None
            if text is not None:
                found.append((interface.name.decode(), bool(interface.flags & _IFF_UP), text))
            entry = interface.next
    finally:
        libc.freeifaddrs(first)
    yield from found


def _text(address: _SockAddr) -> str | None:
    raw = bytes(address.data)
    if address.family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, raw[2:6])
    if address.family == socket.AF_INET6:
        return socket.inet_ntop(socket.AF_INET6, raw[6:22])
    return None


def _canonical(address: str) -> str:
    """Return an address as `_text` writes it; an IPv4 one that came as IPv6, too."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    mapped = getattr(parsed, "ipv4_mapped", None)
    return str(mapped or parsed)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
