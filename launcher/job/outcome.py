"""How a run ended, as data: the job makes it, output/report.py tells it, cli/main.py ends with its exit code."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from launcher.errors import DtrainError
from launcher.protocol import Evidence

__all__ = ["Failure", "FailureKind", "Outcome"]


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


@dataclass(frozen=True)
class Outcome:
    """The end of a run: of its last attempt, and how many there were."""

    run_id: str
    exit_code: int
    error: DtrainError | None  # why no worker was started
    signum: int | None  # the signal that told dtrain to stop
    cause: Failure | None  # the first failure that was not a consequence of our stopping, and that ended the run
    victims: tuple[Failure, ...]  # what failed after it by itself
    stopped: int  # workers that ended because we stopped them
    world_size: int
    hosts: int  # that workers were started on, in any attempt
    attempts: int
    gave_up: str  # why no further attempt was made, where one could have been; else empty
    evidence: tuple[Evidence, ...]  # where the ranks stood when the cause was noticed
    swept: int  # processes that outlived their workers and were ended
    left: tuple[tuple[str, tuple[str, ...]], ...]  # by host, the processes that could not be ended
    unchecked: tuple[tuple[str, str], ...]  # hosts that could not be scanned at the end, each with the reason
    duration_s: float
    preempted: bool = False  # it ended to make room, and is to be started again
    left_out: tuple[Failure, ...] = ()  # processes of the last attempt that the others went on without
    lone_restarts: int = 0  # of single processes, in all attempts
