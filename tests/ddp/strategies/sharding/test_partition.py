"""Every element lies in one piece of one chunk, servers hold equal shares, and all processes cut alike."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp.errors import ArgumentError
from ddp.strategies.sharding.partition import Partition, partition

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int8]
SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=12)


def tensors(shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype] = ()) -> list[torch.Tensor]:
    """Parameters of these shapes, by themselves float32."""
    kinds = dtypes or [torch.float32] * len(shapes)
    return [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in zip(shapes, kinds, strict=True)]


def sizes(cut: Partition) -> list[int]:
    return [sum(chunk.nbytes for chunk in cut.of(server)) for server in range(cut.servers)]


def check(cut: Partition, shapes: list[tuple[int, ...]], dtypes: list[torch.dtype]) -> None:
    assert [chunk.index for chunk in cut.chunks] == list(range(len(cut.chunks)))
    rows_to: dict[int, int] = {}
    for chunk in cut.chunks:
        offset = 0
        for piece in chunk.pieces:
            shape = shapes[piece.parameter]
            assert chunk.dtype == dtypes[piece.parameter]
            assert piece.shape == ((piece.end - piece.begin, *shape[1:]) if shape else ())
            assert piece.begin == rows_to.get(piece.parameter, 0), "the pieces of a parameter follow each other"
            rows_to[piece.parameter] = piece.end
            assert piece.offset == offset
            assert piece.stop == offset + piece.numel == offset + math.prod(piece.shape)
            offset = piece.stop
        assert chunk.pieces
        assert chunk.numel == offset
    assert rows_to == {number: shape[0] if shape else 1 for number, shape in enumerate(shapes)}
    for server in range(cut.servers):
        end = 0
        for chunk in cut.of(server):
            assert chunk.server == server
            assert chunk.offset_bytes % 64 == 0
            assert chunk.offset_bytes >= end
            end = chunk.offset_bytes + chunk.nbytes
        assert end <= cut.bytes(server) < end + 64


@given(SHAPES, st.data(), st.integers(1, 9), st.integers(1, 400), st.booleans())
def test_every_element_lies_in_one_piece(
    shapes: list[tuple[int, ...]], data: st.DataObject, servers: int, chunk_bytes: int, splits: bool
) -> None:
    dtypes = data.draw(st.lists(st.sampled_from(DTYPES), min_size=len(shapes), max_size=len(shapes)))
    alone = data.draw(st.sets(st.integers(0, max(0, len(shapes) - 1))))
    parameters = tensors(shapes, dtypes)
    cut = partition(parameters, servers=servers, chunk_bytes=chunk_bytes, splits=splits, alone=alone)
    check(cut, shapes, dtypes)
    assert cut == partition(parameters, servers=servers, chunk_bytes=chunk_bytes, splits=splits, alone=alone)
    for chunk in cut.chunks:
        rows = sum(piece.end - piece.begin for piece in chunk.pieces if piece.numel)
        full = [piece for piece in chunk.pieces if piece.numel]
        assert chunk.nbytes <= chunk_bytes or (rows == 1 if splits else len(full) == 1)
        numbers = {piece.parameter for piece in chunk.pieces}
        assert len(numbers) == 1 or not numbers & alone
    largest = max((math.prod(s) * d.itemsize for s, d in zip(shapes, dtypes, strict=True)), default=0)
    row = max((math.prod(s[1:]) * d.itemsize for s, d in zip(shapes, dtypes, strict=True)), default=0)
    mean = sum(sizes(cut)) / servers
    # A stripe is at most the share of a server, cut at the next row.
    assert max(sizes(cut)) <= mean + (mean + row if splits else largest) + 1e-9


@given(st.integers(1, 16), st.integers(1, 40), st.integers(1, 200))
def test_equal_rows_are_shared_to_a_row(servers: int, count: int, rows: int) -> None:
    """A model of one row size, cut once a server: none has a row more than its share."""
    cut = partition(tensors([(rows, 4)] * count), servers=servers)
    assert max(sizes(cut)) <= count * rows * 16 / servers + 16


def test_a_large_model_is_shared_evenly_and_in_turn() -> None:
    cut = partition(tensors([(2048, 2048), (2048,)] * 12), servers=3)
    assert max(sizes(cut)) - min(sizes(cut)) <= 4 << 20
    assert [chunk.server for chunk in cut.chunks[:6]] == [0, 1, 2, 0, 1, 2]
    small = partition(tensors([(100, 10), (10,)]), servers=4)
    assert [bool(small.of(server)) for server in range(4)] == [True] * 4
    many = partition(tensors([(7,), ()]), servers=64)
    assert sum(map(bool, map(many.of, range(64)))) == 8, "more servers than elements"


def test_whole_tensors_are_placed_the_largest_first() -> None:
    shapes = [(10,), (80,), (40,), (30,), (20, 2), (1,)]
    cut = partition(tensors(shapes), servers=2, splits=False)
    assert {piece.parameter: chunk.server for chunk in cut.chunks for piece in chunk.pieces}[1] == 0
    assert all(len(piece.shape) == len(shapes[piece.parameter]) for chunk in cut.chunks for piece in chunk.pieces)
    assert abs(sizes(cut)[0] - sizes(cut)[1]) <= 4 * 30, "of the last large one"


@pytest.mark.parametrize(("servers", "chunk_bytes"), [(0, 1), (1, 0)])
def test_what_cannot_be_meant_is_an_error(servers: int, chunk_bytes: int) -> None:
    with pytest.raises(ArgumentError, match="at least 1"):
        partition(tensors([()]), servers=servers, chunk_bytes=chunk_bytes)
