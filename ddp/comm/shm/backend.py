"""Makes the backend `shm` known to torch.distributed; what it consists of is imported when a group is made.

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
    """Make `shm` known to torch.distributed. May be repeated.

    Torch with any backend that is not its own names no default backend for a group of "cpu:gloo" and the like: such a
    group then has the name "undefined", and no numbers of its calls. So this is done only where shm is wanted.
    """
    if NAME not in dist.Backend.backend_list:
        setattr(dist.Backend, NAME.upper(), NAME)  # in place of what would call this function again
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


class _RegisteredWhenUsed:
    """Stands for `dist.Backend.SHM`, which torch reads when a group is asked for by this name."""

    def __get__(self, _: object, __: object) -> str:
        register()
        return NAME


if not hasattr(dist.Backend, NAME.upper()):
    setattr(dist.Backend, NAME.upper(), _RegisteredWhenUsed())


def sharing(store: Any, rank: int, size: int, timeout: timedelta) -> list[tuple[int, ...]]:
    """Return the ranks of each host, in order of their first: those of a tuple share memory. The same on all ranks.

    Tried with memory of the size that a group of all would need. A rank that cannot make such memory is in no tuple.
    All ranks call it, with a store (or a prefix of one) that nothing else uses. Blocks until all have; raises
    RendezvousError after `timeout`.
    """
    from ddp.comm.shm.memory import sharing as of_ranks

    return of_ranks(store, rank, size, timeout.total_seconds())


def connect(store: Any, rank: int, size: int, timeout: timedelta, others: Any = None) -> Any:
    """Make a group, over memory within hosts and gloo between them; torch does not know of it.

    All ranks call it, with a store that nothing else uses. Blocks until all have, else raises RendezvousError after
    `timeout`. `others` moves what is not in host memory.
    """
    from ddp.comm.shm.group import ShmGroup  # not everybody makes one, and importing ddp shall cost little
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
    """What torch calls; `options` are its _DistributedBackendOptions."""
    from ddp.comm.shm.other_devices import OtherDevices

    others = OtherDevices(options, backend_options)
    return connect(options.store, options.group_rank, options.group_size, options.timeout, others)
