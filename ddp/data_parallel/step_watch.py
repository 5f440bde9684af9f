"""Watch for changes of weights and gradients between two reductions: optimizer steps, dropped gradients.

The ranks compare them in the step status: if one has stepped alone, or started a pass with other gradients than the
rest, replicas would differ from then on. Also steps the optimizers that step within backward. Owned by the policy of
DistributedDataParallel.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddp.errors import UnsupportedError
from ddp.torch_internals import in_backward_optimizers, version_of


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
        before, after = weakref.WeakMethod(self._before), weakref.WeakMethod(self._after)
        self._handles = [
            register_optimizer_step_pre_hook(lambda optimizer, *_: _call(before, optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, *_: _call(after, optimizer)),
        ]
        for handle in self._handles:
            weakref.finalize(self, handle.remove).atexit = False

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

    def _before(self, optimizer: Any) -> None:
        if not self._has_ours(optimizer):
            return
        if id(optimizer) in self._running:  # its last step has raised
            del self._running[self._running.index(id(optimizer)) :]
        self._running.append(id(optimizer))
        if len(self._running) == 1 and self._on_step(optimizer):
            self.steps += 1

    def _after(self, optimizer: Any) -> None:
        if id(optimizer) in self._running:
            del self._running[self._running.index(id(optimizer)) :]

    def _has_ours(self, optimizer: Any) -> bool:
        """Return whether it steps any of our parameters. Its first one usually is; an optimizer may be unhashable."""
        return any(not self._ids.isdisjoint(map(id, group["params"])) for group in optimizer.param_groups)


def _call(method: weakref.WeakMethod[Any], optimizer: Any) -> None:
    if (found := method()) is not None:
        found(optimizer)


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
