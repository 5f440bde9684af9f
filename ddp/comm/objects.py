"""Small values from every rank to every rank, as collectives of bytes: nothing that arrives is unpickled freely."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["device_of", "gather_values"]


def gather_values(mine: object, *, device: torch.device, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks, in their order.

    A value is made of None, numbers, strings, bytes, tensors, and tuples, lists, sets and dicts of them: what
    `torch.load(weights_only=True)` reads. Every rank of `group` must call it; blocks. `device` is one that the group
    can gather on.
    """
    written = io.BytesIO()
    torch.save(mine, written)
    data = torch.frombuffer(bytearray(written.getvalue()), dtype=torch.uint8).to(device)  # (own length,)
    size = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(data)], dtype=torch.int64, device=device), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(data)] = data
    every = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(every, padded, group=group)
    return [
        torch.load(io.BytesIO(bytes(other[: int(length)].cpu().tolist())), map_location="cpu", weights_only=True)
        for other, length in zip(every, lengths, strict=True)
    ]


def device_of(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return where a group moves bytes: in host memory, unless it is of NCCL alone, which knows only its device's."""
    return torch.device("cpu" if "cpu:" in dist.get_backend_config(group) else "cuda")
