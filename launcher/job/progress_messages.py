"""What the user is told while a run goes on, in words. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from launcher.job.outcome import Failure, FailureKind
from launcher.job.secondary_failures import signal_name

__all__ = ["attempt_begins", "attempt_ended", "left_out", "some", "starts_again"]

MESSAGE_CHARACTERS = 200


def attempt_begins(number: int, members: Sequence[str], previous: Sequence[str]) -> str:
    now, before = set(members), set(previous)
    changed = [*(name for name in previous if name not in now)]
    come = [name for name in members if name not in before]
    hosts = f"{len(members)} host{'s' if len(members) > 1 else ''}"
    without = f", without {some(changed)}" if changed else ""
    return f"attempt {number} begins on {hosts}{without}" + (f", with {some(come)}" if come else "")


def attempt_ended(number: int, cause: Failure, delay_s: float) -> str:
    when = f"; the next one begins in {delay_s:g} s" if delay_s else ""
    return f"attempt {number} ended after {max(0.0, cause.ran_s):.1f} s: {_what_happened(cause)}{when}"


def starts_again(failure: Failure, restart: str, delay_s: float) -> str:
    """Say that a process alone is started again; `restart` counts it."""
    when = f" in {delay_s:g} s" if delay_s else ""
    return f"{_what_happened(failure)} after {failure.ran_s:.1f} s; it alone starts again{when} ({restart})"


def left_out(failure: Failure, reason: str) -> str:
    """Say that the others go on without a process; `reason` is why it is not started again, if that is news."""
    why = f" ({reason})" if reason else ""
    return f"{_what_happened(failure)} after {failure.ran_s:.1f} s; the others go on without it{why}"


def _what_happened(cause: Failure) -> str:
    who = f"host {cause.host}" if cause.rank is None else f"rank {cause.rank} on {cause.host}"
    said = (cause.message.splitlines() or [""])[0][:MESSAGE_CHARACTERS]
    if cause.kind is FailureKind.STALLED:
        return said
    if cause.kind is FailureKind.RAISED:
        return f"{who} raised {cause.error_type or 'an exception'}{f': {said}' if said else ''}"
    if cause.kind is FailureKind.HOST_LOST:
        return f"{who} was lost: {said}"
    if cause.kind is FailureKind.STORE_LOST:
        return f"the rendezvous store on {cause.host} was lost: {said}"
    if cause.kind is FailureKind.NEVER_STARTED:
        return f"{who} {said}"
    if cause.status < 0:
        return f"{who} was killed by {signal_name(-cause.status)}"
    return f"{who} exited with code {cause.status}"


def some(names: Iterable[str], count: int | None = None) -> str:
    """Return the first three of them, and how many more there are; `count`, where it is known, saves looking at all."""
    if count is None:
        names = list(names)
        count = len(names)
    first = list(islice(names, 3))
    return ", ".join(first) + (f" and {count - 3} more" if count > 3 else "")
