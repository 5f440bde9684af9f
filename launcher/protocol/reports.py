"""Messages from an agent to its controller."""

from __future__ import annotations

from launcher.frozen import dataclass, field
from launcher.protocol.message import Report


@dataclass(frozen=True)
class Hello(Report):
    """The first message of an agent, sent before it receives any."""

    protocol: int
    version: str
    python: str
    hostname: str
    pid: int
    agent_identity: str  # lets another agent on this host find leftovers of this one: cleanup/leftovers.py
    time: float  # this host's monotonic clock, as in every `time` below


@dataclass(frozen=True)
class Facts(Report):
    gpus: list[str]  # ids in the order in which workers get them
    gpu_variable: str  # CUDA_VISIBLE_DEVICES, or that of another vendor; see machine/gpus/vendors.py
    gpus_verified: bool  # seen by the driver, not only listed in the environment
    cores: list[int]  # processors this host's workers may use
    cpu_limit: int  # how many may be busy at a time (cgroup quota)
    problems: list[str]  # why the job cannot start here
    time: float
    left: list[str] = field(default_factory=list)  # processes of lost agents (Prepare.lost_agents) that cannot be ended
    slots: int | None = None  # number of workers, if it was set on the host itself
    machine: str = ""  # identifies the machine, if several agents may be on one
    room: int | None = None  # number of workers that its limits allow
    room_limit: str = ""  # the tightest of these limits
    killed_runs: int = 0  # earlier runs of this user that were killed, agents included; their leftovers are removed
    ended: int = 0  # ended processes of those
    not_ended: list[str] = field(default_factory=list)  # processes of those that cannot be ended
    gpu_trouble: str = ""  # why the GPUs that torch was built for are not known, though their driver is there


@dataclass(frozen=True)
class StoreOpened(Report):
    attempt: int
    address: str
    port: int


@dataclass(frozen=True)
class PortsReserved(Report):
    """The ports are free, and stay reserved until the first worker is started."""

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
    by_exec: str = ""  # why it was not forked from a process with its packages imported; empty if it was
    costs_s: float = 0.0  # least delay caused by the package that prevents that; 0: no package does


@dataclass(frozen=True)
class Stepped(Report):
    """A process has made its first training step."""

    attempt: int
    rank: int


@dataclass(frozen=True)
class Output(Report):
    """Bytes that a worker wrote, as read: cut anywhere, in any encoding. `stream` is 1, 2 or LEDGER."""

    rank: int
    stream: int
    data: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class Returned(Report):
    """A piece of the result or exception of a worker's function; in order, and before its Exited."""

    attempt: int
    rank: int
    data: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class Asks(Report):
    """A worker waits for its standard input after an unfinished line, a prompt; or no longer does."""

    rank: int
    waits: bool


@dataclass(frozen=True)
class Collective:
    """A call of a collective, as torch's flight recorder has it."""

    group: str  # the same in all of its ranks
    number: int  # in that group, from 1
    operation: str  # all_reduce
    tensors: str  # dtypes and shapes of its input: Float[3, 4]
    elements: int  # of all of them
    done: bool


@dataclass(frozen=True)
class Collectives:
    """The newest collectives of a rank, in order, and the process groups that it is in."""

    groups: list[str]
    calls: list[Collective]


@dataclass(frozen=True)
class Exited(Report):
    """A worker ended. `status` is the exit code, or minus the signal's number, as in subprocess."""

    attempt: int
    rank: int
    pid: int
    status: int
    ran_s: float
    provoked: bool  # the agent had already signalled it
    killer: str  # what killed it, if known; else empty
    error: (
        dict[str, str] | None
    )  # type, message, where, inside, failed_ranks, as the worker wrote; only where: for sys.exit
    error_file: str | None  # the whole text of that file
    time: float  # of the exception if one is known, else of the exit
    restart_policy: int = 0  # see job/recovery/restarts.py; 0: its failure ends the attempt
    steps: int = 0  # steps that it reported
    saved: int = 0  # checkpoints that it reported
    unsaved: int | None = 0  # steps since the newest one; None: it trained without ddp, so checkpoints are not known
    recorded_step: int = 0  # of the ledger, in which it ended; 0: it has none
    by_exec: str = ""  # as in Started...
    costs_s: float = 0.0  # if the duration of that package's import is known only now
    stderr: str = field(default="", repr=False)  # its last part, if the process aborted
    collectives: Collectives | None = field(default=None, repr=False)  # if it failed by itself, and torch has them


@dataclass(frozen=True)
class Timings(Report):
    """Time use of the workers of a host since the last such message: timeline/records.py unpacks `data`.

    Also relates this host's clock to the controller's, by the newest heartbeat that had a sending time.
    """

    attempt: int
    time: float
    asked: float = 0.0  # when that heartbeat was sent, by the controller's clock; 0: there was none
    asked_at: float = 0.0  # when it was received, by this host's clock
    lost: int = 0  # records that workers overwrote before they were read
    data: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class HostUse(Report):
    """Use of a host's memory, processors and GPUs, sent regularly; unknown values are left out."""

    attempt: int
    memory_bytes: int  # in use, of the host or of the limit that applies to the workers
    memory_limit_bytes: int
    resident_bytes: dict[str, int] = field(default_factory=dict)  # by rank, with the worker's children
    gpus: dict[str, list[int]] = field(
        default_factory=dict
    )  # by rank, its first GPU: percent busy, bytes in use, total bytes
    pids: dict[str, int] = field(default_factory=dict)  # by rank
    waited_s: dict[str, float] = field(default_factory=dict)  # by rank, of its first thread, for a processor


@dataclass(frozen=True)
class Failing(Report):
    """A worker has failed, by an exception or an exit code, but its process has not ended yet; Exited follows."""

    attempt: int
    rank: int
    pid: int
    status: int  # its future exit code
    ran_s: float
    error: dict[str, str] | None  # as in Exited
    time: float  # of the exception, or of sys.exit()
    recorded_step: int = 0  # as in Exited


@dataclass(frozen=True)
class Evidence(Report):
    """The state of one worker: the kernel's data, and the stacks of its threads if available."""

    number: int  # of the Collect
    attempt: int
    rank: int
    pid: int
    state: str  # as in /proc/PID/stat: R, S, D, T...
    waits_in: str  # kernel function it waits in (/proc/PID/wchan), or empty
    rss_bytes: int
    cpu_s: float
    stack: str  # every thread, the main thread last, as Python's faulthandler prints it
    silent_s: float = 0.0  # since its last sign of life; see hangs/watch.py
    phase: int = 0  # its present phase; see ddp/monitoring/progress.py
    steps: int = 0  # steps that it reported
    tree_cpu_s: float = 0.0  # CPU time of it and its children
    at_disk: bool = False  # one of them is in state D
    traced: bool = False  # a debugger traces it
    native: str = ""  # stacks with C and C++ frames, if requested
    no_native: str = ""  # why they are not available
    collectives: Collectives | None = None  # if torch has recorded any, and the worker has answered


@dataclass(frozen=True)
class Collected(Report):
    number: int
    devices: list[str] = field(default_factory=list)  # what has gone wrong with this host's GPUs, a line for each


@dataclass(frozen=True)
class DebuggerOpened(Report):
    channel: int


@dataclass(frozen=True)
class DebuggerClosed(Report):
    """The worker runs without that debugger; `reason` is set if that was not requested."""

    channel: int
    reason: str = ""


@dataclass(frozen=True)
class Swept(Report):
    """The workers of an attempt are gone and the host is swept; `left` describes what could not be killed."""

    attempt: int
    swept: int  # processes that outlived their workers and were ended
    saved: int  # checkpoints that the workers reported in it
    left: list[str]


@dataclass(frozen=True)
class Bye(Report):
    """Like Swept, and the agent exits; `reason` is set if no Stop was received."""

    swept: int
    left: list[str]
    reason: str
    not_kept: str = ""  # why no process stays warm there although it was requested
    was_warm: bool = False  # its workers were forked from a process of an earlier run
    cold: str = ""  # why they were not, although there was one
