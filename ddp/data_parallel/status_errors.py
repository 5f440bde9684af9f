"""The errors for a step status on which the ranks do not agree: who differs, in what, and what to do about it.

Called by the reducer on every rank in the same iteration; all but `peers_failed` are collective.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ddp.comm.objects import gather_values
from ddp.errors import BackwardError, DdpError, PeerFailedError
from ddp.monitoring.stall_report import StallReport

_NOT_THE_USERS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)

__all__ = ["describe_failure", "forwards_differ", "numbers_differ", "peers_failed", "unfrozen_differ", "weights_differ"]


def describe_failure(what: str, error: BaseException) -> str:
    """One line about an exception: what it ended, its type and text, and where the user's code was."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
    where = f" at {own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""
    return f"{what} raised {type(error).__name__}: {error}{where}"


def peers_failed(report: StallReport, count: int) -> PeerFailedError:
    """What the `count` ranks said that failed in this step; the store may know less, or nothing."""
    failures = report.failures(report.step, expected=count)
    reasons = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items()))
    ranks = f"rank {', '.join(map(str, sorted(failures)))}" if failures else f"{count} other rank{'s' * (count > 1)}"
    return PeerFailedError(
        f"rank {report.rank} of {report.size}: step {report.step + 1} failed on {ranks}, so nothing was averaged. "
        f"{reasons or 'Why is not known here: see the output of the other ranks'}. "
        "The gradients of this step are dropped (None) on every rank; the next step can go on",
        failures=failures,
    )


def forwards_differ(group: dist.ProcessGroup, mine: int) -> DdpError:
    """A rank has skipped a backward pass, or made a forward pass more."""
    every = gather_values(mine, group=group)
    usual = min(every, key=lambda count: (-every.count(count), count))
    odd = [f"rank {rank} made {count}" for rank, count in enumerate(every) if count != usual]
    return BackwardError(
        f"the ranks are not in the same iteration: since the last reduction {', '.join(odd)} training forward "
        f"pass{'es' if len(odd) > 1 or not odd[0].endswith(' 1') else ''} without backward, the others {usual}. "
        "A rank skipped a backward pass (a loss that is not finite?) or made an extra forward pass: let every rank "
        "do the same, and run forward passes that have no backward under torch.no_grad() or in eval mode. The "
        "gradients of this step are dropped (None) on every rank"
    )


def numbers_differ(group: dist.ProcessGroup, mine: int) -> DdpError:
    """The ranks reduce gradients of different models."""
    every = gather_values(mine, group=group)
    which = ", ".join(f"rank {rank} number {number + 1}" for rank, number in enumerate(every))
    return BackwardError(
        f"the ranks reduce different models, of those that were wrapped: {which}. Run forward and backward of several "
        "models in the same order on every rank. The gradients of this step are dropped (None) on every rank"
    )


def weights_differ(group: dist.ProcessGroup, mine: float | None) -> DdpError:
    """Not every rank gave a weight, or they add up to nothing."""
    every = gather_values(mine, group=group)
    without = [rank for rank, weight in enumerate(every) if weight is None]
    if without:
        return BackwardError(
            f"rank {', '.join(map(str, without))} gave no weight in a step in which other ranks did "
            f"({every}): call model.backward(loss, weight=...) on every rank, or on none"
        )
    return BackwardError(f"the weights of this step add up to {sum(every)} ({every}), so there is no average")


def unfrozen_differ(told: Sequence[Sequence[str]]) -> DdpError:
    """Not every rank unfroze the same parameters."""
    every = {name for names in told for name in names}
    name = min(every, key=lambda name: (sum(name in names for names in told), name))
    lacking = [rank for rank, names in enumerate(told) if name not in names]
    having = [rank for rank, names in enumerate(told) if name in names]
    return BackwardError(
        f"parameter {name!r} was frozen when the module was wrapped and requires a gradient now on rank "
        f"{', '.join(map(str, having))}, but not on rank {', '.join(map(str, lacking))}: unfreeze it on every rank in "
        "the same step. The gradients of this step are dropped (None) on every rank",
        parameter=name,
    )
