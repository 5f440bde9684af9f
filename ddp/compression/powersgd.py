"""Sends gradients as products of two thin matrices, and adds the approximation error to the next ones.

The method is that of Vogels et al. 2019, PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization, arXiv:1905.13727, algorithms 1 and 2, with plain averages at first, as torch's hook of that name has them.
No decision here makes the host read a number from a device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ddp.compression.compressor import (
    Bucket,
    Compressor,
    completed,
    mean_over_ranks,
    real_gradients,
)
from ddp.compression.rehearsal import RehearsalGroup
from ddp.errors import ArgumentError, CheckpointError
from ddp.monitoring.stall_report import report_of, waiting_for_peers
from ddp.torch_internals import is_in_stream_order

_SMALLEST_NORM = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class PowerSGD:
    """Matrices as products of two of rank `rank`, after `start_step` steps of plain averages.

    Approximation harms the first steps most; torch recommends a tenth of all steps. A gradient that does not shrink by
    `min_compression_rate` is sent uncompressed. Raises ArgumentError for a `rank` below 1 or a `start_step` below 2.

    Vogels et al. 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
    arXiv:1905.13727, algorithms 1 and 2.
    """

    rank: int = 1
    start_step: int = 1000
    min_compression_rate: float = 2.0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ArgumentError(f"PowerSGD(rank={self.rank}): at least 1")
        if self.start_step < 2:
            raise ArgumentError(f"PowerSGD(start_step={self.start_step}): at least 2, buckets change after the first")

    def compressor(self, group: dist.ProcessGroup, parameters: Mapping[str, torch.Tensor] | None) -> PowerSGDCompressor:
        """Make a compressor for one model, for `make_compression` and the wrapper."""
        return PowerSGDCompressor(group, self, parameters)


class PowerSGDCompressor(Compressor):
    """Averages buckets, from step `start_step` on with matrices of rank `rank`.

    It drops the state of a gradient that is not finite (a GradScaler's skipped step), supports gradients of any shape
    and layout, and compresses nothing in a world of one. The state is kept by parameter, so that buckets may change at
    any time.

    With gloo a bucket is finished before backward continues: otherwise its second collective would start while others
    are in flight, in an order that differs between ranks.
    """

    def __init__(
        self, group: dist.ProcessGroup, settings: PowerSGD, parameters: Mapping[str, torch.Tensor] | None
    ) -> None:
        super().__init__(group, "powersgd", parameters)
        self._settings = settings
        self._step = 0
        self._made = 0  # number of approximations; each draws its first matrix with its own seed
        self._known: dict[str, _Approximation] = {}

    def reduce(self, bucket: Bucket) -> torch.futures.Future[torch.Tensor]:
        assert self._group is not None
        buffer = bucket.buffer()
        is_plain = self._step < self._settings.start_step
        self._step += bucket.is_last()
        if self._size == 1 or not buffer.numel():
            self._pay_all(bucket, "error")
            return completed(buffer)
        if is_plain:
            return self._start_average(self._group, bucket)
        what = f"PowerSGD of bucket {bucket.index()}"
        with _as_stored(buffer.device), waiting_for_peers(what, self._group):
            exchange = _Exchange(self._group, bucket, self._known_of(bucket), what)
            work = exchange.start()
            if not is_in_stream_order(self._group, buffer.device):
                exchange.wait(work)
                return completed(exchange.finish())
            # NCCL's future is complete when its work is enqueued: this runs now, on a stream that waits for it.
            return work.get_future().then(lambda _: exchange.finish())

    def rehearse(self, bucket: Bucket) -> None:
        assert self._group is not None
        with _as_stored(bucket.buffer().device):
            exchange = _Exchange(self._group, bucket, self._known_of(bucket), "rehearsal")
            exchange.start()
            exchange.finish()

    def _start_average(self, group: dist.ProcessGroup, bucket: Bucket) -> torch.futures.Future[torch.Tensor]:
        """Start a plain average, and name the parameters: their order in the first pass is the same in every run."""
        self._keys(bucket)
        buffer = bucket.buffer()
        work = group.allreduce([buffer.div_(self._size)])
        if buffer.device.type == "cpu" or is_in_stream_order(group, buffer.device):
            return work.get_future().then(lambda _: buffer)
        what = f"average of bucket {bucket.index()}"
        with waiting_for_peers(what, group):  # the stream then waits for gloo's copy back to the device
            report_of(group).wait(work, what, device=buffer.device)
        return completed(buffer)

    def state_dict(self) -> dict[str, Any]:
        assert self._group is not None
        parameters: dict[str, Mapping[str, Any]] = {}
        for key, known in self._known.items():
            mean_over_ranks(self._group, known.matrix)  # the sum over ranks depends on the mean only
            error = known.error.clone(memory_format=torch.contiguous_format)
            parameters[key] = {"error": error, "q": known.q.clone(), "seed": known.seed}
        return {
            "method": self._name,
            "rank": self._settings.rank,
            "step": self._step,
            "made": self._made,
            "parameters": {**parameters, **self._loaded},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        loaded = self._read(state, ["error", "q"])
        if state.get("rank") != self._settings.rank:
            raise CheckpointError(
                f"the state is that of PowerSGD of rank {state.get('rank')}, this has {self._settings.rank}"
            )
        try:
            step, made, _ = int(state["step"]), int(state["made"]), [int(held["seed"]) for held in loaded.values()]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"not the state of a compressor ({type(error).__name__}: {error})") from error
        self._step, self._made, self._loaded = step, made, loaded
        self._known.clear()

    def _known_of(self, bucket: Bucket) -> list[_Approximation | None]:
        """Return the state of each gradient of a bucket; None for those that are sent uncompressed."""
        known = [
            self._known_for(key, gradient)
            for key, gradient in zip(self._keys(bucket), real_gradients(bucket), strict=True)
        ]
        self._check_claimed(bucket)
        return known

    def _known_for(self, key: str, gradient: torch.Tensor) -> _Approximation | None:
        known = self._known.get(key)
        if known is not None and known.fits(gradient):
            return known
        self._known.pop(key, None)
        held = self._claim(key, gradient, "error")
        rank = self._rank_for(gradient)
        if rank is None:
            if held is not None:
                gradient.add_(held["error"].to(gradient))
            return None
        if held is None:
            self._made += 1
        known = self._known[key] = _Approximation(gradient, rank, self._made if held is None else int(held["seed"]))
        if held is not None:
            known.error.copy_(held["error"])
            if held["q"].shape == known.q.shape:
                known.q.copy_(held["q"])
        return known

    def _rank_for(self, gradient: torch.Tensor) -> int | None:
        """Return the rank of a gradient's approximation, None if it is not worth it."""
        if not gradient.numel():
            return None
        rows, columns = _as_matrix(gradient).shape
        rank = min(rows, columns, self._settings.rank)
        is_worth = (rows + columns) * rank * self._settings.min_compression_rate < rows * columns
        return rank if is_worth else None


class _Approximation:
    """One rank's state of a gradient (n, m as a matrix), for its approximation with rank r.

    `error`, shaped like the gradient, is the part not yet delivered; `matrix` is a view of it (n, m). `q` (m, r) is the
    right factor of the last step, where the next one starts; `seed` is the seed of the first.
    """

    def __init__(self, gradient: torch.Tensor, rank: int, seed: int) -> None:
        self.error = torch.zeros_like(gradient)
        self.matrix = _as_matrix(self.error)
        self.seed = seed
        drawn = torch.randn(self.matrix.shape[1], rank, generator=torch.Generator().manual_seed(seed), device="cpu")
        self._first = drawn.to(gradient)
        self.q = self._first.clone()

    def fits(self, gradient: torch.Tensor) -> bool:
        error = self.error
        return (error.shape, error.stride(), error.dtype, error.device) == (
            gradient.shape,
            gradient.stride(),
            gradient.dtype,
            gradient.device,
        )

    def left_factor(self, gradient: torch.Tensor) -> torch.Tensor:
        """Add a gradient to the error; return this rank's left factor (n, r) of the sum."""
        self.error.add_(gradient)
        return self.matrix @ _orthonormal(self.q)

    def deliver(self, left: torch.Tensor, right: torch.Tensor, gradient: torch.Tensor) -> None:
        """Overwrite the gradient with the approximation by all ranks' factors (n, r) and (m, r); keep the error.

        If it is not finite, which is the same on all ranks, no error is kept: it would never be finite again. A zero
        column of the right factor would stay zero for ever, so it is drawn again.
        """
        delivered = torch.mm(left, right.t(), out=_as_matrix(gradient))
        self.matrix.sub_(delivered)
        is_finite = delivered.isfinite().all()
        self.error.masked_fill_(is_finite.logical_not(), 0.0)
        torch.where(is_finite & right.any(dim=0), right, self._first, out=self.q)


class _Exchange:
    """One bucket in flight, with two sums over ranks: left factors with uncompressed gradients, then right factors."""

    def __init__(self, group: dist.ProcessGroup, bucket: Bucket, known: list[_Approximation | None], what: str) -> None:
        self._group = group
        self._what = what
        self._buffer = bucket.buffer()
        pairs = list(zip(real_gradients(bucket), known, strict=True))
        self._plain = [_contiguous(gradient) for gradient, each in pairs if each is None]
        self._compressed = [(gradient, each) for gradient, each in pairs if each is not None]

    def start(self) -> dist.Work:
        """Start the first sum."""
        parts = [*self._plain, *(known.left_factor(gradient) for gradient, known in self._compressed)]
        self._shapes = [part.shape for part in parts]
        self._sum = self._flat(parts)
        return self._group.allreduce([self._sum])

    def wait(self, work: dist.Work) -> None:
        """Block until a sum is complete; with NCCL, only the current stream waits."""
        if isinstance(self._group, RehearsalGroup):
            return
        report_of(self._group).wait(work, self._what, device=self._buffer.device)

    def finish(self) -> torch.Tensor:
        """Write the averages to the bucket's buffer, after the first sum; return it."""
        with _as_stored(self._buffer.device):
            return self._finish()

    def _finish(self) -> torch.Tensor:
        parts = self._split(self._sum, self._shapes)
        for gradient in self._plain:
            gradient.copy_(parts.pop(0))
        if not self._compressed:
            return self._buffer
        lefts = list(map(_orthonormal, parts))
        rights = [known.matrix.t() @ left for (_, known), left in zip(self._compressed, lefts, strict=True)]
        total = self._flat(rights)
        self.wait(self._group.allreduce([total]))
        means = self._split(total, [right.shape for right in rights])
        for (gradient, known), left, right in zip(self._compressed, lefts, means, strict=True):
            known.deliver(left, right, gradient)
        return self._buffer

    def _flat(self, parts: list[torch.Tensor]) -> torch.Tensor:
        # Divided before the sum, which would overflow in float16.
        return torch.cat([part.reshape(-1) for part in parts]).div_(self._group.size())

    @staticmethod
    def _split(flat: torch.Tensor, shapes: list[torch.Size]) -> list[torch.Tensor]:
        parts = torch.split(flat, [shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


@contextmanager
def _as_stored(device: torch.device) -> Iterator[None]:
    """Compute in the dtypes of the tensors, without autograd: backward may run inside the user's autocast."""
    knows_autocast = torch.amp.is_autocast_available(device.type)
    with torch.no_grad(), torch.autocast(device.type, enabled=False) if knows_autocast else nullcontext():
        yield


def _orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """Return orthonormal columns (n, r) with the span of `columns`; zeros for a single column of zeros."""
    wide = columns.float() if columns.dtype.itemsize < 4 else columns  # QR has no 16-bit version
    if wide.shape[1] == 1:  # a third of the kernels of QR
        spanning: torch.Tensor = wide / torch.linalg.vector_norm(wide).clamp_min(_SMALLEST_NORM)
    else:
        spanning = torch.linalg.qr(wide).Q
    return spanning.to(columns.dtype)


def _as_matrix(gradient: torch.Tensor) -> torch.Tensor:
    """Return the memory of a dense gradient as a matrix: its first dimension in memory, and all others."""
    plain = _contiguous(gradient)
    return plain.view(plain.shape[0], -1)


def _contiguous(gradient: torch.Tensor) -> torch.Tensor:
    """Return the memory of a dense gradient as a contiguous view, with its dimensions in the order of their strides."""
    order = sorted(range(gradient.dim()), key=lambda dim: (gradient.stride(dim), gradient.size(dim)), reverse=True)
    return gradient.permute(order) if gradient.dim() else gradient.view(1)
