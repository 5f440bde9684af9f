"""Messages from a controller to an agent."""

from __future__ import annotations

from launcher.frozen import dataclass, field
from launcher.protocol.message import HEARTBEAT_S, STEP_TIMES, Command


@dataclass(frozen=True)
class Prepare(Command):
    """Check whether the job can start here and report what this host has; `export` is for the workers alone.

    `lost_agents` are the identities of agents that were lost here: leftovers of their workers are ended before the
    answer.
    """

    run_id: str
    workdir: str
    script: str | None  # a file that must be readable from workdir; None for modules and programs
    program: str | None  # with --no-python: must be found in PATH
    export: dict[str, str]
    grace_s: float  # between the signal that ends workers and SIGKILL
    lease_s: float  # the host is given up after a silence this long: then kill everything; 0: no limit
    lost_agents: list[str]
    part: int  # with --simulate: this is host `part` of `parts` on one machine, sharing GPUs and cores
    parts: int
    interfaces: list[str]  # network interfaces; the first that is up is used; empty: chosen by routes
    through: str = ""  # as in StartWorker; how workers will probably be started
    target: str = ""  # the script or module; for a function, the packages that it uses, separated by commas
    workers: str = ""  # number of workers, gpu, gpu:2, auto or cpu; empty: one for each GPU, or one
    start_method: str = "auto"  # auto, fork or exec
    heartbeat_s: float = HEARTBEAT_S  # pause between heartbeats
    reports_steps: bool = False  # send Stepped
    step_times: int = STEP_TIMES  # most records of a worker in a Timings
    names: list[str] = field(default_factory=list)  # known names of variables in a StartWorker
    keep_warm_s: float = 0.0  # how long the process that workers are forked from stays after the run; 0: it is ended
    flight_recorder: bool = False  # have torch record collectives, and read what it has recorded
    behind: str = ""  # program of the launch prefix: must be found in PATH; no worker is forked
    own_connection: bool = False  # SSH_CONNECTION is how this agent was reached, not how the user has logged in


@dataclass(frozen=True)
class Function(Command):
    """A piece of the function that all workers call, and its position; sent before the first StartWorker using it."""

    at: int
    data: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class OpenStore(Command):
    """Bind the rendezvous store's socket on `address`.

    Empty: the address at which this host was reached, or that of its route `towards` another host.
    """

    attempt: int
    address: str
    towards: str
    port: int
    exact: bool  # the user chose the port: do not use another


@dataclass(frozen=True)
class ReservePorts(Command):
    """Find free ports for workers that others connect to, on `address` as in OpenStore."""

    attempt: int
    address: str
    towards: str
    count: int


@dataclass(frozen=True)
class SharePrefixes(Command):
    """Set prefixes for values of variables in StartWorker.env, which contain only the rest: a prefix may be long."""

    attempt: int
    prefixes: dict[str, str] = field(repr=False)


@dataclass(frozen=True)
class StartWorker(Command):
    rank: int
    attempt: int
    # `script` or `module`: the agent's own Python runs the first of argv; `function`: call the function sent by
    # Function, argv is as in Prepare.target; empty: a program.
    through: str
    argv: list[str]
    env: dict[str, str] = field(repr=False)  # contains the run's key
    defaults: dict[str, str]  # set only if the worker inherits no value
    local_rank: int = 0  # on its host, which may differ from LOCAL_RANK
    numa_binding: str = ""  # mode of binding it to processors near its GPU
    gpu: str = ""  # the id of its first GPU; empty if it has none
    local_world_size: int = 1  # number of workers of its role on the host
    wait_s: float = 0.0  # how long it may wait for the imports of the process that it is forked from
    generation: int = 0  # composition of the attempt that it is started for; 0: the first
    restart_policy: int = 0  # as in Exited, until it reports its own
    input_channel: int = 0  # its standard input is a pipe, for ChannelData; 0: it is empty
    prefix: list[str] = field(default_factory=list)  # the launch prefix, before its command


@dataclass(frozen=True)
class RestartWorker(Command):
    """Restart a failed worker of this attempt alone, once its leftovers are ended."""

    rank: int
    attempt: int
    restart: int  # its TORCHELASTIC_RESTART_COUNT


@dataclass(frozen=True)
class KillWorker(Command):
    """Send `signum` to a worker as another process would: its end then counts as its own failure."""

    rank: int
    attempt: int
    signum: int


@dataclass(frozen=True)
class LoseHost(Command):
    """Kill every process of the run on this host at once, including agent and guard: a simulated host is lost."""


@dataclass(frozen=True)
class NextGeneration(Command):
    """Announce the attempt's newest composition to every worker, with its variables in it.

    `when`: "now" they meet under it; "later" they stop and wait for a newer number, since the participants are not
    known yet; "at_commit" they meet after their next commit, since others have joined and none has failed.
    """

    attempt: int
    number: int
    when: str = "now"
    variables: dict[str, dict[str, str]] = field(default_factory=dict)  # by rank, those that change


@dataclass(frozen=True)
class SignalWorkers(Command):
    """Pass a signal on to every worker; nothing else changes."""

    signum: int


@dataclass(frozen=True)
class Suspend(Command):
    """Stop every process of the run (SIGSTOP), or continue it; the lease rests meanwhile."""

    suspended: bool


@dataclass(frozen=True)
class Collect(Command):
    """Report the state of every living worker: an Evidence for each, then Collected, within `limit_s`."""

    number: int
    limit_s: float
    ranks: list[int] = field(default_factory=list)  # only these, if any are named
    native: bool = False  # with C and C++ frames, by py-spy


@dataclass(frozen=True)
class OpenDebugger(Command):
    """Open a debugger in a worker's main thread: DebuggerOpened once it is open, DebuggerClosed at its end.

    In between, ChannelData goes both ways. See agent/debugging/.
    """

    channel: int  # its number in the run
    attempt: int
    rank: int
    debugger: str  # pdb or debugpy


@dataclass(frozen=True)
class CloseDebugger(Command):
    """Let the worker continue without the debugger, even if it is not open yet; there is no answer."""

    channel: int


@dataclass(frozen=True)
class RestClocks(Command):
    """Stop, or resume, counting silences of workers: meanwhile a debugger is open in a rank of the run.

    See Rest in agent/debugging/channels.py.
    """

    resting: bool


@dataclass(frozen=True)
class EndAttempt(Command):
    """Send `signum` to the workers, SIGKILL after the grace period, sweep, close the store; answer with Swept."""

    attempt: int
    signum: int


@dataclass(frozen=True)
class Stop(Command):
    """Like EndAttempt, but answer with Bye and exit."""

    signum: int
