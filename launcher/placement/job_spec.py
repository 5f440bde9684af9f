"""The user's request, checked once: the JobSpec that cli/main.py makes and all packages below read."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from launcher.errors import UsageError
from launcher.hangs.watch import HangPolicy
from launcher.hosts.host import Host, HostKind
from launcher.placement.chaos_plan import ChaosPlan
from launcher.placement.roles import Roles

DEFAULT_PORT = 29500  # as torchrun's; if it is in use, another one is chosen
REPLAYABLE = "replayable"  # folder of these snapshots, in the run's
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")  # as torchrun's
MAX_WAIT_S = 30 * 86400.0  # waits of the operating system overflow far beyond it
MAX_SETUP = 16 << 10  # characters: it must fit into a pipe
_AT_MOST = f"at most {MAX_WAIT_S:g} (30 days)"

# Variables that are sent to other hosts automatically: settings of libraries that training scripts use.
_TRAVELLING = (
    "NCCL_", "GLOO_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "CUDA_", "CUBLAS_", "CUDNN_", "OMP_", "MKL_", "KMP_",
    "PYTHON", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "WANDB_", "TF_", "XLA_", "PJRT_", "LIBTPU_", "UCX_", "FI_",
    "RCCL_", "HSA_", "MIOPEN_", "CCL_", "ZE_FLAT_DEVICE_HIERARCHY", "DTRAIN_",
)  # fmt: skip
# Variables that dtrain sets for its own processes, workers and --on-end commands. Users do not set them.
INTERNAL_VARIABLES = frozenset(f"DTRAIN_{name}" for name in (
    "AGENT", "AGENT_SLOTS", "AGENT_MACHINE", "AGENT_WORKDIR", "AGENT_TREES", "FILE_LIMIT",
    "DEFAULTS", "ATTEMPT", "HOST", "ELASTIC", "LOST_AFTER_S", "PROGRESS_FILE", "ROLES", "RUN_KEY", "GENERATION",
    "GENERATION_PIPE", "GENERATION_FILE", "STATE_FILE", "COPY_FILE", "COPY_NOTE", "TIMELINE_FILE", "LEDGER_FILE",
    "DEBUGGER_FILE", "OWN_GPUS", "REPLAY", "REPLAY_PLAN", "REPLAYABLE_FOLDER",
    "RUN", "STATE", "EXIT_CODE", "CAUSE", "FOLDER", "IN_ON_END",
))  # fmt: skip
# Never sent: variables of this host or of this process.
_STAYING = INTERNAL_VARIABLES | {
    "CUDA_VISIBLE_DEVICES", "PYTHONHOME", "PYTHONSTARTUP", "TF_CONFIG", "DTRAIN_TOKEN_FILE", "DTRAIN_TOKEN",
    "DTRAIN_SETUP",
    "PJRT_LOCAL_PROCESS_RANK", "PJRT_LOCAL_PROCESS_COUNT",
}  # fmt: skip
_SECRET = {"DTRAIN_TOKEN", "DTRAIN_RUN_KEY"}  # the first is not for workers, the second differs in every run


class CommandKind(Enum):
    SCRIPT = "script"
    MODULE = "module"
    PROGRAM = "program"  # --no-python
    FUNCTION = "function"  # of launcher.launch()


_STANDARD_INPUT = ("/dev/stdin", "/dev/fd/0", "/proc/self/fd/0", "/proc/thread-self/fd/0")


@dataclass(frozen=True)
class WorkerCommand:
    """The command of every worker: a script file, a module (`python -m`) or any program, with its arguments.

    For a function, `target` are the packages that it uses, separated by commas, and the only argument is its name.
    """

    kind: CommandKind
    target: str
    args: tuple[str, ...] = ()

    @property
    def is_standard_input(self) -> bool:
        """Return whether the script is read from the standard input of one rank; that of the others is empty."""
        return self.kind is CommandKind.SCRIPT and self.target in _STANDARD_INPUT


def parse_command(argv: Sequence[str]) -> WorkerCommand:
    """Parse a command: a Python script by its suffix, `-m MODULE`, else any program."""
    if argv[0] == "-m" and len(argv) > 1:
        return WorkerCommand(CommandKind.MODULE, argv[1], tuple(argv[2:]))
    kind = CommandKind.SCRIPT if argv[0].endswith(".py") else CommandKind.PROGRAM
    return WorkerCommand(kind, argv[0], tuple(argv[1:]))


START_METHODS = ("auto", "fork", "exec")
TORCHRUN_START_METHODS = ("spawn", "forkserver")  # besides fork; it does not start programs with them


@dataclass(frozen=True)
class SshOptions:
    """Options for reaching remote hosts; None and 0 mean OpenSSH's own defaults."""

    config: Path | None = None
    accept_new: bool = False
    command: tuple[str, ...] = ()  # the site's own client; empty: paramiko


@dataclass(frozen=True)
class JobSpec:
    """A run. `nproc` is a number of workers for each host, or `gpu`, `cpu`, `auto`, or None: the number of its slots,
    else one for each GPU, else one."""

    command: WorkerCommand
    hosts: tuple[Host, ...]
    nnodes: tuple[int, int] | None = None  # least and most hosts of an attempt; None: all. More are spares
    nproc: int | str | None = None
    gpus_per_proc: int | None = None
    oversubscribe: bool = False
    workdir: Path = field(default_factory=Path.cwd)
    python: str = ""
    export: tuple[tuple[str, str], ...] = ()
    log_dir: Path = Path("runs")
    run_id: str = ""
    start_timeout_s: float = 60.0
    grace_s: float = 10.0
    max_restarts: int = 0
    grow: bool = False
    heartbeat_timeout_s: float = 30.0
    stall_timeout_s: float | None = None
    hang: HangPolicy = field(default_factory=HangPolicy)
    on_nonfinite: str = "warn"  # or "stop": reaction to gradients that are infinite or NaN
    flight_recorder: str = "on"  # or "off": whether torch's record of collectives is switched on and read
    replayable: int | None = None  # steps between two snapshots for dtrain replay
    chaos: ChaosPlan | None = None  # deliberate faults
    master_addr: str | None = None
    master_port: int | None = None
    interfaces: tuple[str, ...] = ()
    roles: Roles = field(default_factory=Roles)
    env_for: tuple[str, ...] = ()  # other launchers whose variables the workers get as well
    pass_local_rank: bool = False  # as the script's first argument
    virtual_local_rank: bool = False  # each worker sees only its own GPU, and LOCAL_RANK 0
    last_call_s: float | None = None  # wait for late hosts once enough are ready; None: see job/gathering.py
    signals: tuple[str, ...] = SIGNALS  # that end a run, or show stacks
    numa_binding: str = ""  # one of numa.MODES
    start_method: str = "auto"  # one of START_METHODS
    keep_warm_s: float = 0.0  # how long the processes that workers are forked from stay after the run
    hosts_script: str | None = None  # a program that prints the present hosts
    first_attempt: int = 0  # number of earlier starts of the job
    requeue: bool = False  # after USR1, the run ends as soon as a checkpoint is saved
    ssh: SshOptions = SshOptions()
    setup: str = ""  # a shell line that each host runs before its agent, which gets the environment that it leaves
    agent_prefix: tuple[str, ...] = ()  # a command that runs the agent
    launch_prefix: tuple[str, ...] = ()  # a command that runs each worker, with {rank}, {local_rank} and {host}
    stdin_rank: int | None = None  # rank that reads this command's standard input
    sync: tuple[str, ...] = ()  # what is sent to the hosts: code, env
    fetch: tuple[str, ...] = ()  # patterns of files that are brought back from remote hosts at the end
    names_workdir: bool = False  # the user chose the working directory, which the hosts may have

    @property
    def min_hosts(self) -> int:
        return len(self.hosts) if self.nnodes is None else self.nnodes[0]

    @property
    def max_hosts(self) -> int:
        return len(self.hosts) if self.nnodes is None else self.nnodes[1]

    @property
    def elastic(self) -> bool:
        """Return whether an attempt may run without one of the hosts, so that losing a host costs no restart."""
        return self.min_hosts < max(self.max_hosts, len(self.hosts))

    def command_of(self, role: str) -> WorkerCommand:
        """Return the command of a role's processes."""
        argv = self.roles.command(role)
        return parse_command(argv) if argv else self.command

    def __post_init__(self) -> None:
        if not self.hosts:
            raise UsageError("a job needs at least one host")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", self.run_id):
            raise UsageError(
                f"run id {self.run_id!r} names a folder: letters, digits, '.', '_' and '-' are allowed, at most 128"
            )
        if not 0 < self.start_timeout_s <= MAX_WAIT_S:  # rejects nan as well
            raise UsageError(
                f"--start-timeout-s is {self.start_timeout_s:g}; it must be more than 0 seconds, {_AT_MOST}"
            )
        if not 0 <= self.grace_s <= MAX_WAIT_S:
            raise UsageError(f"--grace-s is {self.grace_s:g}; it must be 0 seconds or more, {_AT_MOST}")
        if not 0 <= self.max_restarts <= 1_000_000:
            raise UsageError(f"--max-restarts is {self.max_restarts}; it must be 0 to 1000000")
        if not 1 <= self.heartbeat_timeout_s <= MAX_WAIT_S:
            raise UsageError(
                f"--heartbeat-timeout-s is {self.heartbeat_timeout_s:g}; it must be 1 second or more, {_AT_MOST}"
            )
        if self.stall_timeout_s is not None and not 1 <= self.stall_timeout_s <= MAX_WAIT_S:
            raise UsageError(f"--stall-timeout-s is {self.stall_timeout_s:g}; it must be 1 second or more, {_AT_MOST}")
        if self.replayable is not None and self.replayable < 1:
            raise UsageError(f"--replayable is {self.replayable}; it must be 1 step or more")
        self._check_keep_warm()
        self._check_setup()
        if self.sync and any(host.kind is HostKind.JOINED for host in self.hosts):
            raise UsageError(
                "--sync sends nothing to nodes that are started by hand: each runs its own dtrain, and so has its "
                "Python and packages, before it connects; name hosts with --hosts, or copy the code there"
            )
        if self.fetch and any(host.kind is HostKind.JOINED for host in self.hosts):
            raise UsageError(
                "--fetch brings nothing from nodes that each start dtrain, by hand or by srun: it connects to none; "
                "name hosts with --hosts, or have the script write where all nodes see it"
            )
        self._check_chaos()
        if not 1 <= self.min_hosts <= self.max_hosts:
            raise UsageError(f"--nnodes is {self.min_hosts}:{self.max_hosts}; write MIN:MAX with 1 <= MIN <= MAX")
        if self.min_hosts > len(self.hosts):
            names = ", ".join(host.name for host in self.hosts)
            are = "1 is" if len(self.hosts) == 1 else f"{len(self.hosts)} are"
            raise UsageError(f"--nnodes needs {self.min_hosts} hosts, only {are} named: {names}")
        if self.grow and not self.elastic:
            raise UsageError("--grow needs room to grow: write --nnodes MIN:MAX")
        if self.gpus_per_proc is not None and self.gpus_per_proc < 1:
            raise UsageError(f"--gpus-per-proc is {self.gpus_per_proc}; it must be 1 or more")
        if not 0 <= self.first_attempt <= 1_000_000:
            raise UsageError(f"the job was started {self.first_attempt} times before; it must be 0 to 1000000")
        if self.master_port is not None and not 1 <= self.master_port <= 65535:
            raise UsageError(f"--master-port is {self.master_port}; a port is 1 to 65535")

    def _check_setup(self) -> None:
        if len(self.setup) > MAX_SETUP:
            raise UsageError(f"--setup has {len(self.setup)} characters; put more than {MAX_SETUP} into a file there")
        if self.setup and any(host.parts > 1 for host in self.hosts):
            raise UsageError("--setup is not for hosts that are simulated; run its line here, before dtrain")

    def _check_chaos(self) -> None:
        for fault in () if self.chaos is None else self.chaos.faults:
            if fault.target == "host" and any(host.kind is not HostKind.SIMULATED for host in self.hosts):
                raise UsageError("--chaos kills hosts only if they are simulated: add --simulate, or kill workers")
            if fault.action == "stop" and not self.hang.acts:
                raise UsageError("--chaos stops a worker, and nothing would end it: add --hang auto")

    def _check_keep_warm(self) -> None:
        if not self.keep_warm_s:
            return
        if not 1 <= self.keep_warm_s <= MAX_WAIT_S:
            raise UsageError(f"--keep-warm is {self.keep_warm_s:g} s; it must be 1 second or more, {_AT_MOST}")
        if self.start_method == "exec":
            raise UsageError(
                "--keep-warm keeps the process that workers are forked from; --start-method exec forks none"
            )
        if self.launch_prefix:
            raise UsageError("--keep-warm keeps the process that workers are forked from; --launch-prefix forks none")
        if self.setup or self.agent_prefix:
            raise UsageError("--keep-warm is not for agents that --setup or --agent-prefix prepares; leave it out")
        if self.command.kind is CommandKind.PROGRAM:
            raise UsageError(
                "--keep-warm keeps the process that Python workers are forked from; --no-python starts none"
            )
        if any(host.kind is HostKind.SRUN for host in self.hosts):
            raise UsageError("--keep-warm leaves processes behind, which a SLURM job must not have; leave it out here")
        if any(host.kind is HostKind.JOINED for host in self.hosts):
            raise UsageError("--keep-warm is for runs on one machine, not for nodes started by hand")
        if any(host.remote for host in self.hosts):
            raise UsageError("--keep-warm is for runs on this machine alone, not over SSH; leave it out")


def parse_duration(text: str, option: str) -> float:
    """Parse `90s`, `10m`, `1.5h` or a number of seconds. Raises UsageError."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)([smh]?)", text)
    if match is None:
        raise UsageError(f"{option} is {text!r}; write a time such as 90s, 10m or 1h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def parse_hang(text: str) -> HangPolicy:
    """Parse `--hang`: off, report, auto or the least time. Raises UsageError."""
    if text in ("off", "report", "auto"):
        return HangPolicy(watches=text != "off", acts=text == "auto")
    try:
        quiet_s = parse_duration(text, "--hang")
    except UsageError:
        raise UsageError(f"--hang is {text!r}; write off, report, auto, or a time such as 30s or 10m") from None
    if not 1 <= quiet_s <= MAX_WAIT_S:
        raise UsageError(f"--hang is {text}; it must be 1 second or more, {_AT_MOST}")
    return HangPolicy(acts=True, quiet_s=quiet_s)


def parse_nnodes(text: str | None) -> tuple[int, int] | None:
    """Parse `--nnodes`: N or MIN:MAX."""
    if text is None:
        return None
    match = re.fullmatch(r"(-?[0-9]{1,6})(?::([0-9]{1,6}))?", text)
    if match is None:
        raise UsageError(f"--nnodes is {text!r}; it must be a number of hosts, or MIN:MAX")
    least, most = int(match[1]), int(match[2] or match[1])
    if least < 1:
        raise UsageError(f"--nnodes is {text}; it must be 1 or more")
    if least > most:
        raise UsageError(f"--nnodes is {text}; in MIN:MAX, MAX must be at least MIN")
    return least, most


def parse_nproc(text: str | None) -> int | str | None:
    """Parse `--nproc-per-node`."""
    if text is None or text in ("auto", "gpu", "cpu"):
        return text
    if re.fullmatch(r"0*[1-9][0-9]{0,5}", text):  # a larger number is a mistake, and would fill the memory here
        return int(text)
    raise UsageError(f"--nproc-per-node is {text!r}; it must be a number from 1, or auto, gpu or cpu")


def new_run_id(now: float | None = None) -> str:
    """Return a unique run id that sorts by time."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    return f"{stamp}-{os.urandom(2).hex()}"


def parse_exports(wanted: tuple[str, ...], env: dict[str, str], *, remote: bool) -> dict[str, str]:
    """Return the variables that workers get in addition to those inherited on their own hosts.

    `wanted` are `NAME`, `NAME=VALUE` or a glob such as `MY_*`. Settings of known libraries are also sent to remote
    hosts. Raises UsageError for a name that is not set.
    """
    chosen: dict[str, str] = {}
    if remote:
        chosen = {k: v for k, v in env.items() if k.startswith(_TRAVELLING) and k not in _STAYING}
    for item in wanted:
        name, equals, value = item.partition("=")
        if not name or (equals and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)):
            raise UsageError(f"--export {item.partition('=')[0]!r} is not the name of a variable")
        if equals:
            chosen[name] = value
        elif any(character in name for character in "*?["):
            chosen.update(_matching(name, env))
        elif name in env:
            chosen[name] = env[name]
        else:
            raise UsageError(f"--export {name}: it is not set here; write {name}=VALUE, or set it first")
    return chosen


def _matching(pattern: str, env: dict[str, str]) -> dict[str, str]:
    from fnmatch import fnmatchcase

    return {k: v for k, v in env.items() if fnmatchcase(k, pattern) and k not in _SECRET}
