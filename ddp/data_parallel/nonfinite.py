"""Says, or stops, when an optimizer is about to step with gradients that are infinite or no numbers (NaN).

Gradients that nobody steps with are no matter: a GradScaler skips such steps, and so may a script. The step status
tells every rank how many ranks had such gradients, so all of them ask which in the same iteration.
DTRAIN_ON_NONFINITE is `warn`, the default, or `stop`.
"""

from __future__ import annotations

import os
import warnings

from ddp.comm.channel import Channel
from ddp.errors import NonFiniteError

__all__ = ["NonFinite"]

_VARIABLE = "DTRAIN_ON_NONFINITE"


class NonFinite:
    """Of one model. Owned by its reducer."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._ranks: tuple[int, ...] = ()  # of the group, in the last reduction
        self._has_warned = False

    def note(self, count: int, *, is_here: bool) -> None:
        """Note how many ranks had such gradients in the reduction that ends. Communicates if any had."""
        self._ranks = ()
        if count and not self._has_warned:
            every = self._channel.gather(is_here, "exchange of which gradients are not finite")
            self._ranks = tuple(rank for rank, is_there in enumerate(every) if is_there)

    def before_step(self) -> None:
        """An optimizer is about to step. Raises NonFiniteError on every rank, or warns once, on one of the ranks."""
        ranks, self._ranks = self._ranks, ()
        if not ranks:
            return
        report = self._channel.report
        who = f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
        text = f"in step {report.step}, gradients of {who} were infinite or NaN"
        if os.environ.get(_VARIABLE) == "stop":
            raise NonFiniteError(
                f"{text}, and an optimizer was about to step with the average: look at the loss and the data of "
                f"{who}; the weights are those of the step before",
                step=report.step,
                ranks=ranks,
                failed_ranks=None if report.rank in ranks else report.in_world(ranks),
            )
        self._has_warned = True
        if report.rank == ranks[0]:
            warnings.warn(
                f"{text}, and an optimizer stepped with the average: the weights of all ranks are not finite any more. "
                "Look at the loss and the data of that step; dtrain run --on-nonfinite stop ends the run before the "
                "weights change",
                RuntimeWarning,
                stacklevel=2,
            )
