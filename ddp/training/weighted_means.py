"""Losses that are means over labels: combine each replica's means over batches into one mean over a whole step.

Called by `ddp.training.trainer`. The number of labels that count is known before backward, from the batch alone, so
that it can be sent with the gradients.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ddp.errors import ArgumentError, UnsupportedError
from ddp.strategies.strategy import Strategy
from ddp.torch_internals import version_of
from ddp.training.losses_and_metrics import Loss, Share, targets_of

_NOTHING = 1e-30  # the weight of no labels: it changes no sum of weights, and divides a gradient of zeros to zeros


class WeightedMeans:
    """Means of a trainer's `loss` over labels, for the model returned by `strategy.prepare`.

    The gradients of a step's micro-batches on all replicas add up to that of the mean over all its labels, as one
    process would compute it; for a step without labels they are 0. If the model's `backward` takes weights, they are
    sent with the gradients; else the replicas sum them once per step, before its last backward. See
    `Strategy.weighting`.

    Raises UnsupportedError for class weights if the strategy takes no weights.
    """

    def __init__(self, strategy: Strategy, loss: Loss) -> None:
        self._strategy, self._loss = strategy, loss
        if loss.has_class_weights:
            self._refuse("class weights")
        self.unit = 0.0  # of weights, the same on every replica; 0 before the first step
        self.of_step = 0.0  # this replica's weight in the last step that had labels
        self.of_batch: float | None = None  # weight of the labels in the mean loss of this batch
        self._is_settled = self._is_open = False
        self._given: Any = None
        self._labels: Tensor | None = None  # of the batch on the device, as long as nothing has changed them
        self._version = 0
        self._of_means: Any = 0.0  # the means in the loss of this batch, each times its gradient

    def begin_step(self, samples: float) -> None:
        """Count in samples of a replica, or micro-batch, before the first step, since labels are not known yet."""
        self._is_open = False
        self.unit = self.unit or _power_of_two(samples)

    def begin_batch(self, given: Any, moved: Any) -> None:
        """Begin a batch: `given` from the loader, `moved` on the replica's device."""
        self.of_batch, self._given, self._labels = None, given, _labels(moved)
        self._version = 0 if self._labels is None else version_of(self._labels)

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the strategy's means of this batch, from the block that computes its loss on to backward."""
        self._strategy.on_mean = self._add_mean if self._strategy.replicas > 1 else None
        try:
            yield
        finally:
            self._strategy.on_mean = None
            self._of_means = 0.0

    def _add_mean(self, part: Tensor, gradient: Tensor) -> None:
        self._of_means += part.double() * gradient.double()

    def whole(self, loss: Tensor, gradient: Tensor) -> Tensor:
        """Return a loss as its gradient counts it, after a backward from this `gradient` of the loss.

        Its mean over the replicas is the loss of the global batch: strategy.mean() gives a part of a mean, with a
        gradient as of the whole mean, and what train_step() adds to it counts as it is.
        """
        whole: Tensor = loss.detach().double() + (self._strategy.replicas - 1) * self._of_means / gradient.double()
        return whole

    def mean(self, losses: Tensor, share: Share, batch: Any) -> Tensor:
        """Return the loss of a batch for backward: its part of the mean, or a mean by itself.

        Raises ArgumentError in the second call for a batch, UnsupportedError for labels that do not count if the
        strategy takes no weights.
        """
        if self.of_batch is not None:
            raise ArgumentError("train_step() of Trainer was called twice for one batch: it counts the labels once")
        targets = targets_of(batch)
        if self._labels is not None and self._labels is targets and version_of(targets) == self._version:
            targets = targets_of(self._given)  # the same in host memory, without waiting for a device
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
                'samples, so the mean would not be that of the global batch; use reduction="none" (a mean over the '
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
        """Return the factor from this replica's sum of the step to its part of the replicas' average."""
        total = self.of_step / self.unit
        if self._strategy.weighting == "by_exchange":
            total = self._strategy.reduce("sum", total) / self._strategy.replicas
        return 1 / total if total else 0.0

    def settle(self, usual: float) -> None:
        """Count from now on in units of the `usual` weight, unless a step without labels made it 0.

        The reduced sums are then about as large as means, also in half precision. A power of two changes no bit.
        """
        if usual > 0 and not self._is_settled:
            self.load(_power_of_two(usual))

    def place(self) -> tuple[float, bool]:
        """Return the arguments of `load`."""
        return self.unit, self._is_settled

    def load(self, unit: float, is_settled: bool = True) -> None:
        """Use the unit of a resumed training: the residual errors of compression are counted in it."""
        self.unit, self._is_settled = unit, is_settled and unit > 0


def _labels(batch: Any) -> Tensor | None:
    """Return the targets of a batch if torch counts their changes; None also for batches only an override accepts."""
    try:
        targets = targets_of(batch)
    except ArgumentError:
        return None
    return targets if isinstance(targets, Tensor) and not targets.is_inference() else None


def _power_of_two(number: float) -> float:
    return 2.0 ** round(math.log2(number))
