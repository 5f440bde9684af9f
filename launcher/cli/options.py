"""The options of `dtrain run`, `plan` and `check`: one dataclass. Its fields are the options.

A field's name is the long flag (`grace_s`: --grace-s), the variable (DTRAIN_GRACE_S) and the key in the config file;
its annotation is the type. A new option is one field here, and its use. Options that the job has unchanged are listed
in request.py, with the same name in JobSpec, which also has their defaults.
"""

from __future__ import annotations

import difflib
import functools
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from launcher.errors import UsageError
from launcher.machine.numa import MODES
from launcher.placement.job_spec import INTERNAL_VARIABLES, START_METHODS, TORCHRUN_START_METHODS, JobSpec, parse_nnodes

_OTHERS = "Options"  # heading of options without a group
CONFIG_SOURCE = "launcher.config_source"  # in click's context: the file that the defaults are from

# Variables for users that belong to no option.
_NO_OPTION = frozenset(f"DTRAIN_{name}" for name in ("BACKEND", "STRATEGY", "TOKEN", "TORCH_INDEX"))


class Option(click.Option):
    """An option that the config file may set; `group` is the heading under which help lists it."""

    def __init__(self, *args: Any, group: str = _OTHERS, **more: Any) -> None:
        super().__init__(*args, **more)
        self.group = group


class Command(click.Command):
    """A command whose help lists the options by group."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)) is not None:
                groups.setdefault(getattr(param, "group", _OTHERS), []).append(record)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records)


class Listed(Option):
    """An option whose value is a comma-separated list; in the config file it may be a list."""


class _Optional(Option):
    """An option whose value may be left out before another option; it is `flag_value` then."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, is_flag=False, **more)


class _Several(Option):
    """An option that may be repeated; its variable is split as by a shell, so that quoted values may have spaces."""

    def value_from_envvar(self, ctx: click.Context) -> Any:
        value = self.resolve_envvar_value(ctx)
        try:
            return None if value is None else shlex.split(value)
        except ValueError as error:
            raise UsageError(f"{self.envvar} is {value!r}, which cannot be split as by a shell: {error}") from error


_TYPES: Mapping[str, Mapping[str, Any]] = {
    "bool": {"is_flag": True},
    "int": {"type": int},
    "float": {"type": float, "metavar": "SECONDS"},
    "str": {},
    "tuple[int, int]": {"type": parse_nnodes},
    "tuple[str, ...]": {"cls": _Several, "multiple": True},
}


def _option(
    text: str = "",
    metavar: str | None = None,
    *,
    default: Any = None,
    short: str = "",
    env: bool = True,
    no_meaning: str = "",
    **more: Any,
) -> Any:
    """Declare an option with its help; `no_meaning`: why it does nothing here; `more` is click's."""
    given = {"help": text, "metavar": metavar, "default": default, "show_default": bool(default), **more}
    attributes = {name: value for name, value in given.items() if value is not None and value is not False}
    return field(default=default, metadata={"short": short, "env": env, "no_meaning": no_meaning, "click": attributes})


_flag = functools.partial(_option, default=False)
_several = functools.partial(_option, default=())
_torchrun_option = functools.partial(_option, env=False, hidden=True)  # translated by torchrun.py


@dataclass(frozen=True)
class Options:
    """The options of a run: flag > environment > config file > default. request.py parses those that are still text."""

    # Hosts
    nnodes: tuple[int, int] | None = _option("Number of hosts.  [default: all named hosts, else 1]", "N|MIN:MAX")
    hosts: str | None = _option(
        "Hosts, reached by SSH: NAME, NAME:SLOTS, USER@NAME, NAME[01-16].", "A[:SLOTS],B,...", cls=Listed
    )
    hostfile: str | None = _option("Read the hosts from a host file of Open MPI, MPICH, PBS or DeepSpeed.", "FILE")
    include: str | None = _option("Use only these hosts, and only these of their slots (GPUs).", "A[:SLOT,...]@B")
    exclude: str | None = _option("Use all hosts and slots except these.", "A[:SLOT,...]@B")
    hosts_script: str | None = _option("Run this program repeatedly to discover hosts.", "CMD")
    simulate: bool = _flag("Divide this machine's GPUs and cores among --nnodes simulated hosts.")
    ssh_config: str | None = _option(
        "Read this OpenSSH configuration, like ssh -F.  [default: ~/.ssh/config and /etc/ssh/ssh_config]", "FILE"
    )
    ssh_command: str | None = _option(
        "Log in by this client instead of dtrain's own: ssh itself, for Kerberos, two-factor logins or an open "
        "ControlMaster; or a program that is used like it. The host is put for {host}, else at the end.",
        "ssh|'CMD {host}'",
    )
    accept_new_host_keys: bool = _flag("Accept and store the keys of hosts that are in no known_hosts file.")
    interface: str | None = _option(
        "On each host, use the first of these network interfaces that is up.", "NAME,...", cls=Listed
    )

    # Workers
    nproc_per_node: str | None = _option(
        "Workers per host.  [default: the host's slots, else one per GPU, else 1]", "N|auto|gpu|cpu"
    )
    module: bool = _flag("SCRIPT is the name of a module, as for python -m.", short="-m", env=False)
    no_python: bool = _flag("SCRIPT is any program.", env=False)
    export: tuple[str, ...] = _several(
        "Set an environment variable for the workers, or pass on those that match this name or glob.",
        "NAME[=VALUE]",
        short="-x",
    )
    workdir: str | None = _option("Working directory of the workers.  [default: the current one]", "DIR")
    python: str | None = _option("Python interpreter on the hosts.  [default: the current one]", "PATH")
    setup: str | None = _option(
        "Run this line once on each host before its workers, in bash if there is one, in the workers' folder. They get "
        "the environment that it leaves, and --python is found by it. Its last command must succeed.",
        "'source env.sh; module load cuda'",
    )
    launch_prefix: str | None = _option(
        "Run each worker behind this command, with its rank for {rank}, and so {local_rank} and {host}. Workers are "
        "then started by exec.",
        "'numactl -N {local_rank}'",
    )
    agent_prefix: str | None = _option(
        "Run everything of each host behind this command, after --setup: a container has all of it.",
        "'apptainer exec --nv IMAGE'",
    )
    start_method: str = _option(
        "Fork workers from a process that has imported their packages, if that is safe, or start each by exec. fork "
        "also says why if it is not safe.",
        type=click.Choice([*START_METHODS, *TORCHRUN_START_METHODS]),
        default=JobSpec.start_method,
        show_default=True,
    )
    keep_warm: str | None = _option(
        "After a run on this machine only, keep the process that workers are forked from until it was unused for this "
        "time. Later runs find it by themselves; with --keep-warm the time restarts. See dtrain warm.",
        "10m|90s|1h",
    )
    stdin: str | None = _option(
        "Rank that reads the standard input of this command; the others read an empty one. Input is read ahead: use "
        "none in a shell loop that reads its own input.  [default: 0]",
        "RANK|none",
    )

    sync: str | None = _option(
        "Send the hosts what they lack: code, the git repository or folder of SCRIPT; env, the packages of this "
        "Python; or both. A host needs sshd, and a Python of the same minor version.",
        "code|env|both",
        type=click.Choice(["code", "env", "both"]),
        flag_value="both",
        cls=_Optional,
    )

    fetch: tuple[str, ...] = _several(
        "At the end, also after a failure, bring files that match this pattern from the workers' folder on each remote "
        "host to the run's folder, under fetched/HOST. May be repeated.",
        "PATTERN",
    )

    # GPUs and processors
    gpus_per_proc: int | None = _option("Give each worker K GPUs and make only these visible to it.", "K")
    oversubscribe: bool = _flag("Allow more workers than GPUs.")
    numa_binding: str | None = _option("Bind each worker to processors near its GPU.", type=click.Choice(MODES))

    # Failure
    max_restarts: int = _option(
        "After a failure restart all workers, or only the failed one if the others can continue, at most N times.",
        "N",
        default=JobSpec.max_restarts,
        show_default=True,
    )
    grow: bool = _flag(
        "With --nnodes MIN:MAX: restart with more hosts as soon as another one joins; resilient workers continue."
    )
    hang: str = _option(
        "What to do if the others wait for a rank that does nothing, for far longer than ever before in this run: "
        "nothing, report it, or treat it as failed (auto; immediately if it is stopped). TIME is auto with this "
        "minimum; without it, 2m.",
        "off|report|auto|TIME",
        default="report",
        show_default=True,
    )
    stall_timeout_s: float | None = _option(
        "Fail the run after this time without any output or training step. Until the first step, not before "
        "--start-timeout-s after the start of the workers."
    )
    on_nonfinite: str = _option(
        "What ddp does if an optimizer is about to step with infinite or NaN gradients: warn once, or stop the run "
        "before the weights change.",
        type=click.Choice(["warn", "stop"]),
        default=JobSpec.on_nonfinite,
        show_default=True,
    )
    flight_recorder: str = _option(
        "When a run fails or hangs, read from torch's flight recorder which collectives each rank has called; off: "
        "leave torch as it is.",
        type=click.Choice(["on", "off"]),
        default=JobSpec.flight_recorder,
        show_default=True,
    )
    heartbeat_timeout_s: float = _option(
        "Consider a host lost after this time without a heartbeat; the host then ends its workers by itself. Network "
        "outages shorter than 85 % of this do no harm if the connections recover.",
        default=JobSpec.heartbeat_timeout_s,
    )
    start_timeout_s: float = _option("Time within which all workers must be running.", default=JobSpec.start_timeout_s)
    grace_s: float = _option("Time between SIGTERM and SIGKILL when workers are stopped.", default=JobSpec.grace_s)
    requeue: bool = _flag("In SLURM: after SIGUSR1, end once a checkpoint is saved, and requeue the job.")
    replayable: int | None = _option(
        "Every K steps, let @ddp.resilient write its state to the run's folder, so that dtrain replay of a failed run "
        "is short. Two files are kept; they are removed if the run ends with code 0.",
        "K",
    )
    chaos: str | None = _option(
        "Inject faults, and report at the end what each cost: `kill worker every 30s`, `stop worker every 5m`, `kill "
        "host every 10m` (with --simulate), separated by commas; `seed 7` repeats the same faults.",
        "FAULT every TIME,...",
    )

    # Output and runs
    quiet: bool = _flag("Print no messages of dtrain except errors and the report of a failure.", short="-q", env=False)
    verbose: bool = _flag(
        "At the end also print how many workers ran, for how long, and where the output is.", short="-v", env=False
    )
    detach: bool = _flag(
        "Print the run's id and return once all workers have started. See dtrain ps, logs, attach, stop.", env=False
    )
    log_dir: str = _option("Folder for the output.", "DIR", default=str(JobSpec.log_dir))
    run_id: str | None = _option("Name of this run.  [default: derived from the time]", "ID")
    keep_runs: int | None = _option(
        "Keep N runs in --log-dir, including this one; remove ended runs, the oldest first.", "N"
    )
    log_max_size: str | None = _option(
        "Remove ended runs, the oldest first, until --log-dir is not larger than this.", "20G|500M"
    )
    error_json: str | None = _option("Write how the run ended to this file, for programs.", "FILE")
    on_end: str | None = _option(
        "Run this shell command here after the run, however it ended. The result is in DTRAIN_RUN, DTRAIN_STATE, "
        "DTRAIN_EXIT_CODE, DTRAIN_CAUSE and DTRAIN_FOLDER.",
        "CMD",
    )
    only_rank: str | None = _option("Show only the output of these ranks; all output is kept.", "R,R", cls=Listed)
    local_ranks_filter: str | None = _option("Show only the output of these local ranks.", "L,L")
    redirects: str | None = _option(
        "Keep streams off the terminal: 1 stdout, 2 stderr, 3 both; or LOCAL_RANK:N,... such as 0:3,1:1.",
        "STD",
        short="-r",
    )
    tee: str | None = _option("Show these streams on the terminal anyway.", "STD", short="-t")
    lines: str | None = _option(
        "Show equal lines that many ranks write at the same time once, as [all 8] or [2-7], or show all of them.  "
        "[default: merge on a terminal, else all]",
        type=click.Choice(["merge", "all"]),
    )
    log_format: str = _option(
        "Show text, or one JSON object per line.",
        type=click.Choice(["text", "json"]),
        default="text",
        show_default=True,
    )

    # Roles, and other frameworks
    ps: int = _option("Start N parameter servers, of ddp.strategy; with --chief, of TensorFlow.", "N", default=0)
    role: tuple[str, ...] = _several(
        "Start COUNT processes of this role in addition to the workers, on all hosts together; or name the workers.",
        "NAME[:COUNT[:COMMAND]]",
    )
    ends_with: str | None = _option(
        "End the run once these roles have ended, and stop the others.  [default: all]", "ROLE,...", cls=Listed
    )
    evaluator: bool = _flag("Start a TensorFlow evaluator.")
    chief: bool = _flag("Make the first worker TensorFlow's chief.")
    env_for: str | None = _option(
        "Also set the environment variables of these launchers for the workers.", "tf,mpi,deepspeed,horovod", cls=Listed
    )

    # Nodes started by hand
    node_rank: int | None = _option("Join as node K; type the command on every node.", "K")
    master_addr: str | None = _option("Address at which the other hosts reach the first.  [default: detected]", "ADDR")
    master_port: int | None = _option("Port of the rendezvous store.  [default: 29500, or a free one]", "PORT")
    token_file: str | None = _option(
        "Read the secret shared by nodes started by hand from this file; DTRAIN_TOKEN can hold it instead.", "FILE"
    )
    print_commands: bool = _flag("Print the command to type on each node; start nothing.", env=False)

    # torchrun's
    virtual_local_rank: bool = _flag("Make only its own GPU visible to each worker, and set LOCAL_RANK to 0.")
    pass_local_rank: bool = _flag("Pass --local-rank=N to the script, as torch.distributed.launch did.")
    rdzv_backend: str | None = _torchrun_option()
    rdzv_endpoint: str | None = _torchrun_option()
    rdzv_id: str | None = _torchrun_option()
    rdzv_conf: str | None = _torchrun_option()
    standalone: bool = _torchrun_option(default=False)
    run_path: bool = _torchrun_option(default=False)
    shutdown_timeout: float | None = _torchrun_option()
    signals_to_handle: str | None = _torchrun_option()
    monitor_interval: str | None = _torchrun_option(no_meaning="the end of a worker is noticed immediately")
    event_log_handler: str | None = _torchrun_option(no_meaning="see --error-json for how a run ended")
    logs_specs: str | None = _torchrun_option(no_meaning="all output is kept in --log-dir")
    local_addr: str | None = _torchrun_option(
        no_meaning="addresses come from the routes between the hosts; see --interface"
    )
    duplicate_stdout_filters: str | None = _torchrun_option(no_meaning="all output is kept in --log-dir, for grep")
    duplicate_stderr_filters: str | None = _torchrun_option(no_meaning="all output is kept in --log-dir, for grep")

    # Not options
    command: tuple[str, ...] = ()  # SCRIPT [ARGS]
    typed: frozenset[str] = frozenset()  # names of the options on the command line
    origins: tuple[tuple[str, str], ...] = ()  # origin of each option that is not at its default
    as_torchrun: bool = False  # the command is dtrain-torchrun
    # Set by torchrun's options.
    any_port: bool = False
    rdzv_is_host: bool | None = None
    last_call_s: float | None = JobSpec.last_call_s
    signals: tuple[str, ...] = JobSpec.signals


_DECLARED = tuple(found for found in fields(Options) if found.metadata)
_GROUPS = {  # headings in help, by the first option of each group
    "nnodes": "Hosts",
    "nproc_per_node": "Workers",
    "gpus_per_proc": "GPUs and processors",
    "max_restarts": "Failure",
    "quiet": "Output and runs",
    "ps": "Roles, and other frameworks",
    "node_rank": "Nodes started by hand",
    "virtual_local_rank": "torchrun's",
}
_LAUNCH_GROUPS = ("Hosts", "Workers", "Failure", "Nodes started by hand")


def takes_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add all options and SCRIPT [ARGS] to a command; call it with them as Options, and with its other parameters."""

    @functools.wraps(function)
    def command(**values: Any) -> None:
        ours = {name: values.pop(name) for name in [*(found.name for found in _DECLARED), "command"]}
        context = click.get_current_context()
        typed = {name for name in ours if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
        origins = tuple((name, _origin(context, name)) for name in ours if name != "command")
        options = Options(
            **ours,
            typed=frozenset(typed),
            origins=tuple((name, origin) for name, origin in origins if origin),
            as_torchrun=bool(context.obj),
        )
        function(options, **values)

    click.argument(
        "command", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...", shell_complete=_complete_file
    )(command)
    for option in reversed(_shared_options()):
        # click expects a class; the option exists already.
        click.option(cls=lambda *_, option=option: option)(command)  # type: ignore[arg-type]
    return command


@functools.cache
def _shared_options() -> list[Option]:
    """Make the options once for all commands: making them for each costs about 12 ms of every start."""
    made = []
    group = ""
    for declared in _DECLARED:
        group = _GROUPS.get(declared.name, group)
        made.append(_make_option(declared, group))
    return made


def launch_options() -> set[str]:
    """Return the long options on where workers run, how many, and failures."""
    return {option.opts[-1] for option in _shared_options() if option.group in _LAUNCH_GROUPS}


def _complete_file(_: click.Context, __: click.Parameter, begun: str) -> list[CompletionItem]:
    """Make the shell complete file names."""
    return [CompletionItem(begun, type="file")]


def _origin(context: click.Context, name: str) -> str:
    """Return the origin of an option's value; empty for the default."""
    match context.get_parameter_source(name):
        case ParameterSource.COMMANDLINE:
            return "command line"
        case ParameterSource.ENVIRONMENT:
            return f"DTRAIN_{name.upper()}"
        case ParameterSource.DEFAULT_MAP:
            file = context.meta.get(CONFIG_SOURCE) or "the config file"
            return f"PET_{name.upper()} or {file}" if context.obj else file
    return ""


def _make_option(declared: Field[Any], group: str) -> Option:
    long = f"--{declared.name.replace('_', '-')}"
    attributes = {"cls": Option, **_TYPES[str(declared.type).removesuffix(" | None")], **declared.metadata["click"]}
    if declared.metadata["env"]:
        attributes["envvar"] = _variable(declared)
    make: type[Option] = attributes.pop("cls")
    return make([*filter(None, (declared.metadata["short"], long))], group=group, **attributes)


def _variable(declared: Field[Any]) -> str:
    return f"DTRAIN_{declared.name.upper()}"


def unknown_variables() -> list[str]:
    """List the DTRAIN_* variables of this process that look like misspelled options."""
    known = [_variable(declared) for declared in _DECLARED if declared.metadata["env"]]
    unknown = [name for name in os.environ if name.startswith("DTRAIN_") and name not in known]
    return [
        f"the variable {name} is not known and does nothing; did you mean {close[0]}?"
        for name in unknown
        if name not in INTERNAL_VARIABLES | _NO_OPTION
        and (close := difflib.get_close_matches(name, known, n=1, cutoff=0.7))
    ]
