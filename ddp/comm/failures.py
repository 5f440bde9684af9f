"""Turns a failure of one rank into an error on all: reported through the store, counted by a sum."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ddp.comm.channel import Channel
from ddp.errors import CollectiveError, PeerFailedError
from ddp.monitoring.interrupts import is_interrupt
from ddp.monitoring.stall_report import StallReport, finish
from ddp.monitoring.user_code import line_of_traceback

_NEXT = "The gradients of this step are dropped (None) on every rank; the next step can go on"


def describe_failure(what: str, error: BaseException) -> str:
    """Describe an exception in one line: the operation that it ended, its type and message, and the user's line."""
    return f"{what} raised {type(error).__name__}: {error} at {line_of_traceback(error.__traceback__)}"


def peers_failed(report: StallReport, count: int, then: str = _NEXT) -> PeerFailedError:
    """Return an error with the messages of the `count` ranks that failed in this step, as far as the store has them.

    `then` is the advice at its end.
    """
    failures = report.failures(report.step, expected=count)
    reasons = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items()))
    ranks = f"rank {', '.join(map(str, sorted(failures)))}" if failures else f"{count} other rank{'s' * (count > 1)}"
    return PeerFailedError(
        f"rank {report.rank} of {report.size}: step {report.step + 1} failed on {ranks}, so nothing was averaged. "
        f"{reasons or 'Why is not known here: see the output of the other ranks'}. {then}",
        failures=failures,
        failed_ranks=report.in_world(failures),
    )


@contextmanager
def failing_together(channel: Channel, what: str, then: str = _NEXT) -> Iterator[None]:
    """Raise PeerFailedError on all other ranks if one rank raises in this block.

    For work of single ranks between two collectives, where the others would wait for one that has raised. Every rank
    must enter it; its end blocks. After a failed collective, or an exception from a signal handler, it does not wait
    for them.
    """
    own: Exception | None = None
    try:
        yield
    except CollectiveError:
        raise
    except Exception as error:
        if not channel.report.is_in_step or is_interrupt(error):
            raise
        own = error
        channel.report.tell_failure(channel.report.step, describe_failure(what, error))
    failed = torch.tensor([int(own is not None)], device="cpu")
    with channel.report.waiting(f"end of {what} on all ranks"):
        finish(channel.control.allreduce([failed]), device=failed.device)
    if own is not None:
        raise own
    if count := int(failed):
        raise peers_failed(channel.report, count, then)


@contextmanager
def changing_together(channel: Channel) -> Iterator[None]:
    """Like `failing_together`, for a change of buckets: some ranks have made it then, so no step can follow."""
    try:
        with failing_together(channel, "the change of its buckets", "Start all ranks again, from a checkpoint"):
            yield
    except Exception:
        channel.report.leave_step("was in a change of buckets that failed")
        raise
