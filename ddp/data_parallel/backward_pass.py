"""The interface between a reducer and its policy: a backward pass, and the policy's decisions about it.

Also the reducer's connection to autograd: its hooks on the parameters, and graphs that outlive a pass.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ddp.data.micro_batch import MicroBatch
from ddp.data_parallel.buckets.bucket_plan import Member
from ddp.data_parallel.buckets.step_status import RankStatus, StatusSum
from ddp.errors import DdpError
from ddp.monitoring.interrupts import is_interrupt
from ddp.torch_internals import current_node, gradient_hooks, will_be_reached


class Action(enum.Enum):
    """A policy's decision about a backward pass."""

    REDUCE = enum.auto()  # at its end, average the gradients since the last reduction
    HOLD = enum.auto()  # keep its gradients for a later pass of this step
    LEAVE = enum.auto()  # leave its gradients where they are
    STRAY = enum.auto()  # the same, with a warning: no forward pass announced it


@dataclass(eq=False)
class Pass:
    """A backward pass that is reduced or held on this rank, from its first gradient to its end.

    Passes are compared by identity, so that leftovers of an earlier pass cannot end this one. `task` is autograd's
    number of the backward pass, -1 if there is none. `problem` is the reason why it will fail, `has_joined` whether
    this rank has no more inputs.
    """

    action: Action
    task: int = -1
    problem: DdpError | None = None
    graphs: GraphKeeper | None = None
    unfrozen: Sequence[tuple[str, torch.nn.Parameter]] = ()
    has_joined: bool = False
    has_sent_status: bool = False
    micro_batch: MicroBatch | None = None

    @property
    def has_backward(self) -> bool:
        return self.task != -1


class EndOfBackward:
    """Callback for the engine at the end of a backward pass; calls `failed` if the engine drops it without a call.

    That may be late, and in another thread: the graph of a failed pass lives as long as anything references it.
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
    """Decides which backward passes a reducer reduces, and what else the ranks must agree on in them.

    The reducer asks and reports events, in this order; a policy never calls the reducer.
    """

    is_cleared: bool  # every gradient was None before the running backward pass
    micro_batch: MicroBatch | None  # that of the last forward pass

    def choose(self, *, by_output: bool) -> Action:
        """Decide about the running backward pass; `by_output`: it has reached an output of an announced forward pass.

        Raises BackwardError to fail it on every rank.
        """

    def held(self) -> None:
        """Handle the end of a pass to hold."""

    def starting(self) -> None:
        """Handle the start of a pass to reduce. Raises BackwardError to fail it on every rank."""

    def backward_ended(self, pass_: Pass, unplanned: Sequence[Member]) -> None:
        """Handle the end of backward, before the rest is sent. `unplanned`: the members in buckets, in a first pass."""

    def status(self, **common: Any) -> RankStatus:
        """Complete this rank's status; `common` are the reducer's fields."""

    def disagreement(self, statuses: StatusSum, pass_: Pass) -> DdpError | None:
        """Return why the ranks' gradients must not be averaged, or None. Collective if it is not None."""

    def rank_count(self, statuses: StatusSum) -> int:
        """Return the number of ranks, or micro-batches, to average over."""

    def delivered(self, first_used: torch.nn.Parameter, *, is_first: bool) -> None:
        """Handle the arrival of the averages in `.grad`; `first_used` has one, on every rank the same."""

    def ended(self) -> None:
        """Reset after a pass to reduce, or after a failure in place of any pass."""

    def finished(self) -> None:
        """Handle the end of a reduction without errors, after everything else. May replace the reducer."""


def accumulates(leaves: Iterable[Node], warn: Callable[[str], None]) -> bool:
    """Return whether the running backward pass accumulates into `.grad` of `leaves`, or of others if it reaches none.

    `torch.autograd.grad()` does not; `warn` is called if it returns gradients of `leaves`.
    """
    try:
        if any(map(will_be_reached, leaves)):
            return True
    except RuntimeError as error:  # a leaf whose gradient is captured, by torch.autograd.grad()
        if is_interrupt(error):
            raise
        warn(
            "torch.autograd.grad() returns the gradients of this rank's parameters alone: nothing averages them. "
            "Use backward(), or average what it returns, unless that is what you want"
        )
        return False
    try:
        return any(map(will_be_reached, _leaves_below(current_node())))
    except RuntimeError as error:  # the same for a leaf that is not a parameter, as in a gradient penalty
        if is_interrupt(error):
            raise
        return False


def _leaves_below(node: Node | None) -> Iterator[Node]:
    """Yield the nodes reachable from `node` that accumulate into leaves."""
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
    """Returns the exact bits of `value`, with the derivative of `source`."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class GraphKeeper:
    """Keeps `backward(create_graph=True)` differentiable: `.grad` has the average as its value and this rank's graph.

    It holds the gradients of one backward pass with their graphs, while their values are reduced. If every rank then
    computes the same function f of the averaged gradients g, the average of the ranks' gradients of f is exact: the
    derivative of f(mean of g_r) is the mean over the ranks r of f'(g) dg_r.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

    def set_aside(self, members: Iterable[Member]) -> None:
        """Replace gradients that have a graph with plain copies."""
        for member in members:
            grad = member.parameter.grad
            if grad is not None and grad.requires_grad:
                self._kept.append((member.parameter, grad))
                member.parameter.grad = grad.detach().clone()

    def restore(self, on_grad: Callable[[torch.Tensor], None]) -> None:
        """Restore the graphs on the averages; `on_grad` is called when a backward pass goes through one of them."""
        with torch.enable_grad():
            for parameter, grad in self._kept:
                if parameter.grad is not None:
                    parameter.grad = _Revalued.apply(grad, parameter.grad)  # type: ignore[no-untyped-call]  # torch has no types here
                    parameter.grad.register_hook(on_grad)


class GradientHooks:
    """One hook per parameter, called when its gradient is in `.grad`. Parameters are numbered as they are added.

    `nodes` are the autograd nodes that accumulate the parameters' gradients, in the same order.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []  # keeps them alive: autograd only has weak references
        self._handles: list[RemovableHandle] = []
        self._registered: list[Any] = []  # per parameter, an ordered dict of its hooks by handle id

    def add(self, parameter: torch.nn.Parameter, hook: Callable[[torch.Tensor], None]) -> None:
        """Call `hook` whenever a gradient of `parameter` is ready. The parameter may be frozen now."""
        requires_grad = parameter.requires_grad
        parameter.requires_grad_(True)
        self.nodes.append(get_gradient_edge(parameter).node)
        register = parameter.register_post_accumulate_grad_hook
        self._handles.append(register(hook))  # type: ignore[no-untyped-call]  # torch has no types here
        self._registered.append(gradient_hooks(parameter))
        parameter.requires_grad_(requires_grad)

    def be_last(self) -> None:
        """Run our hook after hooks that the user registered later, so that it sends their result."""
        if max(map(len, self._registered)) > 1:
            for hooks, own in zip(self._registered, self._handles, strict=True):
                if own.id in hooks:  # torch uses the order of insertion, which move_to_end() does not change
                    hooks[own.id] = hooks.pop(own.id)

    def shared(self) -> frozenset[int]:
        """Return the parameters that another wrapper reduces too: each must find the local gradient, not an average."""
        if max(map(len, self._registered), default=0) < 2:
            return frozenset()
        return frozenset(
            index for index, hooks in enumerate(self._registered) if sum(map(is_reducers, hooks.values())) > 1
        )

    def has_others(self, index: int) -> bool:
        """Return whether the user has registered hooks on this parameter too."""
        return len(self._registered[index]) > 1

    def unreached(self) -> frozenset[int]:
        """Return the parameters that the running backward pass will not reach, as far as autograd's engine knows.

        It does not see into reentrant checkpoints.
        """
        return frozenset(index for index, node in enumerate(self.nodes) if not will_be_reached(node))

    def remove(self) -> None:
        """Remove the hooks from the parameters. May be repeated."""
        for handle in self._handles:
            handle.remove()


def is_reducers(hook: object) -> bool:
    """Return whether a hook on a parameter is that of a reducer, here or in Horovod's style."""
    return getattr(hook, "__qualname__", "").startswith("GradientSums.hook.")
