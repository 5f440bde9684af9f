"""What this host tells the others of its network: the address by which they reach it, and the interface behind it.

Called by the agent. The kernel's routes decide, never the host's own name.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence

from launcher.errors import DtrainError

__all__ = ["choose_address", "socket_interfaces"]

_FAR_AWAY = "192.0.2.1"  # of no network (RFC 5737): the way to it is the default route; nothing is sent there
_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def choose_address(interfaces: Sequence[str], towards: str, reached_at: str | None) -> str:
    """Return the address by which other hosts reach this one.

    That of the first of `interfaces` that is up; else that by which this host was `reached_at`; else that of the route
    `towards` another host, or out of here. Raises UsageError where none of `interfaces` is up.
    """
    from launcher.machine.routes import (  # not needed on one machine alone
        address_of_interface,
        address_towards,
        addresses,
    )

    if interfaces:
        found = address_of_interface(interfaces)
        if found is None:
            present = ", ".join(sorted(addresses()))
            raise DtrainError(f"no interface {' or '.join(interfaces)} is up there (--interface); it has: {present}")
        return found[1]
    if reached_at is not None:
        return reached_at
    # The next best is the way to where srun runs.
    for target in (towards, os.environ.get("SLURM_SRUN_COMM_HOST", ""), _FAR_AWAY):
        try:
            if target:
                return address_towards(target)
        except DtrainError:  # a name that is not known here, or no route
            continue
    return "127.0.0.1"


def socket_interfaces(master_addr: str, named: Sequence[str]) -> dict[str, str]:
    """Return variables that make gloo and NCCL use the interface on which this host meets the others.

    Empty where all workers are on one machine. With one interface too: gloo takes that of the host's own name, which
    on Debian means 127.0.1.1.
    """
    from launcher.machine.routes import address_of_interface, address_towards, addresses, interface_of

    if named:
        found = address_of_interface(named)
        return {} if found is None else dict.fromkeys(_VARIABLES, found[0])
    if _is_loopback(master_addr):
        return {}
    others = [name for name, found in addresses().items() if not all(map(_is_loopback, found))]
    if not others:
        return {}
    try:
        interface = interface_of(address_towards(master_addr))
    except DtrainError:  # the workers will say what is wrong with that address
        return {}
    return {} if interface is None else dict.fromkeys(_VARIABLES, interface)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return address == "localhost"
