"""The connection of the ranks that train one model; if one is gone or late, the others' errors name it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ddp.comm.objects import control_group, gather_values
from ddp.monitoring.stall_report import StallReport


@dataclass(frozen=True)
class Channel:
    """The groups of one model and its stall report.

    `group` moves the model's tensors. `control` is a group of the same ranks that moves host memory, for messages
    between the ranks: `group` itself on the CPU. `number` identifies a model within the group, the same on every rank.
    """

    group: dist.ProcessGroup
    control: dist.ProcessGroup
    report: StallReport
    number: int

    @classmethod
    def open(
        cls, group: dist.ProcessGroup, device: torch.device, number: int, *, stall_timeout_s: float | None
    ) -> Channel:
        """Open the channel of a model on `device`. All ranks of `group` must call it; blocks if it makes a group."""
        report = StallReport(group, timeout_s=stall_timeout_s, device=device)
        with report.waiting("connection of the model's ranks"):
            return cls(group, control_group(group, device), report, number)

    @contextmanager
    def closing_on_error(self) -> Iterator[None]:
        """Close the report if the block raises."""
        try:
            yield
        except BaseException:
            self.report.close()
            raise

    def gather(self, mine: object, what: str) -> list[Any]:
        """Return the values of all ranks. Every rank must call it; blocks. `what` names the exchange in errors."""
        with self.report.waiting(what):
            return gather_values(mine, group=self.control)
