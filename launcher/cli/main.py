"""The command `dtrain`: options in, one JobSpec, a Controller, a report and an exit code. Only this file exits."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import click

from launcher import __version__
from launcher.cli.node_role import commands
from launcher.cli.options import Group, how, script, torchrun_words, where
from launcher.cli.request import Request, check_here, listed_hosts, parse_command, read_request
from launcher.cli.run import Talk, carry_out
from launcher.cli.torchrun import AS_TORCHRUN
from launcher.errors import DtrainError, UsageError

_PASS_ON = {"ignore_unknown_options": False, "allow_interspersed_args": False}


# What the options are called that users of mpirun, Horovod, DeepSpeed and srun type first.
_ELSEWHERE = {
    "-n": "--nproc-per-node",
    "-H": "--hosts",
    "-N": "--nnodes",
    "--np": "--nproc-per-node",
    "--num-proc": "--nproc-per-node",
    "--num-gpus": "--nproc-per-node",
    "--num-nodes": "--nnodes",
    "--host": "--hosts",
    "--machinefile": "--hostfile",
    "--host-discovery-script": "--hosts-script",
    "--min-np": "--nnodes MIN:MAX",
    "--network-interface": "--interface",
}


def main() -> NoReturn:
    """Run the command line; the console script's entry."""
    _open_standard_streams()
    _end(_main(sys.argv[1:], None))


def main_as(other: str) -> NoReturn:
    """Run `dtrain run` as another launcher would; see torchrun.py."""
    _open_standard_streams()
    _end(_main(["run", *sys.argv[1:]], other))


def _main(words: list[str], other: str | None) -> int:
    try:
        cli.main(words, standalone_mode=False, obj=other)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    except (click.Abort, KeyboardInterrupt):
        return 130
    except click.NoSuchOption as error:
        with contextlib.suppress(OSError):
            error.show()
        if (ours := _ELSEWHERE.get(error.option_name)) is not None:
            _complain(f"what other launchers call {error.option_name} is {ours} here")
        return error.exit_code
    except click.ClickException as error:
        with contextlib.suppress(OSError):  # nobody reads it
            error.show()
        return error.exit_code
    except DtrainError as error:
        _complain(str(error))
        return error.exit_code
    return 0


def _open_standard_streams() -> None:
    """Put /dev/null where 0, 1 or 2 is closed, before a pipe of ours gets one of these numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115  # lives as long as the process


def _end(status: int) -> NoReturn:
    """End with the run's exit code, also where stdout or stderr cannot take their last bytes."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


def _complain(text: str) -> None:
    with contextlib.suppress(OSError):  # stderr is gone; the exit code still says what happened
        click.echo("\n".join(f"dtrain: {line}" for line in text.splitlines()), err=True)


@click.group(
    cls=Group,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: name.replace("_", "-"),
        "max_content_width": 110,
    },
)
@click.version_option(__version__, prog_name="dtrain")
def cli() -> None:
    """Start data-parallel training on every host with one command."""


# ---- commands ------------------------------------------------------------------------------------------------


@cli.command(context_settings=_PASS_ON, short_help="Start a script on all hosts and wait for its end.")
@where
@how
@torchrun_words
@script
def run(command: tuple[str, ...], **options: Any) -> None:
    """Start SCRIPT once for each worker on all hosts, and end with its exit code.

    Options of dtrain come before SCRIPT; everything after it is the script's. Every option that shows an environment
    variable can also be set by it, or in dtrain.toml or [tool.dtrain] of pyproject.toml. torchrun's options are taken
    as well.
    """
    error_json = _error_file(options["error_json"])
    with _told_to_programs(error_json):
        if options["print_commands"]:
            click.echo(_commands(command, options))
            return
        request = _request(command, options, wait=True)
        check_here(request.spec)
    if not options["quiet"]:
        _warn_of_unknown_variables()
        for notice in request.notices:
            _complain(notice)
    talk = Talk(quiet=options["quiet"], verbose=options["verbose"], say=_complain)
    sys.exit(carry_out(request, talk, error_json=error_json))


@cli.command(context_settings=_PASS_ON, short_help="Show which rank would run where; start nothing.")
@where
@how
@torchrun_words
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@script
def plan(command: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Show rank, host, GPU and cores of every worker that `dtrain run` would start. Starts nothing anywhere.

    Takes every option of `dtrain run`, so that one word turns a run into its plan.

    GPUs and cores of this machine are looked up; those of hosts reached by SSH are not known before a run asks them, so
    their GPUs are assumed to be numbered from 0, and marked.
    """
    from launcher.cli.plan import plan_as_json, plan_as_table, plan_workers

    rows = plan_workers(_request(command, options).spec)
    click.echo(plan_as_json(rows) if as_json else plan_as_table(rows))


class _Verbatim(click.Command):
    """Takes every word as it was typed, `--` and `--help` as well."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.params["words"] = tuple(args)
        return []


@cli.command(cls=_Verbatim, short_help="Submit a job to SLURM that is a run; or print its script.")
def sbatch(words: tuple[str, ...]) -> None:
    """See `dtrain sbatch --help`, which sbatch.py answers."""
    from launcher.cli.sbatch import run_sbatch

    sys.exit(run_sbatch(words))


@cli.command(context_settings=_PASS_ON, short_help="Check hosts, network and GPUs before a run.")
@where
@how
@torchrun_words
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option("--no-allreduce", is_flag=True, help="Leave out the all-reduce, which takes as long as torch to import.")
@script
def check(command: tuple[str, ...], as_json: bool, no_allreduce: bool, **options: Any) -> None:
    """Check whether `dtrain run` would start on all hosts, how fast they reach each other, and what to mend.

    Takes every option of `dtrain run`; without SCRIPT, only the hosts are checked. Exit code 0: a run would start.
    """
    from launcher.check.command import run_check

    if not command:
        command, options["module"], options["no_python"] = ("ddp.comm.allreduce_speed",), True, False
    request = _request(command, options)
    sys.exit(run_check(request, as_json=as_json, say=_complain, allreduce=not no_allreduce))


@cli.command(short_help="Show what a bug report needs to say, without secrets.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def env(as_json: bool) -> None:
    """Show versions, hardware, limits and settings of this machine, as a bug report needs them.

    Of variables that may be secret only the names are shown; user and host names are left out.
    """
    from launcher.cli.env import run_env

    sys.exit(run_env(as_json=as_json))


def _warn_of_unknown_variables() -> None:
    """Name DTRAIN_* variables that are no option's but look as if they were meant to be."""
    known = {str(option.envvar) for option in run.params if isinstance(option, click.Option) and option.envvar}
    ours = {"AGENT", "HOST", "ELASTIC", "PROGRESS_FILE", "ROLES", "RUN_KEY"}  # for the workers
    foreign = {
        *(f"DTRAIN_{name}" for name in ours),
        "DTRAIN_STRATEGY",
        "DTRAIN_TOKEN",
        "DTRAIN_TORCH_INDEX",
        "DTRAIN_AGENT_SLOTS",
        "DTRAIN_AGENT_MACHINE",
    }
    unknown = [name for name in os.environ if name.startswith("DTRAIN_") and name not in known | foreign]
    if not unknown:
        return
    import difflib

    for name in unknown:
        if close := difflib.get_close_matches(name, known, n=1, cutoff=0.7):
            _complain(f"the variable {name} is not known and does nothing; did you mean {close[0]}?")


# ---- what was asked for --------------------------------------------------------------------------------------


def _request(command: tuple[str, ...], options: dict[str, Any], *, wait: bool = False) -> Request:
    context = click.get_current_context()
    return read_request(command, options, typed=_typed, as_torchrun=context.obj == AS_TORCHRUN, wait=wait)


def _typed(name: str) -> bool:
    return click.get_current_context().get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def _commands(command: tuple[str, ...], options: dict[str, Any]) -> str:
    """Return what to type on each node for this run."""
    parse_command(command, options)
    hosts = listed_hosts(options, typed=_typed)
    nnodes: tuple[int, int] | None = options["nnodes"]
    nodes = nnodes[1] if nnodes else len(hosts)
    if nodes < 2:
        raise UsageError(
            "--print-commands says what to type on each of several nodes: how many? --nnodes N, or --hosts"
        )
    names = [*(host.name for host in hosts), *(f"node {k}" for k in range(len(hosts), nodes))][:nodes]
    slots = [*(host.slots for host in hosts), *[None] * nodes][:nodes]
    left_out = {"hosts", "hostfile", "include", "exclude", "print_commands", "node_rank", "master_addr", "command"}
    words = [] if nnodes and _typed("nnodes") else ["--nnodes", str(nodes)]
    for param in click.get_current_context().command.params:
        if param.name in left_out or param.name is None or not _typed(param.name):
            continue
        value, flag = options[param.name], max(param.opts, key=len)
        if param.name == "nnodes":
            value = ":".join(map(str, dict.fromkeys(value)))
        given = list(value) if isinstance(value, tuple) else [value]
        words += [flag] if value is True else [word for one in given for word in (flag, str(one))]
    own = [[] if count is None or options["nproc_per_node"] else ["--nproc-per-node", str(count)] for count in slots]
    address = options["master_addr"] or (hosts[0].name if hosts else "ADDRESS_OF_NODE_0")
    return commands([[*more, *words, *command] for more in own], address, names)


@contextlib.contextmanager
def _told_to_programs(error_json: Path | None) -> Iterator[None]:
    """Write the file for programs also where the run ends before it began."""
    try:
        yield
    except DtrainError as error:
        if error_json is not None:
            from launcher.output.error_json import write_usage_error_json

            with contextlib.suppress(OSError):  # the error itself is what is to be seen
                write_usage_error_json(error_json, error, error.exit_code)
        raise


def _error_file(text: str | None) -> Path | None:
    if text is None:
        return None
    path = Path(text).expanduser()
    if not path.parent.is_dir():
        raise UsageError(f"--error-json: the folder {path.parent} does not exist; make it, or name a file elsewhere")
    if path.is_dir():
        raise UsageError(f"--error-json: {path} is a folder; name a file")
    return path
