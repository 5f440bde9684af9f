"""What a reducer and its policy share: one pass, how it begins and ends, and what a policy decides of passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.autograd.graph import Node

from ddp.data_parallel.buckets.step_status import RankStatus, StatusSum
from ddp.data_parallel.double_backward import GraphKeeper
from ddp.errors import DdpError
from ddp.monitoring.interrupts import is_interrupt
from ddp.torch_internals import current_node, will_be_reached

__all__ = ["EndOfBackward", "Pass", "PassPolicy", "accumulates"]


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
