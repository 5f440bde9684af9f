"""Variables in the memory of one host, shared by its processes: one copy of parameters and of optimizer state.

`prepare` moves a model's parameters into shared memory and partitions them: each rank steps some of them with the
averaged gradient, for all. No data is sent; the process group is only used for barriers.

    step:  own gradients to own shared memory | barrier | average and step the own chunks | barrier

Between the barriers every rank reads all gradients and writes its chunks of the parameters; outside of them no rank
does. `step` has the engine, `regions` the memory layout, `state` the optimizer state that any rank can save.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp.errors import ArgumentError, DdpError
from ddp.strategies.central_storage.step import Storage
from ddp.strategies.sharding.stand_in_optimizer import StandInOptimizer
from ddp.strategies.strategy import Strategy, join
from ddp.world import before_leaving


class CentralStorage(Strategy):
    """Train with one copy of the parameters and of the optimizer's state in the memory of this host.

    `prepare` returns the model itself, on the CPU with parameters in memory shared by all ranks, and an optimizer that
    replaces the user's, which no longer steps; state that it has already is kept. A rank averages the gradients of its
    chunks of the parameters over the ranks and steps those; after `step()` every rank sees all new values. On a
    device, the model keeps its copy of them there. The result is that of all-reduce, for every optimizer that a
    `Shards` can step.

    - `max_grad_norm`: clip the averaged gradient to this norm before the step, as a single process would clip that of
      the whole batch. `torch.nn.utils.clip_grad_norm_` before `step()` clips each rank's own gradient instead.
    - `stall_timeout_s`: how long to wait for the other ranks; default: nine tenths of the group's own timeout.

    `.grad` is this rank's own gradient, also after the step, and on the CPU it is in shared memory that the next
    backward pass writes to: clone it to keep it. Parameters that some rank used are averaged with zeros for the
    others; those without a gradient on any rank are not stepped. Buffers are rank 0's on every rank after each step.

    Besides what `Strategy.prepare` raises, `prepare` raises ArgumentError if the ranks run on several hosts,
    UnsupportedError for an optimizer that cannot step pieces of a model, CollectiveError if a rank is gone.
    """

    name = "central_storage"
    averages_in_step = True

    def __init__(
        self, *, max_grad_norm: float | None = None, stall_timeout_s: float | None = None, communication: str = "auto"
    ) -> None:
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ArgumentError(f"max_grad_norm={max_grad_norm!r} must be more than 0, or None for no clipping")
        super().__init__(join(communication))
        self._max_grad_norm = max_grad_norm
        self._stall_timeout_s = stall_timeout_s

    def _prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, CentralOptimizer]:
        group = dist.group.WORLD if dist.is_initialized() else None
        storage = Storage(model, optimizer, group, self._max_grad_norm, self._stall_timeout_s)
        return model, CentralOptimizer(storage, optimizer)


class CentralOptimizer(StandInOptimizer):
    """Replaces the user's optimizer (see `StandInOptimizer`) and steps for all ranks.

    Every rank must call `step()` equally often, with the same hyperparameters; it blocks. `state_dict()` works on any
    rank, between two steps and without the others; `load_state_dict()` must be called on every rank, with the same, and
    blocks.

    `step()` raises ArgumentError if the model was changed after `prepare()` or the ranks' hyperparameters differ,
    PeerFailedError if another rank failed, CollectiveError if one is gone or too slow. After these two, parameters
    may be half stepped.
    """

    def __init__(self, storage: Storage, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._storage: Storage | None = storage
        before_leaving(self, CentralOptimizer._release)

    @property
    def grad_norm(self) -> float | None:
        """Norm of the last step's averaged gradient before clipping; None without `max_grad_norm`."""
        return self._open().grad_norm

    def _make_step(self) -> None:
        self._open().step(self.param_groups)

    def _whole_state(self) -> dict[str, Any]:
        return self._open().state_dict(self)

    def _load_whole_state(self, state: Mapping[str, Any]) -> None:
        self._open().load_state_dict(state)

    def close(self) -> None:
        """Move the parameters back into memory of this process alone. Every rank must call it after the same step."""
        storage, self._storage = self._open(), None
        storage.close()
        self._refusal.remove()

    def _open(self) -> Storage:
        if self._storage is None:
            raise DdpError("this optimizer was closed: use the one that was given to prepare(), or prepare again")
        return self._storage

    def _release(self) -> None:
        if self._storage is not None:
            self._storage.release()
