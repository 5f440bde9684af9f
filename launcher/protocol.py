"""The framed protocol between controller and agent, the same on every byte stream.

A stream begins with PREAMBLE in each direction (whatever a login shell prints before it is skipped), then frames:
4 bytes header length, 4 bytes payload length (big endian), a JSON header, raw payload bytes, a line feed (srun passes
only whole lines on). The payload is the field `data` of a message that has one. Nothing here is a pickle, nor is a
payload ever read as one but by a worker and by who called launcher.launch(). Messages are flat dataclasses, by whose
annotations decode.py checks what arrives.
"""

from __future__ import annotations

import json
import re
import struct
from typing import Any, ClassVar

from launcher.decode import decode_dataclass, parse_json
from launcher.errors import ProtocolError
from launcher.frozen import dataclass, field

PROTOCOL = 12
PREAMBLE = b"\n\x01dtrain-stream-1\n"
MAX_HEADER_BYTES = 8 << 20  # the environment of a worker is the largest thing in a header
MAX_PAYLOAD_BYTES = 1 << 20
INPUT_BYTES = 1 << 16  # of a rank's standard input that are sent and not taken yet
CHANNEL_BYTES = 256 << 10  # see ChannelData
MAX_NOISE_BYTES = 1 << 20  # what a login shell may print before the preamble
RESILIENT = 3  # of restart_policy: the process can meet others in any composition
HEARTBEAT_S = 1.0
STEP_TIMES = 10  # of one worker, between two heartbeats
HEARTBEATS = 10  # at least so many in the heartbeat timeout
MACHINE_HEARTBEATS = 100  # a second, of all the agents on one machine: else they would be most of what many do
# What an agent gets through its environment from who starts it, where that is not the controller.
AGENT_SLOTS = "DTRAIN_AGENT_SLOTS"
AGENT_MACHINE = "DTRAIN_AGENT_MACHINE"
AGENT_WORKDIR = "DTRAIN_AGENT_WORKDIR"  # where the command was typed there
# The variables of a worker that may be others in another composition of its attempt.
COMPOSED = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DTRAIN_ROLES",
)  # fmt: skip
_LENGTHS = struct.Struct(">II")
_END = b"\n"
_to_json = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps would make one each time


class Message:
    """Goes over a stream under its `kind`, the name of its class: `start_worker`. Command and Report say which way."""

    kind: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.kind = re.sub("(?<!^)([A-Z])", r"_\1", cls.__name__).lower()


class Command(Message):
    """What a controller sends."""


class Report(Message):
    """What an agent sends."""


# Controller to agent


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


# Agent to controller


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
    gpu_variable: str  # CUDA_VISIBLE_DEVICES, or that of another vendor; see machine/devices.py
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
    error: dict[str, str] | None  # type, message, where, inside, failed_ranks; from the file that the worker wrote
    error_file: str | None  # that file's whole text
    time: float  # of the exception where one is known, else of the exit
    restart_policy: int = 0  # see job/recovery/restarts.py; 0: its failure ends the attempt
    steps: int = 0  # that it said it made
    saved: int = 0  # checkpoints that it said it saved
    unsaved: int = 0  # steps since the newest one


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
    """What a host's memory and its workers' GPUs are used for, now and then; what cannot be known is left out."""

    attempt: int
    memory_bytes: int  # in use, of the host or of the limit that holds for the workers
    memory_limit_bytes: int
    resident_bytes: dict[str, int] = field(default_factory=dict)  # by rank, with the worker's children
    gpus: dict[str, list[int]] = field(
        default_factory=dict
    )  # by rank, its first: percent busy, bytes in use, of how many


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


# dtrain check, whose examiner says Hello as well


@dataclass(frozen=True)
class Question(Command):
    ask: str
    about: dict[str, Any]


@dataclass(frozen=True)
class Answer(Report):
    """What was asked for, in the order of the questions; or why it cannot be said."""

    value: Any
    problem: str = ""


# Both ways


@dataclass(frozen=True)
class ChannelData(Command, Report):
    """Bytes from or for a debugger. No more than CHANNEL_BYTES are on the way before the other end has taken some."""

    channel: int
    data: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class ChannelTaken(Command, Report):
    """So many bytes of the other direction have been passed on."""

    channel: int
    count: int


@dataclass(frozen=True)
class Heartbeat(Command, Report):
    time: float  # by the agent's clock, when it was sent; to an agent: when it was heard last, which renews its lease
    progress: int = 0  # of the host's workers: a number that changes when they write, or finish a step
    saved: int = 0  # checkpoints that they said they saved in this attempt
    steps: int = 0  # of training, that they said they made
    silent_s: float = 0.0  # since the last sign of life of that worker of the host which has shown none for longest
    silent_in: int = 0  # its phase
    longest_s: list[float] = field(default_factory=list)  # by phase, the longest silence that has ended
    stopped: list[int] = field(default_factory=list)  # ranks that a signal has stopped, at this look and at the last
    resilient: bool = False  # whether all of them that run have restart policy 3, so can go on with other hosts
    sent: float = 0.0  # to an agent: when, by the controller's clock, which Timings repeats


def heartbeat_pause_s(timeout_s: float, agents: int) -> float:
    """Return how often an agent speaks, with so many on its machine; how soon its silence means something, too."""
    return min(max(HEARTBEAT_S, agents / MACHINE_HEARTBEATS), timeout_s / HEARTBEATS)


_KINDS: dict[str, type[Message]] = {cls.kind: cls for way in (Command, Report) for cls in way.__subclasses__()}


def encode(message: Message) -> bytes:
    """Return the frame of a message."""
    fields: dict[str, Any] = dict(vars(message))
    payload: bytes = fields.pop("data", b"")
    fields["kind"] = message.kind
    header = _to_json(fields).encode()
    return b"".join((_LENGTHS.pack(len(header), len(payload)), header, payload, _END))


class Decoder:
    """Turns the bytes of one direction of a stream into messages, however they were cut."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._begun = False
        self.noise = b""  # what came before the preamble

    def feed(self, data: bytes) -> list[Message]:
        """Take the next bytes and return the messages that they complete.

        Raises ProtocolError for lengths, JSON or fields that this version does not send.
        """
        self._buffer += data
        if not self._begun and not self._skip_noise():
            return []
        messages = []
        at = 0
        while len(self._buffer) - at >= _LENGTHS.size:
            header_bytes, payload_bytes = _LENGTHS.unpack_from(self._buffer, at)
            if header_bytes > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
                raise ProtocolError(f"a frame of {header_bytes} + {payload_bytes} bytes is over the limit")
            end_of_header = at + _LENGTHS.size + header_bytes
            end = end_of_header + payload_bytes
            if len(self._buffer) < end + len(_END):
                break
            header = bytes(self._buffer[at + _LENGTHS.size : end_of_header])
            messages.append(_message(header, bytes(self._buffer[end_of_header:end])))
            at = end + len(_END)
        del self._buffer[:at]
        return messages

    def _skip_noise(self) -> bool:
        start = self._buffer.find(PREAMBLE)
        if start < 0:
            if len(self._buffer) > MAX_NOISE_BYTES:
                raise ProtocolError("over 1 MiB of other text came before the agent's greeting")
            self.noise = bytes(self._buffer)
            return False
        self.noise = bytes(self._buffer[:start])
        del self._buffer[: start + len(PREAMBLE)]
        self._begun = True
        return True


def _message(header: bytes, payload: bytes) -> Message:
    try:
        fields = parse_json(header)
        cls = _KINDS[fields.pop("kind")]
        if payload:
            fields["data"] = payload
        return decode_dataclass(cls, fields)
    except (ProtocolError, KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(f"a frame is not a message of protocol {PROTOCOL}: {error}") from error
