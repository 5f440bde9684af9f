"""How the ranks that train one model reach each other; where one is gone or late, the others' errors say which."""

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

    `group` moves the model's tensors. `control` is a group of the same ranks that moves host memory, for what the ranks
    tell each other: `group` itself on the CPU. `number` tells the models of one group apart, the same on every rank.
    """

    group: dist.ProcessGroup
    control: dist.ProcessGroup
    report: StallReport
    number: int

    @classmethod
    def open(
        cls, group: dist.ProcessGroup, device: torch.device, number: int, *, stall_timeout_s: float | None
    ) -> Channel:
        """Make that of a model on `device`. Every rank of `group` must call it; blocks if a control group is made."""
        report = StallReport(group, timeout_s=stall_timeout_s, device=device)
        with report.waiting("connection of the model's ranks"):
            return cls(group, control_group(group, device), report, number)

    @contextmanager
    def closing_on_error(self) -> Iterator[None]:
        """Close the report when the block raises."""
        try:
            yield
        except BaseException:
            self.report.close()
            raise

    def gather(self, mine: object, what: str) -> list[Any]:
        """Return the values of all ranks. Every rank must call it; blocks. `what` names the exchange in errors."""
        with self.report.waiting(what):
            return gather_values(mine, group=self.control)
