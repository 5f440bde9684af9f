"""Small values from every rank to every rank, as collectives of bytes: nothing that arrives is unpickled."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ddp.comm.codec import decode, encode
from ddp.errors import ArgumentError, NotInitializedError
from ddp.torch_internals import timeout_of

__all__ = ["control_group", "device_of", "gather_bytes", "gather_values", "member_group"]

_BLOCK_BYTES = 512  # a payload that fits, as that of a few numbers does, takes one collective
_LENGTH_BYTES = 8


def gather_values(mine: object, *, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks, in their order; tensors arrive in host memory.

    A value is `ddp.comm.codec.PLAIN`. Every rank of `group` must call it; blocks. Raises ArgumentError, before anything
    is sent, for another value.
    """
    return [decode(payload) for payload in gather_bytes(encode(mine), group=group)]


def gather_bytes(payload: torch.Tensor, *, group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
    """Return the payloads (n,) uint8 of all ranks of a group, in host memory. Every rank must call it; blocks."""
    if dist.get_world_size(group) == 1:
        return [payload]
    room = _BLOCK_BYTES - _LENGTH_BYTES
    block = torch.zeros(_BLOCK_BYTES, dtype=torch.uint8, device="cpu")
    block[:_LENGTH_BYTES].view(torch.int64)[0] = len(payload)
    block[_LENGTH_BYTES : _LENGTH_BYTES + min(room, len(payload))] = payload[:room]
    blocks = _all_gather(block, group)
    lengths = [int(each[:_LENGTH_BYTES].view(torch.int64)) for each in blocks]
    longest = max(lengths)
    if longest <= room:
        return [each[_LENGTH_BYTES : _LENGTH_BYTES + length] for each, length in zip(blocks, lengths, strict=True)]
    rest = torch.zeros(longest - room, dtype=torch.uint8, device="cpu")
    rest[: max(0, len(payload) - room)] = payload[room:]
    rests = _all_gather(rest, group)
    return [
        torch.cat([block[_LENGTH_BYTES:], more])[:length]
        for block, more, length in zip(blocks, rests, lengths, strict=True)
    ]


def _all_gather(mine: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    mine = mine.to(device_of(group))
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    return [each.cpu() for each in every]


def device_of(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return where a group moves bytes: in host memory, unless it is of NCCL alone, which knows only its device's."""
    return torch.device("cpu" if "cpu:" in dist.get_backend_config(group) else "cuda")


def control_group(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """A group of the same ranks that moves host memory: `group` if it can, else one that is made now (blocks).

    That has the timeout of `group` for collectives on `device`.
    """
    if device.type == "cpu" or device_of(group).type == "cpu":
        return group
    made = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=timeout_of(group, device),
        backend="gloo",
        use_local_synchronization=True,
    )
    assert isinstance(made, dist.ProcessGroup)
    return made


def member_group(group: dist.ProcessGroup | None, who: str) -> dist.ProcessGroup:
    """`group`, by default that of all ranks, for `who`, which errors name.

    Raises NotInitializedError if there is none yet, ArgumentError on a rank that is not in it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise NotInitializedError(f"there is no process group yet: call ddp.init() before {who}()")
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise ArgumentError(
            f"{who}(): this rank ({dist.get_rank()}) is not a member of the group; only its members call it"
        )
    return group
