"""The micro-batch that this process works on: set by `ddp.StepLoader`, read by every model."""

from __future__ import annotations

from dataclasses import dataclass

from ddp.comm.combine import Shares


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of this rank in a step; its gradients are a leaf in the tree of their sum.

    They are divided by `divisor`, all samples of the step by those of the micro-batch, before they are added up. But if
    all micro-batches have as many, 32-bit sums are divided at the end, by `sum_divisor`, which is 1 otherwise.
    `averages_buffers`: whether buffers are averaged, too. `step` is the step's number over all epochs, from 1, for the
    ledger; None if that has no lines of its loader.
    """

    index: int  # in the step, over all ranks
    divisor: float
    sum_divisor: float
    shares: Shares
    rank: int
    averages_buffers: bool = False
    step: int | None = None

    @property
    def is_first(self) -> bool:
        """Whether it is the rank's first in the step."""
        return self.index == self.shares.firsts[self.rank]

    @property
    def is_last(self) -> bool:
        """Whether it is the rank's last in the step."""
        return self.index + 1 == self.shares.firsts[self.rank] + self.shares.counts[self.rank]


class Current:
    """The micro-batch of this process; None outside of a step."""

    micro_batch: MicroBatch | None = None
    step: object = None  # that sets it
    is_used = False  # whether a model has read it in this step


current = Current()
