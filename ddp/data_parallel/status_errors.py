"""Errors for a step status on which the ranks disagree: which rank differs, in what, and what to do about it.

Also for gradients that are not finite; the status has the number of ranks with such gradients.

Called by the reducer and its policy on every rank in the same iteration; functions with a channel are collective.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from ddp.comm.channel import Channel
from ddp.data_parallel.buckets.bucket_plan import Member
from ddp.errors import BackwardError, DdpError, DriftError, NonFiniteError
from ddp.monitoring.stall_text import ranks_text

_WHAT = "exchange of how the ranks differ"


def forwards_differ(channel: Channel, mine: int) -> DdpError:
    """Return the error for a rank that skipped a backward pass, or made an extra forward pass."""
    every = channel.gather(mine, _WHAT)
    usual = min(every, key=lambda count: (-every.count(count), count))
    odd = [f"rank {rank} made {count}" for rank, count in enumerate(every) if count != usual]
    return BackwardError(
        f"the ranks are not in the same iteration: since the last reduction {', '.join(odd)} training forward "
        f"pass{'es' if len(odd) > 1 or not odd[0].endswith(' 1') else ''} without backward, the others {usual}. "
        "A rank skipped a backward pass (a loss that is not finite?) or made an extra forward pass: let every rank "
        "do the same, and run forward passes that have no backward under torch.no_grad() or in eval mode. The "
        "gradients of this step are dropped (None) on every rank"
    )


def starts_differ(channel: Channel, mine: bool | None) -> DdpError:
    """Return the error for ranks that began the pass with the gradients of the last reduction while others had none."""
    every = channel.gather(mine, _WHAT)
    kept = [rank for rank, is_kept in enumerate(every) if is_kept is True]
    emptied = [rank for rank, is_kept in enumerate(every) if is_kept is False]
    return BackwardError(
        f"rank {', '.join(map(str, kept))} began this backward pass with the averaged gradients of the last one still "
        f"in .grad, and rank {', '.join(map(str, emptied))} without: the average would mix old and new gradients. Let "
        "every rank step and call zero_grad() after the same passes; to accumulate gradients on all, use no_sync(). "
        "The gradients of this step are dropped (None) on every rank"
    )


def steps_of_each(channel: Channel, mine: int) -> str:
    """Describe how often the optimizers of each rank have stepped."""
    every = channel.gather(mine, _WHAT)
    counts = ", ".join(f"{count} time{'s' * (count != 1)} on rank {rank}" for rank, count in enumerate(every))
    return (
        f"Since the last reduction optimizers have stepped {counts}: let every rank step equally often, and make no "
        "step after a pass inside no_sync() that the others do not make"
    )


def stepped_inside(optimizer: Any, members: Sequence[Member]) -> BackwardError:
    """Return the error for an optimizer that stepped before the gradients were averaged."""
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    name = next((member.name for member in members if id(member.parameter) in stepped), "a frozen parameter")
    return BackwardError(
        f"{type(optimizer).__name__} stepped {name!r} within backward, before its gradient was averaged over the "
        "ranks: step after backward, or use torch.distributed.optim._apply_optimizer_in_backward, which is supported",
        parameter=name,
    )


def drifted_meanwhile(step: int) -> DriftError:
    """Return the error for replicas whose digests differed, but whose parameters are equal now."""
    return DriftError(
        f"the replicas were different when the backward pass of step {step} began, and are equal at its end: something "
        "changes weights within backward",
        parameter="",
        step=step,
        ranks=(),
    )


def numbers_differ(channel: Channel, mine: int) -> DdpError:
    """Return the error for ranks that reduce gradients of different models."""
    every = channel.gather(mine, _WHAT)
    which = ", ".join(f"rank {rank} number {number + 1}" for rank, number in enumerate(every))
    return BackwardError(
        f"the ranks reduce different models, of those that were wrapped: {which}. Run forward and backward of several "
        "models in the same order on every rank. The gradients of this step are dropped (None) on every rank"
    )


def weights_differ(every: Sequence[Sequence[float]], micro_batches: Sequence[int] | None) -> DdpError:
    """Return the error for weights, by rank, of which some are missing, or that add up to 0.

    `micro_batches` are the numbers of those that must have one; None: at least one backward pass of each rank.
    """
    least = micro_batches or [1] * len(every)
    without = [rank for rank, weights in enumerate(every) if len(weights) < least[rank]]
    sums = [sum(weights) if weights else None for weights in every]
    if without:
        return BackwardError(
            f"rank {', '.join(map(str, without))} gave no weight in a step in which other ranks did ({sums}): call "
            "model.backward(loss, weight=...) on every rank, for each micro-batch of a ddp.StepLoader, or on none"
        )
    return BackwardError(f"the weights of this step add up to 0 ({sums}), so there is no average")


_VARIABLE = "DTRAIN_ON_NONFINITE"


def _spares_weights(optimizer: Any) -> bool:
    """Return whether a step of an optimizer makes no weight infinite or NaN."""
    if (found := getattr(optimizer, "found_inf", None)) is not None and bool(found):
        return True  # set by a GradScaler: a fused step does nothing then
    grads = [each.grad for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
    return all(bool(grad.isfinite().all()) for grad in grads if grad.layout is torch.strided)


class NonFinite:
    """Warns or stops when an optimizer is about to step a model with gradients that are infinite or NaN.

    Gradients that no optimizer steps with do not matter: a GradScaler skips such steps, and so may a script. The step
    status has the number of ranks with such gradients, so all ranks ask in the same iteration which ranks they are.
    DTRAIN_ON_NONFINITE is `warn`, the default, or `stop`. Owned by the reducer.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._ranks: tuple[int, ...] = ()  # of the group, in the last reduction
        self._step = 0  # that it ended
        self._micro_batches: list[int] = []  # whose gradients they were, in a step of a StepLoader
        self._has_warned = False

    def note(self, count: int, *, is_here: bool, spoilt_by: int | None = None, step: int | None = None) -> None:
        """Record how many ranks had such gradients in the reduction that ends. Communicates if any had.

        `spoilt_by` is the first micro-batch of this rank that had. `step` is the step's number in the ledger; None: as
        this process counts.
        """
        self._ranks, self._step = (), self._channel.report.step + 1 if step is None else step
        if count and not self._has_warned:
            every = self._channel.gather((is_here, spoilt_by), "exchange of which gradients are not finite")
            self._ranks = tuple(rank for rank, (is_there, _) in enumerate(every) if is_there)
            self._micro_batches = [index for _, index in every if index is not None]

    def before_step(self, optimizer: Any = None) -> None:
        """Check before an optimizer steps. Raises NonFiniteError on every rank, or warns once, on one of the ranks.

        Nothing is wrong if the gradients of `optimizer`, which has averages, are finite: the script has mended or
        removed them, or they are others; or if its step will do nothing. All ranks find the same.
        """
        ranks = self._ranks
        if not ranks or (optimizer is not None and _spares_weights(optimizer)):
            return
        self._ranks = ()
        report = self._channel.report
        who = ranks_text(ranks)
        which = f" (micro-batch {', '.join(map(str, self._micro_batches))})" if self._micro_batches else ""
        text = f"in step {self._step}, gradients of {who}{which} were infinite or NaN"
        if os.environ.get(_VARIABLE) == "stop":
            raise NonFiniteError(
                f"{text}, and an optimizer was about to step with the average: look at the loss and the data of "
                f"{who}; the weights are those of the step before",
                step=self._step,
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
