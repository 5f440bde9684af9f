"""Variables in the memory of one host, shared by its processes: one copy of parameters and of optimizer state.

`CentralStorage.prepare` moves a model's parameters into shared memory and deals them out: each rank steps its part of
them with the averaged gradient, for all. Nothing travels; the process group only says when everybody is ready.

    step:  own gradients to own shared memory | barrier | average and step the own part | barrier

Between the barriers every rank reads all gradients and writes its part of the parameters; outside of them nobody does.
`step` has the engine, `regions` what lies where, `state` how any rank can save all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp.errors import ArgumentError, DdpError
from ddp.strategies.central_storage.step import Storage
from ddp.strategies.stand_in_optimizer import StandInOptimizer
from ddp.strategies.strategy import Strategy, join
from ddp.torch_internals import state_dict_hooks
from ddp.world import before_leaving

__all__ = ["CentralOptimizer", "CentralStorage", "CentralStorageStrategy"]


class CentralStorage:
    """Train with one copy of the parameters and of the optimizer's state in the memory of this host.

    `prepare` returns the model itself, on the CPU with parameters that lie in memory shared by all ranks, and an
    optimizer that stands for the user's. A rank averages the gradients of its part of the parameters over the ranks and
    steps that part; after `step()` every rank sees all new values. On a device, the model keeps its copy of them there.
    The result is that of all-reduce, for every optimizer that a `Shards` can step.

    - `max_grad_norm`: clip the averaged gradient to this norm before the step, as a single process would clip that of
      the whole batch. `torch.nn.utils.clip_grad_norm_` before `step()` clips each rank's own gradient instead.
    - `stall_timeout_s`: how long to wait for the other ranks; default: nine tenths of the group's own timeout.

    `.grad` is this rank's own gradient, also after the step, and on the CPU it lies in shared memory that the next
    backward pass writes to: clone what should stay. Parameters that some rank used are averaged with zeros for the
    others; those without a gradient on any rank are not stepped. Buffers are rank 0's on every rank after each step.
    """

    def __init__(self, *, max_grad_norm: float | None = None, stall_timeout_s: float | None = None) -> None:
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ArgumentError(f"max_grad_norm={max_grad_norm!r} must be more than 0, or None for no clipping")
        self._max_grad_norm = max_grad_norm
        self._stall_timeout_s = stall_timeout_s

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, group: dist.ProcessGroup | None = None
    ) -> tuple[nn.Module, CentralOptimizer]:
        """Move the parameters that `optimizer` steps into shared memory; all start with the values of rank 0.

        Every rank of `group` (default: all) must call it with a model and an optimizer made alike; it blocks until all
        have. State that the optimizer has already is taken over, and `optimizer` itself steps no more.

        Raises ArgumentError if the ranks run on several hosts, LayoutMismatchError if their models or optimizers
        differ, UnsupportedError for an optimizer that cannot step parts of a model, CollectiveError if a rank is gone.
        """
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        storage = Storage(model, optimizer, group, self._max_grad_norm, self._stall_timeout_s)
        return model, CentralOptimizer(storage, optimizer)


class CentralStorageStrategy(Strategy):
    """`CentralStorage` behind `ddp.strategy("central_storage")`; its options are the same."""

    name = "central_storage"
    averages_in_step = True

    def __init__(
        self, *, max_grad_norm: float | None = None, stall_timeout_s: float | None = None, communication: str = "auto"
    ) -> None:
        engine = CentralStorage(max_grad_norm=max_grad_norm, stall_timeout_s=stall_timeout_s)
        super().__init__(join(communication))
        self._engine = engine

    def _prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        return self._engine.prepare(model, optimizer)


class CentralOptimizer(StandInOptimizer):
    """Stands for the user's optimizer, as `StandInOptimizer` says, and steps for all ranks.

    Every rank must call `step()` equally often, with the same hyperparameters; it blocks. `state_dict()` is that of the
    user's optimizer, whole, on any rank and without the others; `load_state_dict()` takes it on every rank. Its own
    `state` is empty.

    `step()` raises ArgumentError if the model was changed after `prepare()` or the ranks' hyperparameters differ,
    PeerFailedError if another rank failed, CollectiveError if one is gone or too slow. After these two, parameters
    may be half stepped.
    """

    def __init__(self, storage: Storage, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._storage: Storage | None = storage
        before_leaving(self, CentralOptimizer._let_go)

    @property
    def grad_norm(self) -> float | None:
        """The norm of the averaged gradient of the last step before it was clipped; None without `max_grad_norm`."""
        return self._open().grad_norm

    def _make_step(self) -> None:
        self._open().step(self.param_groups)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as torch has it, copied; on any rank, between two steps, and without the others."""
        for before in state_dict_hooks(self, "state_dict_pre"):
            before(self)
        state = self._open().state_dict(self)
        for after in state_dict_hooks(self, "state_dict_post"):
            state = after(self, state) or state
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a whole state, perhaps saved by torch or in a world of another size.

        Every rank must call it, with the same; blocks. Raises ArgumentError if it is of other parameters.
        """
        state = dict(state_dict)
        for before in state_dict_hooks(self, "load_state_dict_pre"):
            state = before(self, state) or state
        self._open().load_state_dict(state, self.param_groups)
        for after in state_dict_hooks(self, "load_state_dict_post"):
            after(self)

    def close(self) -> None:
        """Move the parameters back into memory of this process alone. Every rank must call it after the same step."""
        storage, self._storage = self._open(), None
        storage.close()
        self._refusal.remove()

    def _open(self) -> Storage:
        if self._storage is None:
            raise DdpError("this optimizer was closed: use the one that was given to prepare(), or prepare again")
        return self._storage

    def _let_go(self) -> None:
        if self._storage is not None:
            self._storage.let_go()
