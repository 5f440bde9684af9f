"""Compares what the ranks call before its data travels: 16 bytes a rank, and an error on all where they differ."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ddp.comm.objects import device_of, gather_values
from ddp.errors import ArgumentError, NotInitializedError
from ddp.monitoring.stall_report import report_of
from ddp.torch_internals import allgather_flat

__all__ = ["Call", "CallCheck", "check_same_call", "form_of", "is_initialized", "own_group", "title"]


def is_initialized() -> bool:
    """Whether there is a process group: after `ddp.init()`, until `shutdown()`."""
    return dist.is_available() and dist.is_initialized()


@dataclass(frozen=True)
class Call:
    """What one rank calls: `facts` must agree between the ranks, `number` need not; a `problem` is all ranks' error."""

    kind: str
    name: str | None
    facts: str
    number: int = 0
    problem: str = ""

    def __str__(self) -> str:
        text = title(self.kind, self.name) + (f" ({self.facts})" if self.facts else "")
        return f"{text}: {self.problem}" if self.problem else text


class CallCheck:
    """The comparison of a call with those of the other ranks, under way. Holds `group` until it is settled."""

    def __init__(self, call: Call, group: dist.ProcessGroup) -> None:
        self.report = report_of(group)
        self._call = call
        self._group: dist.ProcessGroup | None = group
        self._numbers = [call.number]
        if group.size() > 1:
            self._device = device_of(group)
            digest = int.from_bytes(hashlib.blake2b(str(call).encode(), digest_size=8).digest(), "little", signed=True)
            self._mine = torch.tensor([digest, call.number], device=self._device)  # int64
            self._every = torch.empty(2 * group.size(), dtype=torch.int64, device=self._device)
            self._work: dist.Work = allgather_flat(group, self._every, self._mine)

    def is_completed(self) -> bool:
        return self._group is None or self._group.size() == 1 or self._work.is_completed()

    def settle(self) -> list[int]:
        """Wait for the others; return their numbers. Raises ArgumentError on every rank if the calls differ."""
        if self._group is None:
            return self._numbers
        group, self._group = self._group, None
        if group.size() > 1:
            self.report.wait(self._work, str(self._call))
            self.report.step += 1
            every = self._every.tolist()
            self._numbers = every[1::2]
            if len(set(every[::2])) > 1:
                raise _calls_differ(gather_values(str(self._call), group=group))
        if self._call.problem:
            raise ArgumentError(str(self._call))
        return self._numbers


def check_same_call(call: Call, group: dist.ProcessGroup | None) -> list[int]:
    """Wait until every rank has made the same call; return their numbers, by rank. See `CallCheck.settle`."""
    return CallCheck(call, own_group(group, call.kind)).settle()


def _calls_differ(told: Sequence[str]) -> ArgumentError:
    texts: dict[str, list[int]] = {}
    for rank_, text in enumerate(told):
        texts.setdefault(text, []).append(rank_)
    usual = max(texts, key=lambda text: (len(texts[text]), -texts[text][0]))
    lines = [
        f"rank {', '.join(map(str, ranks[:16]))}{', ...' if len(ranks) > 16 else ''} called {text}"
        for text, ranks in sorted(texts.items(), key=lambda item: (item[0] == usual, item[1]))
    ]
    return ArgumentError(
        f"the ranks do not make the same call: {'; '.join(lines)}. Call the same collective, by the same name, with "
        "the same dtype, shape and settings on every rank, in the same order"
    )


def own_group(group: dist.ProcessGroup | None, what: str) -> dist.ProcessGroup:
    """Return the group that `what` works on; default: all. Raises NotInitializedError, ArgumentError if not in it."""
    if not is_initialized():
        raise NotInitializedError(f"there is no process group yet: call ddp.init() before ddp.horovod.{what}()")
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise ArgumentError(
            f"ddp.horovod.{what}(): this rank ({dist.get_rank()}) is not in the group; only its members call it"
        )
    return group


def title(kind: str, name: str | None) -> str:
    return kind if name is None else f"{kind} {name!r}"


def form_of(tensor: Tensor, *, rows: str | None = None) -> str:
    shape = [str(length) for length in tensor.shape]
    if rows is not None and shape:
        shape[0] = rows
    where = "" if tensor.device.type == "cpu" else f", on {tensor.device.type}"
    return f"{str(tensor.dtype).removeprefix('torch.')}, shape ({', '.join(shape)}){where}"
