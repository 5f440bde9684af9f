"""The command `dtrain`, and `dtrain-torchrun`: one function a command. Only this file prints errors and exits."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import replace
from typing import NoReturn

import click

from launcher import __version__
from launcher.cli.config_file import Group
from launcher.cli.options import Option, Options, takes_options
from launcher.cli.request import check_here, read_request
from launcher.errors import DtrainError, UsageError

_PASS_ON = {"allow_interspersed_args": False}

# What the options are called that users of mpirun, Horovod, DeepSpeed and srun type first.
_ALL_WORKERS = ("-n", "--np", "--num-proc")  # count those of all hosts
_ELSEWHERE = {
    "-n": "--nproc-per-node",
    "-H": "--hosts",
    "-N": "--nnodes",
    "--np": "--nproc-per-node",
    "--nproc": "--nproc-per-node",
    "--num-proc": "--nproc-per-node",
    "--num-gpus": "--nproc-per-node",
    "--num-nodes": "--nnodes",
    "--host": "--hosts",
    "--machinefile": "--hostfile",
    "--host-discovery-script": "--hosts-script",
    "--min-np": "--nnodes MIN:MAX",
    "--max-np": "--nnodes MIN:MAX",
    "--reset-limit": "--max-restarts",
    "--network-interface": "--interface",
}


def main() -> NoReturn:
    """Run the command line; the console script's entry."""
    _open_standard_streams()
    _end(_main(sys.argv[1:], as_torchrun=False))


def torchrun() -> NoReturn:
    """Run `dtrain run` as torchrun would; the entry of the console script `dtrain-torchrun`. See torchrun.py."""
    _open_standard_streams()
    _end(_main(["run", *sys.argv[1:]], as_torchrun=True))


def _main(args: list[str], *, as_torchrun: bool) -> int:
    try:
        cli.main(args, standalone_mode=False, obj=as_torchrun)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    except (click.Abort, KeyboardInterrupt):
        return 130
    except click.NoSuchOption as error:
        if (ours := _ELSEWHERE.get(error.option_name)) is not None:
            error = click.NoSuchOption(error.option_name, ctx=error.ctx)  # without those that are spelt alike
        with contextlib.suppress(OSError):
            error.show()
        if ours is not None:
            counts = "; it counts the workers of each host" if error.option_name in _ALL_WORKERS else ""
            _complain(f"what other launchers call {error.option_name} is {ours} here{counts}")
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
    colour = None
    if "\x1b" in text:  # which click would take out of all that is not for a terminal
        from launcher.output.console import takes_colour

        colour = takes_colour(2)
    with contextlib.suppress(OSError):  # stderr is gone; the exit code still says what happened
        click.echo("\n".join(f"dtrain: {line}" for line in text.splitlines()), err=True, color=colour)


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


@cli.command(context_settings=_PASS_ON, short_help="Start a script on all hosts and wait for its end.")
@takes_options
def run(options: Options) -> None:
    """Start SCRIPT once for each worker on all hosts, and end with its exit code.

    Options of dtrain come before SCRIPT; everything after it is the script's. An option can also be set by a variable
    (DTRAIN_GRACE_S=10 for --grace-s 10; not those of one run: -m, --no-python, --detach, --print-commands, -q, -v), and
    in dtrain.toml or [tool.dtrain] of pyproject.toml: flag > variable > file. torchrun's other options are taken too.
    """
    from launcher.cli.run import run_job

    sys.exit(run_job(options, _complain))


@cli.command(context_settings=_PASS_ON, short_help="Show which rank would run where; start nothing.")
@takes_options
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def plan(options: Options, as_json: bool) -> None:
    """Show rank, host, GPU and cores of every worker that `dtrain run` would start. Starts nothing anywhere.

    Takes every option of `dtrain run`, so that one word turns a run into its plan.

    GPUs and cores of this machine are looked up; those of hosts reached by SSH are not known before a run asks them, so
    their GPUs are assumed to be numbered from 0, and marked.
    """
    from launcher.cli.plan import show_plan

    click.echo(show_plan(read_request(options).spec, as_json=as_json))


class _Verbatim(click.Command):
    """Takes every word as it was typed, `--` and `--help` as well."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.params["args"] = tuple(args)
        return []


@cli.command(cls=_Verbatim, short_help="Submit a job to SLURM that is a run; or print its script.")
def sbatch(args: tuple[str, ...]) -> None:
    """See `dtrain sbatch --help`, which sbatch.py answers."""
    from launcher.cli.sbatch import run_sbatch

    sys.exit(run_sbatch(args, cli))


@cli.command(context_settings=_PASS_ON, short_help="Check hosts, network and GPUs before a run.")
@takes_options
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option(
    "--no-allreduce", is_flag=True, cls=Option, help="Leave out the all-reduce, which takes as long as torch to import."
)
def check(options: Options, as_json: bool, no_allreduce: bool) -> None:
    """Check whether `dtrain run` would start on all hosts, how fast they reach each other, and what to fix.

    Takes every option of `dtrain run`; without SCRIPT, only the hosts are checked. Exit code 0: a run would start.
    """
    from launcher.check.command import run_check

    options = replace(options, keep_warm=None)
    if not options.command:
        options = replace(options, command=("ddp.comm.allreduce_speed",), module=True, no_python=False)
    request = read_request(options)
    for notice in request.notices:
        _complain(notice)
    sys.exit(run_check(request.spec, as_json=as_json, say=_complain, allreduce=not no_allreduce))


@cli.command(context_settings=_PASS_ON, short_help="List, start or stop what stays warm between runs.")
@takes_options
@click.option("--start", is_flag=True, help="Import SCRIPT's packages now, for --keep-warm (10m).")
@click.option("--stop", is_flag=True, help="Stop all of yours.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def warm(options: Options, start: bool, stop: bool, as_json: bool) -> None:
    """List what `dtrain run --keep-warm` has left on this machine: processes with packages imported, until when.

    Takes every option of `dtrain run`; SCRIPT only with --start. Only processes of this user are seen.
    """
    from launcher.cli.warm import list_warm, start_warm, stop_warm

    if start and stop:
        raise UsageError("--start and --stop exclude each other")
    if start and not options.command:
        raise UsageError("--start needs the script, whose packages are to be imported: dtrain warm --start train.py")
    if not start:
        options = replace(options, command=("launcher",), module=True, no_python=False, keep_warm=None)
    request = read_request(options)
    if start:
        check_here(request.spec)
        sys.exit(start_warm(request.spec, say=_complain))
    if stop:
        sys.exit(stop_warm(request.spec, say=_complain))
    sys.exit(list_warm(request.spec, as_json=as_json, say=_complain))


def _complete_run(_: click.Context, __: click.Parameter, begun: str) -> list[str]:
    """Return the names of runs that begin so, the newest first, for the shell."""
    from launcher.runs.registry import entries

    return [name for name in ["last", *(entry.run_id for entry in entries())] if name.startswith(begun)]


_RUN = click.argument("run_id", metavar="RUN", shell_complete=_complete_run)
_LAST_RUN = click.argument("run_id", metavar="[RUN]", default="last", shell_complete=_complete_run)
_JSON = click.option("--json", "as_json", is_flag=True, help="As JSON.")


@cli.command(short_help="List your runs: state, hosts, workers, step, age, goodput.")
@click.option("--all", "-a", "show_all", is_flag=True, help="Also those that have ended, and the lost ones.")
@_JSON
def ps(show_all: bool, as_json: bool) -> None:
    """List the runs of this user that go on, in the foreground or detached.

    With --all also those that have ended, each with its cause: what failed first, in a few words. A run is lost if its
    controller was killed or its machine went down.
    """
    from launcher.cli.runs.table import show_runs

    sys.exit(show_runs(everything=show_all, as_json=as_json, say=_complain))


@cli.command(short_help="Show how the ranks of a run do, again and again.")
@_RUN
@_JSON
def top(run_id: str, as_json: bool) -> None:
    """Show hosts and ranks of RUN: step, its time, own work and waits, memory, GPU, restarts, faults; who is slow.

    Refreshed each second until Ctrl-C; where stdout is no terminal, and with --json, it is shown once.
    """
    from launcher.cli.runs.top import show_top

    sys.exit(show_top(run_id, as_json=as_json, say=_complain))


@cli.command(short_help="List all your runs, and how they ended.")
@_JSON
def history(as_json: bool) -> None:
    """List when each run was started, how long it took, how it ended, what failed first, and with which commit."""
    from launcher.cli.runs.table import show_history

    sys.exit(show_history(as_json=as_json, say=_complain))


@cli.command(short_help="Show what the workers of a run have written.")
@_RUN
@click.option("--follow", "-f", is_flag=True, help="Go on until the run ends.")
@click.option("--rank", metavar="R,R", help="Only of these ranks.")
@click.option("--since", metavar="5m|90s|1h", help="Only what was written in this time.")
def logs(run_id: str, follow: bool, rank: str | None, since: str | None) -> None:
    """Show the output of RUN: an id, the beginning of one, or `last`."""
    from launcher.cli.runs.follow import show_logs
    from launcher.output.filter import parse_ranks
    from launcher.placement.job_spec import parse_duration

    since_s = None if since is None else parse_duration(since, "--since")
    sys.exit(show_logs(run_id, follow=follow, ranks=parse_ranks(rank, "--rank"), since_s=since_s))


@cli.command(short_help="Show the report of a run that has ended: what failed, where, why.")
@_LAST_RUN
def report(run_id: str) -> None:
    """Print the last screen of RUN, by default of the last run: what failed first, what followed, what to type next.

    Exit code 0 where there is a report, whatever it says; 1 where RUN goes on or is not known. The run's own exit code
    is that of `dtrain wait RUN`.
    """
    from launcher.cli.runs.steer import show_report

    sys.exit(show_report(run_id))


@cli.command(short_help="Write where the time of a run went, for Perfetto.")
@_RUN
@click.option("--output", "-o", metavar="FILE", help="Instead of RUN.trace.json here; - for stdout.")
def trace(run_id: str, output: str | None) -> None:
    """Write the phases of RUN, on all hosts and ranks, as a JSON that https://ui.perfetto.dev and Chrome show.

    Steps are there if dtrain sees them; with ddp, also what ranks do in them. RUN may go on or have ended.
    """
    from launcher.cli.runs.times import trace_run

    sys.exit(trace_run(run_id, output, say=_complain))


@cli.command(short_help="Draw the step time of each rank.")
@_RUN
@click.option("--output", "-o", metavar="FILE", help="Instead of RUN.png here; its suffix gives the format.")
def plot(run_id: str, output: str | None) -> None:
    """Draw how long the steps of each rank of RUN took, with restarts and faults. Needs matplotlib."""
    from launcher.cli.runs.times import plot_run

    sys.exit(plot_run(run_id, output, say=_complain))


@cli.command(short_help="Show a run as if it were in the foreground.")
@_RUN
def attach(run_id: str) -> None:
    """Show RUN until it ends, its report last, and end with its exit code. Ctrl-C asks: stop it, or leave it (0).

    Of a run that has ended before, the report is shown. A run that is lost gives 1.
    """
    from launcher.cli.runs.follow import attach as attach_to

    sys.exit(attach_to(run_id, say=_complain))


@cli.command(short_help="Stop a run.")
@_RUN
@click.option("--kill", is_flag=True, help="At once: SIGKILL, without --grace-s.")
def stop(run_id: str, kill: bool) -> None:
    """Stop RUN as SIGTERM does, and return once nothing of it is left."""
    from launcher.cli.runs.steer import stop_run

    sys.exit(stop_run(run_id, kill=kill, say=_complain))


@cli.command(short_help="Wait for the end of a run; end with its report and its exit code.")
@_RUN
def wait(run_id: str) -> None:
    """Wait for the end of RUN, show its report on stderr, and end with its exit code. A run that is lost gives 1."""
    from launcher.cli.runs.steer import wait_for_run

    sys.exit(wait_for_run(run_id, say=_complain))


@cli.command(short_help="Show where the ranks of a run are.")
@_RUN
@click.option("--rank", metavar="R,R", help="Only these ranks, with all their threads.")
@click.option(
    "--native", is_flag=True, help="With the frames of C and C++, by py-spy, which stops each rank meanwhile."
)
@_JSON
def stacks(run_id: str, rank: str | None, native: bool, as_json: bool) -> None:
    """Show the Python stacks of all ranks of RUN, those in one place together. The run goes on."""
    from launcher.cli.runs.stacks import show_stacks
    from launcher.output.filter import parse_ranks

    ranks = parse_ranks(rank, "--rank") or ()
    sys.exit(show_stacks(run_id, ranks, native=native, as_json=as_json, say=_complain))


@cli.command(short_help="Open a debugger in a rank of a run that goes on.")
@_RUN
@click.option("--rank", type=click.IntRange(min=0), required=True, help="The rank.")
@click.option("--debugpy", is_flag=True, help="For an editor: debugpy, which the rank's Python must have.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="With --debugpy: where the editor connects to.")
def debug(run_id: str, rank: int, debugpy: bool, port: int) -> None:
    """Open pdb where a rank of RUN is now. To quit it, Ctrl-C, or the end of this command let the rank go on.

    Other ranks wait for it: meanwhile dtrain takes nobody's silence for a stall. Timeouts that are torch's own go on.
    """
    from launcher.cli.runs.debug import debug_rank

    if port and not debugpy:
        raise UsageError("--port is for --debugpy; pdb speaks in this terminal")
    sys.exit(debug_rank(run_id, rank, port=port if debugpy else None, say=_complain))


@cli.command(context_settings=_PASS_ON, short_help="Start the same command again, in the same folder.")
@click.option("--any-commit", is_flag=True, help="Whatever commit is checked out there now.")
@_RUN
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def rerun(context: click.Context, any_commit: bool, run_id: str, options: tuple[str, ...]) -> None:
    """Start the command of RUN again, with more OPTIONS of dtrain run, in its folder and with the same git commit."""
    from launcher.cli.runs.rerun import prepare_rerun

    again = prepare_rerun(run_id, options, any_commit=any_commit, say=_complain)
    os.environ.update(again.variables)
    sys.argv[1:] = [*([] if again.as_torchrun else ["run"]), *again.words]
    cli.main(["run", *again.words], standalone_mode=False, obj=again.as_torchrun)


@cli.command(short_help="Show what a bug report needs to say, without secrets.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option("--torch", "with_torch", is_flag=True, help="Add what torch.utils.collect_env prints.")
def env(as_json: bool, with_torch: bool) -> None:
    """Show versions, hardware, limits and settings of this machine, as a bug report needs them.

    Of variables that may be secret only the names are shown; user and host names are left out.
    """
    from launcher.cli.env import run_env

    sys.exit(run_env(cli.read_config_file().values, as_json=as_json, with_torch=with_torch))


@cli.command(short_help="Print what makes a shell complete dtrain's words.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the lines that make SHELL complete commands, options and runs, for its start-up file.

    \b
    bash:  echo 'eval "$(dtrain completion bash)"' >> ~/.bashrc
    zsh:   echo 'eval "$(dtrain completion zsh)"' >> ~/.zshrc
    fish:  dtrain completion fish > ~/.config/fish/completions/dtrain.fish
    """
    from click.shell_completion import get_completion_class

    if (made := get_completion_class(shell)) is not None:
        click.echo(made(cli, {}, "dtrain", "_DTRAIN_COMPLETE").source())
