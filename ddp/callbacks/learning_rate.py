"""Learning rates: schedules by epoch or step, and linear scaling with the number of replicas or micro-batches."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from ddp.callbacks.callback import Callback
from ddp.errors import ArgumentError


class LearningRateScheduler(Callback):
    """Set the learning rate before each epoch, or each step: `rate(epoch)` or `rate(step)`, from 0.

    Or use one of torch's: `LearningRateScheduler(scheduler=lambda optimizer: StepLR(optimizer, 30))`, stepped after
    each epoch or step; one that needs a value, such as ReduceLROnPlateau, gets that of `monitor`. In a process that
    joins a training in progress (parameter servers), it is stepped as often as the training was; one with `monitor`
    begins anew, with a warning.

    Raises ArgumentError unless exactly one of the two is given; `fit` raises DdpError if the logs have no `monitor`.
    """

    def __init__(
        self,
        rate: Callable[[int], float] | None = None,
        *,
        by: Literal["epoch", "step"] = "epoch",
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        monitor: str | None = None,
    ) -> None:
        if (rate is None) == (scheduler is None):
            raise ArgumentError("LearningRateScheduler takes a function of the epoch or step, or else scheduler=")
        if by not in ("epoch", "step"):
            raise ArgumentError(f"by={by!r}; it must be 'epoch' or 'step'")
        if scheduler is not None and not callable(scheduler):
            kind = type(scheduler).__name__  # type: ignore[unreachable]  # types are not checked in users' scripts
            raise ArgumentError(
                f"scheduler= is a {kind}: pass a function that makes one: {kind}, or lambda optimizer: "
                f"{kind}(optimizer, ...)"
            )
        self._rate, self._make, self._by, self._monitor = rate, scheduler, by, monitor
        self._scheduler: Any = None

    def on_fit_begin(self) -> None:
        if self._make_scheduler() and self.trainer.strategy.goes_on and self.trainer.step:  # an evaluator makes none
            self._catch_up()

    def _make_scheduler(self) -> bool:
        """Make torch's scheduler, if there is to be one and it does not exist; return whether it was made."""
        if self._make is None or self._scheduler is not None:
            return False
        self._scheduler = self._make(self.trainer.optimizer)
        return True

    def _catch_up(self) -> None:
        """Step a new scheduler as often as the training was that this process joins."""
        trainer = self.trainer
        if self._monitor is not None:
            warnings.warn(
                f"LearningRateScheduler: the training goes on from step {trainer.step}, but the scheduler begins anew, "
                f"since the earlier values of {self._monitor!r} are not known here",
                stacklevel=2,
            )
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)  # the servers' steps
            for _ in range(trainer.epoch if self._by == "epoch" else trainer.step):
                self._scheduler.step()

    def on_epoch_begin(self, epoch: int) -> None:
        if self._by == "epoch":
            self._set(epoch)

    def on_step_begin(self, step: int) -> None:
        if self._by == "step":
            self._set(step)

    def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
        if self._by == "epoch":
            self._advance(logs)

    def on_step_end(self, step: int, logs: dict[str, float]) -> None:
        if self._by == "step":
            self._advance(logs)

    def _set(self, number: int) -> None:
        if self._rate is not None:
            rate = float(self._rate(number))
            for group in self.trainer.optimizer.param_groups:
                group["lr"] = rate

    def _advance(self, logs: Mapping[str, float]) -> None:
        if self._scheduler is None:
            return
        if self._monitor is None:
            self._scheduler.step()
        elif self._monitor in logs:
            self._scheduler.step(logs[self._monitor])
        else:
            raise ArgumentError(f"there is no {self._monitor!r} in the logs, which have {', '.join(logs)}")

    def state_dict(self) -> dict[str, Any]:
        return {} if self._scheduler is None else dict(self._scheduler.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # Making a scheduler sets the rates, and some momenta, of its beginning. The checkpoint's are in the optimizer.
        groups = self.trainer.optimizer.param_groups
        restored = [copy.deepcopy({name: group[name] for name in group if name != "params"}) for group in groups]
        self._make_scheduler()
        for group, values in zip(groups, restored, strict=True):
            group.update(values)
        if self._scheduler is None:
            return
        self._scheduler.load_state_dict(dict(state))
        rates = state.get("_last_lr")  # of parameter servers' workers, only the main one has the optimizer's state
        if rates is not None:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate


class LinearScaling(Callback):
    """Multiply the optimizer's learning rate by the number of replicas, reached over `warmup_epochs` epochs.

    For a global batch that grows with the replicas. With a `ddp.StepLoader` it is the number of micro-batches of a
    step, on any number of replicas. During the warm-up the rate rises from the optimizer's own by equal
    amounts from step to step (Goyal et al. 2017, "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour",
    arXiv:1706.02677). Schedules still set the rate of one replica: the factor is applied on top, only within the step.
    """

    def __init__(self, warmup_epochs: float = 5) -> None:
        self.warmup_epochs = warmup_epochs

    def on_step_begin(self, step: int) -> None:
        trainer = self.trainer
        done = trainer.epoch + trainer.epoch_step / trainer.steps
        part = min(1.0, done / self.warmup_epochs) if self.warmup_epochs else 1.0
        trainer.rate_factor = 1 + (trainer.shares - 1) * part
