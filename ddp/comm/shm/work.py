"""The operands and results of collectives of `shm`: flat tensors, and torch's Work, which may still run."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddp.comm.shm.collectives import Steps
from ddp.comm.shm.engine import Engine, Operation
from ddp.errors import ArgumentError, CollectiveError


class Flats:
    """Flattens the tensors of one operation, and copies results back if they were written to copies.

    `in_inference` is whether torch's operations on them need inference mode, in any thread.
    """

    def __init__(self) -> None:
        self.in_inference = False
        self._copied: list[tuple[torch.Tensor, torch.Tensor]] = []

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` as (n,), contiguous, in the same memory where possible. Hidden from autograd."""
        if tensor.dim() == 1 and tensor.is_contiguous() and not _is_special(tensor):
            return tensor
        return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)

    def write(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = self.read(tensor)
        self.in_inference |= flat.is_inference()
        if flat is not tensor and flat.data_ptr() != tensor.data_ptr():
            self._copied.append((tensor.detach(), flat))
        return flat

    def write_parts(self, tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        return _parts(self.write(tensor), sizes)

    def read_parts(self, tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        return _parts(self.read(tensor), sizes)

    def then_back(self, steps: Steps) -> Steps:
        """Return `steps`, followed by the copies."""
        return self._then_back(steps) if self._copied else steps

    def _then_back(self, steps: Steps) -> Steps:
        yield from steps
        self.bring_back()

    def bring_back(self) -> None:
        with torch.inference_mode(self.in_inference):
            for tensor, flat in self._copied:
                tensor.copy_(flat.view(tensor.shape))


def _is_special(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad or tensor.is_conj() or tensor.is_neg()


def _parts(flat: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    if sum(sizes) != flat.numel():
        raise ArgumentError(f"parts of {', '.join(map(str, sizes))} elements do not make a tensor of {flat.numel()}")
    return [*torch.split(flat, [*sizes])]


def _future_of(results: Sequence[torch.Tensor]) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result([*results])
    return future


class DoneWork(dist.Work):
    """The Work of an operation that was done when its call returned. One object serves all."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> Any:
        return None

    def result(self) -> list[torch.Tensor]:
        return []

    def synchronize(self) -> None:
        pass

    def get_future(self) -> Any:
        return _future_of([])


class ShmWork(dist.Work):
    """The Work of an operation that `group` runs in `engine`; keeps the group alive."""

    def __init__(self, group: dist.ProcessGroup, engine: Engine, operation: Operation) -> None:
        super().__init__()
        self._group, self._engine, self._operation = group, engine, operation
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation is done; raises its error, or CollectiveError after `timeout`."""
        seconds = timeout.total_seconds() if timeout else 0.0
        self._engine.wait(self._operation, seconds if seconds > 0 else None)
        return True

    def is_completed(self) -> bool:
        return self._operation.done

    def is_success(self) -> bool:
        return self._operation.done and self._operation.error is None

    def exception(self) -> Any:
        return self._operation.error

    def result(self) -> list[torch.Tensor]:
        return [*self._operation.results]

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self._operation.source

    def _source_rank(self) -> int:
        return self._operation.source

    def get_future(self) -> Any:
        """Return a future of the operation's tensors; its error is a RuntimeError with that of the operation."""
        if self._future is None:
            done: torch.futures.Future[Any] = torch.futures.Future()
            # What set_exception() sets is a value to torch's reducer, which takes it for tensors: SIGSEGV (torch 2.13).
            future = done.then(self._outcome)
            self._engine.when_done(self._operation, lambda: done.set_result(None))
            self._future = future
        return self._future

    def _outcome(self, _: object) -> list[torch.Tensor]:
        error = self._operation.error
        if isinstance(error, CollectiveError):  # what arrives is the name of its class and its text
            raise CollectiveError(str(error), rank=error.rank, what=error.what, failed_ranks=error.failed_ranks or ())
        if isinstance(error, Exception):
            raise error
        return [*self._operation.results]
