"""A step of as many micro-batches as before on fewer ranks: its next pass, and the gradients of earlier passes.

Made by `ddp.resilience.global_batch`; the policy of DistributedDataParallel uses it in each pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch


class MicroBatches:
    """Deals the `count` micro-batches of a step to the ranks in turn. Every rank makes equally many passes per step.

    The gradients of all passes of a rank except the last are set aside, so that the script finds none and its optimizer
    has nothing to do; the last pass reduces them as well. If the number of ranks does not divide that of micro-batches,
    some ranks repeat a micro-batch that counts elsewhere: this spare pass is their first, and its gradients are
    dropped.
    """

    def __init__(self) -> None:
        self.count = 0  # of a step, over all ranks; 0 until it is known
        self.own: Sequence[int] = ()  # of this rank's passes in a step, in their order
        self.at = 0  # index of the next of them
        self.passes = 0  # reduced since the last commit
        self.users_own = 0  # forward passes since then whose gradients the script accumulates by itself
        self.before_pass: Callable[[], None] = lambda: None  # called before each forward with gradients
        self._spare = 0
        self._aside: dict[torch.Tensor, torch.Tensor] = {}  # the gradients of the step's passes so far

    def deal(self, count: int, rank: int, ranks: int) -> None:
        """Begin a step of `count` micro-batches, as `rank` of `ranks`."""
        real = [*range(rank, count, ranks)]
        self._spare = -(-count // ranks) - len(real)
        self.own = [(real or [rank % count])[0]] * self._spare + real
        self.count, self.at, self.passes, self.users_own = count, 0, 0, 0
        self._aside.clear()

    def end(self) -> None:
        """Stop dealing, but keep the count."""
        self.own, self.at, self.passes, self.users_own, self._spare = (), 0, 0, 0, 0
        self._aside.clear()

    @property
    def is_last(self) -> bool:
        """Whether the next or running pass ends the step."""
        return self.at + 1 >= len(self.own)

    @property
    def is_spare(self) -> bool:
        """Whether the next or running pass does not count."""
        return self.at < self._spare

    def set_aside(self, parameters: Iterable[torch.Tensor]) -> None:
        """Add the gradients of `parameters` to those set aside, and set `.grad` to None."""
        for parameter in parameters:
            if parameter.grad is not None:
                before = self._aside.get(parameter)
                self._aside[parameter] = parameter.grad if before is None else before + parameter.grad
                parameter.grad = None

    def put_back(self) -> None:
        """Put the gradients set aside back into `.grad`, where the running backward pass adds to them."""
        for parameter, grad in self._aside.items():
            parameter.grad = grad if parameter.grad is None else grad + parameter.grad
        self._aside.clear()
