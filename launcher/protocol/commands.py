"""What a controller sends to an agent."""

from __future__ import annotations

from launcher.frozen import dataclass, field
from launcher.protocol.message import HEARTBEAT_S, STEP_TIMES, Command


@dataclass(frozen=True)
class Prepare(Command):
    """Check that the job can start here and say what this host has; `export` is for the workers alone.

    `lost_agents` are the identities of those that were lost here: what is left of their workers is ended before the
    answer.
    """

    run_id: str
    workdir: str
    script: str | None  # a file that must be readable from workdir; None for modules and programs
    program: str | None  # with --no-python: must be found in PATH
    export: dict[str, str]
    grace_s: float  # between a signal that ends the workers and SIGKILL
    lease_s: float  # the host is given up when it was not heard for so long: kill everything then; 0: no such limit
    lost_agents: list[str]
    part: int  # with --simulate: this is host `part` of `parts` on one machine, which share GPUs and cores
    parts: int
    interfaces: list[str]  # the network interfaces of which the first that is up is to be used; empty: by the routes
    through: str = ""  # as in StartWorker; what the workers are likely to run
    target: str = ""  # of a function, the packages that it uses, with commas
    workers: str = ""  # how many it will have: a number, gpu, gpu:2, auto or cpu; empty: as many as GPUs, or one
    start_method: str = "auto"  # auto, fork or exec
    heartbeat_s: float = HEARTBEAT_S  # the pause between heartbeats
    reports_steps: bool = False  # Stepped is sent
    step_times: int = STEP_TIMES  # of a worker, in a Timings at most
    names: list[str] = field(default_factory=list)  # of the variables in a StartWorker, as far as they are known
    keep_warm_s: float = 0.0  # so long after the run, what its workers were forked from is to stay; 0: it is ended


@dataclass(frozen=True)
class Function(Command):
    """A piece of what all workers call, and the position in it; before the first StartWorker that needs it."""

    at: int
    data: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class OpenStore(Command):
    """Bind the rendezvous store's socket on `address`.

    Empty: the address by which this host was reached, or that of its route `towards` another host.
    """

    attempt: int
    address: str
    towards: str
    port: int
    exact: bool  # the user named the port: do not take another


@dataclass(frozen=True)
class ReservePorts(Command):
    """Find free ports for workers that others connect to, on `address` as in OpenStore."""

    attempt: int
    address: str
    towards: str
    count: int


@dataclass(frozen=True)
class SharePrefixes(Command):
    """Say how the values of some variables of StartWorker.env begin, which only have the rest: it may be long."""

    attempt: int
    prefixes: dict[str, str] = field(repr=False)


@dataclass(frozen=True)
class StartWorker(Command):
    rank: int
    attempt: int
    # `script` or `module`: the first of argv is run by the agent's own Python; `function`: what came by Function is
    # called, and argv is as in Prepare.target; empty: a program.
    through: str
    argv: list[str]
    env: dict[str, str] = field(repr=False)  # it holds the run's key
    defaults: dict[str, str]  # set only where the worker would not inherit a value
    local_rank: int = 0  # on its host, whatever LOCAL_RANK says
    numa_binding: str = ""  # bind it to processors near its GPU: which of them
    gpu: str = ""  # the id of its first GPU; empty if it has none
    local_world_size: int = 1  # how many workers of its role the host has
    wait_s: float = 0.0  # so long it may wait for the imports of the process from which it is forked
    generation: int = 0  # the composition of the attempt that it is started for; 0: the first
    restart_policy: int = 0  # as in Exited, until it says its own
    has_input: bool = False  # its standard input is a pipe, for what Input brings; else it is empty


@dataclass(frozen=True)
class Input(Command):
    """Bytes for the standard input of a rank that has one, from the INPUT_BYTES that the agent keeps at most.

    `is_end`: no more follow. A process that takes the place of a dead one reads on from what was not written to it.
    """

    rank: int
    attempt: int
    is_end: bool = False
    data: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class RestartWorker(Command):
    """Start a worker of this attempt again that has failed, alone, once what it left is ended."""

    rank: int
    attempt: int
    restart: int  # its TORCHELASTIC_RESTART_COUNT


@dataclass(frozen=True)
class KillWorker(Command):
    """Send `signum` to a worker as if somebody else had: what becomes of it is its own failure."""

    rank: int
    attempt: int
    signum: int


@dataclass(frozen=True)
class LoseHost(Command):
    """Kill every process of the run on this host at once, the agent and its guard too: a simulated host is lost."""


@dataclass(frozen=True)
class NextGeneration(Command):
    """Tell every worker the number of the attempt's newest composition, and what it is in that.

    `when`: "now" they meet under it; "later" they stop, and wait for a newer number, since it is not known yet who
    takes part; "at_commit" they meet once they have committed, since others have joined, and nobody has failed.
    """

    attempt: int
    number: int
    when: str = "now"
    variables: dict[str, dict[str, str]] = field(default_factory=dict)  # by rank, those that are others from now on


@dataclass(frozen=True)
class SignalWorkers(Command):
    """Pass a signal on to every worker; nothing else changes."""

    signum: int


@dataclass(frozen=True)
class Suspend(Command):
    """Stop every process of the run where it is (SIGSTOP), or let it go on; the lease rests meanwhile."""

    suspended: bool


@dataclass(frozen=True)
class Collect(Command):
    """Say where every living worker stands: an Evidence for each, then Collected, within `limit_s`."""

    number: int
    limit_s: float
    ranks: list[int] = field(default_factory=list)  # only these, if any are named
    native: bool = False  # with the frames of C and C++, by py-spy


@dataclass(frozen=True)
class OpenDebugger(Command):
    """Have a debugger opened in a worker's main thread: DebuggerOpened once it is, DebuggerClosed at its end.

    Between them ChannelData goes both ways. See agent/debugging/.
    """

    channel: int  # its number in the run
    attempt: int
    rank: int
    debugger: str  # pdb or debugpy


@dataclass(frozen=True)
class CloseDebugger(Command):
    """Have the worker go on without the debugger, whether it is open yet or not; there is no answer."""

    channel: int


@dataclass(frozen=True)
class RestClocks(Command):
    """Take no silence of a worker for a stall from now on, since a debugger is open in a rank of the run; or do again.

    See agent/debugging/rest.py.
    """

    resting: bool


@dataclass(frozen=True)
class EndAttempt(Command):
    """Send `signum` to the workers, SIGKILL after the grace period, sweep, close the store; answer with Swept."""

    attempt: int
    signum: int


@dataclass(frozen=True)
class Stop(Command):
    """As EndAttempt, but answer with Bye and exit."""

    signum: int
