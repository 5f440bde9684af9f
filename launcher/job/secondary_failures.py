"""What failed after the cause, counted: a hundred ranks that lost one peer are one line. Pure.

The same loss reads differently in every rank: other addresses, ports, ranks, lines of a library's source. Those are
taken out before messages are compared.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.job.outcome import Failure, FailureKind

__all__ = ["Victims", "count_victims", "plain_message", "signal_name"]

MESSAGE_CHARACTERS = 120
_PREFIX = re.compile(r"^(?:\[[^\]]*\]:?\s*)+")  # of a logger, or the line of gloo's source
_SOURCE = re.compile(r"(?:\bat |\bin:? )?[\w./+-]*/[\w.+-]+\.(?:cc|cpp|cu|cuh|h|hpp|py):\d+,?")
_ADDRESS = re.compile(
    r"\[[\w.:%-]*\]:\d+"  # [host]:port
    r"|\([\w.:%-]+, \d+\)"  # (host, port)
    r"|\b\d{1,3}(?:\.\d{1,3}){3}\b(?::\d+)?"
    r"|\b[\w-]+(?:\.[\w-]+)*:\d{2,5}\b"  # host:port
    r"|\b0x[0-9a-fA-F]+\b"
)
_NUMBERED = re.compile(r"\b(ranks?|pid|port|fd|thread|socket|process|node)([ =:#]+)\d+", re.IGNORECASE)
_ADVICE = re.compile(r"\. This is typically caused by .*")  # gloo's, after each lost connection
_LOOSE_END = re.compile(r"(?:\s*(?:\b(?:from|to|at|with|by) )?\.{3}|[\s.,:;])+$")
_GAP = "..."


@dataclass(frozen=True)
class Victims:
    """Those that failed alike. `how` follows their number: `ended in all_reduce: connection closed by peer`."""

    count: int
    how: str
    kind: FailureKind
    ranks: tuple[int, ...]  # of workers; the loss of a host or of the store has none


def count_victims(failures: Sequence[Failure]) -> list[Victims]:
    """Put together what failed alike, the largest group first, equal ones in the order of time."""
    groups: dict[tuple[object, ...], list[Failure]] = {}
    for failure in sorted(failures, key=lambda failure: failure.at):
        key = (failure.kind, failure.status < 0, re.sub(r"\d+", "0", _how(failure, 2)), _code(failure))
        groups.setdefault(key, []).append(failure)
    counted = [
        Victims(
            count=len(alike),
            how=_how(alike[0], len(alike)),
            kind=alike[0].kind,
            ranks=tuple(sorted(failure.rank for failure in alike if failure.rank is not None)),
        )
        for alike in groups.values()
    ]
    return sorted(counted, key=lambda group: -group.count)


def plain_message(message: str) -> str:
    """Return the first line of an error without what differs from rank to rank."""
    line = next((line.strip() for line in message.splitlines() if line.strip()), "")
    line = _PREFIX.sub("", line)
    line = _NUMBERED.sub(rf"\1\2{_GAP}", _ADDRESS.sub(_GAP, _SOURCE.sub("", line)))
    line = re.sub(r"\s+", " ", _ADVICE.sub("", line))
    line = re.sub(r" \.{3}(?=:)", "", line)
    line = _LOOSE_END.sub("", line).lstrip(" .,:;")
    if re.match(r"[A-Z][a-z]+\b", line) and not re.match(r"\w+(?:Error|Exception)\b", line):
        line = line[0].lower() + line[1:]
    return line if len(line) <= MESSAGE_CHARACTERS else line[:MESSAGE_CHARACTERS].rstrip() + _GAP


def signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:  # a real-time signal
        return f"signal {signum}"


def _code(failure: Failure) -> int:
    """Return what tells ends apart that were no exception: two exit codes are two ways to end."""
    return failure.status if failure.kind in (FailureKind.EXITED, FailureKind.KILLED) else 0


def _how(failure: Failure, count: int) -> str:
    were = "was" if count == 1 else "were"
    message = plain_message(failure.message)
    if failure.kind is FailureKind.RAISED:
        place = f"ended in {failure.inside}" if failure.inside else f"ended with {failure.error_type or 'an error'}"
        return f"{place}: {message}" if message else place
    if failure.kind is FailureKind.EXITED:
        return f"exited with code {failure.status}"
    if failure.kind is FailureKind.KILLED:
        return f"{were} killed by {signal_name(-failure.status)}"
    if failure.kind is FailureKind.NEVER_STARTED:
        return f"never started: {message}" if message else "never started"
    return f"{were} lost: {message}" if message else f"{were} lost"
