"""This machine's network addresses and interfaces, and those by which others reach it. Sends nothing.

Called by the agent. The kernel's routes decide, never the host's own name.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
from collections.abc import Iterator, Sequence

from launcher.errors import DtrainError, UsageError

_FAR_AWAY = "192.0.2.1"  # in no network (RFC 5737): the route to it is the default route; nothing is sent there
_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_ENDS_OF_TUNNELS = ("127.0.0.1", "::1")  # where sshd sees who comes through one that ends on its own host
_IFF_UP = 1
_DISCARD = 9  # a port is required; nothing is sent to it


class _SockAddr(ctypes.Structure):
    _fields_ = (("family", ctypes.c_ushort), ("data", ctypes.c_ubyte * 26))  # long enough for an IPv6 address


class _IfAddrs(ctypes.Structure):
    """The struct ifaddrs of getifaddrs(3), up to the last field used here."""


_IfAddrs._fields_ = (
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SockAddr)),
)


def choose_address(interfaces: Sequence[str], towards: str, reached_at: str | None) -> str:
    """Return the address at which other hosts reach this one.

    It is that of the first of `interfaces` that is up; else the one at which this host was `reached_at`, unless that is
    the end of a tunnel here, by which the host `towards` cannot come; else that of the route `towards` another host, or
    of the default route. Raises DtrainError if none of `interfaces` is up.
    """
    if interfaces:
        found = address_of_interface(interfaces)
        if found is None:
            present = ", ".join(sorted(addresses()))
            raise DtrainError(f"no interface {' or '.join(interfaces)} is up there (--interface); it has: {present}")
        return found[1]
    if reached_at is not None and not (towards and reached_at in _ENDS_OF_TUNNELS):
        return reached_at
    # The next best is the route to the host of srun.
    for target in (towards, os.environ.get("SLURM_SRUN_COMM_HOST", ""), _FAR_AWAY):
        try:
            if target:
                return address_towards(target)
        except DtrainError:  # a name unknown here, or no route
            continue
    return "127.0.0.1"


def listening_address(named: str, interfaces: Sequence[str], towards: str, reached_at: str | None) -> str:
    """Return the address at which this host listens for the others, as `choose_address` does, if none is `named`.

    A name may mean another one here than elsewhere. Without another host, `towards`, it means what it means here.
    Blocks for name resolution. Raises DtrainError as `choose_address`.
    """
    if not named:
        return choose_address(interfaces, towards, reached_at)
    try:
        return own_address(named, towards, reached_at) if towards else named
    except (OSError, UnicodeError):  # who listens there reports it
        return named


def own_address(name: str, towards: str = "", reached_at: str | None = None) -> str:
    """Return the address by which other hosts reach this one, of those that a name of it has here; IPv4 first.

    If it has none but loopback addresses (Debian's 127.0.1.1), choose one as `choose_address` does. An address, and the
    name of the loopback, mean themselves. Blocks for name resolution. Raises OSError or UnicodeError if that fails.
    """
    found = [str(where[0]) for *_, where in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    if is_loopback(name) or name in found:
        return found[0]
    usable = [each for each in found if not is_loopback(each) and not _is_link_local(each)]
    return min(usable, key=lambda each: ":" in each, default="") or choose_address((), towards, reached_at)


def socket_interfaces(master_addr: str, named: Sequence[str]) -> dict[str, str]:
    """Return variables that make gloo and NCCL use the interface on which this host meets the others.

    Empty if all workers are on one machine. Needed with a single interface too: gloo uses that of the host's own name,
    which on Debian is 127.0.1.1.
    """
    if named:
        found = address_of_interface(named)
        return {} if found is None else dict.fromkeys(_VARIABLES, found[0])
    if is_loopback(master_addr):
        return {}
    others = [name for name, found in addresses().items() if not all(map(is_loopback, found))]
    if not others:
        return {}
    try:
        interface = interface_of(address_towards(master_addr))
    except DtrainError:  # the workers will report what is wrong with that address
        return {}
    return {} if interface is None else dict.fromkeys(_VARIABLES, interface)


def address_towards(host: str) -> str:
    """Return this machine's address on the route to a host, given by name or address.

    Blocks for name resolution. Raises UsageError if the name is unknown or there is no route to it.
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
    """Return the name of the interface that has an address, also as a secondary one; None if there is none.

    Every address of 127.0.0.0/8 belongs to the loopback interface.
    """
    wanted = _canonical(address)
    if wanted.startswith("127."):
        wanted = "127.0.0.1"
    return next((name for name, _, found in _interfaces() if found == wanted), None)


def addresses() -> dict[str, list[str]]:
    """Return the addresses of every interface that is up, without IPv6's link-local ones; IPv4 first."""
    named: dict[str, list[str]] = {}
    for name, up, address in sorted(_interfaces(), key=lambda found: ":" in found[2]):
        if up and not _is_link_local(address):
            named.setdefault(name, []).append(address)
    return named


def is_own(host: str) -> bool:
    """Return whether a name or address is this machine's; False for an unknown name. Blocks for name resolution."""
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
    """Yield every address of this machine with its interface, and whether that is up."""
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
    """Return an address in the form of `_text`, also an IPv4 address mapped to IPv6."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    mapped = getattr(parsed, "ipv4_mapped", None)
    return str(mapped or parsed)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _is_link_local(address: str) -> bool:
    """Return whether an address means nothing without an interface; IPv4's link-local ones are those of a cable."""
    return ":" in address and ipaddress.ip_address(address.partition("%")[0]).is_link_local


def is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        pass
    try:
        return socket.inet_aton(address)[0] == 127  # short forms, such as 127.1
    except (OSError, UnicodeError):
        return False
