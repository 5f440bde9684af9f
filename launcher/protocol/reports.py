"""What an agent sends to its controller."""

from __future__ import annotations

from launcher.frozen import dataclass, field
from launcher.protocol.message import Report


@dataclass(frozen=True)
class Hello(Report):
    """The first message of an agent, before it receives any."""

    protocol: int
    version: str
    python: str
    hostname: str
    pid: int
    agent_identity: str  # what another agent on this host needs to find what this one leaves: cleanup/leftovers.py
    time: float  # this host's monotonic clock, as in every `time` below


@dataclass(frozen=True)
class Facts(Report):
    gpus: list[str]  # ids to hand out, in order
    gpu_variable: str  # CUDA_VISIBLE_DEVICES, or that of another vendor; see machine/gpus/vendors.py
    gpus_verified: bool  # seen by the driver, not only listed in the environment
    cores: list[int]  # processors this host's workers may use
    cpu_limit: int  # how many at a time (cgroup quota)
    problems: list[str]  # why the job cannot start here
    time: float
    left: list[str] = field(default_factory=list)  # processes of lost agents (Prepare.lost_agents) that cannot be ended
    slots: int | None = None  # how many workers it takes, where that was said on the host itself
    machine: str = ""  # where several agents may be on one machine: which it is
    room: int | None = None  # for so many workers its limits leave room
    room_limit: str = ""  # the one that leaves least
    killed_runs: int = 0  # earlier ones of this user, killed whole: what they had left there is removed
    ended: int = 0  # processes of those
    not_ended: list[str] = field(default_factory=list)  # those of them that cannot be ended


@dataclass(frozen=True)
class StoreOpened(Report):
    attempt: int
    address: str
    port: int


@dataclass(frozen=True)
class PortsReserved(Report):
    """The ports are free, and kept so until the first worker is started."""

    attempt: int
    address: str
    ports: list[int]


@dataclass(frozen=True)
class StoreFailed(Report):
    attempt: int
    reason: str
    time: float


@dataclass(frozen=True)
class Started(Report):
    attempt: int
    rank: int
    pid: int
    time: float
    by_exec: str = ""  # why it was not forked from a process with its packages imported; empty: it was
    costs_s: float = 0.0  # so much longer it takes at least, since a package prevents that; 0: none does


@dataclass(frozen=True)
class Stepped(Report):
    """A process has made its first training step."""

    attempt: int
    rank: int


@dataclass(frozen=True)
class Output(Report):
    """Bytes that a worker wrote, as they were read: any cut, any encoding. `stream` is 1 or 2."""

    rank: int
    stream: int
    data: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class Returned(Report):
    """A piece of what a worker's function has returned, or raised; in order, and before its Exited."""

    attempt: int
    rank: int
    data: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class InputTaken(Report):
    """So many bytes of Input are written to the worker: so many more may be sent."""

    rank: int
    attempt: int
    count: int


@dataclass(frozen=True)
class Asks(Report):
    """A worker waits for its standard input behind an unfinished line, a prompt; or does so no longer."""

    rank: int
    waits: bool


@dataclass(frozen=True)
class Exited(Report):
    """A worker ended. `status` is the exit code, or minus the signal's number, as subprocess counts."""

    attempt: int
    rank: int
    pid: int
    status: int
    ran_s: float
    provoked: bool  # the agent had already signalled it
    killer: str  # who killed it, where that is known; else empty
    error: (
        dict[str, str] | None
    )  # type, message, where, inside, failed_ranks, as the worker wrote; where only: of sys.exit
    error_file: str | None  # that file's whole text
    time: float  # of the exception where one is known, else of the exit
    restart_policy: int = 0  # see job/recovery/restarts.py; 0: its failure ends the attempt
    steps: int = 0  # that it said it made
    saved: int = 0  # checkpoints that it said it saved
    unsaved: int | None = 0  # steps since the newest one; None: it trained without ddp, what it saves is not known
    by_exec: str = ""  # as in Started...
    costs_s: float = 0.0  # where only now it is known how long the import of that package took


@dataclass(frozen=True)
class Timings(Report):
    """What the workers of a host did with their time since the last such message: timeline/records.py unpacks `data`.

    And what puts this host's clock on the controller's: the newest heartbeat that said when it was sent.
    """

    attempt: int
    time: float
    asked: float = 0.0  # when that heartbeat was sent, by the controller's clock; 0: there was none
    asked_at: float = 0.0  # when it was received, by this host's
    lost: int = 0  # records that workers overwrote before they were read
    data: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class HostUse(Report):
    """What a host's memory, processors and GPUs are used for, now and then; what cannot be known is left out."""

    attempt: int
    memory_bytes: int  # in use, of the host or of the limit that holds for the workers
    memory_limit_bytes: int
    resident_bytes: dict[str, int] = field(default_factory=dict)  # by rank, with the worker's children
    gpus: dict[str, list[int]] = field(
        default_factory=dict
    )  # by rank, its first: percent busy, bytes in use, of how many
    pids: dict[str, int] = field(default_factory=dict)  # by rank
    waited_s: dict[str, float] = field(default_factory=dict)  # by rank, for a processor, its first thread until now


@dataclass(frozen=True)
class Failing(Report):
    """A worker has failed, by an exception or an exit code, and its process has not ended yet; Exited follows."""

    attempt: int
    rank: int
    pid: int
    status: int  # what it will end with
    ran_s: float
    error: dict[str, str] | None  # as in Exited
    time: float  # of the exception, or of sys.exit()


@dataclass(frozen=True)
class Evidence(Report):
    """Where one worker stands: what the kernel says of it, and the stacks of its threads if they could be had."""

    number: int  # of the Collect
    attempt: int
    rank: int
    pid: int
    state: str  # as in /proc/PID/stat: R, S, D, T...
    waits_in: str  # the kernel function it waits in (/proc/PID/wchan), or empty
    rss_bytes: int
    cpu_s: float
    stack: str  # every thread, the main thread last, as Python's faulthandler prints it
    silent_s: float = 0.0  # since its last sign of life; see hangs/watch.py
    phase: int = 0  # in which it is; see ddp/monitoring/progress.py
    steps: int = 0  # that it said it made
    tree_cpu_s: float = 0.0  # of it and its children
    at_disk: bool = False  # one of them is in state D
    traced: bool = False  # by a debugger
    native: str = ""  # the stacks with the frames of C and C++, where that was asked for
    no_native: str = ""  # why they could not be had


@dataclass(frozen=True)
class Collected(Report):
    number: int


@dataclass(frozen=True)
class DebuggerOpened(Report):
    channel: int


@dataclass(frozen=True)
class DebuggerClosed(Report):
    """The worker runs without that debugger; `reason` says why, where nobody asked for it."""

    channel: int
    reason: str = ""


@dataclass(frozen=True)
class Swept(Report):
    """The workers of an attempt are gone and the host is swept; `left` describes what could not be killed."""

    attempt: int
    swept: int  # processes that outlived their workers and were ended
    saved: int  # checkpoints that the workers said they saved in it
    left: list[str]


@dataclass(frozen=True)
class Bye(Report):
    """As Swept, and the agent exits; `reason` says why where no Stop has come."""

    swept: int
    left: list[str]
    reason: str
    not_kept: str = ""  # why nothing stays warm there that was to
    was_warm: bool = False  # its workers were forked from what an earlier run had left
    cold: str = ""  # why they were not, though there was something
