"""How many of a group's ranks are on each host, as their launcher has it: asked once, when a model is wrapped."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping

import torch.distributed as dist

from ddp.comm.channel import Channel
from ddp.environment import read_placement
from ddp.errors import LaunchEnvironmentError

__all__ = ["host_number", "ranks_on_hosts"]


def ranks_on_hosts(channel: Channel) -> tuple[int, ...] | None:
    """How many ranks each host has, the same on every rank; None if one does not know its host.

    Every rank must call it; blocks.
    """
    mine = host_number(os.environ, dist.get_rank(), dist.get_world_size())
    every = channel.gather(mine, "comparison of the ranks' hosts")
    return None if None in every else tuple(Counter(every).values())


def host_number(environ: Mapping[str, str], rank: int, world_size: int) -> int | None:
    """A number of this rank's host that other hosts do not have; None where the environment does not say.

    What it says must be of the world of `world_size` in which this is `rank`.
    """
    try:
        placement = read_placement(environ)
    except LaunchEnvironmentError:
        return None
    if (placement.rank, placement.world_size) != (rank, world_size):
        return None
    if placement.node_rank is not None:
        return placement.node_rank
    if placement.source == "env" and not {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= environ.keys():
        return None  # the size of its host is a guess
    if placement.is_single_host:
        return 0
    return rank if placement.local_world_size == 1 else None
