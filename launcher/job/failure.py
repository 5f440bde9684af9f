"""What went wrong by itself, as data, and its one wording: for the report, what is said meanwhile, and JSON. Pure.

The same loss reads differently in every rank: other addresses, ports, ranks, lines of a library's source. Those are
taken out of a message (plain_message) before messages are compared.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from enum import Enum

__all__ = ["Failure", "FailureKind", "how_they_ended", "plain_message", "signal_name", "what_happened"]

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


class FailureKind(Enum):
    RAISED = "raised"  # an exception that nobody caught
    EXITED = "exited"  # another exit code than 0
    KILLED = "killed"  # by a signal that was not ours
    NEVER_STARTED = "never started"
    HOST_LOST = "host lost"
    STORE_LOST = "store lost"
    STALLED = "stalled"  # no rank made progress


@dataclass(frozen=True)
class Failure:
    """Something that went wrong by itself; `at` is its time on the controller's monotonic clock.

    `status` is the exit code, or minus the signal that killed it. `provoked` says that the worker
    was already told to stop when it ended, although it had failed before. `killer` says who killed it, where that
    is known; `inside` is the function in which it raised, `where` the line of the user's own code above that.
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

    @property
    def exit_code(self) -> int:
        if self.kind is FailureKind.RAISED and (self.provoked or self.status == 0):
            return 1  # it would have ended so, had it not been stopped on the way
        return 128 - self.status if self.status < 0 else self.status


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
    if in_full:
        by_whom = _by_whom(failure)
        return f"{who} (pid {failure.pid}) {_ended(failure)}{f' ({by_whom})' if by_whom else ''} {after}"
    if failure.kind is FailureKind.RAISED:
        return f"{who} raised {failure.error_type or 'an exception'} {after}{f': {message}' if message else ''}"
    return f"{who} {_ended(failure)} {after}"


def how_they_ended(failure: Failure, count: int) -> str:
    """Say how this failure and others like it ended, to follow their number: `failed in all_reduce: broken pipe`."""
    message = plain_message(failure.message)
    if failure.kind in (FailureKind.EXITED, FailureKind.KILLED):
        return _ended(failure, count)
    if failure.kind is FailureKind.RAISED:
        how = f"failed in {failure.inside}" if failure.inside else f"failed with {failure.error_type or 'an error'}"
    elif failure.kind is FailureKind.NEVER_STARTED:
        how = "never started"
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
        return _CRASHES[signum]
    if signum in (signal.SIGUSR1, signal.SIGUSR2):
        return "dtrain passes it on when it is sent one; the script has no handler for it"
    by_another = "by another process or by itself: dtrain did not send it"
    return f"{by_another}, and no out-of-memory kill was seen" if signum == signal.SIGKILL else by_another


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
