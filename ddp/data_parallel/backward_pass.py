"""What a reducer and its policy share: one pass, how it begins and ends, and what a policy decides of passes.

And how a reducer holds on to autograd: its hooks on the parameters, and graphs that outlive a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ddp.data_parallel.buckets.bucket_plan import Member
from ddp.data_parallel.buckets.step_status import RankStatus, StatusSum
from ddp.errors import DdpError
from ddp.monitoring.interrupts import is_interrupt
from ddp.torch_internals import current_node, gradient_hooks, will_be_reached


@dataclass(eq=False)
class Pass:
    """One reduction on this rank, from its start until its averages are in place or it has failed.

    Its identity tells it from later ones: what belongs to an earlier pass cannot end this one. `problem` is why it will
    count as failed; `holds` whether all buckets wait for its end; `has_joined` whether this rank has no more inputs.
    """

    problem: DdpError | None
    graphs: GraphKeeper | None
    unfrozen: Sequence[tuple[str, torch.nn.Parameter]]
    holds: bool
    has_joined: bool
    has_told: bool = False  # whether this rank's status is on its way
    arrived: dict[int, Any] = field(default_factory=dict)  # when gradients were ready, while it holds


class EndOfBackward:
    """What the engine calls at the end of a backward pass; `failed` instead, if it drops this without a call.

    That may be late, and in another thread: the graph of a pass that failed lives as long as somebody holds it.
    """

    def __init__(self, done: Callable[[], None], failed: Callable[[], None]) -> None:
        self._done = done
        self._failed: Callable[[], None] | None = failed

    def __call__(self) -> None:
        self._failed = None
        self._done()

    def __del__(self) -> None:
        if self._failed is not None:
            self._failed()


class PassPolicy(Protocol):
    """Decides which backward passes a reducer reduces, and what else the ranks must agree on in them."""

    def may_begin(self) -> bool:
        """A gradient has come and no pass runs: begin one and return True, or leave it where it is."""

    def begin(self) -> None:
        """Call the reducer's `begin`, in a backward pass that will be reduced."""

    def end(self, pass_: Pass) -> None:
        """The backward pass has ended, or there is none: call the reducer's `finish`."""

    def starting(self) -> None:
        """A pass starts."""

    def fill(self, **common: Any) -> RankStatus:
        """This rank's status, from what the reducer knows of it."""

    def disagreement(self, statuses: StatusSum) -> DdpError | None:
        """Why the ranks' gradients must not be averaged. Collective where it is not None."""

    def rank_count(self, statuses: StatusSum) -> int:
        """How many ranks, or micro-batches, the average is over."""

    def delivered(self, *, is_first: bool) -> None:
        """The averages are in `.grad`."""

    def ended(self, *, has_failed: bool) -> None:
        """The pass is over, or a failure has come in its place."""


def accumulates(leaves: Iterable[Node], warn: Callable[[str], None]) -> bool:
    """Whether the running backward pass leaves gradients in `.grad` of `leaves`, or of others if it reaches none.

    `torch.autograd.grad()` does not, which is warned of where it returns gradients of `leaves`.
    """
    try:
        if any(map(will_be_reached, leaves)):
            return True
    except RuntimeError as error:  # a leaf whose gradient is captured: what torch.autograd.grad() does
        if is_interrupt(error):
            raise
        warn(
            "torch.autograd.grad() returns the gradients of this rank's parameters alone: nothing averages them. "
            "Use backward(), or average what it returns, unless that is what you want"
        )
        return False
    try:
        return any(map(will_be_reached, _leaves_below(current_node())))
    except RuntimeError as error:  # the same of a leaf that is no parameter: a gradient penalty, say
        if is_interrupt(error):
            raise
        return False


def _leaves_below(node: Node | None) -> Iterator[Node]:
    """The nodes that accumulate into leaves, among those that `node` leads to."""
    seen, stack = {node}, [node]
    while stack:
        current = stack.pop()
        if current is None:
            continue
        following = [next_node for next_node, _ in current.next_functions]
        if not following and hasattr(current, "variable"):
            yield current
        for next_node in following:
            if next_node not in seen:
                seen.add(next_node)
                stack.append(next_node)


class _Revalued(torch.autograd.Function):
    """`value`, to the bit, with the derivative of `source`."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class GraphKeeper:
    """Keeps `backward(create_graph=True)` differentiable: `.grad` has the average as its value and this rank's graph.

    It holds the gradients of one backward pass with their graphs, while their values are reduced. Where every rank goes
    on to compute the same function f of the averaged gradients g, the average of the ranks' gradients of f is then
    exact: the derivative of f(mean of g_r) is the mean over the ranks r of f'(g) dg_r.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

    def set_aside(self, members: Iterable[Member]) -> None:
        """Put plain copies in the place of gradients that have a graph."""
        for member in members:
            grad = member.parameter.grad
            if grad is not None and grad.requires_grad:
                self._kept.append((member.parameter, grad))
                member.parameter.grad = grad.detach().clone()

    def restore(self, on_grad: Callable[[torch.Tensor], None]) -> None:
        """Give the averages their graphs back; `on_grad` is called when a backward pass goes through one of them."""
        with torch.enable_grad():
            for parameter, grad in self._kept:
                if parameter.grad is not None:
                    parameter.grad = _Revalued.apply(grad, parameter.grad)  # type: ignore[no-untyped-call]  # torch has no types here
                    parameter.grad.register_hook(on_grad)


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
