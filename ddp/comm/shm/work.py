"""The results of collectives of `shm`: torch's Work, for an operation that may still run."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddp.comm.shm.engine import Engine, Operation
from ddp.errors import CollectiveError


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
            self._future = done.then(self._outcome)
            self._engine.when_done(self._operation, lambda: done.set_result(None))
        return self._future

    def _outcome(self, _: object) -> list[torch.Tensor]:
        error = self._operation.error
        if isinstance(error, CollectiveError):  # what arrives is the name of its class and its text
            raise CollectiveError(str(error), rank=error.rank, what=error.what, failed_ranks=error.failed_ranks or ())
        if isinstance(error, Exception):
            raise error
        return [*self._operation.results]
