"""Callbacks: hooks that a trainer calls on every replica, at the same moments on each.

`CallbackList` calls those of a trainer, keeps their states by name, and raises an error in one on all replicas.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from ddp.data.replica_loader import ReplicaLoader
from ddp.data.step_loader import StepLoader
from ddp.errors import ArgumentError, CollectiveError, DdpError, PeerFailedError
from ddp.monitoring.interrupts import is_interrupt
from ddp.strategies.strategy import Strategy


class Training(Protocol):
    """The trainer's interface for callbacks: `ddp.Trainer`. They may change the position of the training."""

    strategy: Strategy
    module: nn.Module
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    train_loader: ReplicaLoader | StepLoader | None = None

    epoch: int = 0  # the current one, or the next
    epochs: int = 0
    step: int = 0  # steps of the optimizer that are done, of all epochs
    epoch_step: int = 0  # of this epoch
    steps_per_epoch: int | None = None
    rate_factor: float = 1.0  # of the learning rates, within a step
    learning_rate: float  # of the first group, in the last step
    logs: dict[str, float]  # of this epoch so far, as last exchanged

    @property
    def steps(self) -> int: ...
    @property
    def shares(self) -> int: ...
    def stop(self) -> None: ...
    def record(self, name: str, total: Any, count: Any) -> None: ...
    def evaluate(self, data: Any, *, global_batch_size: int | None = None) -> dict[str, float]: ...
    def predict(self, data: Any, *, global_batch_size: int | None = None) -> Any: ...
    def weights(self) -> dict[str, Tensor]: ...
    def load_weights(self, weights: Mapping[str, Any]) -> None: ...
    def save(self, path: str | PathLike[str]) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Callback:
    """Override the hooks that you need; `self.trainer` is the trainer.

    Epochs count from 0. Steps are the optimizer's, over all epochs: `on_step_begin(0)` comes before the first one,
    `on_step_end(1, logs)` after it. `logs` are numbers by name, the same on every replica. Those of a step are the
    means over the epoch so far, exchanged at its first step and at every `log_every`-th; in between they are unchanged.
    A hook that writes files or prints should check `self.trainer.strategy.is_main` first; one that communicates must do
    so on every replica. An exception ends the training on all replicas, with an error that names the callback.

    After the failure of a process in a resilient `fit` (see `ddp.Trainer`), the callbacks of every replica are called
    as in a resumed run: `close`, `load_state_dict` with the `state_dict` of the newest commit, `on_fit_begin`,
    `on_epoch_begin`, and `on_step_end` of the last step, or what followed it, once more. State outside of `state_dict`
    stays as it is, and is reset in the new process; if one replica's first `state_dict` raises, or cannot be sent, all
    start again.
    """

    trainer: Training
    runs_last: ClassVar[bool] = False  # whether its hooks run after those of the others

    def on_restore(self) -> None:
        """Restore saved state; called before `on_fit_begin`."""

    def on_fit_begin(self) -> None:
        """Run when `fit` starts, at `trainer.epoch` and `trainer.step`; may still change `trainer.epochs`."""

    def on_fit_end(self) -> None:
        """Run when the last epoch has ended, or training was stopped; not after an error."""

    def on_epoch_begin(self, epoch: int) -> None:
        """Run before the steps of an epoch, and again when a resumed run continues in its middle."""

    def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
        """Run after the steps of an epoch and the evaluation; `trainer.stop()` ends the training."""

    def on_step_begin(self, step: int) -> None:
        """Run before the first batch of a step, when `step` steps are done."""

    def on_step_end(self, step: int, logs: dict[str, float]) -> None:
        """Run after a step, when `step` steps are done."""

    def on_evaluate_begin(self) -> None:
        """Run before an evaluation, within `fit` or not."""

    def on_evaluate_end(self, logs: dict[str, float]) -> None:
        """Run after an evaluation; the names in `logs` have no "val_" prefix."""

    def close(self) -> None:
        """Close files; called when `fit` ends, also with an error."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints: None, numbers, strings, tensors, and lists and dicts of them.

        A resilient `fit` calls it before `on_restore` and `on_fit_begin`, and after every step; it must not
        communicate.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""


_HOOKS = [name for name in vars(Callback) if name.startswith("on_")]


class CallbackList:
    """The callbacks of a trainer, in the order of their calls."""

    def __init__(self, callbacks: Sequence[Callback], trainer: Training) -> None:
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise ArgumentError(f"callbacks: {callback!r} is not an instance of ddp.callbacks.Callback")
            callback.trainer = trainer
        self._callbacks = sorted(callbacks, key=lambda callback: callback.runs_last)
        self._strategy = trainer.strategy
        self._failure: tuple[int, str, int, Exception] | None = None  # callback, hook, step, error
        self._raised: Callable[[], DdpError | None] = lambda: None  # what `raise_failure` raised, as long as it is used

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def call(self, hook: str, *arguments: Any) -> None:
        """Call a hook of each. Errors are kept for `raise_failure`, so that no other replica waits for this one.

        All callbacks are still called, the failed one too, because their hooks may communicate. A process alone raises
        at once. So does any after a failed collective, or an exception from a signal handler: it cannot exchange its
        failure. So do all with what `raise_failure` has raised within a hook, in an evaluation.
        """
        for index, callback in enumerate(self._callbacks):
            try:
                getattr(callback, hook)(*arguments)
            except Exception as error:  # any error of the user's code, see above
                if isinstance(error, CollectiveError) or is_interrupt(error) or error is self._raised():
                    raise
                self._failure = self._failure or (index, hook, callback.trainer.step, error)
        if self.has_failed and (self._strategy.world.world_size == 1 or not self._strategy.collective):
            self.raise_failure(together=False)

    def raise_failure(self, *, together: bool) -> None:
        """Raise DdpError for a failure here or, `together` with all others, PeerFailedError for another process."""
        failure, self._failure = self._failure, None
        world = self._strategy.world
        code = -1
        if failure is not None:
            index, hook, step, error = failure
            code = (step * len(self._callbacks) + index) * len(_HOOKS) + _HOOKS.index(hook)
            code = code * world.world_size + world.rank
        if together:
            code = self._strategy.reduce("max", code)
        if failure is not None:
            own = DdpError(f"{self._what(index, hook, step)}: {type(error).__name__}: {error}")
            self._raised = weakref.ref(own)
            raise own from error
        code, rank = divmod(code, world.world_size)
        code, place = divmod(code, len(_HOOKS))
        step, index = divmod(code, len(self._callbacks))
        what = self._what(index, _HOOKS[place], step)
        other = PeerFailedError(f"{what}, on rank {rank}: see its output", failures={rank: what}, failed_ranks=(rank,))
        self._raised = weakref.ref(other)
        raise other

    def _what(self, index: int, hook: str, step: int) -> str:
        return f"the callback {type(self._callbacks[index]).__name__} failed in {hook}, at step {step}"

    def closing(self) -> contextlib.ExitStack:
        """Return a context that closes all callbacks at its end."""
        stack = contextlib.ExitStack()
        for callback in self._callbacks:
            stack.callback(callback.close)
        return stack

    def states(self) -> dict[str, Any]:
        return {name: state for name, callback in self._named() if (state := callback.state_dict())}

    def forget_failure(self) -> None:
        """Drop the failure, from a step in which another replica failed."""
        self._failure = None

    def load_states(self, states: Mapping[str, Any]) -> None:
        """Restore the callbacks in `states`; new ones keep their initial state."""
        for name, callback in self._named():
            if name in states:
                callback.load_state_dict(states[name])

    def _named(self) -> Iterator[tuple[str, Callback]]:
        """Yield the callbacks by class name; several of one class are numbered in their order."""
        seen: dict[str, int] = {}
        for callback in self._callbacks:
            name = type(callback).__name__
            seen[name] = seen.get(name, 0) + 1
            yield (name if seen[name] == 1 else f"{name}.{seen[name]}"), callback
