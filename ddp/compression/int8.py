"""Sends gradients as signed bytes, and adds the rounding error to the next ones (error feedback).

Error feedback in both directions is that of 1-bit Adam's compressed all-reduce (Tang et al. 2021,
arXiv:2102.02888, algorithm 1), with a byte for each value instead of a bit; for its convergence, see Karimireddy et
al. 2019, Error Feedback Fixes SignSGD, arXiv:1901.09847.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ddp.compression.compressor import Bucket, completed, mean_over_ranks, real_gradients
from ddp.compression.quantize import add_dequantized, dequantize, quantize, row_bytes
from ddp.compression.row_compressor import RowCompressor
from ddp.errors import ArgumentError


@dataclass(frozen=True)
class Int8:
    """One byte per value and one scale per `block` of them; `error_feedback` adds a step's rounding error to the next.

    A smaller block is more exact; a block of 512 takes 0.8 % more bytes for its scale. The errors take 4 (1 + 1/n)
    bytes of memory per gradient in a world of n; `ddp.Checkpoint` saves them. Raises ArgumentError for a `block` that
    is not a multiple of 4 or is less than 16.

    Tang et al. 2021, "1-bit Adam", arXiv:2102.02888, algorithm 1, with bytes for bits; it converges by Karimireddy et
    al. 2019, "Error Feedback Fixes SignSGD", arXiv:1901.09847.
    """

    block: int = 512
    error_feedback: bool = True

    def __post_init__(self) -> None:
        if self.block < 16 or self.block % 4:
            raise ArgumentError(f"Int8(block={self.block}): a multiple of 4, at least 16")

    def compressor(self, group: dist.ProcessGroup, parameters: Mapping[str, torch.Tensor] | None) -> Int8Compressor:
        """Make a compressor for one model, for `make_compression` and the wrapper."""
        return Int8Compressor(group, self, parameters)


class Int8Compressor(RowCompressor):
    """Averages buckets with one byte per value and one float32 per `block` values on the wire.

    Each rank rounds what it sends; its share of the part of a bucket that it owns stays exact until the average is
    rounded. Each rank keeps its own rounding error, and the owner of a part that of the average; both are added to the
    next step's gradients. The sum of all delivered averages thus equals the sum of the true ones, up to the error of
    the last step. This takes 4 (1 + 1/n) bytes of memory per gradient. A parameter keeps its residual when buckets
    change: the owner of a part of the old bucket adds n times the average's error to its own error, which has the same
    effect on the next average.

    A block with an infinite or NaN value is not finite on any rank, and its residual is dropped. With a GradScaler,
    the residual is in its scale at the time.
    """

    def __init__(self, group: dist.ProcessGroup, settings: Int8, parameters: Mapping[str, torch.Tensor] | None) -> None:
        super().__init__(group, "int8", parameters)
        self._settings = settings
        self._rank = group.rank()
        self._owed: dict[int, _Owed] = {}  # by bucket
        self._home: dict[str, _Owed] = {}  # by parameter: the residual of the bucket that it was last in

    def reduce(self, bucket: Bucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        numel = buffer.numel()
        if self._size == 1 or numel == 0:
            self._pay_all(bucket, "owed")
            return completed(buffer)
        owed = self._owed_for(bucket)
        with torch.no_grad():
            rank, (blocks, block) = self._rank, owed.kept.shape
            memory = self._memory(bucket, row_bytes(blocks, block))
            start, end = (min(numel, row * blocks * block) for row in (rank, rank + 1))
            owed.kept.view(-1)[: end - start].add_(buffer[start:end], alpha=1 / self._size)
            flat = owed.flat(owed.sent)
            flat[:start].add_(buffer[:start])
            flat[end:].add_(buffer[end:])
            for others in (slice(rank), slice(rank + 1, None)):
                with self._scratch(owed.sent[others]) as scratch:
                    quantize(owed.sent[others], memory.send[others], scratch)

        def average(received: torch.Tensor) -> torch.Tensor:
            with self._scratch(owed.kept) as scratch:
                for other, row in enumerate(received):
                    if other != rank:
                        add_dequantized(row, owed.kept, scratch, divisor=self._size)
                quantize(owed.kept, received[rank], scratch)
            return received[rank]

        def deliver(gathered: torch.Tensor) -> torch.Tensor:
            if numel == owed.sent.numel() and buffer.is_contiguous():
                dequantize(gathered, buffer.view(owed.sent.shape))
                return buffer
            with self._scratch(owed.sent) as values:
                dequantize(gathered, values)
                return buffer.copy_(owed.flat(values))

        return self._start(bucket, memory, average, deliver)

    def state_dict(self) -> dict[str, Any]:
        assert self._group is not None
        parameters: dict[str, Mapping[str, Any]] = {}
        for owed in dict.fromkeys(self._home.values()):
            owed.fold(self._group)
            mean_over_ranks(self._group, owed.sent)
            for key, part in owed.parts.items():
                if self._home[key] is owed:
                    parameters[key] = {"owed": part.clone(memory_format=torch.contiguous_format)}
            owed.keep_own(self._rank, self._size)  # as in a run that loads this state
        return {"method": self._name, "parameters": {**parameters, **self._loaded}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loaded = self._read(state, ["owed"])
        self._owed.clear()
        self._home.clear()

    def _owed_for(self, bucket: Bucket) -> _Owed:
        """Return the residual of `bucket`; if its parameters changed, it is made from the residuals of each of them."""
        assert self._group is not None
        buffer, index, keys = bucket.buffer(), bucket.index(), self._keys(bucket)
        owed = self._owed.get(index)
        if (
            owed is not None
            and (tuple(owed.parts), owed.numel, owed.sent.device) == (keys, buffer.numel(), buffer.device)
            and all(self._home.get(key) is owed for key in keys)  # else they were in other buckets in between
        ):
            return owed
        owed = _nothing_owed(bucket, keys, self._size, self._settings.block)
        with torch.no_grad():
            for key, part in owed.parts.items():
                if (home := self._home.pop(key, None)) is not None and home.parts[key].shape == part.shape:
                    home.fold(self._group)
                    part.copy_(home.parts[key])
                if (held := self._claim(key, part, "owed")) is not None:
                    part.copy_(held["owed"])
            owed.keep_own(self._rank, self._size)
        self._check_claimed(bucket)
        if self._settings.error_feedback:
            self._owed[index] = owed
            self._home.update(dict.fromkeys(keys, owed))
            homes = set(self._home.values())
            self._owed = {place: each for place, each in self._owed.items() if each in homes}
        return owed


@dataclass(frozen=True, eq=False)
class _Owed:
    """The residual (rounding error) of one bucket of `numel` gradients, in float32.

    `sent`, of shape (n, blocks, block): of this rank's values, before the average; zero in the row that it owns.
    `kept`, of shape (blocks, block): of the average, in that row. Beyond `numel` both are zero. `parts` are views of
    `sent`, one per parameter, with the layout of its gradient in the bucket.
    """

    numel: int
    sent: torch.Tensor
    kept: torch.Tensor
    parts: dict[str, torch.Tensor]

    def flat(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a view of the bucket's elements in `rows`."""
        return rows.view(-1)[: self.numel]

    def keep_own(self, rank: int, size: int) -> None:
        """Move this rank's residual in the row that it owns into `kept`, as its share of the average."""
        self.kept.add_(self.sent[rank], alpha=1 / size)
        self.sent[rank].zero_()

    def fold(self, group: dist.ProcessGroup) -> None:
        """Move the whole residual into `sent`: n times one rank's residual has the same effect on the average of n."""
        self.sent[group.rank()].add_(self.kept, alpha=group.size())
        self.kept.zero_()


def _nothing_owed(bucket: Bucket, keys: Sequence[str], size: int, block: int) -> _Owed:
    buffer = bucket.buffer()
    blocks = -(-buffer.numel() // (size * block))
    sent = torch.zeros(size, blocks, block, dtype=torch.float32, device=buffer.device)
    parts = {
        key: sent.as_strided(each.size(), each.stride(), each.storage_offset() - buffer.storage_offset())
        for key, each in zip(keys, real_gradients(bucket), strict=True)
    }
    return _Owed(buffer.numel(), sent, torch.zeros_like(sent[0]), parts)
