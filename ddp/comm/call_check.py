"""Compares the ranks' collective calls before data is sent: 16 bytes per rank.

If the calls differ, all ranks get the error. Called by `ddp.comm.broadcast_objects` and `ddp.horovod`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddp.comm.objects import control_group, device_of, gather_values, member_group
from ddp.errors import ArgumentError
from ddp.monitoring.stall_report import report_of
from ddp.monitoring.stall_text import ranks_text
from ddp.torch_internals import allgather_flat


@dataclass(frozen=True)
class Call:
    """One rank's call: `facts` must agree between the ranks, `number` need not; a `problem` is an error on all."""

    kind: str
    name: str | None
    facts: str
    number: int = 0
    problem: str = ""

    def __str__(self) -> str:
        text = title(self.kind, self.name) + (f" ({self.facts})" if self.facts else "")
        return f"{text}: {self.problem}" if self.problem else text


class CallCheck:
    """The comparison of a call with those of the other ranks; still running if `is_async`, and then it holds `group`.

    Raises as `settle` does.
    """

    def __init__(self, call: Call, group: dist.ProcessGroup, *, is_async: bool = False) -> None:
        self.report = report_of(group)
        self.what = str(call)
        self._problem = call.problem
        self._group: dist.ProcessGroup | None = group
        self._numbers = [call.number]
        if group.size() > 1:
            self._control = host_side(group)
            digest = int.from_bytes(hashlib.blake2b(self.what.encode(), digest_size=8).digest(), "little", signed=True)
            self._mine = torch.tensor([digest, call.number], device="cpu")  # int64
            self._every = torch.empty(2 * group.size(), dtype=torch.int64, device="cpu")
            self._work: dist.Work = allgather_flat(self._control, self._every, self._mine)
        if call.problem or not is_async:
            self.settle()

    def is_completed(self) -> bool:
        return self._group is None or self._group.size() == 1 or self._work.is_completed()

    def settle(self) -> list[int]:
        """Wait for the others; return their numbers. Raises ArgumentError on every rank if the calls differ.

        May be called again, also after an interrupt.
        """
        if self._group is None:
            return self._numbers
        if self._group.size() > 1:
            self.report.wait(self._work, self.what)
            every = self._every.tolist()
            self._numbers = every[1::2]
            if len(set(every[::2])) > 1:
                self._group = None
                raise _calls_differ(gather_values(self.what, group=self._control))
            self.report.step += 1
        self._group = None
        if self._problem:
            raise ArgumentError(self.what)
        return self._numbers


def host_side(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the group in which the ranks of `group` exchange host memory. Only the first call may block."""
    device = device_of(group)
    if device.type == "cpu":
        return group
    with report_of(group).waiting("connection of the ranks"):
        return control_group(group, device)


def check_same_call(call: Call, group: dist.ProcessGroup | None) -> list[int]:
    """Wait until every rank has made the same call; return their numbers, by rank. See `CallCheck.settle`."""
    return CallCheck(call, member_group(group, f"ddp.horovod.{call.kind}")).settle()


def _calls_differ(calls: Sequence[str]) -> ArgumentError:
    texts: dict[str, list[int]] = {}
    for rank_, text in enumerate(calls):
        texts.setdefault(text, []).append(rank_)
    usual = max(texts, key=lambda text: (len(texts[text]), -texts[text][0]))
    lines = [
        f"{ranks_text(ranks)} called {text}"
        for text, ranks in sorted(texts.items(), key=lambda item: (item[0] == usual, item[1]))
    ]
    return ArgumentError(
        f"the ranks do not make the same call: {'; '.join(lines)}. Call the same collective, by the same name, with "
        "the same dtype, shape and settings on every rank, in the same order"
    )


def no_rank(root: int, link: dist.ProcessGroup) -> str:
    """Return why `root` is not a rank of the group; empty if it is."""
    return "" if 0 <= root < link.size() else f"there is no rank {root} among {link.size()}"


def title(kind: str, name: str | None) -> str:
    return kind if name is None else f"{kind} {name!r}"
