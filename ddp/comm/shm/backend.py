"""Registers the backend `shm` with torch.distributed; its modules are imported when a group is made.

Importing this module, as `import ddp` does, leaves the registration to the moment when torch looks the name up.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore

__all__ = ["NAME", "connect", "register", "sharing"]

NAME = "shm"


def register() -> None:
    """Register `shm` with torch.distributed. May be repeated.

    With any third-party backend, torch has no default backend for a group of "cpu:gloo" and the like: such a group then
    has the name "undefined", and no sequence numbers of its calls. So this is done only when shm is used.
    """
    if NAME not in dist.Backend.backend_list:
        setattr(dist.Backend, NAME.upper(), NAME)  # in place of what would call this function again
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


class _RegisteredWhenUsed:
    """Replaces `dist.Backend.SHM`, which torch reads when a group is requested by this name."""

    def __get__(self, _: object, __: object) -> str:
        register()
        return NAME


if not hasattr(dist.Backend, NAME.upper()):
    setattr(dist.Backend, NAME.upper(), _RegisteredWhenUsed())


def sharing(store: Any, rank: int, size: int, timeout: timedelta) -> list[tuple[int, ...]]:
    """Return the ranks that share memory, one tuple per host, ordered by first rank. The same on all ranks.

    Tested with memory of the size that a group of all would need. A rank that cannot make such memory is in no tuple.
    All ranks must call it, with a store (or a prefix of one) that nothing else uses. Blocks until all have; raises
    RendezvousError after `timeout`.
    """
    from ddp.comm.shm.memory import sharing as of_ranks

    return of_ranks(store, rank, size, timeout.total_seconds())


def connect(store: Any, rank: int, size: int, timeout: timedelta, others: Any = None) -> Any:
    """Make a group, over memory within hosts and gloo between them; torch does not register it.

    All ranks must call it, with a store that nothing else uses. Blocks until all have, else raises RendezvousError
    after `timeout`. `others` moves tensors that are not in host memory.
    """
    from ddp.comm.shm.group import ShmGroup  # here, to keep `import ddp` cheap
    from ddp.comm.shm.hosts_group import HostsGroup
    from ddp.comm.shm.memory import check_able

    if size == 1:
        return ShmGroup(store, rank, size, timeout, others)
    hosts = sharing(PrefixStore("sharing", store), rank, size, timeout)
    check_able(hosts, size)
    if len(hosts) == 1:
        return ShmGroup(store, rank, size, timeout, others)
    return HostsGroup(store, rank, size, timeout, hosts, others)


def _create(options: Any, backend_options: Any) -> Any:
    """Make a group for torch, which calls this; `options` are its _DistributedBackendOptions."""
    from ddp.comm.shm.other_devices import OtherDevices

    others = OtherDevices(options, backend_options)
    return connect(options.store, options.group_rank, options.group_size, options.timeout, others)
