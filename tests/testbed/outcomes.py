"""Ends of runs for tests of what is said of them: an outcome, a failure, where a rank stood."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from launcher.job.ending import Outcome
from launcher.job.failures.failure import Failure, FailureKind
from launcher.protocol.reports import Evidence

_FAILURE = Failure(
    kind=FailureKind.RAISED,
    host="sim1",
    at=1.0,
    ran_s=1.1,
    rank=1,
    pid=812,
    error_type="ValueError",
    message="bad batch",
)
_OUTCOME = Outcome(
    run_id="r1", exit_code=1, error=None, signum=None, cause=None, secondary_failures=(), stopped=0, world_size=4,
    hosts=2, attempts=1, no_restart_reason="", evidence=(), swept=0, left=(), unchecked=(), duration_s=1.5,
)  # fmt: skip
_TORCH = "/usr/lib/python3/site-packages/torch"


def failure(**changes: Any) -> Failure:
    """Return the failure of rank 1 on sim1, an exception after 1.1 s, with some fields changed."""
    return dataclasses.replace(_FAILURE, **changes)


def outcome(cause: Failure | None, *, evidence: Sequence[Evidence] = (), **changes: Any) -> Outcome:
    """Return the end of a run r1 of 4 workers on 2 hosts."""
    return dataclasses.replace(_OUTCOME, cause=cause, evidence=tuple(evidence), **changes)


def evidence(rank: int, function: str, *, line: int = 12) -> Evidence:
    """Return a rank that stands in `function`, called by line `line` of /home/me/train.py, or in that file itself."""
    frames = [f'  File "/home/me/train.py", line {line} in step', '  File "/home/me/train.py", line 40 in <module>']
    if function == "all_reduce":
        frames = [
            f'  File "{_TORCH}/distributed/distributed_c10d.py", line 3010 in all_reduce',
            f'  File "{_TORCH}/distributed/c10d_logger.py", line 81 in wrapper',
            *frames,
        ]
    else:
        frames = [f'  File "/home/me/train.py", line {line} in {function}', frames[1]]
    stack = "\n".join(["Thread 0x00007f0000000000 (most recent call first):", *frames]) + "\n"
    return Evidence(
        number=1,
        attempt=0,
        rank=rank,
        pid=800 + rank,
        state="S",
        waits_in="",
        rss_bytes=1 << 28,
        cpu_s=2.0,
        stack=stack,
    )


STOOD = (evidence(0, "all_reduce"), evidence(1, "all_reduce"), evidence(2, "load", line=7), evidence(3, "all_reduce"))
