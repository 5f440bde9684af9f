"""What a process wrote before it aborted, or raised from a collective: its own fault, a lost peer, or a timeout. Pure.

Watchdog threads of torch end a process by SIGABRT whatever has happened, and often all ranks end so within a second.
Then the text decides which one was first. The patterns are those of torch's ProcessGroupNCCL, NCCL 2, CUDA and glibc.
"""

from __future__ import annotations

import re

from launcher.frozen import dataclass

# The process's own fault, or its device's or host's, however many peers are gone as well.
_OWN = [
    (
        r"Duplicate GPU detected : rank (\d+) and rank (\d+) both on CUDA device (\S+)",
        "ranks {0} and {1} use the same GPU, {2}",
    ),
    (r"CUDA error: ([^\n]+)", "CUDA error: {0}"),
    (r"(CUDA out of memory\.[^\n]*)", "{0}"),
    (r"Cuda failure(?: \d+)? '([^']+)'", "CUDA error: {0}"),
    (
        r"(?:creating|extend|attach\w* to|open\w*) (?:the )?shared memory segment (\S+)[^\n]*?"
        r"(No space left on device|Permission denied|Cannot allocate memory)",
        "NCCL cannot make {0}: {1}",
    ),
    (r"Bootstrap : (no socket interface found[^\n]*)", "NCCL: {0}"),
    (r"Bootstrap Root : ([^\n]+)", "NCCL: {0}"),
    (r"(NET/IB : (?:\S+ )?Got async event : (?:port error|local catastrophic error))", "{0}"),
    (
        r"watchdog got stuck for (\d+) seconds without making progress",
        "NCCL's watchdog made no progress for {0} s: a call of CUDA or NCCL hangs",
    ),
    (
        r"(double free or corruption|corrupted (?:size|double)[^\n]*|stack smashing detected"
        r"|(?:free|malloc|realloc|malloc_consolidate|munmap_chunk)\(\): [^\n]*)",
        "{0}",
    ),
    (r"([\w./+-]+:\d+:[^\n]*Assertion `[^\n]*' failed)", "{0}"),
]  # fmt: skip
_TIMEOUT = re.compile(
    r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+), OpType=_?(\w+)[^\n]*?Timeout\(ms\)=(\d+)\)"
)
_STARTED = re.compile(r"last enqueued (?:NCCL )?work: (\d+)")
_PEER = re.compile(
    r"remote process exited or there was a network error|ncclRemoteError|Connection refused|Broken pipe"
    r"|Connection (?:closed|reset) by (?:remote )?peer|Got completion from peer|NCCL communicator was aborted"
    r"|dump signal (?:due to [^\n]*? )?from +(?:rank \d+|another)|terminate called without an active exception"
    r"|Timed out waiting \S+ for (?:recv|send) operation",
    re.IGNORECASE,
)
# Less specific: only where none of the above is found.
_REST = [
    (r"(unhandled (?:system|cuda) error[^\n]*)", "NCCL: {0}"),
    (r"NCCL error[^\n]*, ((?:internal error|invalid usage|invalid argument)[^\n]*)", "NCCL: {0}"),
    (r"terminate called after throwing an instance of '[^']+'\s+what\(\):\s+([^\n]+)", "{0}"),
    (r"terminate called after throwing an instance of '([^']+)'", "a C++ exception of {0}"),
    (r"Fatal Python error: (?!Aborted)([^\n]+)", "{0}"),
]
_LAST = re.compile(r"Last error:\s*\n([^\n]+)")  # NCCL's own reason, behind torch's


@dataclass(frozen=True)
class AbortCause:
    """`is_own` says that the process did not only follow another one. `started` is the last collective it had started,
    if it was in a timeout."""

    message: str
    is_own: bool
    started: int | None = None


def abort_cause(text: str) -> AbortCause | None:
    """Return what the end of a process's stderr, or the message of an error, says of the cause; None if nothing."""
    if (own := _first(_OWN, text)) is not None:
        return AbortCause(own, is_own=True)
    if (timeout := _TIMEOUT.search(text)) is not None:
        number, operation, limit_ms = timeout.groups()
        started = int(counted[1]) if (counted := _STARTED.search(text)) is not None else int(number)
        message = f"NCCL timed out in {operation.lower()} {number} after {int(limit_ms) / 1000:g} s"
        return AbortCause(message, is_own=False, started=started)
    reason = _LAST.search(text)
    if (peer := _PEER.search(text)) is not None:
        return AbortCause(reason[1].strip() if reason else re.sub(" +", " ", peer[0]), is_own=False)
    if (rest := _first(_REST, text)) is not None:
        return AbortCause(f"{rest}; {reason[1].strip()}" if reason else rest, is_own=True)
    return None


def _first(patterns: list[tuple[str, str]], text: str) -> str | None:
    for pattern, form in patterns:
        if (found := re.search(pattern, text)) is not None:
            return form.format(*(part.strip() for part in found.groups()))
    return None
