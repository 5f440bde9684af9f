"""`dtrain run`, from the options to the exit code: the controller's, or that of a node that joins one.

Called by main.py. Reads the request, opens what the run's output goes to, and hands both to the controller.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.options import Options, unknown_variables
from launcher.cli.request import Request, check_here, read_request
from launcher.errors import DtrainError, NodeZeroTakenError, UsageError
from launcher.hosts.sources import in_slurm
from launcher.runs.housekeeping import Limits, hold
from launcher.transport.connect import start_agents

if TYPE_CHECKING:
    from launcher.job.outcome import Outcome
    from launcher.output.writer import OutputThread
    from launcher.runs.detach import Detachment
    from launcher.timeline.goodput import Parts
    from launcher.timeline.stragglers import Straggler

__all__ = ["run_job"]

GOODPUT_FROM_S = 60.0  # of a run of which no steps are known, a shorter one needs no words on its time
_SWITCH_S = 0.0005  # what threads that connect wait for at each of their steps, while this one imports


@dataclass(frozen=True)
class Verbosity:
    """How much dtrain says of itself, by what, and where it writes how the run ended."""

    quiet: bool
    verbose: bool
    say: Callable[[str], None]
    error_json: Path | None


def run_job(options: Options, say: Callable[[str], None]) -> int:
    """Run what is asked for to its end, with --detach to its start, and return the exit code.

    Blocks; from the main thread only.
    """
    if not options.detach or options.print_commands:
        return _run(options, say)
    from launcher.runs.detach import detached

    return detached(lambda detachment: _run(options, say, detachment), print)


def _run(options: Options, say: Callable[[str], None], detachment: Detachment | None = None) -> int:
    verbosity = Verbosity(options.quiet, options.verbose, say, _error_file(options.error_json))
    try:
        if options.print_commands:
            from launcher.cli.print_commands import commands

            print(commands(options))
            return 0
        limits = Limits(options.keep_runs, options.log_max_size)
        request = read_request(options, wait=True)
        check_here(request.spec)
        if detachment is not None and request.node_role is not None:
            raise UsageError("--detach is for runs that dtrain starts on all nodes; those started by hand stay here")
    except DtrainError as error:  # the file is for runs that end before they began, too
        if verbosity.error_json is not None:
            from launcher.output.error_json import write_usage_error_json

            with contextlib.suppress(OSError):  # the error itself is what is to be seen
                write_usage_error_json(verbosity.error_json, error)
        raise
    if detachment is not None and not verbosity.quiet:
        from launcher.agent.warm.login import ends_with_login

        if ends_with_login():
            say("logind ends this run with your login (KillUserProcesses). To keep it: loginctl enable-linger,")
            say("once, then start it by: systemd-run --user --scope dtrain run --detach ...")
    if not verbosity.quiet:
        for notice in [*unknown_variables(), *request.notices]:
            say(notice)
    spec, node_role, taken = request.spec, request.node_role, ""
    if in_slurm(os.environ):  # which may send them while we start
        for signum in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signum, lambda *_: None)
    if node_role is None or node_role.lead:
        try:
            return _control(request, options, limits, verbosity, detachment)
        except NodeZeroTakenError as error:  # another command on this machine was first
            taken = f"; this command is not node 0, since {error}"
        assert node_role is not None
    from launcher.cli.run_node import JoinError, join_run

    # Under srun all tasks share one terminal, where node 0 says everything.
    tell = say if node_role.by_hand and not verbosity.quiet else lambda _: None
    try:
        return join_run(node_role, spec, tell)
    except JoinError as error:
        raise JoinError(f"{error}{taken}") from error


def _error_file(text: str | None) -> Path | None:
    if text is None:
        return None
    path = Path(text).expanduser()
    if not path.parent.is_dir():
        raise UsageError(f"--error-json: the folder {path.parent} does not exist; make it, or name a file elsewhere")
    if path.is_dir():
        raise UsageError(f"--error-json: {path} is a folder; name a file")
    return path


def _control(
    request: Request, options: Options, limits: Limits, verbosity: Verbosity, detachment: Detachment | None
) -> int:
    spec = request.spec
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(hold(spec.log_dir, spec.run_id))
        except UsageError as error:
            if request.node_role is not None and request.node_role.node_rank is None:
                raise NodeZeroTakenError(str(error)) from error
            if not spec.first_attempt:  # SLURM starts a job again when its last start has ended, whoever holds a lock
                raise
        return _control_alone(request, options, limits, verbosity, detachment)


def _control_alone(
    request: Request, options: Options, limits: Limits, verbosity: Verbosity, detachment: Detachment | None
) -> int:
    spec, node_role = request.spec, request.node_role
    if node_role is not None:
        os.environ.update(node_role.agent_environment)
    early: list[int] = []  # an exception in the middle of an import could be lost
    if "SIGINT" in spec.signals:
        signal.signal(signal.SIGINT, lambda signum, _: early.append(signum))
    # At once: an agent's start takes as long as the imports here. But not before it is certain that we are node 0.
    opened = start_agents(spec) if node_role is None else {}
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)

    from launcher.controller.controller import Controller
    from launcher.machine.processes import raise_file_limit
    from launcher.output.console import Console
    from launcher.output.logfiles import LogFiles, set_aside
    from launcher.output.report import report
    from launcher.output.writer import OutputThread
    from launcher.runs.session import Session
    from launcher.timeline.recording import Recording

    sys.setswitchinterval(switch_s)
    raise_file_limit()
    console = Console(out=1 if detachment is None else 2)  # stdout is for the run's id
    folder = spec.log_dir / spec.run_id
    if spec.first_attempt == 0 and (moved := set_aside(folder)) is not None and not verbosity.quiet:
        verbosity.say(f"moved the files of an earlier run {spec.run_id} to {moved}")
    logs = LogFiles(folder, console.say)
    output = OutputThread(console, logs, output_filter=request.output_filter)
    output.start()
    recording = Recording(folder, spec.run_id, say=output.say, failed=output.cannot_write)
    session = Session(
        spec,
        output,
        words=sys.argv[1 if options.as_torchrun else 2 :],
        script=len(options.command),
        as_torchrun=options.as_torchrun,
        options={name: (getattr(options, name), origin) for name, origin in options.origins},
        folder=folder,
        limits=limits,
        detachment=detachment,
        timeline=recording.timeline,
        say=(lambda _: None) if verbosity.quiet else output.say,
    )

    def show_progress(text: str) -> None:
        output.show_status(text or session.status_line(), gives_way=not text)

    try:
        with contextlib.ExitStack() as stack:
            stack.callback(recording.close)
            listener = None
            if node_role is not None:  # there are commands of this run on other nodes
                from launcher.cli.run_node import listen_for_nodes  # cryptography is slow to import

                listener = stack.enter_context(listen_for_nodes(node_role, spec, output.say))
            controller = Controller(
                spec if listener is None else replace(spec, master_addr=listener.address),
                output,
                show_progress=show_progress if os.isatty(2) and not verbosity.quiet else lambda _: None,
                tell_user=output.say,
                opened=opened,
                listener=listener,
                recording=recording,
                watch=session.watch,
            )
            session.listen(controller)
            outcome = controller.run(early)
            if listener is not None:
                line = report(outcome, folder=None, tail=lambda *_: []).partition("\n")[0]
                listener.close(outcome.exit_code, line)  # for the other nodes
    finally:
        output.close()
    logged_to = folder if logs.usable else None
    _report_end(request, verbosity, outcome, output, controller.evidence_file, logged_to, session.spent(outcome))
    session.end(outcome, controller.evidence_file)
    return _requeue(outcome, verbosity) if outcome.preempted else outcome.exit_code


def _report_end(
    request: Request,
    verbosity: Verbosity,
    outcome: Outcome,
    output: OutputThread,
    evidence_file: Path | None,
    folder: Path | None,
    spent: tuple[Parts | None, Sequence[Straggler]],
) -> None:
    from launcher.output.console import takes_colour
    from launcher.output.insight import goodput_line
    from launcher.output.report import report
    from launcher.output.text import count
    from launcher.output.warm import warm_lines

    spec = request.spec
    parts, stragglers = spent
    if verbosity.error_json is not None:
        from launcher.output.error_json import write_error_json

        try:
            write_error_json(
                verbosity.error_json,
                outcome,
                folder=folder,
                evidence_file=evidence_file,
                parts=parts,
                stragglers=stragglers,
            )
        except OSError as error:
            verbosity.say(f"--error-json: {verbosity.error_json} cannot be written: {error.strerror}")
    if verbosity.verbose:
        workers, hosts = count(outcome.world_size, "worker"), count(outcome.hosts, "host")
        ran = f"{workers} on {hosts} for {outcome.duration_s:.1f} s"
        verbosity.say(f"run {spec.run_id}: {ran}")
        if outcome.forked:
            were = f"{count(outcome.forked, 'worker')} {'was' if outcome.forked == 1 else 'were'}"
            verbosity.say(f"{were} forked from processes that had imported their packages")
    if verbosity.verbose or spec.start_method == "fork":
        for reason in outcome.by_exec:
            verbosity.say(f"workers were started by exec: {reason}")
    ranks = request.output_filter.ranks
    if outcome.error is None and ranks and max(ranks) >= outcome.world_size:
        named = ",".join(map(str, sorted(ranks)))
        verbosity.say(f"--only-rank {named}: there were only ranks 0 to {outcome.world_size - 1}")
    for line in warm_lines(spec, outcome, verbose=verbosity.verbose):
        if not verbosity.quiet:
            verbosity.say(line)
    if parts is not None and not verbosity.quiet and (parts.is_measured or parts.wall_s >= GOODPUT_FROM_S):
        verbosity.say(goodput_line(parts))
    text = report(outcome, folder=folder, tail=output.tail, evidence_file=evidence_file)
    if text and (not verbosity.quiet or outcome.left or outcome.unchecked or outcome.exit_code != 0):
        failed = outcome.error is not None or outcome.cause is not None
        first, newline, rest = text.partition("\n")
        verbosity.say(f"\x1b[1;31m{first}\x1b[0m{newline}{rest}" if failed and takes_colour(2) else text)


def _requeue(outcome: Outcome, verbosity: Verbosity) -> int:
    """Have SLURM start the job again, unless it was cancelled; return the exit code."""
    from launcher.hosts.slurm_allocation import is_cancelled, requeue

    if outcome.signum is not None and is_cancelled(os.environ):
        verbosity.say("the job was cancelled; it is not queued again")
        return 128 + outcome.signum
    verbosity.say("queueing the job again")
    problem = requeue(os.environ)  # SLURM ends this process for it, perhaps before it has answered
    if problem is not None:
        verbosity.say(problem)
    return outcome.exit_code
