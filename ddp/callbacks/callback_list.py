"""Calls the callbacks of a trainer, keeps their states by name, and lets all replicas hear of an error in one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ddp.callbacks.callback import HOOKS, Callback, Training
from ddp.errors import ArgumentError, DdpError

__all__ = ["CallbackList"]


class CallbackList:
    """The callbacks of a trainer, in the order of their calls."""

    def __init__(self, callbacks: Sequence[Callback], trainer: Training) -> None:
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise ArgumentError(
                    f"callbacks: {callback!r} is no object of a class derived from ddp.callbacks.Callback"
                )
            callback.trainer = trainer
        self._callbacks = sorted(callbacks, key=lambda callback: callback.runs_last)
        self._strategy = trainer.strategy
        self._failure: tuple[int, str, int, Exception] | None = None  # callback, hook, step, error

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._callbacks)

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def call(self, hook: str, *arguments: Any) -> None:
        """Call a hook of each. An error waits for `raise_failure`, so that no other replica waits for this one.

        Until then the others are still called, because their hooks may communicate. A process alone raises at once.
        """
        for index, callback in enumerate(self._callbacks):
            if self._failure is not None and self._failure[0] == index:
                continue
            try:
                getattr(callback, hook)(*arguments)
            except Exception as error:  # whatever it is, see above
                self._failure = self._failure or (index, hook, callback.trainer.step, error)
        if self.has_failed and (self._strategy.replicas == 1 or not self._strategy.collective):
            self.raise_failure(together=False)

    def raise_failure(self, *, together: bool) -> None:
        """Raise DdpError for what failed here or, `together` with all others, on another replica."""
        failure, self._failure = self._failure, None
        code = -1
        if failure is not None:
            index, hook, step, error = failure
            code = (step * len(self._callbacks) + index) * len(HOOKS) + HOOKS.index(hook)
            code = code * self._strategy.replicas + self._strategy.replica
        if together:
            code = self._strategy.reduce("max", code)
        if failure is not None:
            raise DdpError(f"{self._what(index, hook, step)}: {type(error).__name__}: {error}") from error
        code, replica = divmod(code, self._strategy.replicas)
        code, place = divmod(code, len(HOOKS))
        step, index = divmod(code, len(self._callbacks))
        raise DdpError(f"{self._what(index, HOOKS[place], step)}, on replica {replica}: see its output")

    def _what(self, index: int, hook: str, step: int) -> str:
        return f"the callback {type(self._callbacks[index]).__name__} failed in {hook}, at step {step}"

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for callback in self._callbacks:
                stack.callback(callback.close)
            yield

    def states(self) -> dict[str, Any]:
        return {name: state for name, callback in self._named() if (state := callback.state_dict())}

    def load_states(self, states: Mapping[str, Any]) -> None:
        """Restore those that `states` has; one that is new starts afresh."""
        for name, callback in self._named():
            if name in states:
                callback.load_state_dict(states[name])

    def _named(self) -> Iterator[tuple[str, Callback]]:
        """By the names of their classes, of several of one class by their order."""
        seen: dict[str, int] = {}
        for callback in self._callbacks:
            name = type(callback).__name__
            seen[name] = seen.get(name, 0) + 1
            yield (name if seen[name] == 1 else f"{name}.{seen[name]}"), callback
