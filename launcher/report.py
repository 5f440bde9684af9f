"""The last screen of a run: what happened, where, and where to look next. Pure; cli.py prints it."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable
from pathlib import Path

from launcher.outcome import Failure, FailureKind, Outcome

__all__ = ["report"]

TAIL_LINES = 15


def report(outcome: Outcome, folder: Path | None, tail: Callable[[int, int], list[str]]) -> str:
    """Return the report; empty for a run that just went well.

    `folder` is the run's log folder, None if it could not be written; `tail` returns the last lines of a rank's
    stream (1 or 2).
    """
    if outcome.error is not None:
        return "\n".join([str(outcome.error), *_left(outcome)])
    if outcome.cause is not None:
        return "\n".join([*_cause(outcome, outcome.cause, folder, tail), *_left(outcome)])
    if outcome.signum is not None:
        name = signal.Signals(outcome.signum).name
        stopped = f"stopped by {name} after {outcome.duration_s:.1f} s; {_count(outcome.stopped, 'worker')} stopped"
        return "\n".join([stopped, *_left(outcome)])
    return "\n".join(_left(outcome))


def _cause(outcome: Outcome, cause: Failure, folder: Path | None, tail: Callable[[int, int], list[str]]) -> list[str]:
    lines = [_headline(cause)]
    if cause.kind is FailureKind.RAISED:
        lines.append(f"  {cause.error_type}: {_first_lines(cause.message)}")
        if cause.where:
            lines.append(f"  at {cause.where}")
    if cause.rank is not None:
        for stream, name in ((2, "stderr"), (1, "stdout")):
            words = tail(cause.rank, stream)[-TAIL_LINES:]
            if words:
                lines.append(f"  the last lines of its {name}:")
                lines += [f"  | {line}" for line in words]
                break
    consequences = []
    if outcome.other_failures:
        consequences.append(f"{_count(outcome.other_failures, 'other worker')} failed after it")
    if outcome.stopped:
        consequences.append(f"{_count(outcome.stopped, 'worker')} stopped by dtrain")
    if consequences:
        lines.append("  " + "; ".join(consequences))
    if folder is not None and cause.rank is not None:
        lines.append(
            f"  its whole output: {shlex.quote(str(folder / 'attempt_0' / str(cause.rank)))}/stdout.log, stderr.log"
        )
    elif folder is not None:
        lines.append(f"  the output of all workers: {shlex.quote(str(folder))}")
    return lines


def _headline(cause: Failure) -> str:
    if cause.kind is FailureKind.HOST_LOST:
        return f"host {cause.host} was lost after {cause.ran_s:.1f} s: {cause.message}"
    if cause.kind is FailureKind.STORE_LOST:
        return f"the rendezvous store on {cause.host} was lost after {cause.ran_s:.1f} s: {cause.message}"
    who = f"rank {cause.rank} on {cause.host}"
    if cause.kind is FailureKind.NEVER_STARTED:
        return f"{who} {cause.message}"
    how = f"exited with code {cause.status}"
    if cause.kind is FailureKind.RAISED:
        how = "raised an exception"
    elif cause.status < 0:
        how = f"was killed by {_signal_name(-cause.status)}"
    return f"{who} (pid {cause.pid}) {how} after {cause.ran_s:.1f} s"


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:  # a real-time signal
        return f"signal {signum}"


def _first_lines(message: str) -> str:
    lines = message.splitlines() or [""]
    return lines[0] if len(lines) == 1 else f"{lines[0]} (and {len(lines) - 1} more lines)"


def _left(outcome: Outcome) -> list[str]:
    lines = []
    if outcome.swept:
        lines.append(f"{_count(outcome.swept, 'process')} outlived the workers and were ended")
    for host, left in outcome.left:
        lines += [f"still there on {host}: {process}" for process in left]
    return lines


def _count(number: int, noun: str) -> str:
    plural = noun if number == 1 else noun + ("es" if noun.endswith("s") else "s")
    return f"{number} {plural}"
