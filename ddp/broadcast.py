"""Copies tensors of a group's rank 0 to its other ranks, many in one collective.

The wrapper copies weights and buffers once, and buffers again before forward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["BufferSync", "broadcast_tensors", "buffer_collector"]

_CHUNK_BYTES = 250 << 20
_ALIGN_BYTES = 16


class _Package:
    """Tensors of one device as the bytes of one staging tensor, whatever their dtypes: a broadcast only moves bytes."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        offsets, end = [], 0
        for tensor in tensors:
            offsets.append(end)
            end += -(-tensor.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        self.staging = torch.zeros(end, dtype=torch.uint8, device=tensors[0].device)
        self.views = [
            self.staging[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for offset, tensor in zip(offsets, tensors, strict=True)
        ]
        self.work: dist.Work | None = None

    def start(self, group: dist.ProcessGroup) -> None:
        """Pack on rank 0 and start the broadcast. The staging tensor is still on its way until `finish`."""
        if group.rank() == 0:
            if self.work is not None:
                self.work.wait()
            torch._foreach_copy_(self.views, self.tensors)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self.work = group.broadcast([self.staging], options)

    def finish(self, group: dist.ProcessGroup) -> None:
        """Wait and unpack. Rank 0 has nothing to unpack, and waits only before it packs again."""
        if group.rank() != 0 and self.work is not None:
            self.work.wait()
            # Through .data, which has a version counter of its own: a graph of an earlier forward may have
            # saved the buffer, and its backward must not fail because of this copy.
            torch._foreach_copy_([tensor.data for tensor in self.tensors], self.views)


def broadcast_tensors(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor]) -> None:
    """Overwrite `tensors` on every rank of `group` with those of its rank 0. Every rank must call it; blocks.

    The tensors must agree in number, shape and dtype between ranks; they may lie on several devices.
    """
    with torch.no_grad():
        for chunk in _chunks([tensor for tensor in tensors if tensor.numel()]):
            package = _Package(chunk)
            package.start(group)
            package.finish(group)
            if package.work is not None:
                package.work.wait()


def _chunks(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Neighbours of one device, up to about 250 MB each."""
    chunks: list[list[torch.Tensor]] = []
    size = 0
    for tensor in tensors:
        if not chunks or size + tensor.nbytes > _CHUNK_BYTES or chunks[-1][0].device != tensor.device:
            chunks.append([])
            size = 0
        chunks[-1].append(tensor)
        size += tensor.nbytes
    return chunks


class BufferSync:
    """Gives every rank the buffers of rank 0. The plan is kept while the module's buffers stay the same tensors."""

    def __init__(self, group: dist.ProcessGroup, collect: Callable[[], list[torch.Tensor]]) -> None:
        self._group = group
        self._collect = collect
        self._packages: list[_Package] = []
        self._planned: list[torch.Tensor] = []

    def run(self) -> None:
        """Broadcast the buffers. Every rank must call it; rank 0 does not block, the others wait for its values."""
        buffers = self._collect()
        with torch.no_grad():
            if not _same(buffers, self._planned):
                self._planned = buffers
                self._packages = [_Package(chunk) for chunk in _chunks([b for b in buffers if b.numel()])]
            for package in self._packages:
                package.start(self._group)
            for package in self._packages:
                package.finish(self._group)


def _same(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))


def buffer_collector(module: nn.Module, ignored: frozenset[str]) -> Callable[[], list[torch.Tensor]]:
    """Make a function that lists the current buffers of `module` like `named_buffers`, but faster.

    It looks into the submodules that exist now; `ignored` are full names of buffers to leave out.
    """
    owners = []
    for prefix, owner in module.named_modules():
        skip = {name[len(prefix) + bool(prefix) :] for name in ignored if name.rpartition(".")[0] == prefix}
        owners.append((owner._buffers, skip))

    def collect() -> list[torch.Tensor]:
        found = {
            id(buffer): buffer
            for buffers, skip in owners
            if buffers
            for name, buffer in buffers.items()
            if buffer is not None and name not in skip
        }
        return list(found.values())

    return collect
