"""What a host has for a job: what its list says of it and what it says of itself, as `run`, `check` and `plan` see it.

Pure.
"""

from __future__ import annotations

from launcher.hosts.host import Host
from launcher.placement.placement import HostOffer
from launcher.protocol import Facts

__all__ = ["offer"]


def offer(host: Host, facts: Facts) -> HostOffer:
    """Return it. Of the GPUs, those that the user has chosen are left, by their places in the host's list."""
    gpus = tuple(facts.gpus)
    if host.chosen is not None:
        gpus = tuple(gpus[place] for place in host.chosen if place < len(gpus))
    return HostOffer(
        name=host.name,
        slots=facts.slots or host.slots,
        max_slots=host.max_slots,
        gpus=gpus,
        gpus_verified=facts.gpus_verified,
        gpu_variable=facts.gpu_variable,
        cores=tuple(facts.cores),
        cpu_limit=facts.cpu_limit,
        machine=facts.machine,
        room=facts.room,
        room_limit=facts.room_limit,
    )
