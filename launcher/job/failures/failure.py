"""Failures: which was first, which only followed from it, and the text for each. Pure.

Report, messages and JSON use the same text. The same loss reads differently in every rank: other addresses, ports,
ranks, lines of a library's source. These are removed from messages before they are compared.

Order is by time on the controller's clock. But when a process dies, its peers see their connections close before its
agent has seen its end, and clocks of different hosts agree to a few milliseconds only. So an error about a lost
connection is taken for a consequence if something that is none follows within SLACK_S.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from enum import Enum

from launcher.frozen import dataclass
from launcher.job.failures.abort_causes import AbortCause, abort_cause
from launcher.protocol.reports import Exited, Failing

MESSAGE_CHARACTERS = 120
LINE_CHARACTERS = 200  # of a message that is no more than a part of a line
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
_CRASHES: dict[int, str] = {
    signal.SIGSEGV: "it crashed: segmentation fault",
    signal.SIGBUS: "it crashed: bus error",
    signal.SIGFPE: "it crashed: arithmetic error",
    signal.SIGILL: "it crashed: illegal instruction",
    signal.SIGSYS: "it crashed: forbidden system call",
    signal.SIGTRAP: "it crashed: trap",
    signal.SIGABRT: "it aborted itself",
}

SLACK_S = 2.0
_TIMEOUT = re.compile(
    r"Timed out waiting \d+ ?ms for (recv|send)|monitoredBarrier|NCCL timed out in "
)  # of a collective
PROGRESS_S = 60.0  # an attempt that ran so long, or saved a checkpoint, has made progress
_CONSEQUENCE_TYPES = {
    "DistBackendError", "DistNetworkError", "DistStoreError", "CollectiveError", "BackwardError",
    "ConnectionResetError", "ConnectionAbortedError", "ConnectionRefusedError", "BrokenPipeError",
}  # fmt: skip
_CONSEQUENCE_WORDS = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|by peer|broken pipe|socket (was )?closed|"
    r"gloo|nccl|remote process|connectFullMesh|timed? ?out|failed to (recv|send|connect)",
    re.IGNORECASE,
)


class FailureKind(Enum):
    RAISED = "raised"  # an exception that was not caught
    EXITED = "exited"  # another exit code than 0
    KILLED = "killed"  # by a signal that was not ours
    NEVER_STARTED = "never started"
    HOST_LOST = "host lost"
    STORE_LOST = "store lost"
    STALLED = "stalled"  # no rank made progress
    HUNG = "hung"  # the others waited for it, and it was killed for that


@dataclass(frozen=True)
class Failure:
    """Something that went wrong by itself; `at` is its time on the controller's monotonic clock.

    `status` is the exit code, or minus the signal that killed it. `provoked` says that the worker
    was already being stopped when it ended, although it had failed before. `killer` says who killed it, where that
    is known; `inside` is the function in which it raised or called sys.exit, `where` the line of the user's own code
    above that.
    `step` is that of the ledger in which it ended, 0 if it has none.
    `failed_ranks` are those that an error of `ddp` names: it is a consequence of their failure, even if it names none.
    """

    kind: FailureKind
    host: str
    at: float
    ran_s: float
    attempt: int = 0
    rank: int | None = None
    pid: int = 0
    status: int = 1
    error_type: str = ""
    message: str = ""
    where: str = ""
    inside: str = ""
    killer: str = ""
    provoked: bool = False
    failed_ranks: tuple[int, ...] | None = None
    step: int = 0
    injected: bool = False  # by --chaos
    abort: AbortCause | None = None  # what it wrote of its cause, if it aborted or a collective raised

    @property
    def exit_code(self) -> int:
        if self.kind is FailureKind.HUNG:
            return 1  # the signal was ours
        if self.kind is FailureKind.RAISED and (self.provoked or self.status == 0):
            return 1  # it would have ended so, had it not been stopped on the way
        return 128 - self.status if self.status < 0 else self.status


@dataclass(frozen=True)
class FailedAttempt:
    """An attempt that has failed; `free`: through a host that the job can do without, or by --chaos, which costs no
    restart.

    With a `rank`, a process that failed while the attempt went on; `may_follow`: it is resilient, and failed as one
    does that has lost a peer. With a `lost_host`, one that the attempt went on without. `succeeds`: that of a worker
    whose rank another process had before it, in the same attempt.
    """

    cause: Failure
    ran_s: float
    saved: int  # checkpoints; for a process alone its steps as well, since the others have what came of them
    free: bool
    rank: int | None = None
    lost_host: str = ""
    may_follow: bool = False
    succeeds: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether it is an attempt that has failed, rather than a process or host of one."""
        return self.rank is None and not self.lost_host

    @property
    def progress(self) -> bool:
        return self.saved > 0 or self.ran_s >= PROGRESS_S

    @property
    def signature(self) -> tuple[object, ...]:
        cause = self.cause
        return (cause.kind, cause.status, cause.error_type, cause.where)


def failure_of(
    host: str, exited: Exited | Failing, at: float, *, attempt: int, hung: Failure | None = None, injected: bool = False
) -> Failure:
    """Return what the bad end of a worker was, or will be; `hung` is why it was killed, if it was for that."""
    said = exited.error or {}
    is_hung = hung is not None and (hung.pid, exited.status) == (exited.pid, -signal.SIGKILL)
    if hung is not None and is_hung:  # else it has ended by itself before
        kind, said = FailureKind.HUNG, {"message": hung.message, "where": hung.where}
    elif exited.pid == 0:
        kind = FailureKind.NEVER_STARTED
    elif "type" in said:
        kind = FailureKind.RAISED
    else:
        kind = FailureKind.KILLED if exited.status < 0 else FailureKind.EXITED
        said = {} if kind is FailureKind.KILLED else said
    abort = None
    if kind is FailureKind.KILLED and isinstance(exited, Exited):
        abort = abort_cause(exited.stderr)
        said = {"message": abort.message} if abort is not None else {}
    elif said.get("type") == "DistBackendError":
        abort = abort_cause(said.get("message", ""))
    named = said.get("failed_ranks")
    return Failure(
        kind=kind,
        host=host,
        at=at,
        ran_s=exited.ran_s,
        attempt=attempt,
        rank=exited.rank,
        pid=exited.pid,
        status=exited.status,
        error_type=said.get("type", ""),
        message=said.get("message", ""),
        where=said.get("where", ""),
        inside=said.get("inside", ""),
        killer="--chaos" if injected else exited.killer if isinstance(exited, Exited) else "",
        provoked=isinstance(exited, Exited) and exited.provoked,
        step=exited.recorded_step,
        failed_ranks=None if named is None else tuple(int(rank) for rank in named.split() if rank.isdecimal()),
        injected=injected,
        abort=abort,
    )


def first_cause(failures: Sequence[Failure]) -> Failure | None:
    """Return the failure that the others followed from, as far as time and kind tell, and what they say themselves."""
    if not failures:
        return None
    first = min(failures, key=lambda failure: failure.at)
    roots = [f for f in failures if f.at <= first.at + SLACK_S and not looks_like_consequence(f)]
    cause = min(roots, key=lambda failure: failure.at, default=_behind(failures) or first)
    others = {failure.rank: failure for failure in failures if failure.rank is not None}
    while named := [others[rank] for rank in cause.failed_ranks or () if rank in others]:
        others.pop(-1 if cause.rank is None else cause.rank, None)  # so that two which name each other come to an end
        cause = min(named, key=lambda failure: failure.at)
    return cause


def _behind(failures: Sequence[Failure]) -> Failure | None:
    """Return the rank that kept the others waiting, having started the fewest collectives, if all were in a timeout."""
    started = [(each.abort.started, each) for each in failures if each.abort is not None]
    counted = [(number, each) for number, each in started if number is not None]
    if len(counted) < len(failures):
        return None
    return min(counted, key=lambda pair: (pair[0], pair[1].at))[1]


def looks_like_consequence(failure: Failure) -> bool:
    """Return whether a failure may only be the consequence of a lost peer."""
    if failure.abort is not None:
        return not failure.abort.is_own
    if failure.kind is FailureKind.RAISED:
        is_known = failure.failed_ranks is not None or failure.error_type in _CONSEQUENCE_TYPES
        return is_known or _CONSEQUENCE_WORDS.search(failure.message) is not None
    # Background threads of gloo and NCCL end the process when a peer is gone.
    return failure.kind is FailureKind.KILLED and failure.status == -signal.SIGABRT


def all_timed_out(failures: Sequence[Failure]) -> bool:
    """Return whether they are timeouts of collectives, and what followed from these: the cause is another rank."""
    timeouts = [_TIMEOUT.search(failure.message) is not None for failure in failures]
    return any(timeouts) and all(map(lambda late, each: late or looks_like_consequence(each), timeouts, failures))


@dataclass(frozen=True)
class SecondaryFailures:
    """Failures of one kind. `how` follows their number: `failed in all_reduce: connection closed by peer`."""

    count: int
    how: str
    kind: FailureKind
    ranks: tuple[int, ...]  # of workers; the loss of a host or of the store has none


def group_secondary_failures(failures: Sequence[Failure]) -> list[SecondaryFailures]:
    """Group failures of the same kind, the largest group first, equal ones in the order of time.

    A hundred ranks that lost one peer are one group.
    """
    groups: dict[tuple[object, ...], list[Failure]] = {}
    for failure in sorted(failures, key=lambda failure: failure.at):
        # Of ends that were no exception, two exit codes or signals are two ways to end.
        code = failure.status if failure.kind in (FailureKind.EXITED, FailureKind.KILLED) else 0
        key = (failure.kind, re.sub(r"\d+", "0", how_they_ended(failure, 2)), code)
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


def what_happened(failure: Failure, *, in_full: bool = False) -> str:
    """Say which process or host failed, how and when, in one line.

    `in_full` names the process, and who killed it; an exception then has lines of its own.
    """
    after = f"after {failure.ran_s:.1f} s"
    message = failure.message if in_full else _first_line(failure.message)[:LINE_CHARACTERS]
    if failure.kind is FailureKind.STALLED:
        return message
    if failure.kind is FailureKind.HOST_LOST:
        return f"host {failure.host} was lost {after}: {message}"
    if failure.kind is FailureKind.STORE_LOST:
        return f"the rendezvous store on {failure.host} was lost {after}: {message}"
    who = f"rank {failure.rank} on {failure.host}"
    if failure.kind is FailureKind.NEVER_STARTED:
        return f"{who} {message}"
    if failure.kind is FailureKind.HUNG:
        return f"{who}{f' (pid {failure.pid})' if in_full else ''} hung {after}: {message}"
    if in_full:
        by_whom = _by_whom(failure)
        return f"{who} (pid {failure.pid}) {_ended(failure)}{f' ({by_whom})' if by_whom else ''} {after}"
    if failure.kind is FailureKind.RAISED:
        return f"{who} raised {failure.error_type or 'an exception'} {after}{f': {message}' if message else ''}"
    return f"{who} {_ended(failure)} {after}{_of_abort(failure)}"


def how_they_ended(failure: Failure, count: int) -> str:
    """Say how this failure and others like it ended, to follow their number: `failed in all_reduce: broken pipe`."""
    message = plain_message(failure.message)
    if failure.kind in (FailureKind.EXITED, FailureKind.KILLED):
        return _ended(failure, count) + _of_abort(failure)
    if failure.kind is FailureKind.RAISED:
        how = f"failed in {failure.inside}" if failure.inside else f"failed with {failure.error_type or 'an error'}"
    elif failure.kind in (FailureKind.NEVER_STARTED, FailureKind.HUNG):
        how = failure.kind.value
    else:
        how = f"{'was' if count == 1 else 'were'} lost"
    return f"{how}: {message}" if message else how


def _ended(failure: Failure, count: int = 1) -> str:
    if failure.kind is FailureKind.RAISED:
        return "raised an exception"
    if failure.status < 0:
        return f"{'was' if count == 1 else 'were'} killed by {signal_name(-failure.status)}"
    return f"exited with code {failure.status}"


def _by_whom(failure: Failure) -> str:
    signum = -failure.status
    if failure.kind is not FailureKind.KILLED:
        return ""
    if failure.killer:
        return failure.killer
    if signum in _CRASHES:
        return _CRASHES[signum] + _of_abort(failure)
    if signum in (signal.SIGUSR1, signal.SIGUSR2):
        return "dtrain passes it on when it is sent one; the script has no handler for it"
    by_another = "by another process or by itself: dtrain did not send it"
    return f"{by_another}, and no out-of-memory kill was seen" if signum == signal.SIGKILL else by_another


def _of_abort(failure: Failure) -> str:
    is_known = failure.kind is FailureKind.KILLED and failure.abort is not None
    return f": {failure.message}" if is_known else ""


def plain_message(message: str) -> str:
    """Return the first line of an error without what differs from rank to rank."""
    line = _PREFIX.sub("", _first_line(message))
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


def _first_line(message: str) -> str:
    return next((line.strip() for line in message.splitlines() if line.strip()), "")
