"""The layout of central storage in shared memory, copies between it and a device, and the barriers of its ranks.

Called by `step`; knows no optimizer.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp.comm.broadcast import BufferSync, broadcast_tensors
from ddp.comm.layout import check_same_layout, describe
from ddp.comm.objects import control_group, gather_values
from ddp.comm.pinned_buffer import PinnedBuffer
from ddp.comm.shared_memory import SharedSegment
from ddp.errors import ArgumentError, CollectiveError
from ddp.monitoring.stall_report import StallReport
from ddp.strategies.sharding.chunk_gradient import Rows
from ddp.strategies.sharding.optimizer_state import hyperparameters
from ddp.strategies.sharding.partition import Chunk, Partition, Piece, aligned, view_of


@dataclass(frozen=True)
class Form:
    """The properties of a parameter when it was prepared."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class RegionPlan:
    """Offsets in bytes. The values and every rank's gradients have the same layout.

    A rank's region has its gradients first, then the row numbers of sparse ones, then a header for the others. Rank
    0's has the values after these.
    """

    chunks: Mapping[int, int]
    parameters: tuple[int, ...]
    values_bytes: int
    rows: Mapping[int, int]
    header: int
    region_bytes: int  # without the values


def make_plan(cut: Partition, forms: Sequence[Form], sparse: Sequence[int]) -> RegionPlan:
    chunks: dict[int, int] = {}
    parameters = [0] * len(forms)
    end = 0
    for chunk in cut.chunks:
        # The rows of a parameter continue where the last chunk ended, so that it is one tensor.
        chunks[chunk.index] = end = end if chunk.pieces[0].begin else aligned(end)
        for piece in chunk.pieces:
            if not piece.begin:
                parameters[piece.parameter] = end + piece.offset * chunk.dtype.itemsize
        end += chunk.nbytes
    values_bytes = end = aligned(max(end, 1))
    rows: dict[int, int] = {}
    for number in sparse:
        rows[number] = end
        end = aligned(end + 8 * forms[number].shape[0])
    region_bytes = aligned(end + 8 * (RankRegion.HEADER + len(forms)))
    return RegionPlan(chunks, tuple(parameters), values_bytes, rows, end, region_bytes)


class RankRegion:
    """One rank's region of shared memory, with the data that the others need in a step."""

    HEADER = 8
    FAILED, DIGEST, STEP, MOVED, SQUARES = 0, 3, 4, 5, 6  # FAILED takes one number for each phase

    def __init__(self, memory: torch.Tensor, plan: RegionPlan, forms: Sequence[Form]) -> None:
        self.memory = memory
        self._plan = plan
        self._forms = forms
        self.header = view_of(memory, plan.header, (self.HEADER,), torch.int64)
        self.kinds = view_of(memory, plan.header + 8 * self.HEADER, (len(forms),), torch.int64)
        self.squares = self.header[self.SQUARES : self.SQUARES + 1].view(torch.float64)

    def flat(self, chunk: Chunk) -> torch.Tensor:
        """Return the gradients of a chunk."""
        return view_of(self.memory, self._plan.chunks[chunk.index], (chunk.numel,), chunk.dtype)

    def slot(self, number: int) -> torch.Tensor:
        """Return the memory of a parameter's gradient."""
        form = self._forms[number]
        return view_of(self.memory, self._plan.parameters[number], form.shape, form.dtype)

    def write_rows(self, number: int, gradient: torch.Tensor) -> int:
        """Write a coalesced sparse gradient; return its number of rows."""
        numbers, values = gradient.indices()[0], gradient.values()
        self._numbers(number, len(numbers)).copy_(numbers)
        self.slot(number).view(-1)[: values.numel()].copy_(values.reshape(-1))
        return len(numbers)

    def rows(self, piece: Piece, count: int) -> Rows:
        """Return those of the `count` rows that are in a piece, numbered from its first row."""
        numbers = self._numbers(piece.parameter, count)
        first, last = torch.searchsorted(numbers, torch.tensor([piece.begin, piece.end], device="cpu")).tolist()
        row = piece.shape[1:]
        slot = self.slot(piece.parameter)
        values = slot.view(-1)[: count * torch.Size(row).numel()].view(count, *row)
        return Rows(numbers[first:last] - piece.begin, values[first:last])

    def _numbers(self, number: int, count: int) -> torch.Tensor:
        return view_of(self.memory, self._plan.rows[number], (count,), torch.int64)


class SharedRegion:
    """The memory that the ranks share: its segments, and the barriers between writing and reading."""

    def __init__(
        self, group: dist.ProcessGroup | None, model: nn.Module, forms: Sequence[Form], stall_timeout_s: float | None
    ) -> None:
        self._group = group if group is not None and group.size() > 1 else None
        self._forms = forms
        self._buffers: BufferSync | None = None
        if self._group is None:
            return
        self._control = control_group(self._group, forms[0].device)
        self._stall_report = StallReport(self._group, timeout_s=stall_timeout_s)
        self._stall_report.at("its forward and backward passes")
        self._token = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._buffers = BufferSync(self._group, model, (), self._stall_report.wait)

    def barrier(self, what: str, *, step: int = 0) -> None:
        """Wait for all ranks; what they wrote before can be read after. Raises CollectiveError."""
        if self._group is not None:
            self._stall_report.step = step
            self._stall_report.wait(self._control.allreduce([self._token]), what)

    def gather(self, mine: object, what: str) -> list[Any]:
        """Return the values of all ranks. Every rank must call it; blocks."""
        if self._group is None:
            return [mine]
        with self._stall_report.waiting(what):
            return gather_values(mine, group=self._control)

    def compare(self, model: nn.Module, optimizer: torch.optim.Optimizer, settings: Mapping[str, object]) -> None:
        """Raise LayoutMismatchError on every rank if the ranks' models, optimizers or settings differ."""
        if self._group is None:
            return
        described = {
            **settings,
            "optimizer": type(optimizer).__qualname__,
            "parameters of the optimizer": [form.name for form in self._forms],
            "hyperparameters": digest(optimizer.param_groups),
        }
        with self._stall_report.waiting("comparison of the models"):
            check_same_layout(
                self._control,
                describe(described, model.named_parameters(), model.named_buffers()),
            )

    def open(self, plan: RegionPlan) -> list[RankRegion]:
        """Make this rank's region and open those of the others."""
        if self._group is None:
            memory = torch.zeros(plan.region_bytes + plan.values_bytes, dtype=torch.uint8, device="cpu")
            return [RankRegion(memory, plan, self._forms)]
        rank = self._group.rank()
        own = SharedSegment(plan.region_bytes + (plan.values_bytes if rank == 0 else 0))
        gathered = self.gather((own.ticket, platform.node()), "places of shared memory")
        found = [own if other == rank else SharedSegment.open(ticket) for other, (ticket, _) in enumerate(gathered)]
        self._check_same_host(
            [host for _, host in gathered], [other for other, segment in enumerate(found) if segment is None]
        )
        regions = [RankRegion(segment.tensor, plan, self._forms) for segment in found if segment is not None]
        own.close()  # to newcomers; the memory stays
        return regions

    def _check_same_host(self, hosts: Sequence[str], hidden: Sequence[int]) -> None:
        for rank, unseen in enumerate(self.gather(list(hidden), "who can open it")):
            if unseen:
                raise ArgumentError(
                    f"central_storage keeps parameters in memory that all processes share, but rank {rank} (on "
                    f"{hosts[rank]}) cannot open that of rank {unseen[0]} (on {hosts[unseen[0]]}): run all processes "
                    'on one host, as one user, or use strategy "all_reduce" or "parameter_server"'
                )

    def in_world(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return the global ranks of ranks of the group."""
        return self._stall_report.in_world(ranks)

    def open_segment(self, ticket: Any, rank: int) -> torch.Tensor:
        segment = SharedSegment.open(ticket)
        if segment is None:
            raise CollectiveError(
                f"the shared memory of rank {rank} is gone: that process has ended",
                rank=self._stall_report.rank,
                what="places of optimizer states",
                failed_ranks=self.in_world([rank]),
            )
        return segment.tensor

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Broadcast rank 0's tensors into these on every rank."""
        if self._group is not None:
            with self._stall_report.waiting("broadcast of what is not stepped"):
                broadcast_tensors(self._group, tensors)

    def broadcast_buffers(self) -> None:
        if self._buffers is not None:
            self._buffers.run()

    def close(self) -> None:
        if self._group is not None:
            self._stall_report.close()
            self._buffers = self._group = None
            del self._control


def digest(groups: Sequence[Mapping[str, Any]]) -> int:
    """Return a 63-bit hash of the hyperparameters."""
    gathered = [
        [(name, value.tolist() if isinstance(value, torch.Tensor) else value) for name, value in group.items()]
        for group in hyperparameters(groups)
    ]
    return int.from_bytes(hashlib.blake2b(repr(gathered).encode(), digest_size=8).digest(), "big") >> 1


_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class _Block:
    """Some parameters of one dtype, by number, with pinned memory for all of their elements."""

    numbers: tuple[int, ...]
    buffer: PinnedBuffer


class DeviceCopies:
    """Copies between `parameters`, by number, and shared memory in a step: gradients to it, new values back.

    For parameters on one `device` with asynchronous copies. These go through pinned memory, since shared memory is not
    pinned: while the host moves one block, the device copies others.
    """

    def __init__(self, parameters: Mapping[int, torch.Tensor], device: torch.device) -> None:
        self._parameters = parameters
        self._blocks = [
            _Block(tuple(numbers), PinnedBuffer(sum(parameters[n].numel() for n in numbers), dtype, device))
            for numbers, dtype in _blocks(parameters)
        ]

    def fetch(self, gradients: Mapping[int, torch.Tensor], into: Sequence[torch.Tensor]) -> None:
        """Copy dense gradients, by number, to their tensors in host memory; blocks until done."""
        present = [[number for number in block.numbers if number in gradients] for block in self._blocks]
        for block, numbers in zip(self._blocks, present, strict=True):
            if numbers:
                block.buffer.start_fetching([gradients[number] for number in numbers])
        for block, numbers in zip(self._blocks, present, strict=True):
            if numbers:
                block.buffer.finish_fetching([into[number] for number in numbers])

    def send(self, values: Sequence[torch.Tensor]) -> None:
        """Start copying values, by number, to the parameters; they may change afterwards."""
        for block in self._blocks:
            block.buffer.start_sending(
                [values[number] for number in block.numbers], [self._parameters[number] for number in block.numbers]
            )


def _blocks(parameters: Mapping[int, torch.Tensor]) -> list[tuple[list[int], torch.dtype]]:
    """Split the numbers, in order, into blocks of one dtype and about `_BLOCK_BYTES`."""
    blocks: list[tuple[list[int], torch.dtype]] = []
    open_bytes: dict[torch.dtype, int] = {}
    open_numbers: dict[torch.dtype, list[int]] = {}
    for number, parameter in parameters.items():
        dtype = parameter.dtype
        if dtype not in open_numbers or open_bytes[dtype] + parameter.nbytes > _BLOCK_BYTES:
            open_numbers[dtype], open_bytes[dtype] = [], 0
            blocks.append((open_numbers[dtype], dtype))
        open_numbers[dtype].append(number)
        open_bytes[dtype] += parameter.nbytes
    return blocks
