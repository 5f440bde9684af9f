"""How a run ended, as data: the job makes it, console.py tells it, cli.py ends with its exit code."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from launcher.errors import DtrainError

__all__ = ["Failure", "FailureKind", "Outcome"]


class FailureKind(Enum):
    RAISED = "raised"  # an exception that nobody caught
    EXITED = "exited"  # another exit code than 0
    KILLED = "killed"  # by a signal that was not ours
    NEVER_STARTED = "never started"
    HOST_LOST = "host lost"
    STORE_LOST = "store lost"


@dataclass(frozen=True)
class Failure:
    """Something that went wrong by itself; `at` is its time on the controller's monotonic clock.

    `status` is the exit code, or minus the signal that killed it. `provoked` says that the worker
    was already told to stop when it ended, although it had failed before.
    """

    kind: FailureKind
    host: str
    at: float
    ran_s: float
    rank: int | None = None
    pid: int = 0
    status: int = 1
    error_type: str = ""
    message: str = ""
    where: str = ""
    provoked: bool = False

    @property
    def exit_code(self) -> int:
        if self.kind is FailureKind.RAISED and (self.provoked or self.status == 0):
            return 1  # it would have ended so, had it not been stopped on the way
        return 128 - self.status if self.status < 0 else self.status


@dataclass(frozen=True)
class Outcome:
    """The end of a run. `left` names, by host, the processes that could not be ended."""

    run_id: str
    exit_code: int
    error: DtrainError | None  # why no worker was started
    signum: int | None  # the signal that told dtrain to stop
    cause: Failure | None  # the first failure that was not a consequence of our stopping
    other_failures: int
    stopped: int  # workers that ended because we stopped them
    world_size: int
    hosts: int
    swept: int
    left: tuple[tuple[str, tuple[str, ...]], ...]
    duration_s: float
