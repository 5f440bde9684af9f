"""The commands `dtrain` and `dtrain-torchrun`: one function per command. Only this file prints errors and exits."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from dataclasses import replace
from typing import NoReturn

import click

from launcher import __version__
from launcher.cli.config_file import Group
from launcher.cli.options import Option, Options, takes_options
from launcher.cli.pod import with_pod_variables
from launcher.cli.process_one import fork_if_process_one
from launcher.cli.request import check_here, read_request
from launcher.errors import DtrainError, UsageError

_PASS_ON = {"allow_interspersed_args": False}
_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_STDOUT = "standard output cannot be written"

# Names of our options for users of mpirun, Horovod, DeepSpeed and srun.
_ALL_WORKERS = ("-n", "--np", "--num-proc")  # the total on all hosts
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


def main(*, as_torchrun: bool = False) -> NoReturn:
    """Run the command line of `dtrain`, or `dtrain run` as torchrun would (torchrun.py)."""
    fork_if_process_one()
    _open_standard_streams()
    _end(_main([*(["run"] if as_torchrun else []), *sys.argv[1:]], as_torchrun=as_torchrun))


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
            error = click.NoSuchOption(error.option_name, ctx=error.ctx)  # without click's similar names
        with contextlib.suppress(OSError):
            error.show()
        if ours is not None:
            counts = "; it counts the workers of each host" if error.option_name in _ALL_WORKERS else ""
            _complain(f"dtrain's option for {error.option_name} is {ours}{counts}")
        return error.exit_code
    except click.ClickException as error:
        with contextlib.suppress(OSError):  # stderr is closed
            error.show()
        return error.exit_code
    except DtrainError as error:
        _complain(str(error))
        return error.exit_code
    except OSError as error:
        if error.errno not in _CANNOT_WRITE or error.filename is not None:
            raise
        _complain(f"{_STDOUT}: {error.strerror}")  # what writes to other files names them
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # what is buffered would fail again
        return 1
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        _complain("this machine has no thread left for dtrain itself; raise the limit of processes (ulimit -u)")
        return 1
    return 0


def _open_standard_streams() -> None:
    """Open /dev/null as 0, 1 and 2 where they are closed, so that no pipe of ours gets one of these numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115  # lives as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files need not be UTF-8, nor tables fit into ASCII
        is_unicode = sys.stdout.encoding.lower().startswith("utf")
        sys.stdout.reconfigure(errors="surrogateescape" if is_unicode else "replace")


def _end(status: int) -> NoReturn:
    """Exit with the run's exit code, even if stdout or stderr cannot be flushed."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if error.errno in _CANNOT_WRITE:
            _complain(f"{_STDOUT}: {error.strerror}")
            status = status or 1
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(status)


def _complain(text: str) -> None:
    colour = None
    if "\x1b" in text:  # click would strip it where stderr is not a terminal
        from launcher.output.console import takes_colour

        colour = takes_colour(2)
    with contextlib.suppress(OSError):  # stderr is closed; the exit code still reports the error
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


@cli.command(context_settings=_PASS_ON, short_help="Start a script on all hosts and wait until it ends.")
@takes_options
def run(options: Options) -> None:
    """Start SCRIPT once per worker on all hosts, and exit with its exit code.

    Options of dtrain come before SCRIPT; everything after it is passed to the script. An option can also be set by an
    environment variable (DTRAIN_GRACE_S=10 for --grace-s 10; except -m, --no-python, --detach, --print-commands, -q,
    -v), and in dtrain.toml or [tool.dtrain] of pyproject.toml: flag > variable > file. torchrun's other options are
    accepted too.
    """
    from launcher.cli.run import run_job

    sys.exit(run_job(options, _complain))


@cli.command(context_settings=_PASS_ON, short_help="Show where each rank would run; start nothing.")
@takes_options
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def plan(options: Options, as_json: bool) -> None:
    """Show rank, host, GPU and cores of every worker that `dtrain run` would start. Starts nothing on any host.

    Accepts every option of `dtrain run`: replace `run` by `plan` in the command.

    GPUs and cores of this machine are looked up. Those of hosts reached by SSH are unknown until a run asks them; their
    GPUs are assumed to be numbered from 0, and marked.
    """
    from launcher.cli.plan import show_plan

    options = with_pod_variables(options, os.environ)
    click.echo(show_plan(read_request(options).spec, as_json=as_json))


class _Verbatim(click.Command):
    """Passes on every argument as typed, including `--` and `--help`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.params["args"] = tuple(args)
        return []


@cli.command(cls=_Verbatim, short_help="Submit a run as a SLURM job, or print its script.")
def sbatch(args: tuple[str, ...]) -> None:
    """See `dtrain sbatch --help`, which sbatch.py answers."""
    from launcher.cli.sbatch import run_sbatch

    sys.exit(run_sbatch(args, cli))


@cli.command(context_settings=_PASS_ON, short_help="Check hosts, network and GPUs before a run.")
@takes_options
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option("--no-allreduce", is_flag=True, cls=Option, help="Skip the all-reduce, which has to import torch.")
def check(options: Options, as_json: bool, no_allreduce: bool) -> None:
    """Check whether `dtrain run` would start on all hosts, measure the network between them, and say what to fix.

    Accepts every option of `dtrain run`; without SCRIPT, only the hosts are checked. Exit code 0: a run would start.
    """
    from launcher.check.command import run_check

    options = replace(options, keep_warm=None)
    if not options.command:
        options = replace(options, command=("ddp.comm.allreduce_speed",), module=True, no_python=False)
    request = read_request(options)
    for notice in request.notices:
        _complain(notice)
    sys.exit(run_check(request.spec, as_json=as_json, say=_complain, allreduce=not no_allreduce))


@cli.command(context_settings=_PASS_ON, short_help="List or remove what --sync keeps on hosts.")
@takes_options
@click.option("--clear", is_flag=True, help="Remove it; what a run uses stays.")
def cache(options: Options, clear: bool) -> None:
    """List the code and packages that `dtrain run --sync` keeps on the hosts for later runs.

    Accepts the options of `dtrain run` that name hosts. What was not used for 30 days goes by itself, and the oldest
    if all has more than 20 GB.
    """
    from launcher.cli.hosts.cache import run_cache

    options = replace(options, command=("launcher",), module=True, no_python=False, keep_warm=None)
    sys.exit(run_cache(read_request(options).spec, clear=clear, say=_complain))


@cli.command(context_settings=_PASS_ON, short_help="List, start or stop processes kept warm between runs.")
@takes_options
@click.option("--start", is_flag=True, help="Import SCRIPT's packages now, for --keep-warm (10m).")
@click.option("--stop", is_flag=True, help="Stop all of them.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def warm(options: Options, start: bool, stop: bool, as_json: bool) -> None:
    """List the processes that `dtrain run --keep-warm` keeps on this machine with packages imported, and until when.

    Accepts every option of `dtrain run`; SCRIPT only with --start. Only processes of this user are listed.
    """
    from launcher.cli.hosts.warm import list_warm, start_warm, stop_warm

    if start and stop:
        raise UsageError("--start and --stop exclude each other")
    if start and not options.command:
        raise UsageError("--start needs the script whose packages it imports: dtrain warm --start train.py")
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
    """Return the names of runs that start with this text, the newest first, for the shell."""
    from launcher.runs.registry import entries

    return [name for name in ["last", *(entry.run_id for entry in entries())] if name.startswith(begun)]


_RUN = click.argument("run_id", metavar="RUN", shell_complete=_complete_run)
_LAST_RUN = click.argument("run_id", metavar="[RUN]", default="last", shell_complete=_complete_run)
_JSON = click.option("--json", "as_json", is_flag=True, help="As JSON.")


@cli.command(short_help="List your runs: state, hosts, workers, step, age, goodput.")
@click.option("--all", "-a", "show_all", is_flag=True, help="Include runs that have ended or are lost.")
@_JSON
def ps(show_all: bool, as_json: bool) -> None:
    """List the active runs of this user, in the foreground or detached.

    With --all also those that have ended, each with a short cause: what failed first. A run is lost if its controller
    was killed or its machine went down.
    """
    from launcher.cli.runs.table import show_runs

    sys.exit(show_runs(everything=show_all, as_json=as_json, say=_complain))


@cli.command(short_help="Show the ranks of a run, refreshed each second.")
@_LAST_RUN
@_JSON
def top(run_id: str, as_json: bool) -> None:
    """Show hosts and ranks of RUN: step, step time, own work and waits, memory, GPU, restarts, faults; stragglers.

    Refreshed each second until Ctrl-C; shown once if stdout is not a terminal, and with --json.
    """
    from launcher.cli.runs.top import show_top

    sys.exit(show_top(run_id, as_json=as_json, say=_complain))


@cli.command(short_help="List all your runs and how they ended.")
@_JSON
def history(as_json: bool) -> None:
    """List for each run when it started, how long it took, how it ended, what failed first, and its git commit."""
    from launcher.cli.runs.table import show_history

    sys.exit(show_history(as_json=as_json, say=_complain))


@cli.command(short_help="Show the output of a run's workers.")
@_LAST_RUN
@click.option("--follow", "-f", is_flag=True, help="Keep showing output until the run ends.")
@click.option("--rank", metavar="R,R", help="Only the output of these ranks.")
@click.option("--since", metavar="5m|90s|1h", help="Only output newer than this.")
def logs(run_id: str, follow: bool, rank: str | None, since: str | None) -> None:
    """Show the output of RUN: an id, a prefix of one, or `last`, the default."""
    from launcher.cli.runs.follow import show_logs
    from launcher.output.filter import parse_ranks
    from launcher.placement.job_spec import parse_duration

    since_s = None if since is None else parse_duration(since, "--since")
    sys.exit(show_logs(run_id, follow=follow, ranks=parse_ranks(rank, "--rank"), since_s=since_s))


@cli.command(short_help="Show the report of a run that has ended: what failed, where, why.")
@_LAST_RUN
def report(run_id: str) -> None:
    """Print the final report of RUN, by default the last run: what failed first, what followed, what to type next.

    Exit code 0 if there is a report, whatever it says; 1 if RUN is still active or unknown. `dtrain wait RUN` exits
    with the run's own exit code.
    """
    from launcher.cli.runs.steer import show_report

    sys.exit(show_report(run_id))


@cli.command(short_help="Write how a run spent its time, for Perfetto.")
@_LAST_RUN
@click.option("--output", "-o", metavar="FILE", help="Write to FILE, not to RUN.trace.json here; - is stdout.")
def trace(run_id: str, output: str | None) -> None:
    """Write the phases of RUN, on all hosts and ranks, as JSON for https://ui.perfetto.dev and Chrome.

    It has steps if dtrain sees them; with ddp, also what ranks do in them. RUN may be active or have ended.
    """
    from launcher.cli.runs.times import trace_run

    sys.exit(trace_run(run_id, output, say=_complain))


@cli.command(short_help="Draw the step time of each rank.")
@_LAST_RUN
@click.option(
    "--output", "-o", metavar="FILE", help="Write to FILE, not to RUN.png here; its suffix selects the format."
)
def plot(run_id: str, output: str | None) -> None:
    """Draw how long the steps of each rank of RUN took, with restarts and faults. Needs matplotlib."""
    from launcher.cli.runs.times import plot_run

    sys.exit(plot_run(run_id, output, say=_complain))


@cli.command(short_help="Show a run as if it were in the foreground.")
@_LAST_RUN
def attach(run_id: str) -> None:
    """Show RUN until it ends, then its report; exit with its exit code. Ctrl-C asks: stop it, or leave it (0).

    If the run has ended already, only the report is shown. The exit code of a lost run is 1.
    """
    from launcher.cli.runs.follow import attach as attach_to

    sys.exit(attach_to(run_id, say=_complain))


@cli.command(short_help="Stop a run.")
@_RUN
@click.option("--kill", is_flag=True, help="Send SIGKILL immediately, without waiting for --grace-s.")
def stop(run_id: str, kill: bool) -> None:
    """Stop RUN as SIGTERM does, and return once none of its processes is left."""
    from launcher.cli.runs.steer import stop_run

    sys.exit(stop_run(run_id, kill=kill, say=_complain))


@cli.command(short_help="Wait until a run ends; show its report, exit with its exit code.")
@_LAST_RUN
def wait(run_id: str) -> None:
    """Wait until RUN ends, show its report on stderr, and exit with its exit code; 1 for a lost run."""
    from launcher.cli.runs.steer import wait_for_run

    sys.exit(wait_for_run(run_id, say=_complain))


@cli.command(short_help="Show where the ranks of a run are.")
@_LAST_RUN
@click.option("--rank", metavar="R,R", help="Only these ranks, with all their threads.")
@click.option("--native", is_flag=True, help="Include C and C++ frames, by py-spy, which stops each rank meanwhile.")
@_JSON
def stacks(run_id: str, rank: str | None, native: bool, as_json: bool) -> None:
    """Show the Python stacks of all ranks of RUN, grouped by place. The run continues."""
    from launcher.cli.runs.stacks import show_stacks
    from launcher.output.filter import parse_ranks

    ranks = parse_ranks(rank, "--rank") or ()
    sys.exit(show_stacks(run_id, ranks, native=native, as_json=as_json, say=_complain))


@cli.command(short_help="Open a debugger in a rank of an active run.")
@_RUN
@click.option("--rank", type=click.IntRange(min=0), required=True, help="The rank to debug.")
@click.option("--debugpy", is_flag=True, help="Use debugpy, for an editor; the rank's Python must have it.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="With --debugpy: the port that the editor connects to."
)
def debug(run_id: str, rank: int, debugpy: bool, port: int) -> None:
    """Open pdb where a rank of RUN is now. The rank continues after `quit`, Ctrl-C, or the end of this command.

    Other ranks wait for it; meanwhile dtrain reports no stall. torch's own timeouts keep running.
    """
    from launcher.cli.runs.debug import debug_rank

    if port and not debugpy:
        raise UsageError("--port is for --debugpy; pdb uses this terminal")
    sys.exit(debug_rank(run_id, rank, port=port if debugpy else None, say=_complain))


@cli.command(context_settings=_PASS_ON, short_help="Start the same command again, in the same folder.")
@click.option("--any-commit", is_flag=True, help="Accept any commit checked out there now.")
@_RUN
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def rerun(context: click.Context, any_commit: bool, run_id: str, options: tuple[str, ...]) -> None:
    """Start the command of RUN again, with more OPTIONS of dtrain run, in its folder and at the same git commit."""
    from launcher.cli.runs.rerun import prepare_rerun
    from launcher.runs.registry import choose, entries

    again = prepare_rerun(choose(run_id, entries()), options, any_commit=any_commit, say=_complain)
    os.environ.update(again.variables)
    sys.argv[1:] = [*([] if again.as_torchrun else ["run"]), *again.argv]
    cli.main(["run", *again.argv], standalone_mode=False, obj=again.as_torchrun)


@cli.command(short_help="Make steps of an earlier run again, in one process, under a debugger.")
@_LAST_RUN
@click.option("--step", type=int, metavar="N", help="The last step to make.  [default: where the run ended]")
@click.option(
    "--micro-batch", type=int, metavar="M", help="With --pdb: stop before this one of the step, not before 0."
)
@click.option(
    "--pdb", is_flag=True, help="Open pdb before the step; without --step, at an exception that ends the script."
)
@click.option("--nproc-per-node", metavar="K", default="1", show_default=True, help="Workers that share the step.")
@click.option("--on", metavar="HOST", help="Run there, by SSH.  [default: this machine]")
@click.option("--any-commit", is_flag=True, help="Accept any commit checked out there now.")
def replay(
    run_id: str, step: int | None, micro_batch: int | None, pdb: bool, nproc_per_node: str, on: str | None,
    any_commit: bool,
) -> None:  # fmt: skip
    """Start the script of RUN with its arguments from its newest checkpoint before step N, and compare each step.

    RUN may be active; its files stay as they are. The script's ddp.Checkpoint saves to the replay's folder, and
    DTRAIN_REPLAY=1 is set. Exit code 0: step N was reached with the same bits; 1: they differ; that of the script if it
    fails. The ledger of ddp.StepLoader is needed.
    """
    from launcher.cli.runs.replay import Wanted, replay_run

    wanted = Wanted(step, micro_batch, pdb, nproc_per_node, on)
    sys.exit(replay_run(run_id, wanted, any_commit=any_commit, parse=cli.options_of_run, say=_complain))


@cli.command(short_help="Show the first step at which two runs differ.")
@click.argument("runs", metavar="RUN RUN", nargs=2, shell_complete=_complete_run)
@_JSON
def diff(runs: tuple[str, str], as_json: bool) -> None:
    """Compare the ledgers of two runs, or two files of ddp.ledger(): seed and sizes, then step by step.

    Exit code 0: the steps that both have are equal; 1: they differ; 2: they cannot be compared.
    """
    from launcher.cli.runs.replay import diff_runs

    sys.exit(diff_runs(runs, as_json=as_json))


@cli.command(short_help="Show what a bug report needs, without secrets.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option("--torch", "with_torch", is_flag=True, help="Add the output of torch.utils.collect_env.")
def env(as_json: bool, with_torch: bool) -> None:
    """Show versions, hardware, limits and settings of this machine for a bug report.

    Only the names of variables that may be secret are shown; user and host names are left out.
    """
    from launcher.cli.hosts.env import run_env

    sys.exit(run_env(cli.read_config_file().values, as_json=as_json, with_torch=with_torch))


@cli.command(short_help="Print the shell code that completes dtrain's commands.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the code that makes SHELL complete commands, options and runs, for its start-up file.

    \b
    bash:  echo 'eval "$(dtrain completion bash)"' >> ~/.bashrc
    zsh:   echo 'eval "$(dtrain completion zsh)"' >> ~/.zshrc
    fish:  dtrain completion fish > ~/.config/fish/completions/dtrain.fish
    """
    from click.shell_completion import get_completion_class

    if (made := get_completion_class(shell)) is not None:
        click.echo(made(cli, {}, "dtrain", "_DTRAIN_COMPLETE").source())
