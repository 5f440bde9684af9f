"""The partition of a model over servers: parameters are split into pieces, and pieces packed into chunks.

Pure functions of shapes and dtypes: every process of a run computes the same partition by itself. Called by the
parameter server, its workers and central storage; nothing here holds values.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from ddp.errors import ArgumentError

_ALIGN_BYTES = 64  # a cache line, and the width of the widest vector instructions


@dataclass(frozen=True)
class Piece:
    """Rows `begin` to `end` (exclusive) along dimension 0 of parameter number `parameter`.

    `shape` is that of the piece; a parameter without dimensions is one row, of shape (). `offset` counts elements
    from the start of the chunk, in which the piece is contiguous in row-major order.
    """

    parameter: int
    begin: int
    end: int
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """The offset after its last element."""
        return self.offset + self.numel

    def in_flat(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a view of this piece in the flat tensor (numel,) of its chunk."""
        return flat[self.offset : self.stop].view(self.shape)

    def in_parameter(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a view of this piece in its parameter, without a graph."""
        whole = parameter.detach()
        return whole if whole.shape == self.shape else whole[self.begin : self.end]


@dataclass(frozen=True)
class Chunk:
    """Pieces of one dtype that are stored, sent and stepped together.

    `index` is unique over all servers. `offset_bytes` counts from the start of its server's memory.
    """

    index: int
    server: int
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    numel: int
    offset_bytes: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def in_memory(self, memory: torch.Tensor) -> torch.Tensor:
        """Return a view (numel,) of this chunk in the memory (bytes,) of its server."""
        return memory[self.offset_bytes : self.offset_bytes + self.nbytes].view(self.dtype)

    def in_flat(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return a view of each piece in the flat tensor (numel,) of this chunk."""
        return [piece.in_flat(flat) for piece in self.pieces]

    def in_parameters(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return a view of each piece in its parameter, without a graph."""
        return [piece.in_parameter(parameters[piece.parameter]) for piece in self.pieces]


@dataclass(frozen=True)
class Partition:
    """Chunks in the order of their `index`; every element of every parameter is in exactly one piece."""

    servers: int
    chunks: tuple[Chunk, ...]

    def of(self, server: int) -> tuple[Chunk, ...]:
        """Return the chunks of one server, in the order of its memory."""
        return self._by_server[server]

    def bytes(self, server: int) -> int:
        """Return the size of one server's chunks, padding included."""
        return max((aligned(chunk.offset_bytes + chunk.nbytes) for chunk in self.of(server)), default=0)

    @cached_property
    def _by_server(self) -> tuple[tuple[Chunk, ...], ...]:
        found: list[list[Chunk]] = [[] for _ in range(self.servers)]
        for chunk in self.chunks:
            found[chunk.server].append(chunk)
        return tuple(map(tuple, found))


def partition(
    parameters: Sequence[torch.Tensor],
    *,
    servers: int,
    chunk_bytes: int = 4 << 20,
    splits: bool = True,
    alone: Collection[int] = (),
) -> Partition:
    """Split parameters into chunks over `servers`, with about the same number of bytes on each.

    A chunk has one dtype and at most `chunk_bytes`, unless a single row has more. With `splits`, parameters are split
    between any two rows, and no server has more than the mean plus one chunk. Without, each parameter is one piece,
    and the largest are placed first. Parameters numbered in `alone` share their chunks with no others (for embeddings,
    only some rows are sent). A parameter without elements has one empty piece.

    The pieces of a parameter are in neighbouring chunks, in order; neighbouring chunks are on different servers, so
    that all servers are busy while a model is sent in order. Raises ArgumentError for arguments below 1.
    """
    if servers < 1 or chunk_bytes < 1:
        raise ArgumentError(f"servers={servers}, chunk_bytes={chunk_bytes}: both must be at least 1")
    kinds = {dtype: place for place, dtype in enumerate(dict.fromkeys(each.dtype for each in parameters))}
    order = sorted(range(len(parameters)), key=lambda number: kinds[parameters[number].dtype])
    sources = [_source(number, parameters[number], is_alone=number in alone) for number in order]
    if splits:
        stripes = _stripes(sources, servers=servers, chunk_bytes=chunk_bytes)
        homes = _homes([sum(map(_nbytes, stripe)) for stripe in stripes], servers)
    else:
        stripes, homes = _whole(sources, servers)
    packed = [_packed(stripe, chunk_bytes=chunk_bytes, splits=splits) for stripe in stripes]
    placed = [(cuts, home) for chunks, home in zip(packed, homes, strict=True) for cuts in chunks]
    if not splits:  # in the order of the parameters again
        places = {number: place for place, number in enumerate(order)}
        placed.sort(key=lambda chunk: places[chunk[0][0][0].number])
    return Partition(servers, _chunks(placed, servers))


class _Source(NamedTuple):
    """One parameter, as rows."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_alone: bool
    rows: int
    row_numel: int
    row_bytes: int


def _source(number: int, parameter: torch.Tensor, *, is_alone: bool) -> _Source:
    shape, dtype = tuple(parameter.shape), parameter.dtype
    row_numel = math.prod(shape[1:])
    return _Source(number, shape, dtype, is_alone, shape[0] if shape else 1, row_numel, row_numel * dtype.itemsize)


_Cut = tuple[_Source, int, int]  # rows begin to end of a parameter


def _stripes(sources: Sequence[_Source], *, servers: int, chunk_bytes: int) -> list[list[_Cut]]:
    """Split the concatenated parameters at the rows nearest to equal distances, into a multiple of `servers` parts."""
    total = sum(source.row_bytes * source.rows for source in sources)
    slack = min(max((source.row_bytes for source in sources), default=0), chunk_bytes // 4)  # of rounding to rows
    count = servers * max(1, -(-total // (servers * (chunk_bytes - slack))))
    stripes: list[list[_Cut]] = [[]]
    at = 0  # bytes before this parameter
    for source in sources:
        begin, size = 0, source.row_bytes
        while len(stripes) < count and size and (border := len(stripes) * total / count) < at + source.rows * size:
            cut = min(max(begin, round((border - at) / size)), source.rows)
            if cut > begin:
                stripes[-1].append((source, begin, cut))
            stripes.append([])
            begin = cut
        if begin < source.rows or not source.rows:
            stripes[-1].append((source, begin, source.rows))
        at += source.rows * size
    return [stripe for stripe in stripes if stripe]


def _whole(sources: Sequence[_Source], servers: int) -> tuple[list[list[_Cut]], list[int]]:
    """Assign whole parameters; return the parameters of each server, and the servers' numbers."""
    homes = _homes([source.row_bytes * source.rows for source in sources], servers)
    owned: list[list[_Cut]] = [[] for _ in range(servers)]
    for source, home in zip(sources, homes, strict=True):
        owned[home].append((source, 0, source.rows))
    return owned, list(range(servers))


def _homes(sizes: Sequence[int], servers: int) -> list[int]:
    """Choose a server for each size: largest first, each to the server with the least; equal sizes go round-robin."""
    quantum = max(1, max(sizes, default=0) // 8)  # stripes may differ by a row, which must not change their order
    order = sorted(range(len(sizes)), key=lambda place: (-round(sizes[place] / quantum), place))
    loads = [(0, server) for server in range(servers)]
    homes = [0] * len(sizes)
    for place in order:
        load, homes[place] = loads[0]
        heapq.heapreplace(loads, (load + sizes[place], homes[place]))
    return homes


def _packed(cuts: Iterable[_Cut], *, chunk_bytes: int, splits: bool) -> list[list[_Cut]]:
    """Pack neighbours into chunks of one dtype and up to `chunk_bytes`; with `splits`, split between rows again."""
    chunks: list[list[_Cut]] = []
    left_bytes = 0
    last: _Source | None = None
    for source, begin, end in cuts:
        if last is None or last.dtype != source.dtype or last.is_alone or source.is_alone:
            chunks.append([])
            left_bytes = chunk_bytes
        last = source
        if begin == end:
            chunks[-1].append((source, begin, end))
        while begin < end:
            fits = min(end - begin, left_bytes // source.row_bytes) if source.row_bytes else end - begin
            if fits < end - begin and not splits:
                fits = 0
            if not fits and chunks[-1]:
                chunks.append([])
                left_bytes = chunk_bytes
                continue
            taken = fits or (1 if splits else end - begin)
            chunks[-1].append((source, begin, begin + taken))
            begin += taken
            left_bytes = max(0, left_bytes - taken * source.row_bytes)
    return chunks


def _nbytes(cut: _Cut) -> int:
    source, begin, end = cut
    return source.row_bytes * (end - begin)


def _chunks(placed: Sequence[tuple[list[_Cut], int]], servers: int) -> tuple[Chunk, ...]:
    chunks = []
    ends = [0] * servers  # of the memory allocated so far
    for index, (cuts, server) in enumerate(placed):
        pieces, offset = [], 0
        for source, begin, end in cuts:
            shape = (end - begin, *source.shape[1:]) if source.shape else ()
            pieces.append(Piece(source.number, begin, end, shape, offset))
            offset += (end - begin) * source.row_numel
        chunk = Chunk(index, server, cuts[0][0].dtype, tuple(pieces), offset, ends[server])
        ends[server] = aligned(chunk.offset_bytes + chunk.nbytes)
        chunks.append(chunk)
    return tuple(chunks)


def aligned(size_bytes: int) -> int:
    """Round the size up to whole cache lines."""
    return -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def view_of(memory: torch.Tensor, at: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor at byte `at` of the storage of `memory`, with a storage of its own.

    Saving it thus saves nothing else. Also, torch 2.13 adds a coalesced one-dimensional sparse tensor to the wrong
    place in a tensor that does not start at its storage's beginning.
    """
    size = torch.Size(shape)
    if not size.numel():
        return torch.empty(size, dtype=dtype, device="cpu")
    tensor = torch.empty(0, dtype=dtype, device="cpu")
    storage = memory.untyped_storage()[at : at + size.numel() * dtype.itemsize]
    tensor.set_(storage, 0, size)  # type: ignore[call-overload]  # torch's stubs know no storage
    return tensor
