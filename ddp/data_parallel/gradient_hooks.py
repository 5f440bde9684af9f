"""The reducer's hooks on the parameters, and the nodes of autograd's graph that they belong to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ddp.torch_internals import gradient_hooks, will_be_reached

__all__ = ["GradientHooks"]


class GradientHooks:
    """One hook for each parameter, called when its gradient is in `.grad`. Parameters are numbered as they are added.

    `nodes` are those that leave the parameters' gradients in `.grad`, in the same order.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []  # they stay alive as long as somebody holds them: autograd only knows them weakly
        self._handles: list[RemovableHandle] = []
        self._registered: list[Any] = []  # an ordered dict for each parameter, of its hooks by ids of handles

    def add(self, parameter: torch.nn.Parameter, hook: Callable[[torch.Tensor], None]) -> None:
        """Call `hook` whenever a gradient of `parameter` is there. It may be frozen now."""
        requires_grad = parameter.requires_grad
        parameter.requires_grad_(True)
        self.nodes.append(get_gradient_edge(parameter).node)
        register = parameter.register_post_accumulate_grad_hook
        self._handles.append(register(hook))  # type: ignore[no-untyped-call]  # torch has no types here
        self._registered.append(gradient_hooks(parameter))
        parameter.requires_grad_(requires_grad)

    def be_last(self) -> None:
        """Let hooks that the user registered after ours run before it, which sends what they leave."""
        if max(map(len, self._registered)) > 1:
            for hooks, own in zip(self._registered, self._handles, strict=True):
                if own.id in hooks:  # torch goes by the order of insertion, which move_to_end() does not change
                    hooks[own.id] = hooks.pop(own.id)

    def has_others(self, index: int) -> bool:
        """Whether the user has registered hooks on this parameter too."""
        return len(self._registered[index]) > 1

    def unreached(self) -> frozenset[int]:
        """The parameters that the running backward pass will not reach, as far as autograd's engine knows.

        It does not see into reentrant checkpoints.
        """
        return frozenset(index for index, node in enumerate(self.nodes) if not will_be_reached(node))

    def remove(self) -> None:
        """Take the hooks off the parameters. May be repeated."""
        for handle in self._handles:
            handle.remove()
