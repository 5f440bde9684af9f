"""Watch for changes of weights and gradients between two reductions: optimizer steps, dropped gradients.

The ranks compare them in the step status: if one has stepped alone, or started a pass with other gradients than the
rest, replicas would differ from then on. Also steps the optimizers that step within backward. Owned by the policy of
DistributedDataParallel.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddp.errors import UnsupportedError
from ddp.torch_internals import in_backward_optimizers, not_traced, version_of


class StepWatch:
    """Counts the steps of optimizers of `parameters` since `restart`; an optimizer within another does not count.

    `on_step` is called before each step and returns whether to count it. The `.grad` seen by `delivered` is compared
    with the one at the start of the next pass.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], on_step: Callable[[Any], bool]) -> None:
        self.steps = 0
        self._ids = frozenset(map(id, parameters))
        self._on_step = on_step
        self._running: list[int] = []  # optimizers that step now, the outermost first, by id
        # A parameter, its gradient and the gradient's version.
        self._probe: tuple[torch.Tensor, weakref.ref[torch.Tensor], int] | None = None
        _hook_optimizers()
        _watches[next(_numbers)] = self

    def restart(self) -> None:
        """Reset, after replicas were made equal."""
        self.steps = 0
        self._running.clear()
        self._probe = None

    def pass_ended(self) -> None:
        """Reset the count. Forget optimizers inside a step, which may have raised."""
        self.steps = 0
        self._running.clear()

    def delivered(self, parameter: torch.Tensor) -> None:
        """Record the gradient of `parameter` after a reduction; every rank passes the same parameter."""
        grad = parameter.grad
        if grad is not None and grad.layout is torch.strided:
            with contextlib.suppress(UnsupportedError):
                self._probe = parameter, weakref.ref(grad), version_of(grad)

    def is_kept(self) -> bool | None:
        """Return True if `.grad` is as `delivered` left it, False if empty, None if unknown. Call it once per pass."""
        if self._probe is None:
            return None
        (parameter, delivered, version), self._probe = self._probe, None
        grad = parameter.grad
        if grad is None:
            return False
        return True if grad is delivered() and version_of(grad) == version else None

    def before_step(self, optimizer: Any) -> None:
        """Handle the start of an optimizer's step."""
        if not self._has_ours(optimizer):
            return
        if id(optimizer) in self._running:  # its last step has raised
            del self._running[self._running.index(id(optimizer)) :]
        self._running.append(id(optimizer))
        if len(self._running) == 1 and self._on_step(optimizer):
            self.steps += 1

    def after_step(self, optimizer: Any) -> None:
        """Handle the end of an optimizer's step."""
        if id(optimizer) in self._running:
            del self._running[self._running.index(id(optimizer)) :]

    def _has_ours(self, optimizer: Any) -> bool:
        """Return whether it steps any of our parameters. Its first one usually is; an optimizer may be unhashable."""
        return any(not self._ids.isdisjoint(map(id, group["params"])) for group in optimizer.param_groups)


_numbers = itertools.count()
_watches: weakref.WeakValueDictionary[int, StepWatch] = weakref.WeakValueDictionary()


@cache
def _hook_optimizers() -> None:
    """Call every watch in each step of an optimizer, by hooks that stay.

    torch runs through its hooks during a step, and fails if the end of a watch removed one meanwhile.
    """
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


@not_traced
def _before_step(optimizer: Any, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
    for watch in list(_watches.values()):
        watch.before_step(optimizer)


@not_traced
def _after_step(optimizer: Any, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
    for watch in list(_watches.values()):
        watch.after_step(optimizer)


class InBackwardOptimizers:
    """The optimizers of `parameters` that step within backward.

    `torch.distributed.optim._apply_optimizer_in_backward` creates them. torch lets them step as soon as a gradient is
    ready, which is before it is averaged. Here their own hooks are removed, and they step after averaging.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._owners = [parameter for parameter in parameters if in_backward_optimizers(parameter)]
        if not self._owners:
            return
        from torch.distributed.optim import apply_optimizer_in_backward as theirs

        for parameter in self._owners:
            handles = theirs.param_to_optim_hook_handle_map
            for handle in handles.get(parameter, []):
                handle.remove()

    def step(self) -> None:
        """Step with the present gradients, and set them to None."""
        for parameter in self._owners:
            if parameter.grad is not None:
                for optimizer in in_backward_optimizers(parameter):
                    optimizer.step()
                parameter.grad = None
