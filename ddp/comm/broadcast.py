"""Copies tensors of one rank of a group to its other ranks, many in one collective.

The wrapper copies weights and buffers once, and buffers again before forward passes. Small tensors are sent together
through staging memory of at most 250 MB; a large one is sent alone, directly between the ranks' tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from ddp.comm.combine import Shares
from ddp.comm.sums.tree_sum import start_tree_sum
from ddp.monitoring import timeline
from ddp.monitoring.stall_report import Pending, finish
from ddp.torch_internals import buffers_of, foreach_copy

_CHUNK_BYTES = 250 << 20
_ALONE_BYTES = 4 << 20  # copying larger ones to staging memory and back takes longer than a separate collective
_ALIGN_BYTES = 16


class Wait(Protocol):
    """Waits for a collective, given its name and the device whose memory it moves."""

    def __call__(self, work: Pending, what: str, *, device: torch.device) -> object: ...


class _Package:
    """Tensors of one device as the bytes of one staging tensor, whatever their dtypes: a broadcast only moves bytes."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        offsets, end = [], 0
        for tensor in tensors:
            offsets.append(-(-end // _ALIGN_BYTES) * _ALIGN_BYTES)
            end = offsets[-1] + tensor.nbytes
        self.staging = torch.zeros(end, dtype=torch.uint8, device=tensors[0].device)
        self.views = [
            self.staging[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for offset, tensor in zip(offsets, tensors, strict=True)
        ]
        self.work: dist.Work | None = None

    def start(self, group: dist.ProcessGroup, root: int, wait: Wait) -> None:
        """Pack on rank `root` and start the broadcast. The staging tensor is in use until `finish`."""
        if group.rank() == root:
            self.wait(wait)
            foreach_copy(self.views, self.tensors)
        self.work = _broadcast(group, self.staging, root)

    def finish(self, group: dist.ProcessGroup, root: int, wait: Wait) -> None:
        """Wait and unpack. The root has nothing to unpack, and waits only before it packs again."""
        if group.rank() != root:
            self.wait(wait)
            # Through .data, which has its own version counter: a graph of an earlier forward may have saved the
            # buffer, and its backward must not fail because of this copy.
            data = [tensor.data for tensor in self.tensors]
            if all(map(_is_plain, data)):
                foreach_copy(data, self.views)
            else:
                for tensor, view in zip(data, self.views, strict=True):
                    tensor.copy_(view)

    def wait(self, wait: Wait) -> None:
        """Wait until the staging tensor is free, or holds the received data."""
        if self.work is not None:
            wait(self.work, "broadcast of buffers", device=self.staging.device)


def broadcast_tensors(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
    """Overwrite `tensors` on every rank of `group` with those of its rank `root`. Every rank must call it; blocks.

    The tensors must agree in number, shape and dtype between ranks; they may be on several devices.
    """
    with torch.no_grad():
        for chunk in _chunks(tensors):
            _broadcast_chunk(group, chunk, root, _wait_as_caller)


def _wait_as_caller(work: Pending, what: str, *, device: torch.device) -> None:
    finish(work, device=device)


def _broadcast_chunk(group: dist.ProcessGroup, chunk: Sequence[torch.Tensor], root: int, wait: Wait) -> None:
    """Broadcast one tensor from its own memory if that is contiguous, else through temporary memory."""
    if len(chunk) == 1 and chunk[0].is_contiguous() and _is_plain(chunk[0]):  # on this rank; its bytes are those of all
        flat = chunk[0].data.view(-1).view(torch.uint8)
        wait(_broadcast(group, flat, root), "broadcast of a tensor", device=flat.device)
        return
    package = _Package(chunk)
    package.start(group, root, wait)
    package.finish(group, root, wait)
    if group.rank() == root:
        package.wait(wait)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether its memory holds its values, unlike that of a conjugated or negated view."""
    return not (tensor.is_conj() or tensor.is_neg())


def _broadcast(group: dist.ProcessGroup, tensor: torch.Tensor, root: int) -> dist.Work:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    return group.broadcast([tensor], options)


def _chunks(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group small neighbours of one device, up to about 250 MB each, then each large one alone.

    The result is the same on every rank, as it depends on shapes alone.
    """
    chunks: list[list[torch.Tensor]] = []
    size = 0
    for tensor in (tensor for tensor in tensors if 0 < tensor.nbytes < _ALONE_BYTES):
        if not chunks or size + tensor.nbytes > _CHUNK_BYTES or chunks[-1][0].device != tensor.device:
            chunks.append([])
            size = 0
        chunks[-1].append(tensor)
        size += tensor.nbytes
    large = (tensor for tensor in tensors if tensor.nbytes >= _ALONE_BYTES)
    return chunks + [[piece] for whole in large for piece in _pieces(whole)]


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield views of at most `_CHUNK_BYTES` that cover `tensor`, for any strides."""
    if tensor.nbytes <= _CHUNK_BYTES or not tensor.dim():
        yield tensor
    elif len(tensor) == 1:
        yield from _pieces(tensor[0])
    else:
        for part in torch.split(tensor, max(1, _CHUNK_BYTES * len(tensor) // tensor.nbytes)):
            yield from _pieces(part)


class BufferSync:
    """Broadcasts one rank's buffers. The plan is kept while the module's buffers stay the same tensors.

    It includes the current submodules of `module`; `ignored` are full names of buffers to skip. `wait` is that of a
    stall report. Up to 250 MB of buffers have their own staging memory, so that the root does not wait; the rest share
    it in turn.
    """

    def __init__(self, group: dist.ProcessGroup, module: nn.Module, ignored: Collection[str], wait: Wait) -> None:
        self._group = group
        self._wait = wait
        self._owners = []
        for prefix, owner in module.named_modules():
            skip = {name[len(prefix) + bool(prefix) :] for name in ignored if name.rpartition(".")[0] == prefix}
            self._owners.append((buffers_of(owner), skip))
        self._packages: list[_Package] = []
        self._planned: list[Any] = []  # the identities of the buffers, kept alive by the packages, and their forms

    def run(self, root: int = 0) -> None:
        """Broadcast the buffers of `root`. Every rank must call it; the others wait for the root.

        It is recorded as a wait on all ranks: sending does not count as the root's own work.
        """
        buffers = self._collect()
        if not buffers:
            return
        recorded = timeline.wait_begins()
        try:
            self._broadcast(buffers, root)
        finally:
            timeline.wait_ended(recorded)

    def values(self) -> torch.Tensor:
        """Return all floating-point buffers, (n,) in float64."""
        flat = [buffer.detach().double().reshape(-1) for buffer in self._collect() if buffer.is_floating_point()]
        return torch.cat(flat) if flat else torch.empty(0, dtype=torch.float64, device="cpu")

    def add_up(self, rows: Sequence[torch.Tensor], shares: Shares) -> None:
        """Set the floating-point buffers to a sum of `values`, by the tree. Every rank must call it; blocks."""
        floats = [buffer.data for buffer in self._collect() if buffer.is_floating_point()]
        total = self.values()
        if floats:
            self._wait(start_tree_sum(self._group, total, rows, shares), "sum of buffers", device=total.device)
        for buffer, part in zip(floats, total.split([buffer.numel() for buffer in floats]), strict=True):
            buffer.copy_(part.view(buffer.shape))

    def _broadcast(self, buffers: Sequence[torch.Tensor], root: int) -> None:
        with torch.no_grad():
            # The shape of a buffer may change in place, as in observers of quantization.
            planned = [(id(buffer), buffer.shape, buffer.dtype, buffer.device) for buffer in buffers]
            if planned != self._planned:
                self._planned = planned
                self._packages = []
                if sum(buffer.nbytes for buffer in buffers) <= _CHUNK_BYTES:
                    self._packages = [_Package(chunk) for chunk in _chunks(buffers)]
            if not self._packages:
                for chunk in _chunks(buffers):
                    _broadcast_chunk(self._group, chunk, root, self._wait)
            for package in self._packages:
                package.start(self._group, root, self._wait)
            for package in self._packages:
                package.finish(self._group, root, self._wait)

    def _collect(self) -> list[torch.Tensor]:
        """Return the current buffers, as `named_buffers` lists them, but faster."""
        found = {
            id(buffer): buffer
            for buffers, skip in self._owners
            if buffers
            for name, buffer in buffers.items()
            if buffer is not None and name not in skip
        }
        return list(found.values())
