"""Gradients as messages carry them: what is absent from one neither reaches the others nor is forgotten."""

from __future__ import annotations

import torch
from torch import nn

from ddp.strategies.parameter_server.messages import Residuals, read_gradient, write_gradient
from ddp.strategies.sharding.chunk_gradient import ChunkGradient, flatten_gradients
from ddp.strategies.sharding.partition import partition


def test_what_int8_owes_to_a_piece_waits_for_its_next_gradient() -> None:
    parameters = [nn.Parameter(torch.zeros(10)), nn.Parameter(torch.zeros(20))]
    (chunk,) = partition(parameters, servers=1, chunk_bytes=1 << 20, splits=True).chunks
    residuals: Residuals = {}
    gradient = torch.linspace(-1, 1, 20)
    for first in (torch.full((10,), 0.003), None, None, torch.zeros(10)):
        memory = torch.full((chunk.numel,), float("nan"))  # what an absent piece has there
        flat = flatten_gradients(chunk, [first, gradient], memory)
        facts, tensors = write_gradient(chunk, flat, "int8", residuals)
        found = read_gradient(chunk, facts, tensors)
        values = found.flat if isinstance(found, ChunkGradient) else found
        assert values is not None
        mine, theirs = (piece.in_flat(values) for piece in chunk.pieces)
        torch.testing.assert_close(theirs, gradient, rtol=0, atol=0.012)
        owed = residuals[0].view(-1)[chunk.pieces[0].offset :][:10]
        if first is None:
            assert isinstance(found, ChunkGradient)
            assert found.absent == {0}
            assert torch.equal(owed, torch.full((10,), 0.003)), "less than half of a step of 1/127"
    assert mine.abs().max() < 0.012
