"""Which failure was first by itself, which were only its consequences, and how many of them are alike. Pure.

Order is by time on the controller's clock. But when a process dies, its peers see their connections close before its
agent has seen its end, and clocks of different hosts agree to a few milliseconds only. So an error about a lost
connection is taken for a consequence if something that is none follows within SLACK_S.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.job.failure import Failure, FailureKind, how_they_ended

__all__ = ["SLACK_S", "SecondaryFailures", "first_cause", "group_secondary_failures", "looks_like_consequence"]

SLACK_S = 2.0
_TYPES = {
    "DistBackendError", "DistNetworkError", "DistStoreError", "CollectiveError", "BackwardError",
    "ConnectionResetError", "ConnectionAbortedError", "ConnectionRefusedError", "BrokenPipeError",
}  # fmt: skip
_WORDS = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|by peer|broken pipe|socket (was )?closed|"
    r"gloo|nccl|remote process|connectFullMesh|timed? ?out|failed to (recv|send|connect)",
    re.IGNORECASE,
)


def first_cause(failures: Sequence[Failure]) -> Failure | None:
    """Return the failure that the others followed from, as far as time and kind tell."""
    if not failures:
        return None
    first = min(failures, key=lambda failure: failure.at)
    roots = [f for f in failures if f.at <= first.at + SLACK_S and not looks_like_consequence(f)]
    return min(roots, key=lambda failure: failure.at, default=first)


def looks_like_consequence(failure: Failure) -> bool:
    """Say whether a failure may be no more than what the loss of a peer looks like."""
    if failure.kind is FailureKind.RAISED:
        return failure.error_type in _TYPES or _WORDS.search(failure.message) is not None
    # Background threads of gloo and NCCL end the process when a peer is gone.
    return failure.kind is FailureKind.KILLED and failure.status == -signal.SIGABRT


@dataclass(frozen=True)
class SecondaryFailures:
    """Those that failed alike. `how` follows their number: `failed in all_reduce: connection closed by peer`."""

    count: int
    how: str
    kind: FailureKind
    ranks: tuple[int, ...]  # of workers; the loss of a host or of the store has none


def group_secondary_failures(failures: Sequence[Failure]) -> list[SecondaryFailures]:
    """Put together what failed alike, the largest group first, equal ones in the order of time.

    A hundred ranks that lost one peer are one group.
    """
    groups: dict[tuple[object, ...], list[Failure]] = {}
    for failure in sorted(failures, key=lambda failure: failure.at):
        # Of ends that were no exception, two exit codes or signals are two ways to end.
        code = failure.status if failure.kind in (FailureKind.EXITED, FailureKind.KILLED) else 0
        key = (failure.kind, failure.status < 0, re.sub(r"\d+", "0", how_they_ended(failure, 2)), code)
        groups.setdefault(key, []).append(failure)
    counted = [
        SecondaryFailures(
            count=len(alike),
            how=how_they_ended(alike[0], len(alike)),
            kind=alike[0].kind,
            ranks=tuple(sorted(failure.rank for failure in alike if failure.rank is not None)),
        )
        for alike in groups.values()
    ]
    return sorted(counted, key=lambda group: -group.count)
