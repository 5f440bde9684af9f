"""The group of a process that replaces a failed rank, until it has met the others: has only rank and size.

The others ran their collectives before this process started and will not run them again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed as dist

from ddp.errors import ReplacementError

_NAME = "pending"
_COLLECTIVES = (
    "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base", "allreduce",
    "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "monitored_barrier", "recv",
    "recv_anysource", "reduce", "reduce_scatter", "reduce_scatter_tensor_coalesced", "_reduce_scatter_base", "scatter",
    "send",
)  # fmt: skip

_ProcessGroup: Any = dist.ProcessGroup
left_out: list[Any] = []  # tensors and optimizers that it should have received: they come with the others' state


class _PendingGroup(_ProcessGroup):  # type: ignore[misc]  # a class of type Any
    """Refuses every collective."""

    def __init__(self, rank: int, size: int, before_refusing: Callable[[], None]) -> None:
        super().__init__(rank, size)
        self._before_refusing = before_refusing
        self._named = ""

    def getBackendName(self) -> str:
        return _NAME

    def _set_group_name(self, name: str) -> None:
        self._named = name

    def _set_group_desc(self, description: str) -> None:
        pass

    @property
    def group_name(self) -> str:
        return self._named


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(self: _PendingGroup, *_: object, **__: object) -> NoReturn:
        self._before_refusing()
        raise ReplacementError(
            f"{name}() before the function of @ddp.resilient: this process replaces rank {self.rank()}, and the other "
            "ranks, which ran this collective when they started, continue. Call it inside the function. Now all ranks "
            "start again"
        )

    return refuse


for _name in _COLLECTIVES:
    setattr(_PendingGroup, _name, _refusing(_name.strip("_")))


def is_pending(group: dist.ProcessGroup | None) -> bool:
    """Return whether `group` waits for the function of `ddp.resilient`, so that it cannot communicate yet."""
    return isinstance(group, _PendingGroup)


def make_pending_group(store: Any, rank: int, size: int, before_refusing: Callable[[], None]) -> None:
    """Make a pending group the default group. Does not communicate."""

    def create(options: Any, backend_options: Any) -> Any:
        return _PendingGroup(options.group_rank, options.group_size, before_refusing)

    if _NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(_NAME, create, extended_api=True, devices=["cpu"])
    dist.init_process_group(_NAME, store=store, rank=rank, world_size=size)
