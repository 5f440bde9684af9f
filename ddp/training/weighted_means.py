"""Losses that are means over labels: of each replica's own in a batch, made one mean over those of a whole step.

Called by `ddp.training.trainer`. How many labels count is known before backward, from the batch alone, so that it can
travel with the gradients.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ddp.errors import ArgumentError, UnsupportedError
from ddp.strategies.strategy import Strategy
from ddp.torch_internals import version_of
from ddp.training.losses_and_metrics import Loss, Share, targets_of

_NOTHING = 1e-30  # the weight of no labels: it changes no sum of weights, and divides a gradient of zeros to zeros


class WeightedMeans:
    """The means of a trainer's `loss` over labels, for the model that `strategy.prepare` has returned.

    The gradients of a step's micro-batches on all replicas add up to that of the mean over all its labels, as one
    process would compute it; of a step without any they are 0. Where the model's `backward` takes weights, they travel
    with the gradients; else the replicas add them up once a step, before its last backward. See `Strategy.weighting`.

    Raises UnsupportedError for class weights where the strategy takes no weights.
    """

    def __init__(self, strategy: Strategy, loss: Loss) -> None:
        self._strategy, self._loss = strategy, loss
        if loss.has_class_weights:
            self._refuse("class weights")
        self.unit = 0.0  # that weights are counted in, the same on every replica; 0 before the first step
        self.of_step = 0.0  # this replica's own, in the last step that had some
        self.of_batch: float | None = None  # of the labels that the loss of this batch is the mean over
        self._is_settled = self._is_open = False
        self._given: Any = None
        self._labels: Tensor | None = None  # of the batch on the device, as long as nothing has changed them
        self._version = 0

    def begin_step(self, global_batch_size: int) -> None:
        """Count in samples at first: nothing is known yet of labels."""
        self._is_open = False
        self.unit = self.unit or _power_of_two(global_batch_size / self._strategy.replicas)

    def begin_batch(self, given: Any, moved: Any) -> None:
        """A batch, as the loader gives it and on the replica's device."""
        self.of_batch, self._given, self._labels = None, given, _labels(moved)
        self._version = 0 if self._labels is None else version_of(self._labels)

    def mean(self, losses: Tensor, share: Share, batch: Any) -> Tensor:
        """Return what to differentiate of a batch's losses: its part of the mean, or a mean by itself.

        Raises ArgumentError in the second call for a batch, UnsupportedError for labels that do not count where the
        strategy takes no weights.
        """
        if self.of_batch is not None:
            raise ArgumentError("train_step() of Trainer was called twice for one batch: it notes the labels of one")
        targets = targets_of(batch)
        if self._labels is not None and self._labels is targets and version_of(targets) == self._version:
            targets = targets_of(self._given)  # the same in host memory, where nothing waits for a device
        weight = self._loss.weight(targets)
        if weight is None:
            return self._strategy.mean(losses, share.weights)
        amount, count = float(weight), share.labels.numel()
        if self._strategy.weighting == "refused":
            if amount != count:
                self._refuse("labels equal to ignore_index")
            return self._strategy.mean((losses / max(1, count)).expand(share.count))  # all count alike
        self.of_batch = amount
        return losses / amount if amount else losses

    def _refuse(self, what: str) -> None:
        if self._strategy.weighting == "refused":
            raise UnsupportedError(
                f"{what} under strategy {self._strategy.name!r}: the servers average the replicas' gradients by "
                'samples, so the mean would not be that of the global batch; take reduction="none" (a mean over the '
                'samples), mode="async", or strategy "all_reduce"'
            )

    def backward(self, model: nn.Module, loss: Tensor, *, ends_step: bool) -> None:
        """Differentiate `loss`, the mean over the labels of this batch. Every replica must call it; may block."""
        assert self.of_batch is not None
        is_first = not self._is_open
        self.of_step = self.of_batch + (0.0 if is_first else self.of_step)
        self._is_open = True
        weight = self.of_batch / self.unit
        if self._strategy.weighting == "in_backward":
            model.backward(loss, weight=weight or _NOTHING)  # type: ignore[operator]  # DistributedDataParallel
            return
        if ends_step:
            factor = self._factor()
            weight *= factor
            for parameter in () if is_first else model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        loss.backward(gradient=torch.full_like(loss, weight))

    def _factor(self) -> float:
        """What makes this replica's sum of the step its part of the average of the replicas."""
        total = self.of_step / self.unit
        if self._strategy.weighting == "by_exchange":
            total = self._strategy.reduce("sum", total) / self._strategy.replicas
        return 1 / total if total else 0.0

    def settle(self, usual: float) -> None:
        """Count from now on in what a step has on the average over the replicas, if there was one with labels.

        The sums that travel are then about as large as means, in half precision too. A power of two changes no bit.
        """
        if usual > 0 and not self._is_settled:
            self.load(_power_of_two(usual))

    def place(self) -> tuple[float, bool]:
        """What `load` takes."""
        return self.unit, self._is_settled

    def load(self, unit: float, is_settled: bool = True) -> None:
        """Go on with the unit of a training that is resumed: what compression still owes is counted in it."""
        self.unit, self._is_settled = unit, is_settled and unit > 0


def _labels(batch: Any) -> Tensor | None:
    """The targets of a batch, where torch counts changes of them; None also for what only an own train_step takes."""
    try:
        targets = targets_of(batch)
    except ArgumentError:
        return None
    return targets if isinstance(targets, Tensor) and not targets.is_inference() else None


def _power_of_two(number: float) -> float:
    return 2.0 ** round(math.log2(number))
