"""Quantization to signed bytes with one scale per block, and back: pure arithmetic on tensors, no communication.

The values of a block are divided by its scale and rounded to -127..127; the scale is the block's largest magnitude
divided by 127 (the linear case of Dettmers 2016, 8-Bit Approximations for Parallelism in Deep Learning,
arXiv:1511.04561, with a scale per block instead of one per tensor). The error of a value is at most half a scale.

On the wire a row is its bytes followed by its scales in float32: `row_bytes(blocks, block)` bytes.
"""

from __future__ import annotations

import torch

_STEPS = 127
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # so that the reciprocal of a scale is finite


def row_bytes(blocks: int, block: int) -> int:
    """Return the size in bytes of a row of `blocks` blocks of `block` values each; `block` is a multiple of 4."""
    return blocks * (block + torch.float32.itemsize)


def quantize(values: torch.Tensor, wire: torch.Tensor, scratch: torch.Tensor) -> None:
    """Write `values` to `wire`, and leave the rounding error in `values`, for the caller to add next time.

    `values` and `scratch` are float32 of shape (..., blocks, block), `wire` uint8 of shape (..., row_bytes). If a value
    of a block is not finite, none of the values read back is; the error of such a block is set to zero.
    """
    # Twice as fast as abs().amax(), and propagates NaN too.
    peak = torch.maximum(values.amax(-1, keepdim=True), values.amin(-1, keepdim=True).neg_())
    scale = peak.div_(_STEPS).clamp_min_(_SMALLEST_SCALE)  # (..., blocks, 1)
    steps = torch.mul(values, scale.reciprocal(), out=scratch).round_()
    numbers, scales = _parts(wire, values.shape[-2], values.shape[-1])
    numbers.copy_(steps)
    scales.copy_(scale)
    values.addcmul_(steps, scale, value=-1)
    is_lost = scale.isfinite().logical_not_()
    if is_lost.device.type != "cpu" or is_lost.any():  # any() would wait for a device
        values.masked_fill_(is_lost, 0.0)


def dequantize(wire: torch.Tensor, out: torch.Tensor) -> None:
    """Read `wire` (..., row_bytes) into `out`, of shape (..., blocks, block) and any floating dtype."""
    numbers, scales = _parts(wire, out.shape[-2], out.shape[-1])
    out.copy_(numbers).mul_(scales)  # a single operation would allocate for the cast


def add_dequantized(wire: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor, *, divisor: int) -> None:
    """Add the values of `wire` (row_bytes,), each divided by `divisor`, to `out`.

    `out` and `scratch` are float32 of shape (blocks, block).
    """
    numbers, scales = _parts(wire, out.shape[-2], out.shape[-1])
    out.addcmul_(scratch.copy_(numbers), scales / divisor)


def _parts(wire: torch.Tensor, blocks: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the bytes (..., blocks, block) and the scales (..., blocks, 1) of rows."""
    numbers = wire[..., : blocks * block].view(torch.int8).view(*wire.shape[:-1], blocks, block)
    scales = wire[..., blocks * block :].view(torch.float32).unsqueeze(-1)
    return numbers, scales
