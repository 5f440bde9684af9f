"""The command `dtrain`: options in, one JobSpec, a Controller, a report and an exit code. Only this file exits."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import click

from launcher import __version__
from launcher.errors import DtrainError, UsageError
from launcher.options import Group, current_folder, how, script, where
from launcher.sources import choose_hosts
from launcher.spec import (
    Command,
    CommandKind,
    JobSpec,
    SshOptions,
    new_run_id,
    parse_exports,
    parse_nproc,
)

_PASS_ON = {"ignore_unknown_options": False, "allow_interspersed_args": False}


def main() -> None:
    """Run the command line; the console script's entry."""
    _open_standard_streams()
    _end(_main())


def _main() -> int:
    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    except (click.Abort, KeyboardInterrupt):
        return 130
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
@script
def run(command: tuple[str, ...], **options: Any) -> None:
    """Start SCRIPT once for each worker on all hosts, and end with its exit code.

    Options of dtrain come before SCRIPT; everything after it is the script's. Every option that shows an environment
    variable can also be set by it, or in dtrain.toml or [tool.dtrain] of pyproject.toml.
    """
    from launcher.transport import start_local_agents

    error_json = _error_file(options["error_json"])
    with _told_to_programs(error_json):
        spec = _spec(command, options)
        _check_here(spec)
    only_ranks = _ranks(options["only_rank"])
    _warn_of_unknown_variables(options["quiet"])
    opened = start_local_agents(spec)

    from launcher.console import Console
    from launcher.controller import Controller
    from launcher.error_json import write_error_json
    from launcher.logfiles import LogFiles, set_aside
    from launcher.output import OutputThread
    from launcher.processes import raise_file_limit
    from launcher.report import report

    raise_file_limit()
    console = Console()
    folder = spec.log_dir / spec.run_id
    if (moved := set_aside(folder)) is not None and not options["quiet"]:
        _complain(f"there was a run {spec.run_id} before; its files are in {moved} now")
    logs = LogFiles(folder, lambda reason: console.say(reason))
    output = OutputThread(console, logs, only_ranks=only_ranks)
    output.start()
    talk = _Talk(quiet=options["quiet"], verbose=options["verbose"])
    controller = Controller(
        spec,
        output,
        show_progress=output.show_status if talk.progress else lambda _: None,
        tell_user=output.say,
        opened=opened,
    )
    try:
        outcome = controller.run()
    finally:
        output.close()
    usable = folder if logs.usable else None
    if error_json is not None:
        try:
            write_error_json(error_json, outcome, folder=usable, evidence_file=controller.evidence_file)
        except OSError as error:
            _complain(f"--error-json: {error_json} cannot be written: {error.strerror}")
    if talk.verbose:
        ran = f"{outcome.world_size} workers on {outcome.hosts} hosts for {outcome.duration_s:.1f} s"
        _complain(f"run {spec.run_id}: {ran}; output in {folder}")
    if outcome.error is None and only_ranks and max(only_ranks) >= outcome.world_size:
        _complain(f"--only-rank {options['only_rank']}: there were only ranks 0 to {outcome.world_size - 1}")
    text = report(outcome, folder=usable, tail=output.tail, evidence_file=controller.evidence_file)
    if text and (not talk.quiet or outcome.left or outcome.unchecked or outcome.exit_code != 0):
        _complain(text)
    sys.exit(outcome.exit_code)


@cli.command(context_settings=_PASS_ON, short_help="Show which rank would run where; start nothing.")
@where
@how
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@script
def plan(command: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Show rank, host, GPU and cores of every worker that `dtrain run` would start. Starts nothing anywhere.

    Takes every option of `dtrain run`, so that one word turns a run into its plan.

    GPUs and cores of this machine are looked up; those of hosts reached by SSH are not known before a run asks them, so
    their GPUs are assumed to be numbered from 0, and marked.
    """
    from launcher.plan import plan_as_json, plan_as_table, plan_workers

    spec = _spec(command, options)
    rows = plan_workers(spec)
    click.echo(plan_as_json(rows) if as_json else plan_as_table(rows))


def _warn_of_unknown_variables(quiet: bool) -> None:
    """Name DTRAIN_* variables that are no option's but look as if they were meant to be."""
    known = {str(option.envvar) for option in run.params if isinstance(option, click.Option) and option.envvar}
    ours = {"DTRAIN_AGENT", "DTRAIN_HOST", "DTRAIN_ELASTIC", "DTRAIN_PROGRESS_FILE"}  # for the workers
    foreign = {*ours, "DTRAIN_STRATEGY", "DTRAIN_TOKEN", "DTRAIN_TORCH_INDEX"}
    unknown = [name for name in os.environ if name.startswith("DTRAIN_") and name not in known | foreign]
    if quiet or not unknown:
        return
    import difflib

    for name in unknown:
        if close := difflib.get_close_matches(name, known, n=1, cutoff=0.7):
            _complain(f"the variable {name} is not known and does nothing; did you mean {close[0]}?")


# ---- from options to the job ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Talk:
    """How much dtrain says of itself."""

    quiet: bool
    verbose: bool

    @property
    def progress(self) -> bool:
        return not self.quiet and os.isatty(2)


def _spec(command: tuple[str, ...], options: dict[str, Any]) -> JobSpec:
    context = click.get_current_context()
    typed = click.core.ParameterSource.COMMANDLINE
    listed: str | None = options["hosts"]
    if context.get_parameter_source("simulate") is typed and context.get_parameter_source("hosts") is not typed:
        listed = None  # the flag is stronger than hosts from the environment or a file
    nnodes: tuple[int, int] | None = options["nnodes"]
    max_restarts = options.get("max_restarts", 0)
    spares = max_restarts > 0 or (nnodes is not None and nnodes[0] < nnodes[1])
    hosts = choose_hosts(listed, nnodes=nnodes, simulate=options["simulate"], spares=spares)
    remote = any(host.remote for host in hosts)
    config = options.get("ssh_config")
    return JobSpec(
        command=_parse_command(command, module=options["module"], no_python=options["no_python"]),
        hosts=hosts,
        nnodes=nnodes,
        max_restarts=max_restarts,
        grow=options.get("grow", False),
        heartbeat_timeout_s=options.get("heartbeat_timeout_s", 30.0),
        stall_timeout_s=options.get("stall_timeout_s"),
        nproc=parse_nproc(options["nproc_per_node"]),
        gpus_per_proc=options["gpus_per_proc"],
        oversubscribe=options["oversubscribe"],
        workdir=_workdir(options.get("workdir")),
        python=options.get("python") or sys.executable,
        export=tuple(parse_exports(options.get("export") or (), dict(os.environ), remote=remote).items()),
        log_dir=Path(options.get("log_dir") or "runs"),
        run_id=options.get("run_id") or new_run_id(),
        start_timeout_s=options.get("start_timeout_s", 60.0),
        grace_s=options.get("grace_s", 10.0),
        master_addr=options.get("master_addr"),
        master_port=options.get("master_port"),
        ssh=SshOptions(
            config=Path(config).expanduser() if config else None,
            accept_new=options.get("accept_new_host_keys", False),
        ),
    )


def _parse_command(words: tuple[str, ...], *, module: bool, no_python: bool) -> Command:
    if not words:
        raise UsageError("nothing to run: name a script, as in `dtrain run train.py`; see dtrain run --help")
    if module and no_python:
        raise UsageError("--module and --no-python exclude each other")
    kind = CommandKind.MODULE if module else CommandKind.PROGRAM if no_python else CommandKind.SCRIPT
    return Command(kind, words[0], words[1:])


def _workdir(named: str | None) -> Path:
    """Return the working directory by the name under which the user knows it: other hosts may have no such links."""
    if named is not None:
        return Path(named).expanduser().absolute()
    shell = os.environ.get("PWD", "")
    if os.path.isabs(shell) and os.path.isdir(shell) and os.path.samefile(shell, "."):
        return Path(shell)
    return current_folder()


def _check_here(spec: JobSpec) -> None:
    """Find a missing script before anything is started, where one of the hosts is this machine."""
    if all(host.remote for host in spec.hosts) or spec.command.kind is not CommandKind.SCRIPT:
        return
    if not spec.workdir.is_dir():
        raise UsageError(f"the working directory {spec.workdir} does not exist; see --workdir")
    script = spec.workdir / spec.command.target
    if not os.path.exists(script):
        hint = "; for a module write -m, for another program --no-python" if not script.suffix else ""
        raise UsageError(f"the script {script} does not exist{hint}")


@contextlib.contextmanager
def _told_to_programs(error_json: Path | None) -> Iterator[None]:
    """Write the file for programs also where the run ends before it began."""
    try:
        yield
    except DtrainError as error:
        if error_json is not None:
            from launcher.error_json import write_usage_error_json

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


def _ranks(text: str | None) -> frozenset[int] | None:
    if text is None:
        return None
    try:
        ranks = frozenset(int(word) for word in text.split(","))
        if min(ranks) < 0:
            raise ValueError(text)
        return ranks
    except ValueError as error:
        raise UsageError(f"--only-rank is {text!r}; it must be numbers such as 0 or 0,4") from error
