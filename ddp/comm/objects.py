"""Gathers small values from all ranks on all ranks, as collectives of bytes: nothing is unpickled."""

from __future__ import annotations

import re
import weakref
from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from ddp.comm.codec import decode, encode
from ddp.comm.sums.small_sum import add_up, pays
from ddp.errors import ArgumentError, NotInitializedError
from ddp.monitoring.stall_report import finish
from ddp.torch_internals import default_store, device_types_of, end_groups, host_group, timeout_of
from ddp.world import before_leaving

_BLOCK_BYTES = 512  # a payload that fits, such as a few numbers, takes one collective
_LENGTH_BYTES = 8
_TORCHS_TIMEOUT = timedelta(minutes=30)


def gather_values(mine: object, *, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks, in rank order; tensors arrive in host memory.

    A value is `ddp.comm.codec.PLAIN`. Every rank of `group` must call it; blocks. Raises ArgumentError for other
    values, before anything is sent.
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
    """Return the bytes (n,) of all ranks; where faster, as a sum with zeros in the other ranks' places."""
    group = dist.group.WORLD if group is None else group
    assert group is not None
    size = group.size()
    if pays(group, size * mine.nbytes):
        table = torch.zeros(size, len(mine), dtype=torch.uint8, device="cpu")
        table[group.rank()] = mine
        add_up(group, table.view(-1))
        return list(table)
    mine = mine.to(device_of(group))
    every = [torch.empty_like(mine) for _ in range(size)]
    finish(group.allgather([every], [mine]), device=mine.device)
    return [each.cpu() for each in every]


def device_of(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return where a group moves bytes: in host memory, unless it only supports a device, as NCCL does."""
    group = dist.group.WORLD if group is None else group
    assert group is not None
    types = [device.type for device in device_types_of(group)]
    types = types or re.findall(r"(\w+):", dist.get_backend_config(group))
    return torch.device("cpu" if "cpu" in types or not types else types[0])


class ControlGroups:
    """The control groups of this process: each ends with the group whose ranks it has, or when the process leaves."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()
        self._made: Counter[str] = Counter()  # by the name of the group, the same on all of its ranks

    def of(self, group: dist.ProcessGroup, timeout: timedelta) -> dist.ProcessGroup:
        if group not in self._of:
            number = self._made[group.group_name]
            self._made[group.group_name] += 1
            # Not by dist.new_group(): it sorts the ranks, and without all ranks of the world it derives the name from
            # the number of groups in this process, which may differ between ranks.
            store = PrefixStore(f"ddp/control/{group.group_name}/{number}", default_store())
            self._of[group] = host_group(group, store, timeout)
            before_leaving(self, ControlGroups.clear)
        return self._of[group]

    def clear(self) -> None:
        groups = [*self._of.values()]
        self._of.clear()
        self._made.clear()
        end_groups(groups)


_control_groups = ControlGroups()


def control_group(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Return a group of the same ranks that moves host memory: `group` if it can, else one that all its users share.

    That is made by the first call (blocks; every rank of `group` must call it), has the timeout of `group` for
    collectives on `device`, and ends with `group`. torch does not register it: use its methods, not those of
    `torch.distributed`.
    """
    if device.type == "cpu" or device_of(group).type == "cpu":
        return group
    return _control_groups.of(group, timeout_of(group, device) or _TORCHS_TIMEOUT)


def member_group(group: dist.ProcessGroup | None, who: str) -> dist.ProcessGroup:
    """Return `group`, by default that of all ranks; errors name the caller `who`.

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
