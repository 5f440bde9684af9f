"""Which failure was first by itself, and which were only its consequences. Pure.

Order is by time on the controller's clock. But when a process dies, its peers see their connections close before its
agent has seen its end, and clocks of different hosts agree to a few milliseconds only. So an error about a lost
connection is taken for a consequence if something that is none follows within SLACK_S.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from launcher.job.outcome import Failure, FailureKind

__all__ = ["SLACK_S", "first_cause", "looks_like_consequence"]

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
