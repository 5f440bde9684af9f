"""`dtrain run`, from the options to the exit code: of the controller (control.py), or of a node that joins a run.

Called by main.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from launcher.cli.caller import Caller, Verbosity, error_file, write_all
from launcher.cli.control import control
from launcher.cli.options import Options, unknown_variables
from launcher.cli.pod import with_pod_variables, write_termination_message
from launcher.cli.request import Request, check_here, read_request
from launcher.cli.run_end import run_at_end
from launcher.errors import DtrainError, NodeZeroTakenError, UsageError
from launcher.runs.housekeeping import Limits, hold

if TYPE_CHECKING:
    from launcher.runs.detach import Detachment


def run_job(options: Options, say: Callable[[str], None]) -> int:
    """Run the job to its end, with --detach to its start, and return the exit code.

    Blocks; call from the main thread only.
    """
    if options.log_format == "json":
        from launcher.output.json_lines import message

        try:
            return _run_job(options, lambda text: write_all(2, message(text)))
        except DtrainError as error:
            write_all(2, message(str(error), "error"))
            return error.exit_code
    return _run_job(options, say)


def _run_job(options: Options, say: Callable[[str], None]) -> int:
    try:
        options = with_pod_variables(options, os.environ)
        return _run_here(options, say)
    except DtrainError as error:
        write_termination_message(str(error))
        raise


def _run_here(options: Options, say: Callable[[str], None]) -> int:
    if not options.detach or options.print_commands:
        return _run(options, say)
    from launcher.runs.detach import detached

    def announce(run_id: str) -> None:
        try:
            print(run_id, flush=True)
        except OSError as error:  # the run goes on, and so must a script that uses the exit code
            say(f"run {run_id} has started; its id cannot be written to standard output: {error.strerror}")

    return detached(lambda detachment: _run(options, say, detachment), announce)


def _run(options: Options, say: Callable[[str], None], detachment: Detachment | None = None) -> int:
    as_json = options.log_format == "json"
    verbosity = Verbosity(options.quiet, options.verbose, as_json, say, error_file(options.error_json))
    for signum in (signal.SIGUSR1, signal.SIGUSR2):  # they may come before there are workers, and after the last
        signal.signal(signum, lambda *_: None)
    try:
        if options.print_commands:
            from launcher.cli.run_node import commands_of_nodes

            print(commands_of_nodes(options))
            return 0
        limits = Limits(options.keep_runs, options.log_max_size)
        request = read_request(options, wait=True)
        check_here(request.spec)
        if detachment is not None and request.node_role is not None:
            raise UsageError("--detach is for runs that dtrain starts on all nodes, not for nodes started by hand")
    except DtrainError as error:  # also for runs that end before they start
        if verbosity.error_json is not None:
            from launcher.output.error_json import write_usage_error_json

            with contextlib.suppress(OSError):  # the original error is more important
                write_usage_error_json(verbosity.error_json, error)
        raise
    if detachment is not None and not verbosity.quiet:
        from launcher.machine.system_files import read_text
        from launcher.runs.detach import logout_notice

        for line in logout_notice(read_text("/proc/self/cgroup")):
            say(line)
    for notice in [*unknown_variables(), *request.notices]:
        verbosity.inform(notice)
    spec, node_role, taken = request.spec, request.node_role, ""
    if node_role is None or node_role.lead:
        try:
            return _control(request, options, limits, verbosity, detachment)
        except NodeZeroTakenError as error:  # another command on this machine was first
            taken = f"; this command is not node 0, since {error}"
        assert node_role is not None
    from launcher.cli.run_node import join_run
    from launcher.transport.tcp.dial import JoinError

    shows = node_role.by_hand and not verbosity.quiet  # under srun all tasks share node 0's terminal

    def notify(text: str) -> None:
        write_termination_message(text)
        if shows:
            say(text)

    try:
        return join_run(node_role, spec, notify)
    except JoinError as error:
        raise JoinError(f"{error}{taken}") from error


def _control(
    request: Request, options: Options, limits: Limits, verbosity: Verbosity, detachment: Detachment | None
) -> int:
    spec = request.spec
    caller = Caller(sys.argv[1 if options.as_torchrun else 2 :], detachment=detachment)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(hold(spec.log_dir, spec.run_id))
        except UsageError as error:
            if request.node_role is not None and request.node_role.node_rank is None:
                raise NodeZeroTakenError(str(error)) from error
            if not spec.first_attempt:  # SLURM restarts a job only after its end, even if a lock is held
                raise
        ended = control(request, options, limits, verbosity, caller)
    write_termination_message(ended.line)
    run_at_end(ended, options, verbosity, caller)
    return ended.outcome.exit_code
