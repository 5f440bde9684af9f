"""What measured steps of a model showed: when each gradient was ready, and what the step took beside backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["GradReady", "StepRecord"]


@dataclass(frozen=True)
class GradReady:
    """One gradient: the index of its parameter, its size on the wire, and when it was ready.

    `ready_s` counts from the start of backward, without what collectives beside it delay.
    """

    index: int
    nbytes: int
    dtype: torch.dtype
    ready_s: float


@dataclass(frozen=True)
class StepRecord:
    """One step without its communication, on the slowest of the ranks, in seconds.

    `gradients` are in the order in which they were ready. `backward_s` is the time from the start of backward to its
    end with nothing on the wire; `forward_s` that of the forward pass and what lies between it and backward; `other_s`
    the rest of a step: copying averages into gradients, the optimizer, reading data.
    """

    gradients: tuple[GradReady, ...]
    forward_s: float
    backward_s: float
    other_s: float

    @property
    def compute_s(self) -> float:
        """Seconds of a step that communicates nothing."""
        return self.forward_s + self.backward_s + self.other_s

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(gradient.nbytes for gradient in self.gradients)
