"""The options of the command line, and where their defaults come from: flag > environment > settings file."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from launcher.cli.settings import Settings, read_settings
from launcher.cli.torchrun import AS_TORCHRUN, defaults
from launcher.errors import UsageError
from launcher.machine.numa import MODES
from launcher.placement.job_spec import parse_nnodes

__all__ = ["Group", "current_folder", "how", "script", "torchrun_words", "where"]

F = TypeVar("F", bound=Callable[..., Any])


def _option(*names: str, **attributes: Any) -> Callable[[F], F]:
    """Declare an option with its environment variable: DTRAIN_ and the long name."""
    long = next(name for name in names if name.startswith("--")).split("/")[0]
    variable = "DTRAIN_" + long.lstrip("-").replace("-", "_").upper()
    return click.option(*names, envvar=variable, show_envvar=True, **attributes)


class _Several(click.Option):
    """An option that may be given several times; its variable is split as a shell would, so that quotes hold blanks."""

    def value_from_envvar(self, ctx: click.Context) -> Any:
        value = self.resolve_envvar_value(ctx)
        try:
            return None if value is None else shlex.split(value)
        except ValueError as error:
            raise UsageError(f"{self.envvar} is {value!r}, which cannot be split into words: {error}") from error


def _all(*options: Callable[[F], F]) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


class _Nnodes(click.ParamType):  # type: ignore[type-arg]  # not generic in older click
    """N or MIN:MAX."""

    name = "nnodes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int] | None:
        return value if isinstance(value, tuple) else parse_nnodes(str(value))


where = _all(
    _option(
        "--nnodes", type=_Nnodes(), metavar="N|MIN:MAX", help="How many hosts.  [default: all that are named, else 1]"
    ),
    _option(
        "--nproc-per-node",
        metavar="N|auto|gpu|cpu",
        help="Workers on each host.  [default: the host's slots, else one for each GPU, else 1]",
    ),
    _option(
        "--hosts", metavar="A[:SLOTS],B,...", help="Hosts, reached by SSH: NAME, NAME:SLOTS, USER@NAME, NAME[01-16]."
    ),
    _option("--hostfile", metavar="FILE", help="Hosts from a file as Open MPI, MPICH, PBS and DeepSpeed have them."),
    _option(
        "--include", metavar="A[:SLOT,...]@B", help="Of these hosts, only those; of these slots (GPUs), only those."
    ),
    _option("--exclude", metavar="A[:SLOT,...]@B", help="... all but those."),
    _option(
        "--hosts-script", metavar="CMD", help="A program that prints the hosts there are now; asked again and again."
    ),
    _option("--simulate", is_flag=True, help="Divide this machine's GPUs and cores between --nnodes hosts."),
    _option("--node-rank", type=int, metavar="K", help="This is node K: the command is typed on every node."),
    _option("--master-addr", metavar="ADDR", help="The first host's address for the others.  [default: found]"),
    _option("--master-port", type=int, metavar="PORT", help="The store's port.  [default: 29500, or a free one]"),
    _option(
        "--role",
        cls=_Several,
        multiple=True,
        metavar="NAME[:COUNT[:COMMAND]]",
        help="Processes beside the workers, over all hosts; or a name for the workers.",
    ),
    _option(
        "--ends-with", metavar="ROLE,...", help="The run ends with these roles; others are stopped.  [default: all]"
    ),
    _option("--chief", is_flag=True, help="The first worker is TensorFlow's chief."),
    _option("--ps", type=int, default=0, metavar="N", help="N parameter servers: ddp's; TensorFlow's with --chief."),
    _option("--evaluator", is_flag=True, help="One evaluator of TensorFlow's."),
    _option("--env-for", metavar="tf,mpi,deepspeed,horovod", help="Variables of these launchers for the workers, too."),
    _option("--gpus-per-proc", type=int, metavar="K", help="Give each worker K GPUs and let it see only these."),
    _option("--oversubscribe", is_flag=True, help="Allow more workers than GPUs."),
    _option("--virtual-local-rank", is_flag=True, help="Let each worker see its own GPU only, and LOCAL_RANK 0."),
    _option("--pass-local-rank", is_flag=True, help="Give the script --local-rank=N, as torch.distributed.launch did."),
    click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name, as for python -m."),
    click.option("--no-python", is_flag=True, help="SCRIPT is any program."),
)

how = _all(
    _option(
        "-x",
        "--export",
        cls=_Several,
        multiple=True,
        metavar="NAME[=VALUE]",
        help="A variable for the workers; globs too.",
    ),
    _option("--workdir", metavar="DIR", help="The workers' working directory.  [default: this one]"),
    _option("--python", metavar="PATH", help="The Python interpreter on the hosts.  [default: this one]"),
    _option("--log-dir", default="runs", show_default=True, metavar="DIR", help="Where the output is kept."),
    _option("--run-id", metavar="ID", help="The name of this run.  [default: made from the time]"),
    _option("--start-timeout-s", type=float, default=60.0, show_default=True, help="Until all workers run."),
    _option("--grace-s", type=float, default=10.0, show_default=True, help="From asking workers to end to KILL."),
    _option(
        "--max-restarts",
        type=int,
        default=0,
        show_default=True,
        metavar="N",
        help="How often all workers are started again after a failure, or one alone that the others can do without.",
    ),
    _option("--grow", is_flag=True, help="With --nnodes MIN:MAX: start again as soon as another host has come."),
    _option(
        "--heartbeat-timeout-s",
        type=float,
        default=30.0,
        show_default=True,
        help="A host that is silent for so long is lost; by then it has ended its workers by itself.",
    ),
    _option("--stall-timeout-s", type=float, help="A run without any output or step for so long has failed."),
    _option("--error-json", metavar="FILE", help="Where to write how the run ended, for programs."),
    _option("--interface", metavar="NAME,...", help="The network interface to use, the first that a host has up."),
    _option("--token-file", metavar="FILE", help="The secret that nodes started by hand share; or DTRAIN_TOKEN."),
    _option("--numa-binding", type=click.Choice(MODES), help="Bind each worker to processors near its GPU."),
    _option("--requeue", is_flag=True, help="In SLURM: after USR1, end once a checkpoint is saved, and queue again."),
    _option("--ssh-config", metavar="FILE", help="As ssh -F.  [default: ~/.ssh/config and /etc/ssh/ssh_config]"),
    _option(
        "--accept-new-host-keys",
        is_flag=True,
        help="Trust hosts that are in no known_hosts file, from now on.",
    ),
    _option("--only-rank", metavar="R,R", help="Show only the output of these ranks; all of it is kept."),
    _option("-r", "--redirects", metavar="STD", help="Keep off the terminal: 1 stdout, 2 stderr, 3 both; or 0:3,1:1."),
    _option("-t", "--tee", metavar="STD", help="... but not these."),
    _option("--local-ranks-filter", metavar="L,L", help="Show only the output of these local ranks."),
    click.option("--print-commands", is_flag=True, help="Print what to type on each node, and start nothing."),
    click.option("-q", "--quiet", is_flag=True, help="Nothing of dtrain's own but errors."),
    click.option("-v", "--verbose", is_flag=True, help="Also say what was run, for how long, and where its output is."),
)

# What else torchrun takes; launcher/torchrun.py says what becomes of it.
torchrun_words = _all(
    click.option("--rdzv-backend", hidden=True),
    click.option("--rdzv-endpoint", hidden=True),
    click.option("--rdzv-id", hidden=True),
    click.option("--rdzv-conf", hidden=True),
    click.option("--standalone", is_flag=True, hidden=True),
    click.option("--run-path", is_flag=True, hidden=True),
    click.option("--shutdown-timeout", type=float, hidden=True),
    click.option("--signals-to-handle", hidden=True),
    click.option("--monitor-interval", hidden=True),
    click.option("--start-method", hidden=True),
    click.option("--event-log-handler", hidden=True),
    click.option("--logs-specs", hidden=True),
    click.option("--local-addr", hidden=True),
    click.option("--duplicate-stdout-filters", hidden=True),
    click.option("--duplicate-stderr-filters", hidden=True),
)

script = click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...")


class Group(click.Group):
    """Takes `_` for `-` in option names, and defaults from the settings file."""

    def invoke(self, ctx: click.Context) -> Any:
        ctx.default_map = {}
        known = {p.name for c in self.commands.values() for p in c.params if isinstance(p, click.Option) and p.name}
        settings = read_settings(current_folder(), known - {"help", "as_json"})
        for name, command in self.commands.items():
            ctx.default_map[name] = _defaults(command, settings, ctx)
        if ctx.obj == AS_TORCHRUN:
            flags = {p.name: p.is_flag for p in self.commands["run"].params if isinstance(p, click.Option) and p.name}
            ctx.default_map["run"] = defaults(os.environ, flags, ctx.default_map["run"])
        return super().invoke(ctx)


def _defaults(command: click.Command, settings: Settings, ctx: click.Context) -> dict[str, Any]:
    """Check the settings that one command has options for; a wrong value is an error that names the file."""
    defaults = {}
    for param in command.params:
        if param.name not in settings.values:
            continue
        value = settings.values[param.name]
        if param.name in ("hosts", "only_rank", "interface", "env_for", "ends_with") and isinstance(value, list):
            value = ",".join(map(str, value))
        if param.multiple and isinstance(value, str):
            value = [value]
        try:
            if isinstance(param, click.Option) and param.is_flag and not isinstance(value, bool):
                raise click.BadParameter("must be true or false")
            if isinstance(param, click.Option) and not param.is_flag and isinstance(value, bool | dict):
                raise click.BadParameter(f"{value!r} is not a value for it")
            if isinstance(value, list) and not param.multiple:
                raise click.BadParameter(f"it is {value!r}; it must be one value")
            param.type_cast_value(ctx, value if isinstance(value, list | bool) else str(value))
        except (click.ClickException, UsageError) as error:
            reason = error.message if isinstance(error, click.ClickException) else str(error)
            raise UsageError(f"{settings.source}: {param.name}: {reason}") from error
        defaults[param.name] = value if isinstance(value, list | bool) else str(value)
    return defaults


def current_folder() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError as error:
        raise UsageError("the current folder does not exist any more; change to another one") from error
